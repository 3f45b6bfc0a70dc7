"""Columns and `info` values that an environment declares reach the slots of a learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from penstock.actors import role as actor_role
from penstock.actors.rollout import Rollout
from penstock.algos.acting import make_inference
from penstock.algos.recorded import make_recorders
from penstock.algos.samples import network_shape, slot_spec
from penstock.algos.slots import RecordedSum, UnrollSummary
from penstock.cli.check_env import check
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.interfaces import Welcome
from penstock.core.params import Float32, Stamp
from penstock.core.role import learner_socket
from penstock.core.specs import Column
from penstock.envs import make, probe
from penstock.envs.space_json import brief_spaces
from penstock.evaluation.evaluate import play
from penstock.launch import connector as connector_role
from penstock.profiling.ledger import TimeLedger
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.zmq import relay
from seat_game import LENGTHS
from transport_world import RUN_ID, Learner, context, in_thread, reports
from waiting import wait_until

ENVS, UNROLL = 4, 8
SMALL = (
    "actors.count=1",
    f"actors.envs={ENVS}",
    f"actors.unroll={UNROLL}",
    "stop.return=null",
    "algo.reward_scale=1",
)


class Wind(gymnasium.Env[Any, Any]):
    """A single environment that records the step of its episode, whose parity its numbers are."""

    metadata = {"recorded": {"wind": "<i4"}}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.age = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.age += 1
        return np.zeros(2, np.float32), 0.0, self.age == 4, False, {"wind": self.age, "more": "x"}


class Goal(gymnasium.Env[Any, Any]):
    """Tells how far it is in all but its second step, and in its fourth, the last, of success."""

    observation_space = gymnasium.spaces.Box(0, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.age = 0
        return np.zeros(2, np.float32), {"far": 9}

    def step(self, action: Any) -> Any:
        self.age += 1
        info = {"far": [1, None, np.array([0.5]), np.inf][self.age - 1], "name": "x"}
        over = self.age == 4
        return np.zeros(2, np.float32), 0.0, over, False, info | ({"won": True} if over else {})


def goals(num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    return gymnasium.vector.SyncVectorEnv([Goal] * num_envs)


def config(env: str, *options: str) -> Config:
    return resolve("cartpole", [f"env.id={env}", *SMALL, *options])


def weights(out: Float32, newer_than: Stamp | None) -> Stamp:
    out.fill(0.01)
    return Stamp(0, 3)


def fill(cfg: Config) -> dict[str, Any]:
    """The columns of an actor's first slot."""
    env = make(cfg.env, ENVS)
    inference, spec = make_inference(cfg, env.info, 0), slot_spec(cfg, env.info)
    inference.refresh(weights)
    rollout = Rollout(env, inference, 0, TimeLedger(), make_recorders(cfg, env))
    columns = spec.views(spec.zeros())
    rollout.fill(columns, 0)
    env.close()
    return columns


@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_learner_receives_the_recorded_columns_of_each_row(kind: str, tmp_path: Path) -> None:
    cfg = config("seat_game:Pair")
    info = probe(cfg.env)
    spec, layout = slot_spec(cfg, info), network_shape(cfg, info).layout
    welcome = Welcome(
        RUN_ID, 0, spec, layout, cfg.model_dump(mode="json"), brief_spaces(*info.spaces)
    )
    store, board = SlotStore(spec, 8), WeightsBoard.create(layout.size)
    board.publish(np.zeros(layout.size, np.float32), Stamp(0, 0))
    path, address = learner_socket(tmp_path, 0), f"ipc://{tmp_path}/wire"
    side = Learner(path, store, [board], welcome)
    side.start(ShmHost(path, welcome, [board], store))
    actor = context(tmp_path, config=cfg, address=address if kind == "zmq" else None)
    receives = context(tmp_path, "connector", config=cfg, address=address)
    follows = context(tmp_path, "relay", address=address)
    try:
        if kind == "shm":
            with in_thread(actor, actor_role.run):
                slots = [side.take(60) for _ in range(3)]
        else:
            with in_thread(receives, connector_role.run):
                wait_until(lambda: bool(reports(receives, "ready")), 60)
                with in_thread(follows, relay.run), in_thread(actor, actor_role.run):
                    slots = [side.take(60) for _ in range(3)]
    finally:
        side.stop()
        store.close()
        board.close()

    rows = {
        name: np.concatenate([slot.columns[name] for slot in slots])
        for name in ("alive", "whose", "outcome", "terminated", "reward", "episode_length")
    }
    seat = np.arange(ENVS) % 2
    age = np.arange(1, 3 * UNROLL + 1)[:, None] % (max(LENGTHS) + 1)  # after each step
    decides = (age > 0) & (age <= np.array(LENGTHS)[seat])
    ends = age == np.array(LENGTHS)[seat]
    np.testing.assert_array_equal(rows["whose"], np.broadcast_to(seat, decides.shape))
    np.testing.assert_array_equal(rows["alive"], decides)
    np.testing.assert_array_equal(rows["reward"], decides)
    np.testing.assert_array_equal(rows["terminated"], ends)
    np.testing.assert_array_equal(rows["outcome"], np.where(ends, 0.5, 0.0))
    np.testing.assert_array_equal(rows["episode_length"][ends], (age + 0 * seat)[ends])
    for slot in slots:
        assert slot.header["steps"] == np.count_nonzero(slot.columns["alive"])


