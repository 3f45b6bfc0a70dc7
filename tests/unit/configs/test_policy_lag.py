"""The policy lag that follows from the number of slots, against counts by hand."""

from __future__ import annotations

import pytest

from penstock.configs.load import resolve
from penstock.configs.policy_lag import batches_ahead, lag_of, lent_by_batch, slots_within_lag
from penstock.configs.schema import Config


def config(prefetch: int, batch_slots: int, updates: int, publish_every: int, lag: int) -> Config:
    return resolve(
        "CartPole-v1",
        [
            f"learner.prefetch={prefetch}",
            f"learner.batch_slots={batch_slots}",
            f"learner.updates_per_batch={updates}",
            f"learner.publish_every={publish_every}",
            f"transport.max_policy_lag={lag}",
            "actors.count=4",
        ],
    )


@pytest.mark.parametrize(
    ("settings", "slots", "lag"),
    [
        # Weights that are published while a slot is lent come one batch later at most, and the
        # other slots of its batch add nothing.
        ((0, 1, 1, 1), 1, 1),
        ((0, 2, 1, 1), 2, 1),
        # Three slots ahead are three batches of one slot, or one of two with one left over.
        ((0, 1, 1, 1), 4, 4),
        ((0, 2, 1, 1), 4, 2),
        # Each batch is four optimizer steps; one more is prefetched.
        ((1, 1, 4, 1), 1, 8),
        ((1, 1, 4, 1), 3, 16),
        # Published after every second batch of four.
        ((0, 1, 4, 8), 1, 8),
    ],
)
def test_lag_follows_from_the_number_of_slots(
    settings: tuple[int, int, int, int], slots: int, lag: int
) -> None:
    assert lag_of(config(*settings, lag=1000), slots) == lag


@pytest.mark.parametrize(
    ("settings", "limit", "slots"),
    [
        ((0, 1, 1, 1), 1, 1),
        ((0, 1, 1, 1), 4, 3),
        ((0, 2, 1, 1), 4, 6),
        ((1, 1, 4, 1), 8, 1),
        ((1, 1, 4, 1), 15, 1),
        ((1, 1, 4, 1), 16, 2),
        ((0, 1, 4, 8), 1000, 248),
    ],
)
def test_number_of_slots_follows_from_the_lag_limit(
    settings: tuple[int, int, int, int], limit: int, slots: int
) -> None:
    found = config(*settings, lag=limit)
    assert slots_within_lag(found) == slots
    assert lag_of(found, slots) <= limit


@pytest.mark.parametrize(
    ("options", "by_batch"),
    [
        # 10 epochs of 4 minibatches
        (["algo.name=ppo", "algo.epochs=10", "transport.max_policy_lag=0"], True),
        (["algo.name=ppo", "algo.epochs=10", "transport.max_policy_lag=39"], True),
        (["algo.name=ppo", "algo.epochs=10", "transport.max_policy_lag=100"], False),
        (["algo.name=impala", "transport.max_policy_lag=3"], True),
        (["algo.name=dqn", "transport.max_policy_lag=3"], False),
    ],
)
def test_slots_are_lent_by_batch_if_the_lag_limit_is_below_one_batch(
    options: list[str], by_batch: bool
) -> None:
    updates = ["learner.updates_per_batch=4"] if "algo.name=dqn" not in options else []
    assert lent_by_batch(resolve("CartPole-v1", [*options, *updates, "actors.envs=8"])) == by_batch


@pytest.mark.parametrize(
    ("target", "prefetch", "ahead"),
    [
        ("pong_impala", "null", 1),
        ("pendulum_sac", "null", 2),
        ("pendulum_sac", "1", 1),
        ("pendulum_sac", "0", 0),
    ],
)
def test_two_batches_are_drawn_ahead_from_replay(target: str, prefetch: str, ahead: int) -> None:
    assert batches_ahead(resolve(target, [f"learner.prefetch={prefetch}"])) == ahead
