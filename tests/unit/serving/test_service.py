"""A service without connections: its actions are those of the loaded policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from penstock import LoadedPolicy
from penstock.serving import service as service_module
from penstock.serving.messages import Hello, MessageError
from penstock.serving.seats import StepRows
from penstock.serving.service import Service
from served_games import PARTS, RECURRENT, random_policy

FIRST, TERMINATED = 1, 2


def batches(policy: LoadedPolicy, count: int, rows: int) -> list[Any]:
    """Batches of observations, which are no two the same."""
    space = batch_space(policy.observation_space, rows)
    space.seed(4)
    samples = [space.sample() for _ in range(count)]
    for sample in samples:
        if isinstance(sample, dict) and "action_mask" in sample:
            sample["action_mask"][:, 1] = 1
    return samples


def play(service: Service, seats: Any, flags: list[int], observations: Any) -> Any:
    """Take one row of each seat, and return the actions by seat."""
    rows = np.zeros((len(flags), service.observations.layout.nbytes), np.uint8)
    service.observations.layout.write(observations, rows)
    step = StepRows(
        np.array(seats, np.int64),
        flags=np.array(flags, np.uint8),
        reward=np.zeros(len(flags), np.float32),
        message=np.zeros(len(flags), np.int64),
    )
    assert service.take(step, rows) == []
    decisions = service.decide()
    assert decisions is not None
    actions = decisions.actions.view(service.actions.dtype)[:, 0]["action"]
    return dict(zip(decisions.seat.tolist(), actions, strict=True))


@pytest.mark.parametrize(
    ("target", "overrides"),
    [
        ("cartpole", ()),
        ("cartpole", RECURRENT),
        ("parts", ()),
        ("numbered", RECURRENT),
        ("bounded", ()),
        ("paired", ()),
        ("frames", ()),
    ],
)
def test_actions_of_several_seats_are_those_of_the_loaded_policy(
    target: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    policy = random_policy(tmp_path, target, *overrides)
    service = Service(policy)
    seats = service.join(Hello(seats=5), game=0)
    flags = [FIRST] * 5
    state = None
    for observations in batches(policy, 12, rows=5):
        actions = play(service, seats, flags, observations)
        expected, state = policy(observations, state)
        for seat in seats:
            np.testing.assert_array_equal(actions[seat], expected[seat])
        flags = [0] * 5


def test_a_seat_is_remembered_apart_from_the_others_and_until_its_episode_ends(
    tmp_path: Path,
) -> None:
    policy = random_policy(tmp_path, "bounded", *RECURRENT)
    service = Service(policy)
    seats = service.join(Hello(seats=3), game=0)
    states: dict[int, Any] = {}
    rng = np.random.default_rng(0)
    for turn in range(30):
        some = [seat for seat in seats if turn == 0 or rng.random() < 0.6] or [0]
        begins = [turn == 0 or rng.random() < 0.2 for _ in some]
        observations = rng.standard_normal((len(some), 3))
        actions = play(service, some, [FIRST if first else 0 for first in begins], observations)
        for seat, first, observation in zip(some, begins, observations, strict=True):
            state = None if first else states[seat]
            expected, states[seat] = policy(observation, state)
            np.testing.assert_allclose(actions[seat], expected, rtol=0, atol=1e-5)


def test_a_game_with_the_spaces_of_the_policy_may_join(tmp_path: Path) -> None:
    policy = random_policy(tmp_path, "parts")
    hello = Hello(observation=policy.observation_space, action=policy.action_space)
    assert Service(policy).join(hello, game=0) == range(1)


def test_a_game_with_other_spaces_is_refused_by_the_column(tmp_path: Path) -> None:
    policy = random_policy(tmp_path, "parts")
    others = {name: part for name, part in PARTS.spaces.items() if name != "ways"}
    with pytest.raises(MessageError, match=r"observations\.ways of the game are absent"):
        Service(policy).join(Hello(observation=spaces.Dict(others)), game=0)


def test_seats_beyond_the_most_are_refused(tmp_path: Path) -> None:
    service = Service(random_policy(tmp_path, "cartpole"), most_seats=8)
    service.join(Hello(seats=6), game=0)
    with pytest.raises(MessageError, match="no room for 3 seats, as 6 of 8 are taken"):
        service.join(Hello(seats=3), game=1)


def test_seats_of_a_large_memory_are_limited_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "STATE_NBYTES", 1 << 16)
    policy = random_policy(tmp_path, "cartpole", *RECURRENT)
    assert Service(policy).seats.capacity == (1 << 16) // (4 * 2 * 16)