def test_single_environments_record_columns() -> None:
    """Also through wrappers; the step that only resets has a value of 0."""
    columns = fill(
        config(f"{__name__}:Wind", "env.wrappers=[gymnasium.wrappers:RecordEpisodeStatistics]")
    )
    assert columns["wind"].dtype == np.int32
    np.testing.assert_array_equal(columns["wind"], np.tile([1, 2, 3, 4, 0, 1, 2, 3], (ENVS, 1)).T)


@pytest.mark.parametrize("maker", ["Goal", "goals"])
def test_info_values_are_recorded_in_the_steps_that_have_them(maker: str) -> None:
    """The fifth row only resets."""
    columns = fill(config(f"{__name__}:{maker}", "env.record=[won, far]"))
    alive, given = columns["alive"][:, 0], columns["far_given"][:, 0]
    assert given[alive].tolist() == [True, False, True, False, True, False, True]
    assert columns["far"][alive, 0].tolist() == [1, 0, 0.5, 0, 1, 0, 0.5]
    assert columns["won_given"][:, 0].tolist() == [False] * 3 + [True] + [False] * 4
    assert columns["won"].sum() == ENVS
    summary = UnrollSummary.of(columns, ["won", "far"])
    assert summary.recorded == {
        "won": (RecordedSum(ENVS, ENVS), RecordedSum(ENVS, ENVS)),
        "far": (RecordedSum(4 * ENVS * 0.75, 4 * ENVS), RecordedSum(0, 0)),
    }


def test_a_column_that_the_environment_declares_is_recorded_once() -> None:
    columns = fill(config(f"{__name__}:Wind", "env.record=[wind]"))
    assert "wind_given" not in columns
    steps, finals = UnrollSummary.of(columns, ["wind"]).recorded["wind"]
    assert steps == RecordedSum(ENVS * (1 + 2 + 3 + 4 + 1 + 2 + 3), ENVS * 7)
    assert finals == RecordedSum(ENVS * 4, ENVS)


@pytest.mark.parametrize(
    ("maker", "key", "words"),
    [
        ("Goal", "name", "env.record names name, and the info of a step has 'x' there, which is"),
        ("goals", "name", r"env.record names name, and environment .*:goals has array\(\['x'"),
        ("Goal", "reward", "two columns of a slot would be called reward"),
    ],
)
def test_unrecordable_key_is_refused_in_one_sentence(maker: str, key: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        fill(config(f"{__name__}:{maker}", f"env.record=[{key}]"))


@pytest.mark.parametrize("maker", ["Goal", "goals"])
def test_a_check_names_the_keys_that_no_step_has(maker: str) -> None:
    report = check(f"{__name__}:{maker}", ["env.record=[won, wom]"], 50, 2)
    assert report["problems"] == []
    [note] = [note for note in report["notes"] if "env.record" in note]
    assert note == (
        "env.record names wom, and the info of none of 50 steps had it; their keys are far, name, "
        "won: correct the name, or raise --steps if it is rare"
    )


def test_an_evaluation_counts_the_steps_in_which_a_row_plays() -> None:
    env = make(config("seat_game:Pair").env, 2)
    episodes = play(env, lambda obs: np.zeros(2, np.int32), 6, 0, 100)
    env.close()
    assert [episode.length for episode in episodes] == [LENGTHS[0]] * 3 + [LENGTHS[1]] * 3
    assert [episode.episode_return for episode in episodes] == [3.0] * 3 + [5.0] * 3


@pytest.mark.parametrize(
    ("lies", "words"),
    [
        ("playing", r"says in info\['playing'\] that a row plays whose episode has just ended"),
        ("outcome", r"records outcome by its metadata\['recorded'\], and the info of a step"),
    ],
)
def test_contradictory_flags_of_an_environment_are_refused_in_one_sentence(
    lies: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        fill(config("seat_game:Pair", f"env.kwargs={{lies: {lies}}}"))


@pytest.mark.parametrize(
    ("recorded", "words"),
    [
        ({"wind": "<U5"}, "numbers or flags"),
        ({"wind": "nothing"}, "nothing"),
        (["wind"], r"names and dtypes, as in \{\"opponent\": \"<u4\"\}"),
        ({"reward": "<f4"}, "two columns of a slot would be called reward"),
    ],
)
def test_invalid_declaration_of_recorded_columns_is_refused_in_one_sentence(
    recorded: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Wind.metadata, "recorded", recorded)
    cfg = config(f"{__name__}:Wind")
    with pytest.raises(UserError, match=words):
        slot_spec(cfg, probe(cfg.env))


def test_environment_without_recorded_columns_adds_no_column() -> None:
    cfg = resolve("cartpole", [*SMALL])
    info = probe(cfg.env)
    assert info.recorded == ()
    assert slot_spec(cfg, info).columns[-1] == Column("policy_id", "<u2", rows="slot")
