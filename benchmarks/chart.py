"""Draws the comparison with other systems on the front page: docs/images/peers.svg.

    python benchmarks/chart.py

Every figure is read from `benchmarks/results`, and the caption names the machine of those files.
The picture has its own background, and follows the browser's preference for light or dark.
`tests/unit/benchmarks/test_chart.py` compares it with the results.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from common import RESULTS

OUT = Path(__file__).parents[1] / "docs" / "images" / "peers.svg"
OURS = "Penstock"
NAMES = {
    "penstock": OURS,
    "sample_factory": "Sample Factory",
    "sample_factory_vector": "Sample Factory, vectorised CartPole too",
    "sb3": "Stable-Baselines3",
}
COLUMNS = 2
WIDTH, PANEL_WIDTH, BAR_WIDTH = 880, 420, 240  # pixels
MARGIN, TITLE, ROW, GAP = 20, 44, 38, 18
STYLE = """
  text { font: 13px system-ui, 'DejaVu Sans', sans-serif; fill: #1f2328 }
  .title { font-weight: 600 } .note { fill: #59636e; font-size: 12px }
  .page { fill: #ffffff } .ours { fill: #1f6feb } .theirs { fill: #afb8c1 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .note { fill: #9198a1 }
    .page { fill: #0d1117 } .ours { fill: #58a6ff } .theirs { fill: #57606a }
  }
"""


class Bar(NamedTuple):
    """One system in a panel."""

    name: str
    value: float
    text: str
    """The value as it is written beside the bar."""


class Panel(NamedTuple):
    """One measurement of several systems, made together on one machine."""

    title: str
    note: str
    bars: Sequence[Bar]


def main() -> None:
    """Write the picture."""
    OUT.write_text(drawn(panels(), caption()), encoding="utf-8")
    print(f"{OUT.name}: {OUT.stat().st_size:,} bytes")


def panels() -> list[Panel]:
    """The comparisons that `benchmarks/results` holds, small games first."""
    cartpole = _result("bench_cartpole_vector")["peers"]
    return [
        Panel(
            "CartPole: seconds to a mean return of 475",
            "shorter is better; median of three runs",
            [_seconds(name, cartpole[name]["solved_at_s"]) for name in _in_order(cartpole)],
        ),
        _pong_to_18(_result("learning_pong")),
        _pong_rate("bench_pong", "APPO, one pass over the samples"),
        _pong_rate("bench_pong_sb3", "PPO, four passes over the samples"),
    ]


def caption() -> str:
    """The machine of the figures."""
    machines = [
        _result(name)["machine"]
        for name in ("bench_cartpole_vector", "learning_pong", "bench_pong", "bench_pong_sb3")
    ]
    (cpu,) = {machine["cpu"] for machine in machines}
    (cores,) = {machine["cores"] for machine in machines}
    (torch,) = {machine["packages"]["torch"].partition("+")[0] for machine in machines}
    return f"{cores} cores of a shared {cpu} machine without a GPU, torch {torch}."


def drawn(panels: Sequence[Panel], caption: str) -> str:
    """The picture as SVG."""
    rows = [panels[at : at + COLUMNS] for at in range(0, len(panels), COLUMNS)]
    parts: list[str] = []
    top = MARGIN
    for row in rows:
        for column, panel in enumerate(row):
            parts += _panel(panel, MARGIN + column * PANEL_WIDTH, top)
        top += TITLE + ROW * max(len(panel.bars) for panel in row) + GAP
    parts.append(_text(MARGIN, top, caption + " Bars of one panel were measured together.", "note"))
    height = top + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">'
    )
    label = "Penstock beside Sample Factory and Stable-Baselines3"
    page = f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>'
    lines = [head, f"<title>{label}</title>", f"<style>{STYLE}</style>", page, *parts, "</svg>"]
    return "\n".join(lines) + "\n"


def _panel(panel: Panel, left: int, top: int) -> list[str]:
    """The bars of a panel, to the scale of its longest."""
    parts = [_text(left, top + 12, panel.title, "title"), _text(left, top + 28, panel.note, "note")]
    longest = max(bar.value for bar in panel.bars)
    for number, bar in enumerate(panel.bars):
        y = top + TITLE + number * ROW
        width = max(2, round(BAR_WIDTH * bar.value / longest))
        kind = "ours" if bar.name == OURS else "theirs"
        parts.append(_text(left, y + 6, bar.name))
        shape = f'x="{left}" y="{y + 11}" width="{width}" height="12" rx="2"'
        parts.append(f'<rect class="{kind}" {shape}/>')
        parts.append(_text(left + width + 6, y + 22, bar.text))
    return parts


def _pong_to_18(result: dict[str, Any]) -> Panel:
    """Seconds to a mean return of 18, and how far the peer came in the time it was given."""
    seconds = [run["reached"]["seconds"] for run in result["runs"]["first"]]
    (peer,) = result["peers"]
    if peer["reached"] is not None or peer["peer"] != "sample_factory-18":
        raise ValueError(f"learning_pong.json has another peer than this panel: {peer['peer']}")
    end = peer["curve"][-1]
    return Panel(
        "Pong from pixels: minutes to a mean return of 18",
        f"shorter is better; Penstock: PPO, median of {len(seconds)} seeds",
        [
            _minutes(OURS, statistics.median(seconds)),
            Bar(
                "Sample Factory, its own settings for Atari",
                end["seconds"],
                f"{peer['return']:.0f} after {end['seconds'] / 60:.0f}".replace("-", "\u2212"),
            ),
        ],
    )


def _pong_rate(name: str, algorithm: str) -> Panel:
    """Rates beside another system that runs ``algorithm``, on a processor with bf16 arithmetic."""
    peers = _result(name)["peers"]
    (other,) = (NAMES[peer] for peer in peers if peer != "penstock")
    return Panel(
        f"Pong against {other}: steps a second",
        f"longer is better; IMPALA beside {algorithm}",
        [_rate(peer, peers[peer]["steps_per_s"]) for peer in _in_order(peers)],
    )


def _in_order(peers: dict[str, Any]) -> list[str]:
    return [name for name in NAMES if name in peers]


def _seconds(name: str, value: float) -> Bar:
    return Bar(NAMES[name], value, f"{value:.2g} s" if value < 10 else f"{value:.0f} s")


def _minutes(name: str, seconds: float) -> Bar:
    return Bar(name, seconds, f"{seconds / 60:.1f}")


def _rate(name: str, value: float) -> Bar:
    digits = len(str(int(value)))
    return Bar(NAMES[name], value, f"{round(value, 3 - digits):,.0f}")


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x}" y="{y}">{escape(text)}</text>'


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


if __name__ == "__main__":
    main()
