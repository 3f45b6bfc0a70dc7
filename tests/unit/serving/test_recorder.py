"""What games play, against the rows that their own logs make, and against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import LoadedPolicy
from penstock.algos.samples import network_shape
from penstock.algos.unrolled import unrolled
from penstock.core.observations import views
from penstock.core.params import Float32
from penstock.envs.vector_env import action_map
from penstock.models.distributions import distribution
from penstock.models.torch_heads import ActorCritic
from penstock.models.torch_nets import filled_net
from recorded_games import (
    Array,
    ExpectedSlot,
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


def log_probs(net: ActorCritic, columns: dict[str, Array]) -> Array:
    """Those of all recorded actions of a slot, by the network of a learner, ``[T]``."""
    batch = {
        name: torch.from_numpy(np.ascontiguousarray(columns[name]))[:, None]
        for name in ("obs", "action", "alive")
    }
    if "core_state" in columns:
        batch["core_state"] = torch.from_numpy(columns["core_state"].copy())
    with torch.inference_mode():
        outputs, _, mask = unrolled(net, batch, slice(None))
        steps = len(columns["action"])
        policy = distribution(net.actions, outputs[:steps], None if mask is None else mask[:steps])
        return np.asarray(policy.logp(batch["action"].flatten(0, 1)))


def net_of(policy: LoadedPolicy, weights: Float32) -> Any:
    return filled_net(network_shape(policy.config, policy.info), weights)


@pytest.mark.parametrize(
    ("target", "overrides"),
    [
        ("cartpole", ("actors.unroll=5",)),
        ("cartpole", ("actors.unroll=1",)),
        ("cartpole", ("actors.unroll=7", "model.core=lstm", "model.core_size=16")),
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
    games = RecordedGames(policy, seed=1, games=32)
    for _ in range(150):
        games.turn()
    games.finish()

    assert games.held_turns
    assert min(games.seen[kind] for kind in ("fault", "seat left", "game left")) > 10
    assert len(games.weights) > 5
    nets = [net_of(policy, weights) for weights in games.weights]
    is_recurrent = policy.batch_policy.state_size > 0
    for place, log in games.logs.items():
        slots = games.published[place]
        expected = expected_slots(log, policy.config.actors.unroll)
        check_headers(slots, place)
        assert len(slots) == len(expected)
        for slot, expected_slot in zip(slots, expected, strict=True):
            check_rows(policy, slot, expected_slot)
            if not is_recurrent:
                check_log_probs(nets, slot.columns, expected_slot.rows)


def check_log_probs(nets: list[Any], columns: dict[str, Array], rows: list[Row]) -> None:
    """Those of each row, by the weights of its version; 0 where the policy decided nothing."""
    by_version = {
        version: log_probs(nets[version], columns)
        for version in np.unique(columns["policy_version"])
    }
    for t, row in enumerate(rows):
        expected = 0.0
        if row.decision is not None:
            expected = by_version[row.decision.version][t]
        elif row.is_last_look:
            expected = by_version[columns["policy_version"][t]][t]
        np.testing.assert_allclose(columns["behaviour_logp"][t], expected, atol=2e-5, rtol=1e-5)


def test_a_recurrent_learner_computes_the_recorded_log_probabilities(tmp_path: Path) -> None:
    overrides = ("actors.unroll=9", "model.core=lstm", "model.core_size=16")
    policy = recorded_policy(tmp_path, "cartpole", *overrides)
    games = RecordedGames(policy, seed=2, games=20, changes_weights=False)
    for _ in range(200):
        games.turn()
    games.finish()

    net = net_of(policy, games.weights[0])
    steps = 0
    for slot in (slot for slots in games.published.values() for slot in slots):
        alive = slot.columns["alive"]
        computed = log_probs(net, slot.columns)
        np.testing.assert_allclose(
            slot.columns["behaviour_logp"][alive], computed[alive], rtol=0, atol=1e-5
        )
        steps += int(alive.sum())
    assert steps > 1000
