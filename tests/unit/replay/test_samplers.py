"""Samplers against exact probabilities, over an array of valid rows made by the test."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from chi_square import assert_drawn_as
from pages import blocks
from penstock.replay.buffer import Replay
from penstock.replay.errors import ReplayError
from penstock.replay.samplers import (
    Constant,
    Linear,
    Prioritized,
    SampleCountLimit,
    Sampler,
    Uniform,
    as_schedule,
)

Array = npt.NDArray[Any]


class World:
    """A sampler and the table it believes in."""

    def __init__(self, sampler: Sampler, rows: int, seed: int = 0) -> None:
        self.sampler = sampler
        self.valid = np.zeros(rows, np.bool_)
        sampler.bind(self.valid, np.random.default_rng(seed))

    def insert(self, start: int, stop: int, priorities: Array | None = None) -> None:
        self.valid[start:stop] = True
        self.sampler.insert(start, stop, priorities)

    def remove(self, start: int, stop: int) -> None:
        self.valid[start:stop] = False
        self.sampler.remove(start, stop)

    def remove_rows(self, rows: list[int]) -> None:
        self.valid[rows] = False
        self.sampler.remove_rows(np.array(rows, np.int64))

    def draws(self, batches: int, count: int) -> Array:
        return np.concatenate([self.sampler.sample(count)[0] for _ in range(batches)])


def prioritized(rows: int, seed: int = 0, **options: Any) -> tuple[World, Prioritized]:
    sampler = Prioritized(**options)
    return World(sampler, rows, seed), sampler


# ---------------------------------------------------------------- uniform


def uniform_over(valid: Array) -> Array:
    return np.where(valid, 1 / np.count_nonzero(valid), 0.0)


@pytest.mark.parametrize("share", [1.0, 0.97, 0.9, 0.3, 0.04, 0.01])
def test_uniform_draws_evenly_from_any_share_of_valid_rows(share: float) -> None:
    world = World(Uniform(), 1003)
    world.insert(0, 1003)
    holes = np.flatnonzero(np.random.default_rng(1).random(1003) >= share)
    world.remove_rows(holes.tolist())
    assert_drawn_as(world.draws(500, 100), uniform_over(world.valid))


def test_uniform_draws_are_independent_even_with_invalid_rows() -> None:
    """Neighbours within a batch, and the first of each batch, where some draws are repeated."""
    world = World(Uniform(), 12)
    world.insert(0, 12)
    world.remove_rows([0, 3, 4, 9])
    rows = world.draws(4000, 8).reshape(4000, 8)
    pair = uniform_over(world.valid)[:, None] * uniform_over(world.valid)
    assert_drawn_as(rows[:, 0] * 12 + rows[:, 1], pair.ravel())
    assert_drawn_as(rows[:, 6] * 12 + rows[:, 7], pair.ravel())


def test_uniform_draws_evenly_when_valid_rows_change_after_drawing_ahead() -> None:
    """Rows that count only later, and rows that are removed."""
    drawn = []
    for seed in range(400):
        world = World(Uniform(), 200, seed)
        world.valid[:160] = True
        world.sampler.insert(0, 200, None)
        world.draws(3, 50)
        world.insert(160, 200)
        world.remove_rows([7, 8, 9])
        drawn.append(world.draws(2, 50))
    assert_drawn_as(np.concatenate(drawn), uniform_over(world.valid))


def test_uniform_never_draws_rows_that_were_not_inserted() -> None:
    world = World(Uniform(), 1_000_000)
    world.insert(0, 20)
    assert_drawn_as(world.draws(20, 100), np.full(20, 0.05))


def test_uniform_draws_evenly_after_rows_were_removed_and_inserted_again() -> None:
    world = World(Uniform(), 200)
    world.insert(0, 200)
    world.remove(0, 197)
    assert set(world.draws(20, 10)) == {197, 198, 199}
    world.insert(50, 60)
    assert_drawn_as(world.draws(200, 20), uniform_over(world.valid))


@pytest.mark.parametrize("sampler", [Uniform, Prioritized])
def test_sampling_without_rows_is_an_error(sampler: Callable[[], Sampler]) -> None:
    world = World(sampler(), 100)
    with pytest.raises(ReplayError, match="cannot sample 5 rows: no stored row"):
        world.sampler.sample(5)
    world.insert(0, 100)
    world.remove(0, 100)
    with pytest.raises(ReplayError, match="cannot sample 5 rows: no stored row"):
        world.sampler.sample(5)


# ---------------------------------------------------------------- prioritised: which rows


def proportional(priorities: Array, alpha: float, epsilon: float) -> Array:
    """The paper's P(i), in a loop; a priority below 0 stands for a row that is not there."""
    powers = [(float(p) + epsilon) ** alpha if p >= 0 else 0.0 for p in priorities]
    return np.array(powers) / sum(powers)


