"""Picks the codec that a config names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.configs.reduce import ReduceConfig
from penstock.learner.codecs.buckets import GradientPart
from penstock.learner.codecs.codec import Codec
from penstock.learner.codecs.dgc import Dgc
from penstock.learner.codecs.gradient_dropping import Dropping
from penstock.learner.codecs.int8 import Int8
from penstock.learner.codecs.onebit import OneBit
from penstock.learner.codecs.powersgd import PowerSgd
from penstock.learner.codecs.rounding import Bf16, Fp16, Fp32
from penstock.learner.codecs.terngrad import TernGrad

CODECS: dict[str, type[Codec]] = {
    codec.name: codec
    for codec in (Fp32, Fp16, Bf16, Int8, OneBit, TernGrad, Dropping, Dgc, PowerSgd)
}


def make_codec(
    cfg: ReduceConfig,
    parts: Sequence[GradientPart],
    size: int,
    device: torch.device,
    world: int,
    rank: int,
    momentum: float = 0.9,
) -> Codec:
    """The codec ``cfg.codec``; see `Codec` for the rest.

    :raises ValueError: for ``auto``, which is to be decided before.
    """
    if cfg.codec not in CODECS:
        raise ValueError(f"codec {cfg.codec!r} is not one of {sorted(CODECS)}")
    return CODECS[cfg.codec](cfg, parts, size, device, world, rank, momentum)
