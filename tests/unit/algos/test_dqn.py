"""DQN against figures by hand: targets on a table of Q-values, priorities of short slots."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from penstock.algos.dqn import algorithm as dqn
from penstock.algos.dqn import update
from penstock.algos.dqn.algorithm import initial_priorities
from penstock.algos.dqn.config import DqnConfig
from penstock.algos.samples import make_receive, process, slot_spec
from penstock.algos.slots import newest_frames
from penstock.configs.load import resolve
from penstock.core.specs import SlotSpec
from penstock.envs import EnvInfo
from penstock.models.acting.categorical import EpsilonGreedySampler
from random_unrolls import random_ends

TWO = EnvInfo(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), 1, "")


class Table(nn.Module):
    """Q-values ``[states, actions]``; an observation is the number of its state."""

    def __init__(self, values: list[list[float]]) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, obs: Tensor) -> Tensor:
        return self.values[obs]


# In state 1 the trained network prefers action 0, the target network action 1.
ONLINE = [[1.0, 2.0], [5.0, 4.0], [0.0, 0.0]]
TARGET = [[0.0, 0.0], [3.0, 7.0], [9.0, 9.0]]
MASKED_TARGET = [[0.0, 8.0], [9.0, 7.0], [9.0, 9.0]]


def transitions(*rows: tuple[int, int, float, int, float, float]) -> dict[str, Tensor]:
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    names = ("obs", "action", "reward", "next_obs", "discount", "weights")
    return dict(zip(names, columns, strict=True))


@pytest.mark.parametrize(
    ("double", "expected"),
    [
        # double: r + d * Q'(s', argmax Q) = 0.5 + 0.9 * 3; plain: 0.5 + 0.9 * 7
        (True, [0.5 + 0.9 * 3 - 1, -1 + 0.81 * 3 - 2, 2 - 4]),
        (False, [0.5 + 0.9 * 7 - 1, -1 + 0.81 * 7 - 2, 2 - 4]),
    ],
)
def test_td_errors_of_one_step_two_steps_and_a_terminal(
    double: bool, expected: list[float]
) -> None:
    batch = transitions(
        (0, 0, 0.5, 1, 0.9, 1.0), (0, 1, -1.0, 1, 0.81, 1.0), (1, 1, 2.0, 2, 0.0, 1.0)
    )
    nets: Any = Table(ONLINE), Table(TARGET)
    net, target = nets
    loss, differences, sums = update.loss(net, target, batch, DqnConfig(double=double, huber=100.0))
    np.testing.assert_allclose(differences, expected, rtol=1e-6)
    assert loss.item() == pytest.approx(sum(0.5 * e * e for e in expected))
    named = dict(zip(update.STATISTICS, sums.tolist(), strict=True))
    assert named["q_loss"] == pytest.approx(loss.item())
    assert named["td_error"] == pytest.approx(sum(abs(e) for e in expected))
    assert named["q_mean"] == pytest.approx(1 + 2 + 4)
    assert named["q_target_mean"] == pytest.approx(sum(expected) + 7)
    assert not differences.requires_grad
    assert not sums.requires_grad


@pytest.mark.parametrize(
    ("double", "expected"),
    [
        # In state 1 only action 1 is allowed, which the online network values less: Q' is 7. In
        # state 0 only action 0: Q' is 0. Nothing is allowed in state 2, so nothing is forbidden.
        (True, [0.5 + 0.9 * 7 - 1, -1 + 0.9 * 0 - 2, 1 + 0.5 * 9 - 4]),
        (False, [0.5 + 0.9 * 7 - 1, -1 + 0.9 * 0 - 2, 1 + 0.5 * 9 - 4]),
    ],
)
def test_targets_use_only_allowed_actions(double: bool, expected: list[float]) -> None:
    batch = transitions(
        (0, 0, 0.5, 1, 0.9, 1.0), (0, 1, -1.0, 0, 0.9, 1.0), (1, 1, 1.0, 2, 0.5, 1.0)
    )
    mask = torch.tensor([[0, 1], [1, 0], [0, 0]], dtype=torch.uint8)
    nets: Any = Table(ONLINE), Table(MASKED_TARGET)
    cfg = DqnConfig(double=double, huber=100.0)
    net, target = nets
    _, differences, _ = update.loss(net, target, batch, cfg, mask)
    np.testing.assert_allclose(differences, expected, rtol=1e-6)
    open_mask = torch.ones_like(mask)
    _, free, _ = update.loss(net, target, batch, cfg)
    _, same, _ = update.loss(net, target, batch, cfg, open_mask)
    assert torch.equal(free, same)
    assert not torch.equal(free, differences)


@pytest.mark.parametrize(
    ("reward", "delta", "loss", "slope"),
    [
        (1.5, 1.0, 0.5 * 0.5**2, 0.5),  # difference 0.5
        (4.0, 1.0, 1.0 * (3 - 0.5), 1.0),  # 3
        (-4.0, 1.0, 1.0 * (5 - 0.5), -1.0),  # -5
        (4.0, 2.0, 2.0 * (3 - 1.0), 2.0),  # 3, wider
    ],
)
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_huber_loss_and_its_gradient_by_hand(
    reward: float, delta: float, loss: float, slope: float, weight: float
) -> None:
    net: Any = Table(ONLINE)
    target: Any = Table(TARGET)
    batch = transitions((0, 0, reward, 2, 0.0, weight))
    total, _, _ = update.loss(net, target, batch, DqnConfig(huber=delta))
    total.backward()
    assert total.item() == pytest.approx(weight * loss)
    expected = torch.zeros(3, 2)
    expected[0, 0] = -weight * slope
    torch.testing.assert_close(net.values.grad, expected)
    assert target.values.grad is None


N, GAMMA = 2, 0.5
F, T = False, True


def priorities(**rows: Any) -> list[float]:
    """Of one environment; 5 steps unless said otherwise."""
    steps = len(rows["reward"])
    n_step = rows.pop("n", N)
    columns = {"terminated": [F] * steps, "truncated": [F] * steps, "alive": [T] * steps} | rows
    arrays = {name: np.array(column)[:, None] for name, column in columns.items()}
    numbers = {name: arrays[name].astype(np.float32) for name in BASE}
    found = initial_priorities(arrays | numbers, n_step=n_step, discount=GAMMA)
    assert found.dtype == np.float32
    return [float(value) for value in found[:, 0]]


BASE = {
    "reward": [1.0, 2.0, 3.0, 4.0, 5.0],
    "q_taken": [10.0, 0.0, 1.0, 1.0, 1.0],
    "q_max": [100.0, 20.0, 40.0, 60.0, 80.0],
}


def test_priorities_sum_n_rewards_and_bootstrap_with_the_actors_value() -> None:
    found = priorities(**BASE)
    expected = [
        1 + 0.5 * 2 + 0.25 * 40 - 10,
        2 + 0.5 * 3 + 0.25 * 60 - 0,
        3 + 0.5 * 4 + 0.25 * 80 - 1,
        4 + 0.5 * 80 - 1,  # the last row stands for its own value
    ]
    assert found == pytest.approx([*map(abs, expected), max(expected)])


@pytest.mark.parametrize("truncated", [False, True])
def test_termination_ends_the_n_step_sum_and_overrides_truncation(truncated: bool) -> None:
    ends = [F, F, T, F, F]
    alive = [T, T, T, F, T]
    extra = {"truncated": ends} if truncated else {}
    found = priorities(**BASE, terminated=ends, alive=alive, **extra)
    expected = [1 + 0.5 * 2 + 0.25 * 40 - 10, 2 + 0.5 * 3, 3 - 1, 0]
    assert found == pytest.approx([*expected, max(expected)])


def test_truncation_goes_on_with_the_value_of_the_final_observation() -> None:
    found = priorities(**BASE, truncated=[F, F, T, F, F], alive=[T, T, T, F, T])
    expected = [1 + 0.5 * 2 + 0.25 * 40 - 10, 2 + 0.5 * (3 + 0.5 * 60), 3 + 0.5 * 60 - 1, 0]
    assert found == pytest.approx([*expected, max(expected)])


def test_terminated_last_row_has_an_exact_priority() -> None:
    found = priorities(**BASE, terminated=[F, F, F, F, T])
    assert found[3:] == pytest.approx([4 + 0.5 * 5 - 1, 5 - 1])
    found = priorities(**BASE, truncated=[F, F, F, F, T])
    assert found[3] == pytest.approx(4 + 0.5 * 80 - 1)


def test_priorities_of_slots_of_one_step_and_shorter_than_n() -> None:
    one = {name: values[:1] for name, values in BASE.items()}
    assert priorities(**one) == [1.0]
    assert priorities(**one, terminated=[T]) == [9.0]
    two = {name: values[:2] for name, values in BASE.items()}
    assert priorities(**two, n=7) == pytest.approx([1 + 0.5 * 20 - 10, 1])
    assert priorities(**two, n=7, alive=[F, F]) == [0, 0]


def naive(columns: dict[str, Any], n: int, discount: float, t: int, e: int) -> float | None:
    """The absolute difference of one row by following it; None where the slot does not tell."""
    steps, total, factor = len(columns["reward"]), 0.0, 1.0
    for j in range(n + 1):
        row = t + j
        last = row == steps - 1
        if j == n or (last and not columns["terminated"][row, e]):
            if j == 0:
                return None
            total += factor * columns["q_max"][row, e]
            break
        total += factor * columns["reward"][row, e]
        factor *= discount
        if columns["terminated"][row, e]:
            break
        if columns["truncated"][row, e]:
            total += factor * columns["q_max"][row + 1, e]
            break
    return float(abs(total - columns["q_taken"][t, e]))


@pytest.mark.parametrize(("n", "seed"), [(1, 0), (3, 1), (5, 2), (20, 3)])
def test_priorities_of_random_slots_are_those_of_a_plain_loop(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = SlotSpec(12, 9, dqn.columns(spaces.Box(-1, 1, (3,)), spaces.Discrete(2)))
    columns = spec.views(spec.zeros())
    for name in ("reward", "q_taken", "q_max"):
        columns[name][...] = rng.normal(size=(12, 9))
    ends = random_ends(rng, 12, 9, 0.15)
    for name, flags in zip(("terminated", "truncated", "alive"), ends, strict=True):
        columns[name][...] = flags
    process(DqnConfig(n_step=n, discount=0.9, reward_scale=0.5), columns)
    expected = np.full((12, 9), np.nan)
    for t, e in zip(*np.nonzero(columns["alive"]), strict=True):
        value = naive(columns, n, 0.9, t, e)
        expected[t, e] = np.nan if value is None else value
    unknown = np.isnan(expected) & columns["alive"]
    expected[unknown] = np.nanmax(expected)
    expected[~columns["alive"]] = 0
    assert unknown.any()
    np.testing.assert_allclose(columns["priority"], expected, rtol=1e-4, atol=1e-5)


def test_slot_has_the_columns_of_dqn() -> None:
    class Game:
        observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
        action_space = spaces.Discrete(6)

    spec = slot_spec(resolve("Acrobot-v1", ["algo.name=dqn", "actors.envs=2"]), Game())
    found = {c.name: (c.dtype, c.shape, c.rows) for c in spec.columns}
    assert found["obs"] == ("|u1", (4, 84, 84), "unroll+1")
    assert found["action"] == ("<i4", (), "unroll")
    for name in ("q_taken", "q_max", "priority"):
        assert found[name] == ("<f4", (), "unroll")


def test_process_clips_rewards_before_computing_priorities() -> None:
    spec = SlotSpec(2, 1, dqn.columns(spaces.Box(-1, 1, (3,)), spaces.Discrete(2)))
    columns = spec.views(spec.zeros())
    columns["reward"][:] = [[-7.0], [3.0]]
    columns["terminated"][1] = columns["alive"][...] = True
    process(DqnConfig(reward_clip=1.0, reward_scale=0.5, discount=0.5), columns)
    np.testing.assert_allclose(columns["reward"], [[-0.5], [0.5]])
    np.testing.assert_allclose(columns["priority"], [[abs(-0.5 + 0.5 * 0.5)], [0.5]])


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("action", 2, "actions from 0 to 2, there are 2"),
        ("q_max", math.nan, "column q_max holds numbers that are not finite"),
        ("q_taken", math.inf, "column q_taken"),
        ("reward", 1e9, "a reward of 1e\\+09, and rewards must lie"),
    ],
)
def test_received_slot_with_invalid_values_is_refused(
    column: str, value: float, sentence: str
) -> None:
    spec = SlotSpec(2, 2, dqn.columns(spaces.Box(-1, 1, (3,)), spaces.Discrete(2)))
    columns = spec.views(spec.zeros())
    make_receive(DqnConfig(), TWO)(columns)
    columns[column][1, 1] = value
    with pytest.raises(ValueError, match=sentence):
        make_receive(DqnConfig(), TWO)(columns)


@pytest.mark.parametrize("pad", [-1, 2])
def test_frame_stack_column_uses_no_side_rows(pad: int) -> None:
    stacks = spaces.Box(0, 255, (4, 8, 8), np.uint8)
    spec = SlotSpec(2, 2, newest_frames(dqn.columns(stacks, spaces.Discrete(2)), 4))
    columns = spec.views(spec.zeros())
    columns["pad"][0, 0] = 1
    make_receive(DqnConfig(), TWO)(columns)
    columns["pad"][1, 1] = pad
    with pytest.raises(ValueError, match="column pad"):
        make_receive(DqnConfig(), TWO)(columns)


def test_actions_are_random_until_the_first_update() -> None:
    """And never those that are forbidden."""
    sampler = EpsilonGreedySampler(4, np.zeros(3000), np.random.default_rng(0))
    for untrained, counts in ((True, [1000, 0, 1000, 1000]), (False, [0, 0, 0, 3000])):
        sampler.on_new_weights(untrained=untrained)
        sampler.outputs[:] = np.arange(4, dtype=np.float32)[:, None]
        sampler.forbid(np.repeat(np.arange(4)[:, None] == 1, 3000, axis=1))
        found = np.bincount(sampler.sample(), minlength=4)
        np.testing.assert_allclose(found, counts, atol=100)


@pytest.mark.parametrize(
    ("actor", "expected"), [(0, [False] * 4), (1, [False, False, True, True]), (2, [False] * 4)]
)
def test_quarter_of_the_environments_with_the_least_epsilon_explores_least(
    actor: int, expected: list[bool]
) -> None:
    config = resolve("cartpole_dqn", ["actors.count=2", "actors.envs=4"])
    found = dqn.least_exploring(config, actor)
    assert found is not None
    assert found.tolist() == expected
    # Those are the environments whose epsilon is below that of all others.
    epsilon = 0.1 ** (1 + 7 * np.arange(8) / 7)
    assert sorted(epsilon)[:2] == epsilon[[7, 6]].tolist()


@pytest.mark.parametrize(
    "options",
    [
        ["algo.epsilon_alpha=0"],
        ["algo.epsilon=0"],
        ["actors.count=1", "actors.envs=1"],
    ],
)
def test_environments_that_explore_alike_have_no_least_exploring_ones(options: list[str]) -> None:
    assert dqn.least_exploring(resolve("cartpole_dqn", options), 0) is None
