"""Tests of the code of docs/extending/, run in a copy of Penstock that contains this code.

`test_extending.py` makes the copy and runs this file with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from torch import nn
from typer.testing import CliRunner

from contract.test_transports import CHAIRS, CONTRACT, World
from fake_inference import ScriptedInference
from lockstep_run import of_kind, train_in_lockstep
from pace_world import config_of, train_two
from pages import blocks, code
from penstock.actors import role as actor_role
from penstock.actors.rollout import Rollout
from penstock.algos.recorded import make_recorders
from penstock.algos.samples import slot_spec
from penstock.cli import app as cli
from penstock.cli.check_env import check
from penstock.configs.load import resolve, resolve_target
from penstock.configs.reference import reference
from penstock.core.interfaces import Collective, Link, RunEvent
from penstock.core.params import Stamp
from penstock.core.specs import SlotSpec
from penstock.core.web.guard import Guard
from penstock.envs import make
from penstock.launch import topology
from penstock.launch.run import EngineChoice, run_in_folder
from penstock.learner import role as learner_role
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.monitor.run_folder.events import EventLog
from penstock.monitor.sinks import FanOut, make_sinks
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Replay
from penstock.replay.factory import sampler_for
from penstock.watch.app import make_app
from penstock.watch.catalog import RunCatalog
from penstock.watch.page_files import STATIC, bundle
from penstock.watch.views import Views
from reduce_ring import Floats, codec_for, gradients, reduce_all, run_ranks
from run_folders import make_run
from transport_world import LAYOUT, SPEC, context, in_thread, learner, reports
from waiting import wait_until

LOCKSTEP = (
    *("transport.kind=inproc", "actors.count=1", "actors.envs=4", "actors.unroll=8"),
    *("stop.return=null", "stop.learner_steps=20"),
)


def test_the_algorithm_trains(tmp_path: Path) -> None:
    small = ("replay.min_size=64", "replay.batch_size=16", "algo.explore=0.5")
    config = resolve("cartpole_dqn", ["algo.name=sarsa", *LOCKSTEP, *small])
    heard = train_in_lockstep(tmp_path / "run", config)
    assert "Expected SARSA." in reference()
    [stop] = of_kind(heard, "stop")
    assert (stop["reason"], stop["error"]) == ("learner_steps", "")
    assert of_kind(heard, "metrics")[-1]["q_loss"] > 0


def test_two_ranks_reduce_by_the_codec(tmp_path: Path) -> None:
    grads = 10 * gradients(2, 1)[0]

    def work(ring: Collective) -> Floats:
        codec = codec_for(2, ring.rank, codec="grid", grid=0.25)
        assert codec.nbytes(0) > 0
        return reduce_all(codec, ring, 0, grads[ring.rank])

    assert "`grid` as multiples of a number" in reference()
    found = run_ranks(2, work)
    for summed in found:
        assert summed.any()
        np.testing.assert_array_equal(summed, (np.round(grads * 4) / 4).sum(0))


def test_the_optimizer_steps(tmp_path: Path) -> None:
    values, momentum, decay, beta = np.array([1.0, -2.0, 0.5]), np.zeros(3), 0.1, 0.9
    gradients = np.array([[1.0, -1.0, 0.0], [-2.0, 1.0, 3.0], [0.5, 0.5, -4.0]])
    assert "`lion`, `lars` or `lamb`." in reference()
    overrides = (f"learner.weight_decay={decay}", f"learner.lion_beta={beta}")
    config = resolve("cartpole", ["learner.optimizer=lion", "learner.lr=0.01", *overrides])
    start = nn.Parameter(torch.from_numpy(values).float())
    optimizer = FlatOptimizer([("x", start)], config.learner)
    optimizer.grad_clip = None
    for gradient in gradients:
        optimizer.grads.copy_(torch.from_numpy(2 * gradient))
        optimizer.step(2, 0)
        direction = np.sign(0.9 * momentum + 0.1 * gradient)
        values = values - 0.01 * (direction + decay * values)
        momentum = beta * momentum + (1 - beta) * gradient
    state = optimizer.values.clone()
    optimizer.grads.fill_(np.nan)
    optimizer.step(2, 0)
    np.testing.assert_allclose(state.numpy(), values, rtol=1e-5)
    assert torch.equal(optimizer.values, state)


def test_two_learners_go_at_the_pace(tmp_path: Path) -> None:
    assert "`elastic` draws parameters towards their mean" in reference()
    learners = train_two(tmp_path, config_of("elastic", "learner.elasticity=1"))
    first, second = learners
    for each in learners:
        assert each.heard_stop
        assert np.isfinite(each.norms).all()
        assert not np.array_equal(each.values, each.start)
    np.testing.assert_allclose(first.values, second.values, rtol=1e-6)


def test_sink_writes_each_metrics_line_to_its_file(tmp_path: Path) -> None:
    sinks = FanOut(make_sinks(resolve("cartpole", ["run.csv=true"]), tmp_path))
    for steps in (100, 200):
        mean = steps / 10
        sinks.metrics({"env_steps": steps, "episode_return_mean": mean, "time_s": steps})
    sinks.close()
    assert (tmp_path / "returns.csv").read_text() == "100,10.0\n200,20.0\n"


def test_the_column_is_recorded_and_trained_with(tmp_path: Path) -> None:
    config = resolve("cartpole", [*LOCKSTEP, "learner.updates_per_batch=1"])
    env = make(config.env, 4)
    logp = np.zeros(4, np.float32)
    left = ScriptedInference(lambda _: np.zeros(4, np.int32), behaviour_logp=logp)
    recorders, spec = make_recorders(config, env), slot_spec(config, env.info)
    columns = spec.views(spec.zeros())
    Rollout(env, left, 0, TimeLedger(), recorders).fill(columns, 0)
    env.close()
    [stop] = of_kind(train_in_lockstep(tmp_path / "run", config), "stop")
    keys = [row.round(1).tobytes() for row in columns["obs"][1:].reshape(-1, 4)]
    counts = [keys[: i + 1].count(key) for i, key in enumerate(keys)]
    assert columns["visits"].ravel().tolist() == counts
    assert max(counts) > 1
    assert (stop["reason"], stop["error"]) == ("learner_steps", "")


def test_the_environment_is_sound_and_trains(tmp_path: Path) -> None:
    preset = tmp_path / "ring.yaml"
    preset.write_text(code("extending/environment.md", "yaml", 0))
    assert check(str(preset), [], 300, 2)["problems"] == []
    config = resolve(str(preset), [*LOCKSTEP, "learner.updates_per_batch=1"])
    [stop] = of_kind(train_in_lockstep(tmp_path / "run", config), "stop")
    assert (stop["reason"], stop["error"]) == ("learner_steps", "")


def delayed_link(path: Path, spec: SlotSpec, want: int, every_s: float) -> Link:
    link: Link = resolve_name("penstock.transport.delayed:DelayedLink")(path, spec, want, every_s)
    return link


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as links, ExitStack() as far_side:
        side = far_side.enter_context(learner(tmp_path, chairs=CHAIRS))

        def join(want: int = 2, *, actor: int = 7, spec: SlotSpec = SPEC) -> Link:
            link = delayed_link(side.path, spec, want, 0.0)
            links.callback(link.close)
            return link

        yield World(side, join, far_side.close)


@pytest.mark.parametrize("case", CONTRACT.values(), ids=CONTRACT)
def test_the_transport_keeps_the_contract(world: World, case: Callable[[World], None]) -> None:
    case(world)


def test_the_transport_delays_weights(world: World) -> None:
    side, values = world.learner, np.ones(LAYOUT.size, np.float32)
    link = delayed_link(side.path, SPEC, 1, 60.0)
    side.call(lambda: side.board.publish(values, Stamp(2, 1)))
    out = np.zeros(LAYOUT.size, np.float32)
    assert link.read_weights(out, None) == Stamp(2, 1)
    assert out.all()
    side.call(lambda: side.board.publish(2 * values, Stamp(2, 2)))
    assert link.read_weights(out, Stamp(2, 1)) is None
    assert link.read_weights(out, None) == Stamp(2, 2)
    link.close()


def test_cartpole_is_trained_over_the_transport(tmp_path: Path) -> None:
    config = resolve(
        "cartpole",
        [
            *("transport.kind=delayed", "transport.weights_every_ms=10", "actors.count=1"),
            *("actors.envs=4", "actors.unroll=8", "learner.updates_per_batch=1"),
            *("stop.learner_steps=8", "stop.return=null", "run.interval_s=0.2"),
        ],
    )
    main = context(tmp_path, "learner", config=config)
    plays = context(tmp_path, "actor", config=config)
    with in_thread(main, learner_role.run):
        wait_until(lambda: bool(reports(main, "ready")), 60)
        with in_thread(plays, actor_role.run):
            wait_until(lambda: bool(reports(main, "stop")), 60)
    [stop] = reports(main, "stop")
    assert stop["reason"] == "learner_steps"


def test_the_sampler_is_named_by_a_run_and_by_its_snapshot(tmp_path: Path) -> None:
    small = ("replay.min_size=64", "replay.batch_size=64", "replay.checkpoint=true")
    config = resolve("cartpole_dqn", ["replay.sampler=combined", *LOCKSTEP, *small])
    [stop] = of_kind(train_in_lockstep(tmp_path / "run", config), "stop")
    assert (stop["reason"], stop["error"]) == ("learner_steps", "")

    columns = {"obs": ("f4", ()), "action": ("i4", ())}
    sampler = sampler_for(config.replay, lambda: 0)
    with Replay(columns, 100, sampler=sampler, autoreset="none") as replay:
        for i in range(30):
            replay.add(obs=i, action=0, reward=0, terminated=False, truncated=False, next_obs=i + 1)
        replay.save(tmp_path / "snapshot")
        rows = replay.sample(8)["obs"]
    with Replay.load(tmp_path / "snapshot") as loaded:
        assert type(loaded.sampler) is resolve_name("penstock.replay.combined:Combined")
        assert np.array_equal(loaded.sample(8)["obs"], rows)


def test_the_adapter_is_sound_and_trains(tmp_path: Path) -> None:
    assert check("corridors/Short-v0", [], 300, 2)["problems"] == []
    target = [*LOCKSTEP, "learner.updates_per_batch=1", "env.kwargs.length=3"]
    config = resolve("corridors/Long-v0", target)
    [stop] = of_kind(train_in_lockstep(tmp_path / "run", config), "stop")
    assert (stop["reason"], stop["error"]) == ("learner_steps", "")


def test_the_engine_trains_with_the_role_beside(tmp_path: Path) -> None:
    options = ("actors.count=1", "actors.envs=4", "stop.learner_steps=5", "stop.return=null")
    resolved = resolve_target("cartpole", [*options, f"run.dir={tmp_path / 'run'}"])
    place = EngineChoice("spoken")
    outcome, _ = run_in_folder(
        resolved, tmp_path / "run", "no", topology.train_roles, lambda _: FanOut([]), place=place
    )
    assert outcome.exit_code == 0
    started = (tmp_path / "run" / "logs" / "started.txt").read_text().splitlines()
    assert sorted(started) == ["actor-0 0", "disk-0 0", "evaluator-0 0", "learner-0 0"]


def test_the_role_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role = resolve_name("penstock.launch.disk_watch")
    monkeypatch.setattr(role, "LEFT", 1.1)
    ctx = context(tmp_path, "disk")
    with in_thread(ctx, role.run):
        wait_until(lambda: bool(reports(ctx, "event")), 10)
    assert "are left on the disk" in reports(ctx, "event")[0]["text"]


def test_the_command_answers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1.0])
    (run / "logs" / "actor-0.log").write_text("one\ntwo\n")
    result = CliRunner().invoke(cli.app, ["logs", str(run), "--json"])
    assert json.loads(result.stdout) == {"actor-0.log": 2}


def test_the_view_is_answered_and_part_of_the_page(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    log = EventLog(make_run(runs / "one", [1.0, 2.0]) / "logs")
    log.event(RunEvent("restart", "it is restarted", "actor-0", 1))
    log.close()
    app = make_app(Views(RunCatalog(runs)), Guard(is_own=lambda scope: True))
    with TestClient(app, base_url="http://127.0.0.1:8700") as page:
        reply = page.get("/api/restarts", params={"run": "one"})
    assert reply.json() == {"restarts": [{"role": "actor-0", "count": 1}]}

    module, extension = (block.partition("\n") for block in blocks("extending/view.md", "js"))
    scripts = {path.name: path.read_text() for path in STATIC.glob("*.js")}
    scripts |= {module[0].rpartition("/")[2]: module[2], "app.js": scripts["app.js"] + extension[2]}
    assert "return { RestartsView };" in bundle(scripts, "app.js")
