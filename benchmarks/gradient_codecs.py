"""What coding one gradient costs one learner of several, on one core, and the bytes it sends.

The network is left out: all other learners are taken to send what this one does. The least of many
runs counts, in time of the thread, so that other work on the machine counts as little as it can.
`penstock bench reduce` measures codecs over links.

    python benchmarks/gradient_codecs.py [--learners 4] [--times 50] [--json] [--save]
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from common import finish, parser
from penstock.configs.reduce import ReduceConfig
from penstock.core.interfaces import Codec, CodecContext
from penstock.learner.codecs.auto import AFTER_WARMUP
from penstock.learner.codecs.buckets import parts_of
from penstock.learner.codecs.collective import SoloCollective
from penstock.learner.codecs.registry import CODECS, make_codec

CASES: dict[str, dict[str, Any]] = {name: {"codec": name} for name in CODECS.specs} | {
    "terngrad, ternary again": {"codec": "terngrad", "reternarize": True}
}
ASKED_MS = {"int8": 5.0, "onebit": 8.0, "dgc": 15.0} | dict.fromkeys(
    ("terngrad", "terngrad, ternary again"), 20.0
)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--learners", type=int, default=4)
    args.add_argument("--times", type=int, default=50)
    options = args.parse_args()
    torch.set_num_threads(1)
    parts = parts_of(nature().named_parameters())
    size = parts[-1].stop
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0))
    ring = SoloCollective(0, options.learners)
    fp32 = 0
    rows: list[list[Any]] = [["codec", "bytes", "fewer", "coding, ms", "asked, ms"]]
    codecs: dict[str, dict[str, float]] = {}
    for name, chosen in CASES.items():
        cfg = ReduceConfig(**chosen)
        codec = make_codec(
            CodecContext(cfg, parts, size, gradient.device, options.learners, rank=0)
        )
        nbytes = codec.nbytes(AFTER_WARMUP)
        fp32 = fp32 or nbytes
        code_ms = least_ms(codec, gradient, ring, options.times)
        codecs[name] = {"bytes": nbytes, "bytes_ratio": fp32 / nbytes, "code_ms": code_ms}
        rows.append([name, nbytes, fp32 / nbytes, code_ms, ASKED_MS.get(name, "")])
    result = {
        "learners": options.learners,
        "parameters": size,
        "codecs": codecs,
        "asked_ms": ASKED_MS,
    }
    finish("codecs", result, rows, options)


def nature() -> nn.Module:
    """The parameters of the network for Atari, with 18 actions: 1.7 million."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4),
        nn.Conv2d(32, 64, 4, 2),
        nn.Conv2d(64, 64, 3),
        nn.Linear(3136, 512),
        nn.Linear(512, 18),
        nn.Linear(512, 1),
    )


def least_ms(codec: Codec, gradient: torch.Tensor, ring: SoloCollective, times: int) -> float:
    """Milliseconds of this thread, in which nobody else's work counts."""
    work = torch.empty_like(gradient)
    taken_s = []
    for _ in range(times):
        work.copy_(gradient)
        began_s = time.thread_time()
        codec.begin(AFTER_WARMUP)
        for bucket in codec.buckets:
            codec.reduce(bucket, work[bucket.start : bucket.stop], ring)
        taken_s.append(time.thread_time() - began_s)
    return 1e3 * min(taken_s)


if __name__ == "__main__":
    main()
