"""Seconds from typing `penstock train cartpole` to the first learner step.

The clock starts before the program does and stops when `metrics.jsonl` first tells of a learner
step; metrics come every 20 ms here. Each run is followed by `import torch` alone, for comparison.
Bytecode is compiled first, as `make` does.

    python benchmarks/startup.py [--times 5] [--json] [--save]
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import compile_package, finish, parser


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--times", type=int, default=5)
    options = args.parse_args()
    compile_package()
    pairs = [(first_step_s(), import_torch_s()) for _ in range(options.times)]  # in turns
    runs, alone = map(list, zip(*pairs, strict=True))
    result = {
        "first_step_s": statistics.median(runs),
        "runs_s": runs,
        "import_torch_s": statistics.median(alone),
        "ratio": statistics.median(runs) / statistics.median(alone),
        "asked_s": 5.0,
        "aim_s": 2.5,
    }
    rows: list[list[Any]] = [
        ["what", "s"],
        ["first learner step, median", result["first_step_s"]],
        ["slowest", max(runs)],
        ["python -c 'import torch' alone", result["import_torch_s"]],
        ["ratio of the medians (aim 1.15)", result["ratio"]],
    ]
    finish("startup", result, rows, options)


def first_step_s() -> float:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        options = [f"run.dir={run_dir}", "run.interval_s=0.02"]
        began_s = time.perf_counter()
        run = subprocess.Popen(
            [sys.executable, "-m", "penstock", "train", "cartpole", *options],
            stdout=subprocess.DEVNULL,
        )
        try:
            while not has_trained(run_dir / "metrics.jsonl"):
                if run.poll() is not None:
                    raise SystemExit("the run ended before its first learner step")
                time.sleep(0.005)
            return time.perf_counter() - began_s
        finally:
            run.send_signal(signal.SIGINT)
            run.wait()


def has_trained(metrics: Path) -> bool:
    if not metrics.exists():
        return False
    lines = metrics.read_text().splitlines()
    return any(json.loads(line)["learner_steps"] for line in lines)


def import_torch_s() -> float:
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
