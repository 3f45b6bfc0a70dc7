"""Sparklines and bars on the terminal."""

from __future__ import annotations

import pytest

from penstock.monitor.terminal_charts import MOST_POINTS, History, bar, merged, sparkline


def test_a_sparkline_spans_the_least_and_the_greatest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([-7, 0], 8) == "▁█"
    assert sparkline([2.0, 2.0], 8) == "▁▁"
    assert sparkline([], 8) == ""
    assert sparkline([0, 1], 8, ascii_only=True).isascii()


@pytest.mark.parametrize("columns", [0, 1, 7, 100])
def test_a_sparkline_is_no_longer_than_its_columns(columns: int) -> None:
    assert len(sparkline(range(100), columns)) == max(1, columns)


def test_merged_values_are_means_of_neighbouring_values() -> None:
    assert merged([1, 3, 5, 7], 2) == [2, 6]
    assert merged([1, 2, 3, 4, 5], 2) == [1.5, 4.0]
    assert merged([1, 2], 5) == [1, 2]


def test_a_history_of_any_length_is_bounded_and_keeps_its_shape() -> None:
    history = History()
    for value in range(100_000):
        history.add(value)
        assert len(history.points) < MOST_POINTS
    assert history.points == sorted(history.points)
    assert history.points[0] < 1000
    assert history.points[-1] > 99_000


@pytest.mark.parametrize("columns", [0, 1, 10, 33, 100])
def test_the_parts_of_a_bar_fill_its_columns(columns: int) -> None:
    parts = bar({"compute": 0.5, "wait_data": 0.25, "publish": 0.125, "other": 0.125}, columns)
    assert [name for name, _ in parts] == ["compute", "wait_data", "publish", "other"]
    assert sum(len(text) for _, text in parts) == columns
    assert parts[0][1] == "█" * round(columns / 2)


def test_bar_beyond_the_whole_is_cut() -> None:
    assert bar({"a": 0.8, "b": 0.8, "c": -1.0}, 10) == [("a", "█" * 8), ("b", "░" * 2), ("c", "")]
    assert bar({"a": 0.5, "b": 0.5, "c": 0.0}, 4, ascii_only=True) == [
        ("a", "##"), ("b", ".."), ("c", "")
    ]  # fmt: skip
