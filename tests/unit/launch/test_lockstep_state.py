"""Checkpoints of the lockstep mode do not affect a run, and a resume continues bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from data_algorithms import BURN_IN, train_dqn_on
from lockstep_run import of_kind, train_in_lockstep
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.interfaces import Dataset, Transitions, TransitionSequences
from penstock.core.notes import notes_to
from penstock.core.state_bytes import from_bytes, to_bytes
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import Checkpoint

STATE = "team/lockstep"
HALF, WHOLE = 20, 40
SMALL = ("transport.kind=inproc", "stop.return=null", "learner.device=cpu", "actors.envs=4")
REPLAY = (
    *("replay.checkpoint=true", "replay.min_size=64", "replay.batch_size=16", "actors.unroll=8"),
    *("replay.samples_per_insert=1.7", "replay.capacity=300", "actors.count=2"),
)
STACKED = "env.wrappers=[{'gymnasium.wrappers:FrameStackObservation': {stack_size: 4}}]"
CASES: dict[str, tuple[str, ...]] = {
    "impala": ("cartpole", "actors.unroll=8", "learner.publish_every=7"),
    "waiting": ("cartpole", "actors.unroll=5", "actors.count=3", "learner.batch_slots=2"),
    "accumulated": (
        *("cartpole_ppo", "actors.unroll=8", "actors.count=3", "learner.accumulate=2"),
        *("learner.batch_slots=1", "learner.updates_per_batch=1", "algo.epochs=1"),
        "model.normalize_observations=true",
    ),
    "accumulated, published at once": (
        *("cartpole_ppo", "actors.unroll=8", "actors.count=3", "learner.accumulate=2"),
        *("learner.batch_slots=1", "learner.updates_per_batch=1", "algo.epochs=1"),
        *("model.normalize_observations=true", "learner.publish_every=1"),
    ),
    "frames": ("cartpole", "actors.unroll=8", STACKED, "transport.frame_stack=4", "model.core=gru"),
    "ppo": (
        "cartpole_ppo",
        "actors.unroll=8",
        "algo.normalize_rewards=true",
        "algo.reward_scale=1",
    ),
    "lstm": ("memory", "actors.unroll=8"),
    "pqn": ("cartpole_dqn", "algo.name=pqn", "actors.count=2", "actors.envs=4", "actors.unroll=8"),
    "dqn": ("cartpole_dqn", *REPLAY, "algo.n_step=3", "algo.target_every=8"),
    "dqn frames": ("cartpole_dqn", *REPLAY, STACKED, "transport.frame_stack=4", "algo.n_step=3"),
    "r2d2": (
        *("memory_r2d2", *REPLAY, "algo.target_every=8", "algo.sequence_length=12"),
        *("algo.overlap=6", "algo.burn_in=4"),
    ),
    "sac": ("pendulum_sac", *REPLAY),
    "hindsight": ("bit_flip", "env.kwargs.bits=6", *REPLAY),
    "td3": ("Pendulum-v1", "algo.name=td3", *REPLAY),
    "seats": (
        *("penstock/SyntheticGames-v0", "algo.name=impala", "actors.unroll=8", "model.core=gru"),
        "env.kwargs={turns: true, ends_apart: true, episode_steps: 5}",
    ),
    "scripted players": (
        *("penstock/Kuhn-v0", "algo.name=impala", "actors.unroll=8", "model.core=gru"),
        "league.bots={nash: 0.25, random: 0.25}",
    ),
    "minatar": ("minatar_breakout", "actors.unroll=5", "learner.updates_per_batch=2"),
}


def train(folder: Path, case: Sequence[str], steps: int, *options: str, **how: str) -> Checkpoint:
    target, *more = case
    config = resolve(target, [*SMALL, *more, f"stop.learner_steps={steps}", *options])
    heard = train_in_lockstep(folder, config, **how)
    [stop], [final] = of_kind(heard, "stop"), of_kind(heard, "final")
    assert stop["reason"] == "learner_steps"
    accounting = final["accounting"]
    assert accounting["produced"] == accounting["trained"] + accounting["in_flight"]
    return checkpoint_format.load(folder / "checkpoints" / "last")


def same(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether two checkpoints are equal in all that a run continues from, besides the random
    generators of spaces, which are not seeded and not used.
    """
    counters = ("env_steps", "trained_steps", "learner_steps", "episodes", "version", "returns")
    return (
        all(a.meta["progress"][name] == b.meta["progress"][name] for name in counters)
        and np.array_equal(a.weights, b.weights)
        and a.arrays.keys() == b.arrays.keys()
        and all(np.array_equal(a.arrays[k], b.arrays[k]) for k in a.arrays.keys() - {STATE})
        and to_bytes(seeded(a)).tobytes() == to_bytes(seeded(b)).tobytes()
    )