@pytest.mark.parametrize(("rows", "alpha"), [(37, 0.6), (1000, 1.0), (9001, 0.3), (140_000, 0.6)])
def test_prioritized_draws_follow_widely_different_priorities(rows: int, alpha: float) -> None:
    """Independent draws: one of each batch."""
    rng = np.random.default_rng(rows)
    priorities = np.full(rows, -1.0)
    start = rows // 3
    stop = min(rows, start + 500)
    priorities[start:stop] = 10.0 ** rng.uniform(-3, 3, stop - start)
    world, _ = prioritized(rows, alpha=alpha, epsilon=0.01, fast=False)
    world.insert(start, stop, priorities[start:stop])
    assert_drawn_as(world.draws(20_000, 1), proportional(priorities, alpha, 0.01))


def test_each_stratum_gives_one_row() -> None:
    """So a row comes n P(i) times, give or take less than 2."""
    rng = np.random.default_rng(2)
    priorities = 10.0 ** rng.uniform(-1, 1, 50)
    world, _ = prioritized(50, alpha=1.0)
    world.insert(0, 50, priorities)
    expected = 400 * proportional(priorities, 1.0, 1e-6)
    total = np.zeros(50)
    for _ in range(200):
        counts = np.bincount(world.sampler.sample(400)[0], minlength=50)
        assert (np.abs(counts - expected) < 2).all()
        total += counts
    # 200 batches: a count's spread is below 1/2 a batch, so the mean's is below 1/2 / sqrt(200).
    assert (np.abs(total / 200 - expected) < 4.5 * 0.5 / np.sqrt(200)).all()


def test_prioritized_draws_are_correct_after_wrap_around_removal_and_updates() -> None:
    """Each row's priority is followed in a plain list."""
    rng = np.random.default_rng(3)
    world, sampler = prioritized(61, alpha=0.5, epsilon=1e-6)
    priorities, highest = np.full(61, -1.0), 1.0
    for turn in range(23):
        start = turn * 7 % 56
        world.remove(start, start + 7)
        given = rng.uniform(0, 9, 7) if turn % 2 else None
        world.insert(start, start + 7, given)
        for row in range(start, start + 7):
            priorities[row] = highest if given is None else given[row - start]
        rows = sampler.sample(4)[0]
        fresh = rng.uniform(0, 20, 4)
        sampler.update(rows, fresh)
        for row, priority in zip(rows, fresh, strict=True):
            priorities[row] = priority
        highest = max([highest, *fresh, *([] if given is None else given)])
    world.remove_rows([8, 20, 21])
    priorities[[8, 20, 21]] = -1
    np.testing.assert_allclose(
        sampler._tree.leaves / sampler._tree.total, proportional(priorities, 0.5, 1e-6), rtol=1e-12
    )
    assert_drawn_as(world.draws(15_000, 1), proportional(priorities, 0.5, 1e-6))


def test_invalid_rows_are_never_drawn() -> None:
    """Not valid when inserted, with a priority that is no number, or not valid when updated."""
    world, sampler = prioritized(10)
    world.valid[:10] = [1, 0, 1, 1, 1, 1, 1, 1, 1, 0]
    priorities = np.ones(10)
    priorities[[1, 9]] = np.nan
    sampler.insert(0, 10, priorities)
    world.remove_rows([4])
    sampler.update(np.array([4, 5]), np.array([1e6, 1.0]))
    assert set(world.draws(50, 20)) == {0, 2, 3, 5, 6, 7, 8}
    assert sampler.stored == 7


def test_new_rows_get_the_highest_priority_so_far() -> None:
    world, sampler = prioritized(4, alpha=1.0, epsilon=0.5)
    world.insert(0, 1)
    assert sampler._tree.leaves[0] == 1.5
    sampler.update(np.array([0]), np.array([6.0]))
    sampler.update(np.array([0]), np.array([2.0]))
    world.insert(1, 2)
    assert sampler._tree.leaves[:2].tolist() == [2.5, 6.5]
    world.insert(2, 3, np.array([9.0]))
    world.insert(3, 4)
    assert sampler._tree.leaves[2:].tolist() == [9.5, 9.5]


