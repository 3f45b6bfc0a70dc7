"""What a replay draws of recorded games, against transitions made from the games' own logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LoadedPolicy
from penstock.algos.samples import network_shape, slot_spec
from penstock.models.torch_nets import filled_net
from penstock.replay import Replay
from penstock.replay.table import ROW_OF_KEY
from recorded_games import (
    FIRST_ACTOR,
    Act,
    Event,
    First,
    Outcome,
    RecordedGames,
    recorded_policy,
)
from replay_reference import History, Step

DISCOUNT = 0.9
SCALE = 0.5
OVERRIDES = (
    f"algo.discount={DISCOUNT}",
    f"algo.reward_scale={SCALE}",
    "algo.reward_clip=null",
    "actors.unroll=7",
    "replay.prioritized=false",
)


class ReplayedGames(RecordedGames):
    """Games whose slots fill a replay."""

    def __init__(self, policy: LoadedPolicy, n_step: int, **options: Any) -> None:
        spec = slot_spec(policy.config, policy.info)
        self.replay = Replay(
            spec, 40_000, n_step=n_step, discount=DISCOUNT, writers=1, in_hand=12, seed=0
        )
        super().__init__(policy, store=self.replay.table.store, **options)

    def learn(self) -> None:
        with self.replay.lock:
            self.replay.table.collect()
        self.recorder.publish_waiting()

    def finish(self) -> None:
        super().finish()
        self.learn()


def history_of(events: list[Event]) -> History:
    """The steps of one seat, as its client knows them."""
    history = History()
    obs = np.zeros(0)
    action = -1
    starts = True
    for event in events:
        match event:
            case First():
                obs, starts = event.obs, True
                action = -1
            case Act():
                action = int(event.action)
            case Outcome() if action >= 0:
                next_obs = obs if event.obs is None else event.obs
                reward = SCALE * event.reward
                ends = event.terminated, event.truncated
                history.steps.append(
                    Step({"": obs}, {"": next_obs}, action, reward, *ends, starts=starts)
                )
                obs, starts, action = next_obs, False, -1
            case Outcome():
                pass
            case _:
                starts, action = True, -1
    return history


def index_of_rows(games: ReplayedGames) -> dict[int, tuple[int, int]]:
    """For each row of the replay that counts, its place and its number among the place's steps."""
    table = games.replay.table
    slots = sorted(table.order, key=lambda slot: int(table.store.slots[slot].header["sequence"]))
    counts = dict.fromkeys(games.logs, 0)
    rows = {}
    for slot in slots:
        place = int(table.store.slots[slot].header["actor"]) - FIRST_ACTOR
        for t in np.flatnonzero(table.store.slots[slot].columns["alive"][:, 0]):
            rows[slot * table.rows_per_slot + int(t)] = place, counts[place]
            counts[place] += 1
    return rows


@pytest.mark.parametrize("n_step", [1, 3])
def test_every_transition_is_that_of_its_games_log(n_step: int, tmp_path: Path) -> None:
    policy = recorded_policy(tmp_path, "cartpole_dqn", *OVERRIDES, f"algo.n_step={n_step}")
    games = ReplayedGames(policy, n_step, seed=3, games=40)
    for _ in range(150):
        games.turn()
    games.finish()

    histories = {place: history_of(log) for place, log in games.logs.items()}
    rows = index_of_rows(games)
    assert len(rows) == sum(len(history.steps) for history in histories.values())
    assert len(histories) >= 64
    left = set(rows)
    for _ in range(200):
        batch = games.replay.sample(512)
        numbers = batch.keys & ROW_OF_KEY
        for i, row in enumerate(numbers.tolist()):
            if row not in left:
                continue
            left.remove(row)
            place, number = rows[row]
            history = histories[place]
            expected = history.expected(number, n_step, DISCOUNT)
            assert batch.action[i] == history.steps[number].action
            np.testing.assert_array_equal(batch.obs[i], expected.obs[""])
            np.testing.assert_array_equal(batch.next_obs[i], expected.next_obs[""])
            assert batch.reward[i] == pytest.approx(expected.reward, rel=1e-5, abs=1e-6)
            assert batch.discount[i] == expected.discount
            assert batch.terminated[i] == expected.terminated
            # A game may say both; then the end is one of the environment.
            assert (batch.truncated[i] and not batch.terminated[i]) == expected.truncated
        if not left:
            break
    assert not left


def test_recorded_values_are_those_of_the_network(tmp_path: Path) -> None:
    policy = recorded_policy(tmp_path, "cartpole_dqn", *OVERRIDES)
    games = RecordedGames(policy, seed=4, games=20, changes_weights=False)
    for _ in range(60):
        games.turn()
    games.finish()

    net: Any = filled_net(network_shape(policy.config, policy.info), games.weights[0])
    last_looks = 0
    for slot in (slot for slots in games.published.values() for slot in slots):
        columns = slot.columns
        q = np.asarray(net(as_tensor(columns["obs"][:-1])))
        # A truncated row is followed by the value of the last observation.
        cut_off = columns["truncated"] & ~columns["terminated"]
        is_decided = columns["alive"].copy()
        is_decided[1:] |= cut_off[:-1]
        last_looks += int((is_decided & ~columns["alive"]).sum())
        taken = q[np.arange(len(q)), columns["action"]]
        np.testing.assert_allclose(columns["q_max"][is_decided], q.max(1)[is_decided], atol=1e-5)
        np.testing.assert_allclose(columns["q_taken"][is_decided], taken[is_decided], atol=1e-5)
    assert last_looks > 10


def test_recorded_states_are_those_of_the_network(tmp_path: Path) -> None:
    """From each row's state the network computes the row's value, and the next row's state."""
    options = ("algo.name=r2d2", "model.core_size=8", "model.hidden=[16]", "actors.unroll=7")
    policy = recorded_policy(tmp_path, "cartpole", *options)
    games = RecordedGames(policy, seed=4, games=20, changes_weights=False)
    for _ in range(60):
        games.turn()
    games.finish()

    net: Any = filled_net(network_shape(policy.config, policy.info), games.weights[0])
    later_rows = 0
    for slot in (slot for slots in games.published.values() for slot in slots):
        columns = slot.columns
        q, next_state = net.unroll(
            as_tensor(columns["obs"][:-1])[None], as_tensor(columns["state"])
        )
        alive = columns["alive"]
        largest = np.asarray(q.max(1).values)
        np.testing.assert_allclose(columns["q_max"][alive], largest[alive], atol=1e-5)
        continues = alive[:-1] & alive[1:]
        later_rows += int(continues.sum())
        expected = np.asarray(next_state)[:-1][continues]
        np.testing.assert_allclose(columns["state"][1:][continues], expected, atol=1e-5)
    assert later_rows > 200


def as_tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array.copy())
