"""What faults are injected into: runs of CartPole, small, over each transport, pace and replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

HANG_S = 5.0
REDUCE_S = 5.0
GRACE_S = 8.0
SMALL = (
    "actors.envs=4", "actors.unroll=8", "model.hidden=[16]", "stop.return=null",
    "run.interval_s=0.1", f"run.hang_timeout_s={HANG_S}", f"run.grace_s={GRACE_S}",
    "run.max_restarts=100000", "run.restarts=100000", "checkpoint.every_s=1",
    f"learner.reduce.timeout_s={REDUCE_S}",
)  # fmt: skip
DQN = (
    "replay.min_size=200",
    "replay.capacity=20000",
    "replay.batch_size=32",
    "replay.samples_per_insert=2",
)

EVALUATED = ("eval.every_s=2", "eval.episodes=2")


def _shim(weight: float, *roles: str) -> dict[str, float]:
    """Kills of each of the two processes between the supervisor and the ``roles``."""
    return {f"{process}:{role}": weight for process in ("guard", "keeper") for role in roles}


LATE = ("run.hang_timeout_s=30",)  # the wire must not need it to notice that peers are gone
HANGS = ("hang:actor", "hang:relay", "hang:connector")
ENDS = {  # of a run with one learner: each costs a start, so they are rare
    "kill:learner": 0.5, "end:supervisor": 0.15, "end:term": 0.1, "end:term-all": 0.1,
    "checkpoint:flip": 0.1, "checkpoint:cut": 0.1, **_shim(0.2, "learner"),
}  # fmt: skip
ACTORS = {"kill:actor": 4.0, "stop:actor": 2.0, "hang:actor": 0.5, "memory:actor": 1.0}
ACTORS |= _shim(0.3, "actor")
EVALUATOR = {"kill:evaluator": 1.0, **_shim(0.2, "evaluator")}
HOST = {"disk:full": 0.7, "descriptors:supervisor": 0.7, "stop:supervisor": 0.5, "oom:actor": 0.5}
CARRIERS = {
    "kill:connector": 2.0, "kill:relay": 2.0, "stop:connector": 0.7, "stop:relay": 0.7,
    "hang:connector": 0.2, "hang:relay": 0.2, "pair:any": 1.0,
}  # fmt: skip
CARRIERS |= _shim(0.3, "connector", "relay")
WIRE = {"hostile:wire": 2.0, "hoard:grants": 0.7, "descriptors:connector": 0.7}
GROUP = {
    "kill:actor": 3.0, "kill:learner": 1.5, "stop:learner": 1.5, "stop:actor": 1.0,
    "pair:any": 0.5, "stop:supervisor": 0.3, "disk:full": 0.3,
    "end:supervisor": 0.1, "end:term": 0.1, **_shim(0.4, "learner"),
}  # fmt: skip


@dataclass(frozen=True)
class Topology:
    """``kinds`` of faults by weight. ``by_hand``: learner and actors are commands of their own,
    joined through a proxy or over namespaces of the network."""

    name: str
    kinds: Mapping[str, float]
    target: str = "cartpole"
    options: tuple[str, ...] = ()
    actors: int = 3
    learners: int = 1
    by_hand: Literal["", "proxy", "hosts"] = ""
    fake_clock: bool = False
    served: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)


def _without(kinds: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    return {kind: weight for kind, weight in kinds.items() if kind not in names}


def _group(pace: str, **kinds: float) -> Topology:
    options = (f"learner.pace={pace}", "learner.count=2")
    return Topology(pace, GROUP | kinds, options=options, actors=4, learners=2)


_SERVER = {"stop:server": 0.7, "kill:server": 0.3, **_shim(0.1, "server")}
_ALL = (
    Topology(
        "shm",
        ACTORS | HOST | ENDS | EVALUATOR | {"stop:learner": 1.0, "hostile:attach": 1.0},
        options=EVALUATED,
    ),
    Topology(
        "zmq",
        ACTORS | HOST | ENDS | CARRIERS | WIRE | EVALUATOR | {"hostile:attach": 0.5},
        options=("transport.kind=zmq", *EVALUATED),
    ),
    Topology(
        "connectors",
        ACTORS | CARRIERS | {"end:learner": 0.15, "end:term": 0.1},
        options=("transport.kind=zmq", "transport.connectors=2", "run.restarts=0"),
        actors=4,
    ),
    _group("bsp"),
    _group("local_sgd"),
    _group("ssp", **{**_SERVER}),
    _group("asp", **{**_SERVER}),
    _group("tap", **{**_SERVER}),
    _group("backup", **{**_SERVER}),
    Topology(
        "replay",
        ACTORS | HOST | ENDS | {"stop:learner": 1.0},
        target="cartpole_dqn",
        options=(*DQN, "replay.checkpoint=true"),
    ),
    Topology(
        "served",
        {
            "kill:client": 4.0, "stop:client": 2.0, "kill:replay": 1.5, "stop:replay": 1.5,
            "hostile:replay": 2.0, "descriptors:replay": 0.7,
        },
        actors=3,
        served=True,
    ),
    Topology(
        "hand",
        _without(ACTORS | CARRIERS | WIRE, HANGS)
        | {"net:latency": 2.0, "net:half-open": 2.0, "net:cut": 2.0, "net:flip": 2.0}
        | {"kill:learner": 0.5},
        options=("transport.kind=zmq", *LATE),
        by_hand="proxy",
    ),
    Topology(
        "hosts",
        _without(ACTORS | CARRIERS, HANGS)
        | {"net:silent": 2.0, "net:down": 2.0, "net:slow": 1.0, "kill:host": 1.0},
        options=LATE,
        by_hand="hosts",
        actors=4,
    ),
    Topology(
        "clock",
        ACTORS | CARRIERS | {"clock:step": 6.0, "end:term": 0.1},
        options=("transport.kind=zmq",),
        fake_clock=True,
    ),
)  # fmt: skip
TOPOLOGIES = {topology.name: topology for topology in _ALL}