def test_last_priority_of_a_repeated_row_counts() -> None:
    world, sampler = prioritized(3, alpha=1.0, epsilon=0.5)
    world.insert(0, 3)
    sampler.update(np.array([1, 2, 1]), np.array([7.0, 8.0, 3.0]))
    assert sampler._tree.leaves.tolist() == [1.5, 3.5, 8.5]


# ---------------------------------------------------------------- prioritised: weights


def test_importance_weights_match_the_paper() -> None:
    priorities = np.array([0.1, 1.0, 5.0, 20.0])
    world, sampler = prioritized(4, alpha=0.7, beta=0.5, epsilon=0.01)
    world.insert(0, 4, priorities)
    rows, weights = sampler.sample(64)
    share = proportional(priorities, 0.7, 0.01)
    expected = np.array([(4 * share[row]) ** -0.5 for row in rows])
    np.testing.assert_allclose(weights, expected / expected.max(), rtol=1e-6)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(sampler.probabilities, share[rows], rtol=1e-12)


def limited(sampler: Sampler, most: int, rows: int) -> World:
    limit = SampleCountLimit(sampler, most)
    world = World(limit, rows)
    table: Any = SimpleNamespace(remove_rows=lambda rows, why: world.remove_rows(rows.tolist()))
    limit.place(table)
    return world


