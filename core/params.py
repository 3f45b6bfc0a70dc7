"""The position of each parameter and buffer of a network in one flat float32 vector.

Weights travel as that vector: float32 on a host, bfloat16 (upper half of the float32) between
hosts. Actors that compute in numpy read it without torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.specs import read_shape

WireDtype = Literal["fp32", "bf16"]
Float32 = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Array = npt.NDArray[np.generic]
Arrays = dict[str, npt.NDArray[Any]]


class Stamp(NamedTuple):
    """A policy version: ``version`` optimizer steps published in ``generation`` of the run."""

    generation: int
    version: int


POLICY_ID = 0
"""The policy of a run that trains only one."""
MAX_POLICY_ID = (1 << 31) - 1


@dataclass(frozen=True)
class ParamLayout:
    """Names and shapes of parameters, in their order in the flat vector."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]

    @cached_property
    def size(self) -> int:
        """Number of float32 values."""
        return sum(math.prod(shape) for _, shape in self.entries)

    @cached_property
    def hash(self) -> int:
        """First eight bytes of the SHA-256 of `to_list` as JSON, little-endian."""
        text = json.dumps(self.to_list(), separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def views(self, flat: Float32) -> dict[str, Float32]:
        """Returns arrays over ``flat`` (float32 ``[size]``) by name, without a copy.

        Raises ValueError for a vector of another shape.
        """
        if flat.shape != (self.size,):
            raise ValueError(
                f"flat vector has shape {flat.shape}; this layout needs ({self.size},)"
            )

        arrays: dict[str, Float32] = {}
        offset = 0
        for name, shape in self.entries:
            count = math.prod(shape)
            arrays[name] = flat[offset : offset + count].reshape(shape)
            offset += count
        return arrays

    @property
    def filled(self) -> ParamLayout:
        """This layout without empty entries, by which layouts of release 0.1 described spaces."""
        return ParamLayout(tuple(entry for entry in self.entries if 0 not in entry[1]))

    def to_list(self) -> list[list[Any]]:
        return [[name, list(shape)] for name, shape in self.entries]

    @classmethod
    def from_list(cls, entries: Iterable[Any]) -> ParamLayout:
        """The inverse of `to_list`. Raises ValueError or TypeError for an invalid layout."""
        layout = cls(tuple((str(name), read_shape(shape)) for name, shape in entries))

        # A small file could claim one tensor a million times.
        names = {name for name, _ in layout.entries}
        if len(names) < len(layout.entries):
            raise ValueError("a parameter is named twice")
        if layout.size > sys.maxsize:
            raise ValueError("the parameters are more than any memory holds")
        return layout


def to_bf16(values: Float32) -> npt.NDArray[np.uint16]:
    """Round float32 to the bits of bfloat16, the nearest number or of two the even one.

    NaN stays NaN.
    """
    # Half of the last bit that is kept is added before the lower half is cut off; if that bit is
    # 0, a little less, so that a tie is rounded down to it.
    bits = values.view(np.uint32)
    last_kept_bit = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + (np.uint32(0x7FFF) + last_kept_bit)) >> np.uint32(16)
    bf16 = rounded.astype(np.uint16)

    # The sum may have made infinity of NaN.
    is_nan = np.isnan(values)
    if is_nan.any():
        bf16[is_nan] = 0x7FC0
    return bf16


def from_bf16(bits: npt.NDArray[np.uint16]) -> Float32:
    """Convert the bits of bfloat16 to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
