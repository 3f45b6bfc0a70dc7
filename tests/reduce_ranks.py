"""One rank, a process of its own, of the contract suite of the codecs.

    python tests/reduce_ranks.py RANK RANKS FOLDER

Runs every case with all ranks and then with one fewer, and writes what came out to
``FOLDER/rank-R.npz`` under ``<world>/<case>/<what>``.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.core.interfaces import Codec
from penstock.learner.codecs.registry import CODECS
from penstock.learner.group.collective import GroupCollective
from reduce_ring import SIZE, Floats, codec_for, gradients, reduce_all

UPDATES = 4
SETTINGS: dict[str, dict[str, Any]] = {  # so that four updates of a small vector show something
    "int8": {"block": 64},
    "onebit": {"onebit_block": 100, "warmup_updates": 1},
    "onebit_adam": {"onebit_block": 100, "warmup_updates": 1},
    "onebit_lamb": {"onebit_block": 100, "warmup_updates": 1},
    "zeroone_adam": {"onebit_block": 100, "variance_doubling": 1},
    "dropping": {"density": 0.02},
    "dgc": {"dgc_density": 0.01, "warmup_updates": 1},
    "powersgd": {"warmup_updates": 1},
}
LARGE: dict[str, dict[str, Any]] = {
    **{name: {"codec": name} | SETTINGS.get(name, {}) for name in CODECS.specs},
    "terngrad-again": {"codec": "terngrad", "reternarize": True},
    "dgc-clip": {"codec": "dgc", "dgc_density": 0.01, "warmup_updates": 0, "dgc_clip": 1.0},
}
TINY: dict[str, dict[str, Any]] = {  # every parameter is a bucket, two of them of one value
    f"{name}-tiny": {"codec": name, "warmup_updates": 0, "bucket_mb": 1e-6} for name in CODECS.specs
}
CASES = LARGE | TINY
ODD = ("zeros", "nan", "inf", "huge", "denormal")
LATE = 10**6  # an update behind every warm-up


def odd(kind: str, rank: int) -> Floats:
    """A gradient of which something is not as usual; NaN and infinity are on rank 1 only."""
    grads = np.random.default_rng(rank).standard_normal(SIZE).astype(np.float32)
    if kind == "zeros":
        grads[:] = 0.0
    elif kind == "huge":
        grads *= 1e15
    elif kind == "denormal":
        grads *= 1e-42
    elif rank == 1:
        grads[::100] = -np.inf if kind == "inf" else np.nan
    return grads


def run_case(ring: GroupCollective, options: dict[str, Any]) -> dict[str, Floats]:
    codec = codec_for(ring.world, ring.rank, **options)
    grads = gradients(ring.world, UPDATES)[:, ring.rank]
    found = _run(codec, ring, grads, 0)
    found["residual"] = np.stack([np.zeros(SIZE), *(r.numpy() for r in codec.residuals().values())])
    for kind in ODD:
        codec.reset()
        found[kind] = reduce_all(codec, ring, LATE, odd(kind, ring.rank))
        if kind in ("nan", "inf"):
            found[f"after {kind}"] = reduce_all(codec, ring, LATE + 1, grads[0])
    return found


def run_again(ring: GroupCollective, options: dict[str, Any]) -> dict[str, Floats]:
    """Go on from residuals, and go back to the first update."""
    first, second = (codec_for(ring.world, ring.rank, **options) for _ in range(2))
    grads = gradients(ring.world, UPDATES)[:, ring.rank]
    _run(first, ring, grads[:2], 0)
    for kind, values in second.residuals().items():
        values.copy_(first.residuals()[kind])
    found = {
        "straight on": _run(first, ring, grads[2:], 2)["sums"],
        "resumed": _run(second, ring, grads[2:], 2)["sums"],
    }
    found["from the first again"] = _run(first, ring, grads, 0)["sums"]
    return found


def _run(codec: Codec, ring: GroupCollective, grads: Floats, first: int) -> dict[str, Any]:
    sums, sent, theory = [], [], []
    for update, grad in enumerate(grads, start=first):
        before = ring.sent_nbytes
        sums.append(reduce_all(codec, ring, update, grad))
        sent.append(ring.sent_nbytes - before)
        theory.append(codec.nbytes(update))
    return {"sums": np.stack(sums), "sent": np.array(sent), "theory": np.array(theory)}


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for world in (ranks, ranks - 1):
        if rank < world:
            store = dist.FileStore(str(folder / f"store-{world}"), world)  # type: ignore[attr-defined]
            timeout = timedelta(seconds=30)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timeout
            )
            group = dist.new_group(timeout=timeout)
            assert isinstance(group, dist.ProcessGroup)
            ring = GroupCollective(group)
            for case, options in CASES.items():
                found = run_case(ring, options)
                if case in LARGE:
                    found |= run_again(ring, options)
                results |= {f"{world}/{case}/{what}": values for what, values in found.items()}
            dist.destroy_process_group()
    np.savez(folder / f"rank-{rank}.npz", **results)


if __name__ == "__main__":
    main()
