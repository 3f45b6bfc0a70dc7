"""The chart on the front page matches the committed results."""

from __future__ import annotations

import re

import chart


def test_the_chart_of_the_front_page_is_up_to_date() -> None:
    drawn = chart.drawn(chart.panels(), chart.caption())
    assert chart.OUT.read_text(encoding="utf-8") == drawn, "run python benchmarks/chart.py"


def test_the_longest_bar_of_each_panel_has_the_full_width() -> None:
    panel = chart.Panel("t", "n", [chart.Bar("Penstock", 1.0, "1"), chart.Bar("other", 4.0, "4")])
    widths = re.findall(r'class="(?:ours|theirs)".* width="(\d+)"', chart.drawn([panel], ""))
    assert widths == [str(chart.BAR_WIDTH // 4), str(chart.BAR_WIDTH)]


def test_names_are_escaped() -> None:
    panel = chart.Panel("a < b", "", [chart.Bar("x & y", 1.0, "1")])
    picture = chart.drawn([panel], "")
    assert "a &lt; b" in picture
    assert "x &amp; y" in picture
