"""Memory of a training run over time: is it flat after the first minute?

Sums the proportional set size of all processes of the run every few seconds; memory that several
share is counted once. The slope is that of a least-squares line from the first minute on.

    python benchmarks/memory.py [--minutes 15] [--target pong] [--json] [--save]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import suppress

import numpy as np
import psutil

from common import finish, parser

SETTLED_S = 60.0
EVERY_S = 5.0


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--minutes", type=float, default=15.0)
    args.add_argument("--target", default="pong")
    args.add_argument("override", nargs="*", help="options of the config")
    options = args.parse_args()
    limits = [f"stop.minutes={options.minutes}", "stop.return=null", *options.override]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "penstock", "train", options.target]
        run = subprocess.Popen(
            [*command, f"run.dir={folder}/run", *limits], stdout=subprocess.DEVNULL
        )
        samples = watch(run)
    if run.returncode:
        sys.exit(f"the run failed with {run.returncode}, so its memory says nothing")
    times, sizes = (np.array(column) for column in zip(*samples, strict=True))
    settled = times >= SETTLED_S
    slope = float(np.polyfit(times[settled] / 60, sizes[settled], 1)[0])
    result = {
        "target": options.target,
        "minutes": options.minutes,
        "samples_s_mb": [[round(t, 1), round(s, 2)] for t, s in samples],
        "slope_mb_per_minute": slope,
        "after_a_minute_mb": float(sizes[settled][0]),
        "at_the_end_mb": float(sizes[-1]),
    }
    rows = [
        ["what", "MB"],
        ["after a minute", result["after_a_minute_mb"]],
        ["at the end", result["at_the_end_mb"]],
        ["slope, per minute", slope],
    ]
    finish(f"memory_{options.target}", result, rows, options)


def watch(run: subprocess.Popen[bytes]) -> list[tuple[float, float]]:
    """Seconds since the start and MB of the process tree, while it trains."""
    began_s = time.perf_counter()
    samples = []
    while run.poll() is None:
        time.sleep(EVERY_S)
        tree: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            tree = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        sizes = []
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                sizes.append(process.memory_full_info().pss / 1e6)
        samples.append((time.perf_counter() - began_s, sum(sizes)))
    return samples[:-2]  # the last ones may have seen it end


if __name__ == "__main__":
    main()
