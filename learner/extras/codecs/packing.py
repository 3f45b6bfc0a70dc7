"""Packs small integers into few bits, without a loop over them."""

from __future__ import annotations

import torch
from torch import Tensor

# Types of a word that holds as many int8 as values fit in one byte.
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Packing:
    """Packs integers ``-offset .. 2**bits - 1 - offset`` (int8) in ``bits`` (1, 2, 4 or 8) each.

    Bytes are little-endian inside: the first value has the lowest bits. A word of as many int8 as
    fit in one byte is packed by one multiplication, whose summands do not overlap, and unpacked by
    a table of 256 words.
    """

    def __init__(self, bits: int, offset: int, device: torch.device) -> None:
        """Prepare the factor that packs and the table that unpacks."""
        self.per_byte = 8 // bits
        """Number of values in a byte."""
        self._word = WORDS[self.per_byte]
        self._offset = offset
        self._mask = 2**bits - 1 if bits < 8 else -1  # as an int8

        # Value i of a word is at bit 8 i. The product has it at bit ``top + bits i`` too, and so
        # all values together from bit ``top`` on.
        self._top = 8 * (self.per_byte - 1)
        self._factor = sum(1 << (self._top - (8 - bits) * i) for i in range(self.per_byte))

        # The table has the word of each byte.
        byte = torch.arange(256).view(256, 1)
        codes = (byte >> (bits * torch.arange(self.per_byte))) & (2**bits - 1)
        self._table = (codes - offset).to(torch.int8).view(self._word).flatten().to(device)

    def pack(self, values: Tensor, out: Tensor) -> None:
        """Pack integers; those out of range spoil no others.

        Args:
            values: int8 (or bool), contiguous.
            out: output, uint8, one for ``per_byte`` values.
        """
        codes = values.view(torch.int8)
        if self._offset:
            codes = (codes + self._offset).bitwise_and_(self._mask)
        words = codes.view(-1).view(self._word)
        out.copy_((words * self._factor).bitwise_right_shift_(self._top).view(out.shape))

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Unpack the bytes of `pack` into ``out``, int8, contiguous."""
        words = out.view(-1).view(self._word)
        torch.index_select(self._table, 0, packed.int().view(-1), out=words)
