"""Penstock on a GPU, in ten stages, the most informative first.

Each stage runs in a process of its own: one that crashes or hangs loses no other. Every figure is
printed and recorded as soon as it is measured, beside the one that is expected of an H100 with 16
cores (`gpu_stages/expected.py` has the reasons). The exit code is 1 if a stage failed; a figure
that misses what is expected is no failure.

All stages should take 11 minutes, and 8 with `--seconds 4` (added up from their parts, not
measured). Where less time is lent, run `--only set-up correctness synchronisations utilization
codecs group tests` first, then `--only copies ceilings pong`, each with an `--out` of its own and
`--minutes` below the time lent: a stage that still runs then is ended, and its findings so far are
kept. `--only pong --train` takes up to 10 minutes more.

It needs torch 2.11 to 2.13 (with CUDA), Python 3.11 to 3.13, and for the stages `pong` and `tests`
the extras `atari` and `dev`; test files that import a missing package are reported and not run. A
machine without a package index needs wheels that were downloaded on another one (`pip download`
with the Python version and platform of the first). Install them with `pip install --no-index
--no-deps --target FOLDER WHEELS`, and put FOLDER and the project's folder into PYTHONPATH. On a CPU
every stage runs in its smallest form, which shows that the benchmark works; its figures mean
nothing.

    python benchmarks/gpu.py [--only STAGE ...] [--seconds 8] [--minutes 10] [--train]
                             [--device cpu] [--out FILE] [--json] [--save]
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from common import RESULTS, machine, parser
from gpu_stages.expected import compared, line
from gpu_stages.finding import Options
from gpu_stages.isolation import StageError, findings

SMALL_S = 0.2  # of a measurement on a CPU
USERS_MISTAKE = 2


class Stage(NamedTuple):
    """A part of the benchmark."""

    name: str
    target: str
    """The function that yields its findings."""
    limit_s: float
    """Time after which it hangs; several times of what it takes."""


STAGES: tuple[Stage, ...] = (
    Stage("set-up", "gpu_stages.set_up:run", 90),
    Stage("correctness", "gpu_stages.updates:correctness", 120),
    Stage("copies", "gpu_stages.copies:run", 90),
    Stage("ceilings", "gpu_stages.ceilings:run", 400),
    Stage("synchronisations", "gpu_stages.updates:synchronisations", 120),
    Stage("utilization", "gpu_stages.utilization:run", 400),
    Stage("codecs", "gpu_stages.codecs:run", 90),
    Stage("group", "gpu_stages.group:run", 120),
    Stage("pong", "gpu_stages.pong:run", 1200),
    Stage("tests", "gpu_stages.marked_tests:run", 1800),
)


def main() -> None:
    made = parser(__doc__)
    names = [stage.name for stage in STAGES]
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--only", nargs="+", choices=names, metavar="STAGE", help=", ".join(names))
    made.add_argument("--seconds", type=float, default=8.0, help="of each measurement on a GPU")
    made.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="time limit; stages that have not started by then are skipped",
    )
    made.add_argument("--train", action="store_true", help="also train Pong to a return of 18")
    made.add_argument("--out", type=Path, help="write the result there as it grows")
    args = made.parse_args()
    if args.device == "cpu" and args.save:
        made.error("--save with --device cpu: figures of a CPU would replace those of a GPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    people = sys.stderr if args.json else sys.stdout
    path = args.out or (RESULTS / "gpu.json" if args.save else None)
    report = Report(_name_of(args.device), path, people)
    options = Options(args.device, SMALL_S if args.device == "cpu" else args.seconds, args.train)
    ends_s = time.monotonic() + 60 * args.minutes
    for stage in STAGES:
        if not args.only or stage.name in args.only:
            report.run(stage, options, ends_s - time.monotonic())
    report.end()
    if args.json:
        print(json.dumps(report.result))
    sys.exit(int(report.failed))


class Report:
    """The result, printed and written as it grows."""

    def __init__(self, gpu: str, path: Path | None, people: TextIO) -> None:
        self.failed = False
        self._path, self._people = path, people
        self._stages: dict[str, Any] = {}
        self.result = {
            "benchmark": "gpu",
            "machine": machine(),
            "gpu": gpu,
            "stages": self._stages,
        }
        self._say(f"{gpu}; expected is what an H100 with 16 cores should reach")

    def run(self, stage: Stage, options: Options, left_s: float) -> None:
        """Take the findings of a stage, or leave it out where no time is left."""
        found: list[dict[str, Any]] = []
        record = self._stages[stage.name] = {"state": "running", "findings": found}
        self._say(f"\n{stage.name}")
        began_s = time.monotonic()
        if left_s <= 0:
            record["state"] = "left out"
            self._say("  left out: --minutes are over")
            return self._write()
        try:
            limit_s = min(stage.limit_s, left_s)
            for finding in findings(stage.target, options, limit_s):
                found.append(compared(stage.name, finding, options))
                self._say(line(found[-1]))
                self._write()
            record["state"] = "done"
        except StageError as error:
            self.failed = True
            record |= {"state": "failed", "error": str(error).splitlines()}
            self._say("\n    ".join(["  FAILED:", *str(error).splitlines()]))
        record["seconds"] = time.monotonic() - began_s
        self._say(f"  {record['seconds']:.0f} s")
        return self._write()

    def end(self) -> None:
        """Print how much of what was asked was met."""
        met = [one["met"] for stage in self._stages.values() for one in stage["findings"]]
        states = [stage["state"] for stage in self._stages.values()]
        self._say(
            f"\n{self.result['gpu']}: {met.count(True)} figures as expected, {met.count(False)} "
            f"not; {states.count('done')} stages done, {states.count('failed')} failed, "
            f"{states.count('left out')} left out"
        )

    def _say(self, text: str) -> None:
        print(text, file=self._people, flush=True)

    def _write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            written = self._path.with_name(f".{self._path.name}")  # a cut run leaves a whole file
            written.write_text(json.dumps(self.result, indent=2) + "\n")
            written.replace(self._path)


def _name_of(device: str) -> str:
    """The GPU's name. Exits where there is none."""
    if device == "cpu":
        return "no GPU: these figures say nothing"
    import torch

    if not torch.cuda.is_available():
        print("gpu.py: torch finds no CUDA device here; run it on a machine with one, with a torch "
              "that is built for CUDA", file=sys.stderr)  # fmt: skip
        sys.exit(USERS_MISTAKE)
    name: str = torch.cuda.get_device_name()
    return name


if __name__ == "__main__":
    main()
