"""What several learners gain over one, with gradients reduced during the backward pass and after.

Each learner is on a host of its own behind a rate-limited link (on loopback without root), and its
forward and backward passes sleep instead of computing, so that cores are not the limit: layer by
layer, by their shares of the multiplications of a Nature CNN, whose 1.7 M gradients are reduced as
in training. A step's compute is 85 ms forward and 170 ms backward, about what 640 frames take on a
core.

    python benchmarks/overlap.py [--learners 4] [--seconds 10] [--json] [--save]
"""

from __future__ import annotations

import contextlib
from typing import Any

from common import finish, parser
from hosts import NoHostsError, hosts
from simulated.group import learners

PARAMETERS = 1_700_000
SAMPLES = 640  # of a step
FORWARD_S, BACKWARD_S = 0.085, 0.170
CASES = (("1gbit", "none"), ("100mbit", "int8"), ("100mbit", "dgc"))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--learners", type=int, default=4)
    made.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    args = made.parse_args()
    alone = measure(1, "unlimited", "none", True, args.seconds)
    rows: list[list[Any]] = [
        ["link", "codec", "overlap", "learners", "ms a step", "samples/s", "of one"],
        ["-", "-", "-", 1, alone["step_ms"], alone["samples_s"], 1.0],
    ]
    results = [alone]
    for link, codec in CASES:
        for overlap in (True, False):
            found = measure(args.learners, link, codec, overlap, args.seconds)
            found["of_one"] = found["samples_s"] / alone["samples_s"]
            results.append(found)
            step_ms, samples_s = found["step_ms"], found["samples_s"]
            rows.append([link, codec, overlap, args.learners, step_ms, samples_s, found["of_one"]])
    result = {"forward_s": FORWARD_S, "backward_s": BACKWARD_S, "runs": results, "asked": 3.8}
    finish("overlap", result, rows, args)


def measure(count: int, link: str, codec: str, overlap: bool, seconds: float) -> dict[str, Any]:
    """One configuration; the slowest learner counts."""
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(hosts(count))
            place.limit(link)
        except NoHostsError:
            place, link = None, "loopback"
        group = stack.enter_context(learners(count, PARAMETERS, place))
        found = group.do(
            "compute",
            codec=codec,
            seconds=seconds,
            overlap=overlap,
            forward_s=FORWARD_S,
            backward_s=BACKWARD_S,
        )
    step_ms = max(one["step_ms"] for one in found)
    return {
        "learners": count,
        "link": link,
        "codec": codec,
        "overlap": overlap,
        "step_ms": step_ms,
        "samples_s": count * SAMPLES / step_ms * 1e3,
    }


if __name__ == "__main__":
    main()
