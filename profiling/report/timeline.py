"""What each thread did when, as a picture: a row per thread, colours by part.

A column of pixels stands for a stretch of time, and has the colours of the parts in it, mixed by
their shares; so nothing is left out, however many spans there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.profiling.ledger import PARTS, Part
from penstock.profiling.report.readings import Spans, Thread

COLUMNS = 1200
DETAIL_SPANS = 150  # of the first thread, in the lower panel
MOST_ROWS = 40
INSTALL = "pip install 'penstock[plot]'"
# Of each part, the same in every picture: waiting is pale, work is not.
COLOURS = {
    "other": "#9a9a9a",
    "wait": "#e6e6e6",
    "step": "#4878cf",
    "infer": "#6acdd8",
    "write": "#b5b0e8",
    "receive": "#4878cf",
    "decompress": "#b47cc7",
    "process": "#d65f9a",
    "publish": "#c4ad66",
    "gather": "#f0a35e",
    "h2d": "#d65f5f",
    "forward": "#7fcc7f",
    "backward": "#2e8b57",
    "reduce": "#8c2d2d",
    "pull": "#c9787e",
    "optimize": "#a8c545",
    "save": "#5a4632",
    "compress": "#b47cc7",
    "send": "#f0a35e",
    "device": "#176b3a",
    "count": "#d9c8a9",
}

Floats = npt.NDArray[np.float64]


def draw(path: Path, threads: Sequence[Thread], from_ns: int, to_ns: int) -> None:
    """Write a PNG: the whole window above, its last moments below.

    Args:
        path: the file.
        threads: at most `MOST_ROWS` of those with spans are shown.
        from_ns, to_ns: the window; CLOCK_MONOTONIC.

    Raises UserError if matplotlib is missing, or if no thread has spans.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UserError(
            f"timeline.png needs matplotlib, which is not installed; get it with {INSTALL}"
        ) from error
    shown = [thread for thread in threads if len(thread.spans)][:MOST_ROWS]
    if not shown:
        raise UserError("timeline.png has nothing to show: no thread kept a ledger")

    figure = Figure(figsize=(14, 2.4 + 0.5 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, start_ns in zip(figure.subplots(2, 1), (from_ns, _detail(shown[0], from_ns)),
                              strict=True):  # fmt: skip
        edges = np.linspace(start_ns, to_ns, COLUMNS + 1)
        image = np.stack([_mix(shares(thread.spans, edges)) for thread in shown])
        extent = ((start_ns - from_ns) * 1e-9, (to_ns - from_ns) * 1e-9, len(shown) - 0.5, -0.5)
        axes.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
        axes.set_yticks(range(len(shown)), [f"{t.process} {t.name}" for t in shown], fontsize=8)
        axes.set_xlabel("seconds of the window")

    # The legend has only the parts that occur.
    present = np.unique(np.concatenate([thread.spans.part for thread in shown]))
    names = [Part(int(part)).name.lower() for part in present]
    figure.legend(
        handles=[Patch(facecolor=COLOURS[name], edgecolor="#888888", label=name) for name in names],
        loc="outside upper center",
        ncols=10,
        fontsize=8,
    )
    figure.savefig(path, dpi=100)


def shares(spans: Spans, edges: Floats) -> Floats:
    """Returns the share of each part in the stretches between ``edges``.

    Args:
        spans: of one thread.
        edges: ``[n + 1]``, in nanoseconds, rising.

    Returns: float64 ``[n, PARTS]``; zeros where there is no span.
    """
    found = np.zeros((len(edges) - 1, PARTS))
    if not len(spans):
        return found

    points = spans.edges_ns.astype(np.float64)
    lengths = np.diff(points)
    for part in np.unique(spans.part):
        spent = np.concatenate([[0.0], np.cumsum(np.where(spans.part == part, lengths, 0.0))])
        found[:, part] = np.diff(np.interp(edges, points, spent)) / np.diff(edges)
    return found


def _mix(share: Floats) -> Floats:
    """Colours of stretches, float64 ``[columns, 3]``; white where nothing is known."""
    palette = np.ones((PARTS, 3))
    for part in Part:
        text = COLOURS[part.name.lower()]
        palette[part] = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    known = share.sum(1, keepdims=True)
    mixed: Floats = share @ palette + (1.0 - known)
    return mixed.clip(0.0, 1.0)


def _detail(thread: Thread, from_ns: int) -> float:
    """Where the lower panel begins."""
    begins = thread.spans.begin_ns
    return max(from_ns, float(begins[max(0, len(begins) - DETAIL_SPANS)]))
