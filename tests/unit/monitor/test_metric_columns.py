"""Columns of metrics and the points of their curves, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.monitor.metric_groups import scalars
from penstock.monitor.run_folder import columns as columns_module
from penstock.monitor.run_folder.columns import MetricColumns, Points, rising_points


def columns_of(lines: list[dict[str, Any]], *only: str) -> MetricColumns:
    columns = MetricColumns(only or None)
    columns.extend(lines)
    return columns


def curve(lines: list[dict[str, Any]], y: str) -> Points:
    return columns_of(lines, "x", y).points("x", y)


def full_times(lines: list[dict[str, Any]]) -> list[float]:
    columns = columns_of(lines)
    return list(columns.column("time_s")[columns.full_intervals()])


def test_repeated_steps_of_a_resume_replace_lost_points_of_a_curve() -> None:
    steps = [0, 10, 20, 30, 15, 25]  # resumed from a checkpoint at 12
    lines: list[dict[str, Any]] = [{"x": step, "y": i} for i, step in enumerate(steps)]
    lines.insert(2, {"x": 12, "y": None})
    xs, ys = curve(lines, "y")
    assert (xs.tolist(), ys.tolist()) == ([0, 10, 15, 25], [0, 1, 4, 5])


def test_curve_drops_points_that_a_later_one_repeats() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        xs = np.cumsum(rng.integers(1, 4, 40)).astype(float)
        for _ in range(3):
            at = int(rng.integers(5, 35))
            xs[at:] -= rng.integers(0, 20)
        ys = rng.normal(size=40)
        expected: list[tuple[float, float]] = []
        for point in zip(xs.tolist(), ys.tolist(), strict=True):
            while expected and expected[-1][0] >= point[0]:
                expected.pop()
            expected.append(point)
        assert list(zip(*rising_points(xs, ys), strict=True)) == expected


def test_curve_without_values_is_empty() -> None:
    assert [len(found) for found in curve([{"x": 1}], "y")] == [0, 0]


def test_nested_metric_has_a_curve() -> None:
    line = {"x": 1, "ledger": {"compute": 0.5}, "ranks": [{"rate": 1.0}, {"rate": 2.0}]}
    line["lag_histogram"] = {"0": 3}
    assert curve([line], "ledger/compute")[1].tolist() == [0.5]
    assert curve([line], "ranks/1/rate")[1].tolist() == [2.0]
    assert curve([line], "lag_histogram/0")[1].tolist() == [3.0], "a bin that is asked for"
    for missing in ("ledger", "ledger/wait", "ledger/compute/more", "ranks/2/rate"):
        assert len(curve([line], missing)[1]) == 0


def test_selected_metrics_keep_a_row_for_every_line() -> None:
    count = 2 * columns_module.MOST_ROWS
    columns = columns_of([{"x": i, "other": 1, "y": {"z": -i}} for i in range(count)], "x", "y/z")
    assert columns.names == ["x", "y/z"]
    np.testing.assert_array_equal(columns.column("y/z"), -np.arange(count))


def test_truncated_intervals_are_left_out() -> None:
    lines = [{"time_s": time_s} for time_s in (1.0, 2.0, 3.0, 3.01)]
    assert full_times(lines) == [1.0, 2.0, 3.0]
    thinned = [{"time_s": at_s, "interval_s": 1.0} for at_s in (1.0, 2.0, 300.0, 400.0)]
    times = [1.0, 2.0, 300.0, 400.0]
    assert full_times([*thinned, {"time_s": 480.0, "interval_s": 0.01}]) == times
    assert full_times([]) == []


def test_a_resume_with_shorter_intervals_hides_nothing() -> None:
    lengths = [10.0] * 30 + [0.2, 0.0, *[1.0] * 25, 0.3]  # 0.2 and 0.3: stopped; 0: resumed
    lines = [{"time_s": i, "interval_s": length} for i, length in enumerate(lengths)]
    assert full_times(lines) == [*range(30), *range(32, 57)]


def test_rows_without_a_metric_are_nan() -> None:
    columns = MetricColumns()
    columns.extend([{"a": 1, "ledger": {"compute": 0.5}}, {"b": [1, 2]}, {"a": None, "b": [3]}])
    assert columns.rows == 3
    assert columns.names == ["a", "ledger/compute", "b/0", "b/1"]
    np.testing.assert_array_equal(columns.column("a"), [1, np.nan, np.nan])
    np.testing.assert_array_equal(columns.column("b/0"), [np.nan, 1, 3])
    assert np.isnan(columns.column("unknown")).all()
    assert columns.last("b/0") == 3
    assert columns.last("a") is None


def test_columns_have_the_values_of_other_sinks() -> None:
    """Lines of any form give the figures that `scalars` gives, which TensorBoard has."""
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


def test_names_below_a_prefix_are_listed() -> None:
    columns = MetricColumns()
    columns.extend([{"ledger": {"b": 1, "a": 2}, "ledgers": {"actor-0": {"step": 1}}, "c": 3}])
    assert columns.below("ledger/") == ["ledger/b", "ledger/a"]
    assert columns.below("ledgers/actor-0/") == ["ledgers/actor-0/step"]
    assert columns.below("ledgers/") == []


def test_process_metrics_do_not_displace_other_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(columns_module, "MOST_COLUMNS", 4)
    columns = MetricColumns()
    columns.extend([{"cpu": {f"actor-{i}": 1.0 for i in range(9)}, "env_steps": 1, "time_s": 2}])
    assert columns.names[:2] == ["env_steps", "time_s"]


def test_columns_grow_beyond_their_first_capacity() -> None:
    columns = MetricColumns()
    columns.extend([{"a": i} for i in range(5000)])
    np.testing.assert_array_equal(columns.column("a"), np.arange(5000))


@pytest.mark.parametrize("most_cells", [8192, 1 << 25])
def test_long_run_keeps_evenly_spaced_rows_and_the_newest(
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


def test_hostile_names_make_no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "MOST_COLUMNS", 10)
    columns = MetricColumns()
    columns.extend([{f"m{i}": 1 for i in range(50)}, {"x" * 10_000: 1}])
    assert len(columns.names) == 10
    assert columns.left_out == 41
