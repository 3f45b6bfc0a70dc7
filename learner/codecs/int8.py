"""Eight bits per value, and a scale per block."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.learner.codecs.two_phase import TwoPhase

LEVELS = 127  # number of levels of each sign
SMALLEST = torch.finfo(torch.float32).tiny  # smallest scale that has a reciprocal


class Int8(TwoPhase):
    """s = max|x| / 127 for each block of ``learner.reduce.block`` values; q = round(x / s).

    The relative error of Gaussian values in blocks of 512 is 1e-2 for both phases together. A block
    without any value above 1.5e-36 becomes zero, as its scale has no reciprocal.
    """

    head = 1
    bits = 8

    def _set_up(self) -> None:
        super()._set_up()
        self.block = self._context.cfg.block

    def encode(self, values: Tensor, pads: Tensor, heads: Tensor, codes: Tensor) -> None:
        # The scale of a block maps its largest magnitude to the last level.
        work = self._memory("work", values.shape, torch.float32)
        scales = torch.abs(values, out=work).amax(1, keepdim=True).div_(LEVELS)
        scales.masked_fill_(scales < SMALLEST, 0.0)
        heads.copy_(scales)

        factors = scales.reciprocal_().masked_fill_(heads == 0.0, 0.0)
        torch.mul(values, factors, out=work).round_()
        codes.view(torch.int8).copy_(work)

    def decode(self, heads: Tensor, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.int8)).mul_(heads)
