"""Soak: CartPole over ZeroMQ for hours, ten actors a second come and go, nothing may grow.

Two real actors train it; beside them benchmarks/soak_actors.py makes light ones, which speak the
protocol, send a few unrolls, and leave with a BYE, without one, or half-open. Memory (anonymous
and shared) and descriptors of every process of the run are taken once a second. Shown is the slope
of each by least squares, with its 95 % confidence interval, over all but the first quarter; since
neighbouring samples resemble each other, the means of twelve spans are compared. Meanwhile buffers
fill, half-open connections come to be as many as they stay, and (in two hours, at ten
actors a second) the learner comes to remember as many streams as it ever does, 16,384. In the end
the accounting must balance. The exit code is 1 where it does not, or where the run ended by itself.

    python benchmarks/soak.py [--hours 2] [--churn 10] [--json] [--save]
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import finish, parser, print_table
from faults.invariants import check_balance
from faults.program import Broken
from faults.topologies import Topology
from faults.vitals import descriptors, memory, slope
from faults.world import World

TOPOLOGY = Topology("soak", {}, options=("transport.kind=zmq", "run.interval_s=1"), actors=2)
ACTORS = Path(__file__).with_name("soak_actors.py")
WARM_UP, WARM_UP_S = 0.25, 120.0  # of the time, and at least, but for a short look half of it
LEAST_SAMPLES = 40
BLOCKS = 12
SAMPLE_S = 1.0
SHOW_S = 600.0
HOUR_S = 3600.0
Samples = dict[str, list[tuple[float, int, int]]]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--hours", type=float, default=2.0)
    made.add_argument("--churn", type=float, default=10.0, help="actors a second")
    args = made.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    samples: Samples = {}
    answer: dict[str, Any] = {}
    failure = None
    try:
        with World(TOPOLOGY, folder) as world:
            world.start()
            churn = _churn(world, args.churn)
            try:
                _watch(world, churn, args.hours * HOUR_S, samples)
            finally:
                churn.terminate()
                came = churn.communicate()[0]
            answer = world.finish()
            check_balance(answer)
    except Broken as error:
        failure = str(error)
        print(f"FAILED: {failure}\nfolder: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        print(came.strip(), file=sys.stderr)
    found = trends(samples)
    result = {
        "hours": args.hours,
        "churn_per_s": args.churn,
        "failure": failure,
        "accounting": answer.get("accounting"),
        "trends": found,
    }
    finish("soak", result, table(found), args)
    sys.exit(failure is not None)


def _churn(world: World, per_s: float) -> subprocess.Popen[str]:
    port = world.address.rpartition(":")[2]
    command = [sys.executable, str(ACTORS), port, str(per_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _watch(world: World, churn: subprocess.Popen[str], seconds: float, samples: Samples) -> None:
    """Take samples; raises Broken where the run, the churn or training ends."""
    ends_s = time.monotonic() + seconds
    show_s = time.monotonic() + SHOW_S
    while (now_s := time.monotonic()) < ends_s:
        for role in world.roles():
            held, open_ = memory(role.pid), descriptors(role.pid)
            if held is not None and open_ is not None:
                samples.setdefault(role.name, []).append((now_s, held, open_))
        if not world.main.runs:
            raise Broken(f"the run ended: {world.main.said.strip()[-800:]}")
        if churn.poll() is not None:
            raise Broken("the harness failed: the light actors ended")
        if now_s >= show_s:
            show_s += SHOW_S
            print(f"{(ends_s - now_s) / 60:.0f} minutes are left", file=sys.stderr, flush=True)
            print_table(table(trends(samples)))
        time.sleep(max(0.0, now_s + SAMPLE_S - time.monotonic()))
    if world.progress.since(time.monotonic() - 10 * SAMPLE_S) is None:
        raise Broken("nothing was trained on in the last ten seconds")


def trends(samples: Samples) -> dict[str, dict[str, Any]]:
    """`trend` of each process, except those with fewer than `LEAST_SAMPLES` samples."""
    return {name: trend(found) for name, found in samples.items() if len(found) >= LEAST_SAMPLES}


def trend(samples: list[tuple[float, int, int]]) -> dict[str, Any]:
    """Growth per hour after the warm-up, with its confidence interval."""
    span_s = samples[-1][0] - samples[0][0]
    cold_s = min(max(WARM_UP * span_s, WARM_UP_S), span_s / 2)
    warm = [sample for sample in samples if sample[0] - samples[0][0] >= cold_s]
    size = max(1, len(warm) // BLOCKS)
    blocks = [warm[at : at + size] for at in range(0, len(warm) - size + 1, size)]
    means = [[statistics.fmean(column) for column in zip(*block, strict=True)] for block in blocks]
    times, nbytes, counts = (list(column) for column in zip(*means, strict=True))
    held = slope(times, [each / 1e6 for each in nbytes])
    open_ = slope(times, counts)
    return {
        "megabytes": warm[-1][1] / 1e6,
        "megabytes_per_h": held.per_s * HOUR_S,
        "megabytes_per_h_95": [bound * HOUR_S for bound in held.interval],
        "descriptors": warm[-1][2],
        "descriptors_per_h": open_.per_s * HOUR_S,
        "descriptors_per_h_95": [bound * HOUR_S for bound in open_.interval],
    }


def table(of: dict[str, dict[str, Any]]) -> list[list[Any]]:
    rows: list[list[Any]] = [["process", "MB", "MB/h", "95 %", "descriptors", "per h", "95 %"]]
    for name, found in of.items():
        cells: list[Any] = [name]
        for what in ("megabytes", "descriptors"):
            low, high = found[f"{what}_per_h_95"]
            cells += [found[what], found[f"{what}_per_h"], f"{low:.1f} ... {high:.1f}"]
        rows.append(cells)
    return rows


if __name__ == "__main__":
    main()