def seeded(checkpoint: Checkpoint) -> Any:
    """The state of actors and environments without the attributes that are spaces."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if not k.endswith("_space")}
        return [without(v) for v in value] if isinstance(value, list) else value

    return without(from_bytes(checkpoint.arrays[STATE]))


@pytest.mark.parametrize("name", CASES)
def test_checkpoints_do_not_affect_a_run_and_a_resume_continues_bit_for_bit(
    tmp_path: Path, name: str
) -> None:
    if name == "minatar":
        pytest.importorskip("minatar")
    case = CASES[name]
    half = train(tmp_path / "parts", case, HALF - 1)
    whole = train(tmp_path / "whole", case, WHOLE)
    often = train(tmp_path / "often", case, WHOLE, "checkpoint.every_steps=3")
    assert same(whole, often)
    assert not np.array_equal(half.weights, whole.weights)
    state = from_bytes(half.arrays[STATE])
    assert name != "impala" or "published" in state, "which are older than the weights"
    assert not name.startswith("accumulated") or "samples" in state["unfinished"]
    assert name != "waiting" or state["data"]
    parts = train(tmp_path / "parts", case, WHOLE, resume="must")
    assert same(whole, parts)
    assert parts.meta["progress"]["generation"] == 1


def test_run_resumed_twice_continues_bit_for_bit(tmp_path: Path) -> None:
    """From a checkpoint that a resumed run wrote."""
    for steps, resume in ((13, "no"), (26, "must"), (WHOLE, "must")):
        parts = train(tmp_path / "parts", CASES["waiting"], steps, resume=resume)
    assert same(parts, train(tmp_path / "whole", CASES["waiting"], WHOLE))


# --------------------------------------------------------------------- where that cannot be


class Counted(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole with an object that cannot be saved."""

    def __init__(self) -> None:
        super().__init__(CartPoleEnv())
        self.counter = itertools.count()


UNSAVABLE = ("cartpole", "env.id=test_lockstep_state:Counted", "actors.unroll=8")


def noted(folder: Path, case: Sequence[str], *options: str) -> tuple[Checkpoint, list[str]]:
    """The checkpoint of a resumed run, and its notes on the resume."""
    notes: list[str] = []
    with notes_to(notes.append):
        found = train(folder, case, WHOLE, *options, resume="must")
    return found, [note for note in notes if "bit for bit" in note]


