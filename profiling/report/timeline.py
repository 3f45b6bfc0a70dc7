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

COLUMNS = 1200  # columns of pixels
DETAIL_SPANS = 150  # spans of the first thread in the lower panel
MOST_ROWS = 40  # threads
INSTALL = "pip install 'penstock[plot]'"
# The colour of each part, the same in every picture: waiting is pale, work is not.
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
    labels = [f"{thread.process} {thread.name}" for thread in shown]
    panel_starts_ns = (from_ns, _detail_start_ns(shown[0], from_ns))
    for axes, start_ns in zip(figure.subplots(2, 1), panel_starts_ns, strict=True):
        edges = np.linspace(start_ns, to_ns, COLUMNS + 1)
        image = np.stack([_mixed_colours(shares(thread.spans, edges)) for thread in shown])
        start_s = (start_ns - from_ns) * 1e-9
        end_s = (to_ns - from_ns) * 1e-9
        extent = (start_s, end_s, len(shown) - 0.5, -0.5)  # left, right, bottom, top
        axes.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
        axes.set_yticks(range(len(shown)), labels, fontsize=8)
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
    part_shares = np.zeros((len(edges) - 1, PARTS))
    if not len(spans):
        return part_shares

    span_edges = spans.edges_ns.astype(np.float64)
    lengths = np.diff(span_edges)
    for part in np.unique(spans.part):
        # The time that the thread has spent in the part, up to each edge of a span.
        part_lengths = np.where(spans.part == part, lengths, 0.0)
        spent = np.concatenate([[0.0], np.cumsum(part_lengths)])
        part_shares[:, part] = np.diff(np.interp(edges, span_edges, spent)) / np.diff(edges)
    return part_shares


def _mixed_colours(part_shares: Floats) -> Floats:
    """Returns the colours of stretches, float64 ``[n, 3]``; white where nothing is known.

    ``part_shares`` are as `shares` returns them.
    """
    palette = np.ones((PARTS, 3))
    for part in Part:
        text = COLOURS[part.name.lower()]
        palette[part] = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]

    known = part_shares.sum(1, keepdims=True)
    colours: Floats = part_shares @ palette + (1.0 - known)
    return colours.clip(0.0, 1.0)


def _detail_start_ns(thread: Thread, from_ns: int) -> float:
    """Returns where the lower panel begins."""
    begins_ns = thread.spans.begin_ns
    first_shown = max(0, len(begins_ns) - DETAIL_SPANS)
    return max(from_ns, float(begins_ns[first_shown]))
