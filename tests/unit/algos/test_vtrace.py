"""V-trace against the paper's definition, written out without its recursion, and by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.algos.ops.vtrace import VTrace, vtrace

Array = npt.NDArray[Any]


def by_definition(
    values: Array,
    rewards: Array,
    rhos: Array,
    terminated: Array,
    truncated: Array,
    alive: Array,
    *,
    discount: float,
    trace_lambda: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> tuple[Array, Array]:
    """Targets and advantages of one environment: eq. 1 as a sum over n of products, in float64."""
    steps = len(rewards)

    def value_after(t: int) -> float:
        return 0.0 if terminated[t] else float(values[t + 1])

    def goes_on(t: int) -> bool:
        ended = terminated[t] or truncated[t]
        return t + 1 < steps and bool(alive[t] and alive[t + 1]) and not ended

    def delta(t: int) -> float:
        rho = min(rho_clip, float(rhos[t]))
        return rho * (float(rewards[t]) + discount * value_after(t) - float(values[t]))

    def target(s: int) -> float:
        total, t = float(values[s]), s
        while True:
            cs = [trace_lambda * min(c_clip, float(rhos[i])) for i in range(s, t)]
            total += discount ** (t - s) * math.prod(cs) * delta(t)
            if not goes_on(t):
                return total
            t += 1

    targets = [target(s) if alive[s] else float(values[s]) for s in range(steps)]
    advantages = []
    for t in range(steps):
        after = targets[t + 1] if goes_on(t) else value_after(t)
        rho = min(rho_clip, rhos[t])
        advantages.append(alive[t] * rho * (rewards[t] + discount * after - values[t]))
    return np.array(targets), np.array(advantages)


def one_env(values: list[float], rewards: list[float], **others: Any) -> dict[str, Any]:
    """Tensors ``[T(+1), 1]``; on-policy, alive and never ended where not said otherwise."""
    steps = len(rewards)
    given = {
        "values": values,
        "rewards": rewards,
        "log_rhos": [0.0] * steps,
        "terminated": [False] * steps,
        "truncated": [False] * steps,
        "alive": [True] * steps,
    } | others
    return {name: torch.tensor(column)[:, None] for name, column in given.items()}


def targets_of(inputs: dict[str, Any], trace: VTrace) -> list[float]:
    targets: Tensor = inputs["values"][:-1] + trace.errors
    return targets[:, 0].tolist()


def test_targets_of_three_steps_match_a_sum_by_hand() -> None:
    half = Fraction(1, 2)
    rhos = [Fraction(2), half, Fraction(1)]  # clipped: 1, 1/2, 1
    deltas = [1 + half * 2 - 1, half * (2 + half * 4 - 2), 3 + half * 8 - 4]
    assert deltas == [1, 1, 3]
    last, middle, first = 4 + 3, 2 + 1 + half * half * 3, 1 + 1 + half * (1 + half * half * 3)
    assert [first, middle, last] == [Fraction(23, 8), Fraction(15, 4), 7]
    advantages = [1 + half * middle - 1, half * (2 + half * last - 2), 3 + half * 8 - 4]

    inputs = one_env([1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 3.0], log_rhos=[math.log(r) for r in rhos])
    trace = vtrace(**inputs, discount=0.5)
    assert targets_of(inputs, trace) == pytest.approx([2.875, 3.75, 7.0])
    assert trace.advantages[:, 0].tolist() == pytest.approx([float(a) for a in advantages])


def test_truncation_bootstraps_from_the_final_observation_and_termination_from_nothing() -> None:
    values, rewards = [1.0, 2.0, 4.0, 8.0], [1.0, 1.0, 1.0]
    ended = [False, True, False]
    alive = [True, True, False]  # the row after an end is the reset
    truncated = one_env(values, rewards, truncated=ended, alive=alive)
    trace = vtrace(**truncated, discount=0.5)
    assert targets_of(truncated, trace) == [1 + 0.5 * (1 + 0.5 * 4), 1 + 0.5 * 4, 4.0]
    assert trace.advantages[:, 0].tolist() == [1 + 0.5 * 3 - 1, 1 + 0.5 * 4 - 2, 0.0]

    terminated = one_env(values, rewards, terminated=ended, alive=alive)
    trace = vtrace(**terminated, discount=0.5)
    assert targets_of(terminated, trace) == [1 + 0.5 * 1, 1.0, 4.0]
    assert trace.advantages[:, 0].tolist() == [1 + 0.5 * 1 - 1, 1.0 - 2, 0.0]

    both = one_env(values, rewards, terminated=ended, truncated=ended, alive=alive)
    assert torch.equal(vtrace(**both, discount=0.5).errors, trace.errors)


def test_values_after_an_episode_end_do_not_affect_steps_before_it() -> None:
    ended, alive = [False, True, False, False], [True, True, False, True]
    for flag in ("terminated", "truncated"):
        calm = one_env([0.0] * 5, [1.0] * 4, alive=alive, **{flag: ended})
        wild = one_env(
            [0.0, 0.0, 0.0, 99.0, 99.0], [1.0, 1.0, 7.0, 9.0], alive=alive, **{flag: ended}
        )
        a, b = (vtrace(**inputs, discount=0.9) for inputs in (calm, wild))
        assert torch.equal(a.errors[:2], b.errors[:2])
        assert torch.equal(a.advantages[:2], b.advantages[:2])
        assert b.errors[2].item() == b.advantages[2].item() == 0.0


def test_on_policy_without_lambda_the_target_is_the_discounted_return() -> None:
    rewards = [1.0, -2.0, 3.0, 0.5]
    inputs = one_env([0.3, 0.1, -0.4, 0.2, 2.0], rewards)
    expected = [
        sum(0.9 ** (t - s) * rewards[t] for t in range(s, 4)) + 0.9 ** (4 - s) * 2.0
        for s in range(4)
    ]
    assert targets_of(inputs, vtrace(**inputs, discount=0.9)) == pytest.approx(expected)


def test_on_policy_the_target_is_the_lambda_return() -> None:
    values, rewards, lam, discount = [0.3, 0.1, -0.4, 0.2, 2.0], [1.0, -2.0, 3.0, 0.5], 0.7, 0.9

    def n_step(s: int, n: int) -> float:
        return sum(discount**k * rewards[s + k] for k in range(n)) + discount**n * values[s + n]

    expected = [
        (1 - lam) * sum(lam ** (n - 1) * n_step(s, n) for n in range(1, 4 - s))
        + lam ** (3 - s) * n_step(s, 4 - s)
        for s in range(4)
    ]
    inputs = one_env(values, rewards)
    trace = vtrace(**inputs, discount=discount, trace_lambda=lam)
    assert targets_of(inputs, trace) == pytest.approx(expected)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    steps, envs = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    likely = draw(st.sampled_from([0.0, 0.2, 0.6]))
    return {
        "values": rng.normal(size=(steps + 1, envs)),
        "rewards": rng.normal(size=(steps, envs)),
        "log_rhos": rng.normal(size=(steps, envs)),
        "terminated": rng.random((steps, envs)) < likely,
        "truncated": rng.random((steps, envs)) < likely,
        "alive": rng.random((steps, envs)) >= likely / 2,
        "discount": draw(st.sampled_from([0.0, 0.5, 0.99, 1.0])),
        "trace_lambda": draw(st.sampled_from([0.0, 0.9, 1.0])),
        "rho_clip": draw(st.sampled_from([0.5, 1.0, 3.0])),
        "c_clip": draw(st.sampled_from([0.5, 1.0, 3.0])),
    }


@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_random_cases_agree_with_the_definition(case: dict[str, Any]) -> None:
    arrays = {name: x for name, x in case.items() if isinstance(x, np.ndarray)}
    settings_ = {name: x for name, x in case.items() if name not in arrays}
    tensors: dict[str, Any] = {
        name: torch.from_numpy(x if x.dtype == np.bool_ else x.astype(np.float32))
        for name, x in arrays.items()
    }
    trace = vtrace(**tensors, **settings_)
    columns: dict[str, Any] = {name: x for name, x in arrays.items() if name != "log_rhos"}
    columns["rhos"] = np.exp(arrays["log_rhos"])
    for env in range(arrays["values"].shape[1]):
        targets, advantages = by_definition(
            **{name: x[:, env] for name, x in columns.items()}, **settings_
        )
        errors = targets - arrays["values"][:-1, env]
        np.testing.assert_allclose(trace.errors[:, env], errors, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(trace.advantages[:, env], advantages, rtol=1e-4, atol=1e-4)


def test_inputs_are_unchanged_and_outputs_carry_no_gradient() -> None:
    inputs = one_env([1.0, 2.0, 3.0], [1.0, 1.0], log_rhos=[1.0, -1.0])
    inputs["values"].requires_grad_()
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    trace = vtrace(**inputs, discount=0.9)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)
    assert not trace.errors.requires_grad
    assert not trace.advantages.requires_grad


@pytest.mark.parametrize("name", ["values", "rewards", "alive"])
def test_inputs_of_wrong_shape_are_refused(name: str) -> None:
    inputs = one_env([1.0, 2.0, 3.0], [1.0, 1.0])
    inputs[name] = inputs[name][:-1]
    with pytest.raises(AssertionError):
        vtrace(**inputs, discount=0.9)