def test_unsavable_environment_begins_new_episodes_only_on_resume(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", UNSAVABLE, WHOLE)
    often = train(tmp_path / "often", UNSAVABLE, WHOLE, "checkpoint.every_steps=3")
    assert same(whole, often)
    for name in ("parts", "again"):
        train(tmp_path / name, UNSAVABLE, HALF)
    parts, [note] = noted(tmp_path / "parts", UNSAVABLE)
    assert note.startswith(f"episodes begin anew at optimizer step {HALF}, so the resumed run is")
    assert note.endswith("counter is of class itertools.count")
    assert not np.array_equal(parts.weights, whole.weights)
    assert same(parts, noted(tmp_path / "again", UNSAVABLE)[0]), "it is deterministic all the same"


def test_a_run_with_other_actors_begins_new_episodes(tmp_path: Path) -> None:
    train(tmp_path, CASES["impala"], HALF)
    _, [note] = noted(tmp_path, CASES["impala"], "actors.envs=6")
    assert note.endswith("actors.*, or what they record, is not as it was")


def test_a_run_in_another_environment_begins_new_episodes(tmp_path: Path) -> None:
    train(tmp_path, CASES["impala"], HALF)
    found, notes = noted(tmp_path, CASES["impala"], "env.kwargs.sutton_barto_reward=true")
    assert not notes
    assert found.meta["progress"]["learner_steps"] == WHOLE


def test_a_checkpoint_without_the_state_begins_new_episodes(tmp_path: Path) -> None:
    """As versions before, and other transports, write it."""
    train(tmp_path, CASES["impala"], HALF)
    folder = tmp_path / "checkpoints" / "last"
    stored = checkpoint_format.load(folder)
    others = {name: array for name, array in stored.arrays.items() if name != STATE}
    checkpoint_format.save(folder, replace(stored, arrays=others))
    _, [note] = noted(tmp_path, CASES["impala"])
    assert note.endswith("the checkpoint was not written in lockstep mode by this version")


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_damaged_state_begins_new_episodes(tmp_path: Path, keep: float) -> None:
    train(tmp_path, CASES["impala"], HALF)
    folder = tmp_path / "checkpoints" / "last"
    stored = checkpoint_format.load(folder)
    state = stored.arrays[STATE]
    part = {STATE: state[: int(keep * len(state))]}
    checkpoint_format.save(folder, replace(stored, arrays={**stored.arrays, **part}))
    _, [note] = noted(tmp_path, CASES["impala"])
    assert "episodes begin anew" in note


def test_environment_state_naming_program_internals_ends_the_resume(tmp_path: Path) -> None:
    """Instead of new episodes in environments that it has changed."""
    train(tmp_path, CASES["impala"], HALF)
    folder = tmp_path / "checkpoints" / "last"
    stored = checkpoint_format.load(folder)
    state = from_bytes(stored.arrays[STATE])
    spec = ["object", "gymnasium.envs.registration.EnvSpec", {"entry_point": "subprocess:Popen"}]
    state["players"][0]["env"][2]["spec"] = spec
    checkpoint_format.save(
        folder, replace(stored, arrays={**stored.arrays, STATE: to_bytes(state)})
    )

    with pytest.raises(UserError, match="a part of the program"):
        train(tmp_path, CASES["impala"], WHOLE, resume="must")

    assert gymnasium.spec("CartPole-v1").entry_point != "subprocess:Popen"


def test_an_empty_replay_is_noted(tmp_path: Path) -> None:
    off = (*CASES["dqn"], "replay.checkpoint=false")
    train(tmp_path, off, HALF)
    _, [note] = noted(tmp_path, off)
    assert note.startswith("the replay begins empty, as replay.checkpoint is false")
    assert note.endswith("; the resumed run is not bit for bit one without a stop")
    assert "episodes" not in note, "these continue"


def test_replay_of_another_step_is_noted(tmp_path: Path) -> None:
    """As where a crash came between the two."""
    case = CASES["dqn"]
    train(tmp_path / "a", case, HALF)
    train(tmp_path / "b", case, HALF - 5)
    shard = Path("checkpoints/last/replay")
    (tmp_path / "a" / shard).rename(tmp_path / "newer")
    (tmp_path / "b" / shard).rename(tmp_path / "a" / shard)
    _, [note] = noted(tmp_path / "a", case)
    assert "the replay continues with" in note
    assert note.endswith("; the resumed run is not bit for bit one without a stop")


@pytest.mark.parametrize(
    "draws", [Transitions(3), TransitionSequences(6, burn_in=BURN_IN, overlap=3)]
)
@pytest.mark.parametrize("prioritized", ["true", "false"])
def test_resumed_data_set_run_draws_as_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draws: Any, prioritized: str
) -> None:
    train_dqn_on(Transitions(3), monkeypatch=monkeypatch)
    case = ("cartpole_dqn", *REPLAY, f"replay.prioritized={prioritized}")
    train(tmp_path / "data", case, HALF)
    train_dqn_on(
        Dataset(tmp_path / "data/checkpoints/last/replay/0", draws), monkeypatch=monkeypatch
    )
    whole = train(tmp_path / "whole", case, WHOLE)
    assert same(whole, train(tmp_path / "often", case, WHOLE, "checkpoint.every_steps=3"))
    train(tmp_path / "parts", case, HALF)
    assert same(whole, train(tmp_path / "parts", case, WHOLE, resume="must"))
