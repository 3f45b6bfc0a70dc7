"""One colour for each part of a ledger, the same in every picture: waiting is pale, work is not."""

from __future__ import annotations

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
    "optimize": "#a8c545",
    "save": "#5a4632",
    "compress": "#b47cc7",
    "send": "#f0a35e",
    "device": "#176b3a",
    "count": "#d9c8a9",
}
# Those of design section 5, in which several of the above are one.
LEARNER_COLOURS = {
    "wait_data": COLOURS["wait"],
    "h2d_exposed": COLOURS["h2d"],
    "compute": COLOURS["backward"],
    "reduce_exposed": COLOURS["reduce"],
    "publish": COLOURS["publish"],
    "bookkeeping": COLOURS["count"],
    "other": COLOURS["other"],
}
