"""What games play, against the rows that their own logs make, and against torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import LoadedPolicy
from penstock.algos.samples import network_shape, slot_spec
from penstock.algos.unrolled import unrolled
from penstock.core.observations import views
from penstock.core.params import Float32
from penstock.envs.vector_env import action_map
from penstock.models.distributions import distribution
from penstock.models.torch_heads import ActorCritic
from penstock.models.torch_nets import filled_net
from penstock.serving import game_recorder as recorder_module
from penstock.serving.messages import Hello, MessageError
from recorded_games import (
    FIRST,
    LEAVES,
    Array,
    ExpectedSlot,
    Message,
    Published,
    RecordedGames,
    Row,
    check_headers,
    expected_slots,
    recorded_policy,
)

NO_REWARD_CHANGE = ("algo.reward_clip=null", "algo.reward_scale=1")


def check_rows(policy: LoadedPolicy, slot: Published, expected: ExpectedSlot) -> None:
    """All columns of a slot but those that its network computed."""
    columns = slot.columns
    # Packed parts have bytes between them that mean nothing.
    seen = views(policy.info.parts, columns["obs"]) if policy.info.parts else columns
    logged = np.array(expected.obs)
    expected_parts = views(policy.info.parts, logged) if policy.info.parts else {"obs": logged}
    for name, part in expected_parts.items():
        np.testing.assert_array_equal(seen[name], part)
    rows = expected.rows
    outcomes = [row.outcome for row in rows]
    for name, values in {
        "alive": [outcome is not None for outcome in outcomes],
        "reward": [outcome.reward if outcome else 0 for outcome in outcomes],
        "terminated": [bool(outcome and outcome.terminated) for outcome in outcomes],
        "truncated": [bool(outcome and outcome.truncated) for outcome in outcomes],
        "episode_length": [row.episode_length for row in rows],
        "seat": [0],
        "policy_id": [0],
    }.items():
        np.testing.assert_array_equal(columns[name], np.array(values, columns[name].dtype), name)
    np.testing.assert_allclose(
        columns["episode_return"], [row.episode_return for row in rows], rtol=1e-6
    )
    if "discounted_return" in columns:
        discounted = [row.discounted_return for row in rows]
        np.testing.assert_allclose(columns["discounted_return"], discounted, rtol=1e-5, atol=1e-6)
    check_decisions(policy, columns, rows)


def check_decisions(policy: LoadedPolicy, columns: dict[str, Array], rows: list[Row]) -> None:
    """Actions and versions, which are zeros where the policy decided nothing."""
    to_env = action_map(policy.action_space)
    for t, row in enumerate(rows):
        if row.decision is not None:
            np.testing.assert_array_equal(
                to_env(columns["action"][t][None])[0], row.decision.action
            )
            assert columns["policy_version"][t] == row.decision.version
        elif row.repeats:
            np.testing.assert_array_equal(columns["action"][t], columns["action"][t - 1])
        elif not row.is_last_look:
            assert not columns["action"][t].any()


def log_probs(net: ActorCritic, slots: list[Published]) -> Array:
    """Those of all recorded actions of slots, by the network of a learner, ``[slots, T]``."""
    batch = {
        name: torch.from_numpy(np.stack([slot.columns[name] for slot in slots], axis=1))
        for name in ("obs", "action", "reward", "alive")
    }
    if "core_state" in slots[0].columns:
        states = np.concatenate([slot.columns["core_state"] for slot in slots])
        batch["core_state"] = torch.from_numpy(states)
    with torch.inference_mode():
        outputs, _, mask = unrolled(net, batch, slice(None))
        rows = batch["action"].shape[0] * len(slots)
        policy = distribution(net.actions, outputs[:rows], None if mask is None else mask[:rows])
        logp = policy.logp(batch["action"].flatten(0, 1))
    return np.asarray(logp).reshape(-1, len(slots)).T


def net_of(policy: LoadedPolicy, weights: Float32) -> Any:
    return filled_net(network_shape(policy.config, policy.info), weights)


@pytest.mark.parametrize(
    ("target", "overrides"),
    [
        ("cartpole", ("actors.unroll=5",)),
        ("cartpole", ("actors.unroll=1",)),
        ("cartpole", ("actors.unroll=7", "model.core=lstm", "model.core_size=16")),
        (
            "cartpole_ppo",
            ("actors.unroll=6", "algo.normalize_rewards=true", "learner.updates_per_batch=1"),
        ),
        ("parts", ("actors.unroll=4",)),
        ("numbered", ("actors.unroll=6",)),
        ("bounded", ("actors.unroll=3",)),
        ("paired", ("actors.unroll=8",)),
    ],
)
def test_slots_of_random_games_are_those_of_their_logs(
    target: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    policy = recorded_policy(tmp_path, target, *NO_REWARD_CHANGE, *overrides)
    games = RecordedGames(policy, seed=1, games=30)
    for _ in range(100):
        games.turn()
    games.finish()

    assert games.held_turns
    assert min(games.seen[kind] for kind in ("fault", "seat left", "game left")) > 10
    assert len(games.weights) > 5
    pairs: list[tuple[Published, ExpectedSlot]] = []
    for place, log in games.logs.items():
        slots = games.published[place]
        expected = expected_slots(log, policy.config.actors.unroll, policy.config.algo.discount)
        check_headers(slots, place)
        pairs += zip(slots, expected, strict=True)
    for slot, expected_slot in pairs:
        check_rows(policy, slot, expected_slot)
    if not policy.batch_policy.state_size:
        check_log_probs(policy, games.weights, pairs)


def check_log_probs(
    policy: LoadedPolicy, weights: list[Float32], pairs: list[tuple[Published, ExpectedSlot]]
) -> None:
    """Those of each row, by the weights of its version; 0 where the policy decided nothing."""
    slots = [slot for slot, _ in pairs]
    versions = np.stack([slot.columns["policy_version"] for slot in slots])
    recorded = np.stack([slot.columns["behaviour_logp"] for slot in slots])
    rows = [row for _, expected in pairs for row in expected.rows]
    is_decided = np.array([row.decision is not None or row.is_last_look for row in rows])
    is_decided = is_decided.reshape(versions.shape)
    for version in np.unique(versions):
        computed = log_probs(net_of(policy, weights[version]), slots)
        chosen = is_decided & (versions == version)
        np.testing.assert_allclose(recorded[chosen], computed[chosen], atol=2e-5, rtol=1e-5)
    repeats = np.array([row.repeats for row in rows]).reshape(versions.shape)
    assert not recorded[~is_decided & ~repeats].any()


@pytest.mark.parametrize("inputs", ["[]", "[action,reward]"])
@pytest.mark.parametrize("target", ["cartpole", "numbered", "bounded"])
def test_a_recurrent_learner_computes_the_recorded_log_probabilities(
    target: str, inputs: str, tmp_path: Path
) -> None:
    overrides = ("actors.unroll=9", "model.core=lstm", "model.core_size=16")
    rewards = ("algo.reward_clip=1.5", "algo.reward_scale=3")
    policy = recorded_policy(tmp_path, target, *overrides, *rewards, f"model.core_inputs={inputs}")
    games = RecordedGames(policy, seed=2, games=20, changes_weights=False)
    for _ in range(100):
        games.turn()
    games.finish()

    slots = [slot for slots in games.published.values() for slot in slots]
    computed = log_probs(net_of(policy, games.weights[0]), slots)
    recorded = np.stack([slot.columns["behaviour_logp"] for slot in slots])
    alive = np.stack([slot.columns["alive"] for slot in slots])
    assert alive.sum() > 1000
    np.testing.assert_allclose(recorded[alive], computed[alive], rtol=0, atol=1e-5)


def test_games_of_one_episode_a_connection_lose_no_return(tmp_path: Path) -> None:
    policy = recorded_policy(tmp_path, "cartpole", *NO_REWARD_CHANGE, "actors.unroll=16")
    games = RecordedGames(policy, seed=5, games=0, slots=4)
    rng = np.random.default_rng(5)
    played = []
    for _ in range(150):
        game = games.join()
        [first, *_] = game.seats
        steps = int(rng.integers(1, 40))
        rewards = rng.standard_normal(steps).astype(np.float32)
        flags = [FIRST, *[0] * (steps - 1), int(rng.choice([2, 4, 2 | LEAVES, 4 | LEAVES]))]
        for flag, reward in zip(flags, [0.0, *rewards], strict=True):
            games.take(
                [Message(game, first, flag, float(reward), policy.observation_space.sample())]
            )
            games.answer()
            while first.phase == "waiting":  # its place is held
                games.learn()
                games.answer()
        games.leave(game)
        played.append(float(rewards.sum(dtype=np.float64)))
    games.finish()

    recorded = []
    for slot in (slot for slots in games.published.values() for slot in slots):
        columns = slot.columns
        ends = columns["terminated"] | columns["truncated"]
        recorded += columns["episode_return"][ends].tolist()
    assert len(recorded) == len(played)
    np.testing.assert_allclose(sorted(recorded), sorted(played), rtol=1e-5, atol=1e-5)


def test_an_unroll_is_not_older_than_the_game_that_played_it(tmp_path: Path) -> None:
    policy = recorded_policy(tmp_path, "cartpole", "actors.unroll=4")
    games = RecordedGames(policy, seed=0, games=0)
    joined_s = []
    for _ in range(2):
        joined_s.append(time.monotonic())
        game = games.join()
        for flags in (FIRST, 0, 0):
            observation = policy.observation_space.sample()
            games.take([Message(game, game.seats[0], flags, 1.0, observation)])
            games.answer()
        games.leave(game)
        games.learn()
        time.sleep(0.01)

    [slots] = games.published.values()
    assert len(slots) == 2
    for slot, at_s in zip(slots, joined_s, strict=True):
        assert slot.header["started_s"] > at_s


def test_seats_beyond_a_quarter_of_the_free_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = recorded_policy(tmp_path, "cartpole")
    spec = slot_spec(policy.config, policy.info)
    monkeypatch.setattr(
        recorder_module, "available_nbytes", lambda: 4 * 3 * 10 * spec.payload_nbytes
    )
    games = RecordedGames(policy, seed=0, games=0)
    assert games.recorder.capacity == 10
    games.service.join(Hello(seats=9), 100)
    with pytest.raises(MessageError, match="no room for 2 seats, as 9 of 10 are taken"):
        games.service.join(Hello(seats=2), 101)


def test_games_wait_for_the_first_weights(tmp_path: Path) -> None:
    policy = recorded_policy(tmp_path, "cartpole")
    games = RecordedGames(policy, seed=0, games=0)
    games.service._stamp = None
    game = games.join()
    games.take([Message(game, game.seats[0], FIRST, 0.0, policy.observation_space.sample())])
    games.answer()
    games.answer()
    assert game.seats[0].phase == "waiting"
    games.load()
    games.answer()
    assert game.seats[0].phase == "acting"


def test_a_row_that_waits_is_not_decided_for_the_next_game_of_its_place(tmp_path: Path) -> None:
    policy = recorded_policy(tmp_path, "cartpole", "actors.unroll=1")
    games = RecordedGames(policy, seed=0, games=0, slots=1)
    game = games.join()
    seat = game.seats[0]
    for flags in (FIRST, 0, 0):
        games.take([Message(game, seat, flags, 1.0, policy.observation_space.sample())])
        games.answer()
    assert seat.phase == "waiting"
    assert games.recorder.held == 1
    games.leave(game)
    following = games.join()
    assert following.seats[0].place == seat.place
    games.learn()
    games.learn()
    games.answer()
    assert games.recorder.held == 0
    games.take(
        [Message(following, following.seats[0], FIRST, 0, policy.observation_space.sample())]
    )
    games.answer()
    assert following.seats[0].phase == "acting"