def test_rewritten_row_may_be_drawn_max_times_again() -> None:
    world = limited(Uniform(), 2, 4)
    for _ in range(2):
        world.insert(0, 4)
        assert sorted(world.draws(8, 1).tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_weights_of_repeated_draws_follow_their_priorities() -> None:
    """Each row comes once, so further draws of a heavy one fall on others: then the total is 5 %
    less."""
    priorities = np.random.default_rng(0).uniform(1, 3, 20_000)
    priorities[500] = 2000.0  # of 42,000: two whole strata of 64, or more
    world = limited(Prioritized(alpha=1.0, beta=1.0, epsilon=1e-9, fast=False), 1, 20_000)
    world.insert(0, 20_000, priorities)
    rows, weights = world.sampler.sample(64)
    assert len(set(rows.tolist())) == 64
    assert 500 in rows
    assert weights is not None
    drawn = priorities[rows]
    assert drawn[-1] > 1.2 * drawn.min(), "drawn anew, and not the lightest"
    np.testing.assert_allclose(weights, drawn.min() / drawn, rtol=0.07)


def test_beta_follows_its_schedule_by_transitions_drawn() -> None:
    world, sampler = prioritized(2, alpha=1.0, beta=Linear(0.0, 1.0, 100), epsilon=1e-9)
    world.insert(0, 2, np.array([1.0, 3.0]))
    for beta in (0.0, 0.4, 0.8, 1.0):
        assert sampler.beta == pytest.approx(beta)
        rows, weights = sampler.sample(40)
        np.testing.assert_allclose(weights[rows == 1], 3**-beta, rtol=1e-6)
        np.testing.assert_allclose(weights[rows == 0], 1.0)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("bad", [np.nan, -0.5, np.inf, -np.inf, 1e200])
def test_invalid_priority_is_refused_without_changes(bad: float) -> None:
    world, sampler = prioritized(5)
    world.insert(0, 5)
    before = sampler.state_dict()["leaves"]
    priorities = np.array([1.0, 2.0, bad, 1.0, bad])
    message = f"priority {bad} at position 2 must be a finite number from 0"
    with pytest.raises(ReplayError) as update:
        sampler.update(np.arange(5), priorities)
    assert str(update.value).startswith(message)
    if not np.isnan(bad):  # in an insert: the sampler is to rate the row
        with pytest.raises(ReplayError) as insert:
            sampler.insert(0, 5, priorities)
        assert str(insert.value).startswith(message)
    np.testing.assert_array_equal(sampler.state_dict()["leaves"], before)
    assert sampler.state_dict()["highest"] == 1.0


def test_the_wrong_number_of_priorities_is_refused() -> None:
    world, sampler = prioritized(5)
    world.insert(0, 5)
    with pytest.raises(ReplayError, match=r"priorities of shape \(2,\) came for 3 rows"):
        sampler.update(np.arange(3), np.ones(2))
    with pytest.raises(ReplayError, match=r"priorities of shape \(3, 1\) came for 3 rows"):
        sampler.insert(0, 3, np.ones((3, 1)))
    sampler.update(np.arange(0), np.ones(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "alpha 1.5 must be between 0 and 1"),
        ({"alpha": np.nan}, "alpha nan must be"),
        ({"beta": -0.1}, "beta -0.1 must be"),
        ({"epsilon": 0.0}, "epsilon 0.0 must be at least"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        Prioritized(**options)  # type: ignore[arg-type]


# ---------------------------------------------------------------- numba and snapshots


def test_missing_numba_is_named_with_its_install_command() -> None:
    try:
        import numba  # noqa: F401
    except ImportError:
        with pytest.raises(ReplayError, match=r"pip install 'penstock\[fast\]'"):
            prioritized(10, fast=True)
    else:
        pytest.skip("numba is installed")


def test_both_trees_give_the_same_batches() -> None:
    pytest.importorskip("numba", reason="the extra 'fast' is not installed")
    batches = []
    for fast in (False, True):
        world, sampler = prioritized(30_000, seed=5, fast=fast)
        world.insert(0, 30_000, np.random.default_rng(1).uniform(0, 9, 30_000))
        rows, _ = sampler.sample(256)
        sampler.update(rows, np.random.default_rng(2).uniform(0, 9, 256))
        batches.append(sampler.sample(256))
    np.testing.assert_array_equal(batches[0][0], batches[1][0])
    np.testing.assert_array_equal(batches[0][1], batches[1][1])


@pytest.mark.parametrize("holes", [0, 300, 995])
@pytest.mark.parametrize("make", [Uniform, lambda: Prioritized(beta=Linear(0.4, 1.0, 1000))])
def test_loaded_sampler_continues_identically(make: Callable[[], Sampler], holes: int) -> None:
    world = World(make(), 1000, seed=7)
    world.insert(0, 1000, np.random.default_rng(1).uniform(0, 9, 1000))
    world.remove_rows(list(range(holes)))
    for _ in range(3):  # so that rows are drawn ahead
        rows, _ = world.sampler.sample(50)
    world.sampler.update(rows, np.linspace(0, 20, 50))
    if holes < 900:
        world.insert(0, 3)
    other = World(make(), 1000, seed=99)
    other.valid[:] = world.valid
    other.sampler.load_state_dict(world.sampler.state_dict())
    for _ in range(3):
        (rows, weights), (same_rows, same_weights) = (w.sampler.sample(33) for w in (world, other))
        np.testing.assert_array_equal(same_rows, rows)
        np.testing.assert_array_equal(same_weights, weights)
        for w in (world, other):
            w.sampler.update(rows, np.linspace(5, 0, 33))
            w.insert(10, 12)


def test_sampler_state_is_a_copy_and_fits_only_its_size() -> None:
    world, sampler = prioritized(10)
    world.insert(0, 10)
    state = sampler.state_dict()
    sampler.update(np.arange(10), np.full(10, 5.0))
    assert (state["leaves"] == state["leaves"][0]).all()
    with pytest.raises(ReplayError, match="has 10 priorities and the buffer 11 rows"):
        prioritized(11)[1].load_state_dict(state)


@pytest.mark.parametrize("sampler", ["per", 0.6, Prioritized])
def test_object_that_is_no_sampler_is_refused(sampler: Any) -> None:
    columns = {"obs": ("float32", (4,)), "action": ("int64", ())}
    sentence = f"sampler {sampler!r} is not a sampler; give an object, such as Uniform()"
    with pytest.raises(ReplayError, match=re.escape(sentence)):
        Replay(columns, 64, sampler=sampler)


def test_documented_code_draws_no_row_more_than_max_times() -> None:
    names: dict[str, Any] = {}
    exec(
        next(code for code in blocks("replay.md", "python") if "max_times_sampled=" in code), names
    )
    assert names["draws"].max() == 2
    assert names["evicted"] == np.count_nonzero(names["draws"] == 2) > 75


# ------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("drawn", "value"), [(0, 0.4), (250, 0.55), (500, 0.7), (1000, 1.0), (5000, 1.0)]
)
def test_linear_schedule_goes_from_start_to_end_and_stays(drawn: int, value: float) -> None:
    assert Linear(0.4, 1.0, 1000)(drawn) == pytest.approx(value, abs=1e-12)


def test_linear_schedule_reaches_its_end_exactly_and_may_fall() -> None:
    assert Linear(0.1, 0.3, 3)(3) == 0.3
    assert Linear(1.0, 0.0, 4)(1) == 0.75


def test_linear_schedule_over_zero_steps_is_refused() -> None:
    with pytest.raises(ReplayError, match="over 0 transitions has no slope"):
        Linear(0.4, 1.0, 0)


def test_number_becomes_a_constant_schedule_and_a_schedule_is_kept() -> None:
    assert as_schedule(0.4) == Constant(0.4)
    assert as_schedule(0.4)(10**9) == 0.4
    linear = Linear(0.4, 1.0, 10)
    assert as_schedule(linear) is linear
