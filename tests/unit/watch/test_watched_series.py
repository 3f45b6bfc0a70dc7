"""Curves that fit a screen, and the columns behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.monitor.curves import curve, whole
from penstock.monitor.metric_groups import scalars
from penstock.watch import columns as columns_module
from penstock.watch.columns import MetricColumns
from penstock.watch.series import (
    as_json,
    clipped,
    full_intervals,
    known,
    means,
    reduced,
    smooth,
)


def test_rows_without_a_metric_are_unknown() -> None:
    columns = MetricColumns()
    columns.extend([{"a": 1, "ledger": {"compute": 0.5}}, {"b": [1, 2]}, {"a": None, "b": [3]}])
    assert columns.rows == 3
    assert columns.names == ["a", "ledger/compute", "b/0", "b/1"]
    np.testing.assert_array_equal(columns.column("a"), [1, np.nan, np.nan])
    np.testing.assert_array_equal(columns.column("b/0"), [np.nan, 1, 3])
    assert np.isnan(columns.column("unknown")).all()
    assert columns.last("b/0") == 3
    assert columns.last("a") is None


def test_values_are_those_of_the_other_reader_of_metrics() -> None:
    """Lines of any form give the figures that `scalars` gives, which plots and reports use."""
    lines: list[dict[str, Any]] = [
        {"a": 1, "b": None, "c": {"d": 2.5, "e": [1, {"f": 2}]}, "x_histogram": {"1": 3}},
        {"a": "3", "b": True, "c": {"d": None}, "x_histogram": [1, 2]},
        {"c": {"e": [4], "d": 1}, "a": 10**400, "b": -1e301},
        {},
        {"a": float("nan"), "c": 5, "b": 7, "g": {"h_histogram": {"i": 1}, "j": {"k": -3}}},
        {"a": float("inf"), "c": {"d": 1}, "b": 0},
    ]
    for repeated in (lines, lines * 300):
        columns = MetricColumns()
        columns.extend(repeated)
        expected = [dict(scalars(line)) for line in repeated]
        assert {*columns.names} == {name for found in expected for name in found}
        for name in columns.names:
            wanted = [found.get(name, np.nan) for found in expected]
            np.testing.assert_array_equal(columns.column(name), wanted)


def test_memory_is_bounded_where_metrics_appear_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "FIRST_ROWS", 4)
    monkeypatch.setattr(columns_module, "MOST_CELLS", 64)
    columns = MetricColumns()
    columns.extend([{"i": i} for i in range(60)])
    late = [{"i": i, "late": {str(k): 100 * i + k for k in range(7)}} for i in range(60, 64)]
    for lines in (late[:1], late[1:]):
        columns.extend(lines)
        whole = [columns.column(name).base for name in columns.names]
        assert sum(each.nbytes for each in whole if each is not None) <= 8 * 64
    places = columns.column("i")
    assert np.isin([0, 63], places).all()
    assert (np.diff(places) > 0).all()
    for k in range(7):
        expected = np.where(places >= 60, 100 * places + k, np.nan)
        np.testing.assert_array_equal(columns.column(f"late/{k}"), expected)


def test_the_names_below_a_prefix() -> None:
    columns = MetricColumns()
    columns.extend([{"ledger": {"b": 1, "a": 2}, "ledgers": {"actor-0": {"step": 1}}, "c": 3}])
    assert columns.below("ledger/") == ["ledger/b", "ledger/a"]
    assert columns.below("ledgers/actor-0/") == ["ledgers/actor-0/step"]
    assert columns.below("ledgers/") == []


def test_figures_of_processes_do_not_take_the_room_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(columns_module, "MOST_COLUMNS", 4)
    columns = MetricColumns()
    columns.extend([{"cpu": {f"actor-{i}": 1.0 for i in range(9)}, "env_steps": 1, "time_s": 2}])
    assert columns.names[:2] == ["env_steps", "time_s"]


@pytest.mark.parametrize("count", [1, 2, 7, 50, 5000])
def test_a_zoom_shows_a_part_of_the_smoothed_curve(count: int) -> None:
    xs = np.arange(1000, dtype=float)
    ys = np.random.default_rng(count).normal(size=1000)
    whole = smooth((xs, ys), count, None, None)
    for low, high in ((None, None), (0.0, 3.0), (400.5, 600.0), (990.0, None), (2000.0, 3000.0)):
        found = smooth((xs, ys), count, low, high)
        expected = clipped(*whole, low, high)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_allclose(found[1], expected[1], atol=1e-12)


def test_columns_grow_beyond_their_first_capacity() -> None:
    columns = MetricColumns()
    columns.extend([{"a": i} for i in range(5000)])
    np.testing.assert_array_equal(columns.column("a"), np.arange(5000))


@pytest.mark.parametrize("most_cells", [8192, 1 << 25])
def test_a_long_run_has_rows_at_even_distances_and_the_newest_ones(
    monkeypatch: pytest.MonkeyPatch, most_cells: int
) -> None:
    monkeypatch.setattr(columns_module, "MOST_CELLS", most_cells)
    columns, most = MetricColumns(), min(most_cells // 2, columns_module.MOST_ROWS)
    highest = 0
    for start in range(0, 100_000, 500):
        columns.extend([{"a": i, "b": -i} for i in range(start, start + 500)])
        values = columns.column("a")
        highest = max(highest, len(values))
        old, new = values[: -most // 8], values[-most // 16 :]
        np.testing.assert_array_equal(new, start + 500 - len(new) + np.arange(len(new)))
        assert np.diff(old).max(initial=0) <= columns.stride
    assert most // 2 < highest <= most
    assert columns.lines == 100_000
    assert columns.stride <= 4 * 100_000 / most
    assert values[0] == 0
    np.testing.assert_array_equal(columns.column("b"), -values)


def test_memory_does_not_grow_with_a_long_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "MOST_ROWS", 1024)
    columns = MetricColumns()
    sizes = set()
    for start in range(0, 20_000, 100):
        columns.extend([{"a": i} for i in range(start, start + 100)])
        base = columns.column("a").base
        assert base is not None
        sizes.add(base.nbytes)
    assert sizes == {8 * 1024}


def test_hostile_names_do_not_make_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "MOST_COLUMNS", 10)
    columns = MetricColumns()
    columns.extend([{f"m{i}": 1 for i in range(50)}, {"x" * 10_000: 1}])
    assert len(columns.names) == 10
    assert columns.left_out == 41


def test_a_resume_replaces_what_it_repeats_as_in_plots() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        xs = np.cumsum(rng.integers(1, 4, 40)).astype(float)
        for _ in range(3):
            at = int(rng.integers(5, 35))
            xs[at:] -= rng.integers(0, 20)
        ys = rng.normal(size=40)
        expected = curve(
            [{"x": float(x), "y": float(y)} for x, y in zip(xs, ys, strict=True)], "x", "y"
        )
        found = known(xs, ys)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


def test_shortened_intervals_are_left_out_as_in_plots() -> None:
    rng = np.random.default_rng(4)
    seconds = np.where(rng.random(200) < 0.1, 0.01, 1.0)
    lines = [{"time_s": float(i), "interval_s": float(s)} for i, s in enumerate(seconds)]
    kept = [line["time_s"] for line in whole(lines)]
    np.testing.assert_array_equal(np.nonzero(full_intervals(seconds))[0], kept)


@pytest.mark.parametrize("length", [1, 10, 599, 600, 601, 1000, 12_345, 100_000])
def test_reduction_keeps_outliers_order_and_the_ends(length: int) -> None:
    rng = np.random.default_rng(length)
    xs, ys = np.arange(length, dtype=float), rng.normal(size=length)
    low, high = int(rng.integers(length)), int(rng.integers(length))
    ys[low], ys[high] = -100, 100
    found, values = reduced(xs, ys, 600)
    assert len(found) <= 601
    assert (np.diff(found) > 0).all()
    assert found[-1] == xs[-1]
    assert values.max() == ys.max()
    assert values.min() == ys.min()
    np.testing.assert_array_equal(values, ys[found.astype(int)])


def test_means_of_shares_still_add_up() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(4), size=5000).T
    xs = np.arange(5000, dtype=float)
    total = sum(means(xs, share, 160)[1] for share in shares)
    np.testing.assert_allclose(total, 1.0)
    assert len(means(xs, shares[0], 160)[0]) == 160
    np.testing.assert_allclose(means(xs, shares[0], 160)[1].mean(), shares[0].mean(), rtol=1e-2)


def test_a_range_has_a_point_beyond_either_end() -> None:
    xs = np.arange(10, dtype=float)
    np.testing.assert_array_equal(clipped(xs, xs, 3.5, 5.5)[0], [3, 4, 5, 6])
    np.testing.assert_array_equal(clipped(xs, xs, None, None)[0], xs)


def test_json_has_short_numbers() -> None:
    found = as_json((np.array([0.0, 1e6]), np.array([1 / 3, 2.0])))
    assert found == {"x": [0, 1_000_000], "y": [0.3333333, 2]}
