"""The weights board: the newest weights of one policy, for all actors of a host.

A double buffer with two counters. The writer announces the buffer that it is about to overwrite
(`writing`), fills it, then publishes it (`ready`). A reader copies the published buffer, and copies
again if the writer has begun to overwrite it meanwhile, so neither ever waits for the other. Old
weights are never queued, only replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.interfaces import UnknownPolicyError
from penstock.core.params import POLICY_ID, Float32, Stamp, WireDtype, from_bf16
from penstock.core.specs import PAGE, Bytes
from penstock.transport.shm.arena import Arena, fence

# The layout of the first page, in words of 8 bytes; each counter has a cache line.
_WRITING = 0  # the counter of buffers that the writer has announced
_READY = 8  # the counter of buffers that were published
_META = 16  # generation, version and dtype of each of the two buffers
_META_WORDS = 8
_POLICY = _META + 2 * _META_WORDS
_DTYPES: tuple[WireDtype, ...] = ("fp32", "bf16")
_ITEM_NBYTES = {"fp32": 4, "bf16": 2}


class WeightsBoard:
    """``size`` values as float32 or bfloat16; created by the writer, attached by readers."""

    def __init__(self, arena: Arena, size: int) -> None:
        """Use the memory of ``arena`` for ``size`` values; see `create` and `attach`."""
        self.arena = arena
        self.size = size
        self._words = arena.words
        nbytes = _buffer_nbytes(size)
        self._buffers = [arena.bytes[PAGE + index * nbytes :][:nbytes] for index in (0, 1)]

    @classmethod
    def attach(cls, fd: int, size: int) -> WeightsBoard:
        """Attach to a board as a reader; takes over the descriptor."""
        return cls(Arena.attach(fd), size)

    @classmethod
    def create(cls, size: int, *, shared: bool = True, policy_id: int = POLICY_ID) -> WeightsBoard:
        """Make a board as its writer.

        Args:
            size: the number of values.
            shared: use memory that other processes can map.
            policy_id: whose weights they are.

        Raises:
            UserError: the host lacks the memory.
        """
        nbytes = _nbytes(size)
        arena = Arena.shared(nbytes, "weights") if shared else Arena.private(nbytes)
        arena.words[_POLICY] = policy_id
        return cls(arena, size)

    @property
    def policy_id(self) -> int:
        """The policy of the weights."""
        return self._words[_POLICY]

    @property
    def fd(self) -> int:
        """The descriptor of the memory, for readers in other processes."""
        assert self.arena.fd is not None, "a private board cannot be shared"
        return self.arena.fd

    def publish(
        self, payload: npt.NDArray[np.generic], stamp: Stamp, policy_id: int = POLICY_ID
    ) -> None:
        """Publish new weights: float32 ``[size]``, or bfloat16 bits as uint16 ``[size]``.

        Raises UnknownPolicyError for another policy.
        """
        raw = payload.view(np.uint8)
        np.copyto(self._begin(policy_id)[: raw.size], raw)
        self._commit(stamp, "fp32" if payload.dtype == np.float32 else "bf16")

    def publish_parts(
        self, parts: Sequence[npt.NDArray[Any]], stamp: Stamp, policy_id: int = POLICY_ID
    ) -> None:
        """Publish new weights that lie in several arrays ``[n]``, together ``[size]``, as float32.

        Raises UnknownPolicyError for another policy.
        """
        out = self._begin(policy_id)[: self.size * _ITEM_NBYTES["fp32"]].view(np.float32)
        np.concatenate(parts, out=out, casting="same_kind")
        self._commit(stamp, "fp32")

    def _begin(self, policy_id: int) -> Bytes:
        """Announce the buffer that is not published, and return it.

        Raises UnknownPolicyError for another policy.
        """
        words = self._words
        if policy_id != words[_POLICY]:
            raise UnknownPolicyError(policy_id)
        count = words[_READY] + 1
        words[_WRITING] = count
        fence()
        return self._buffers[count & 1]

    def _commit(self, stamp: Stamp, dtype: WireDtype) -> None:
        """Publish the buffer of the last `_begin`."""
        words = self._words
        count = words[_READY] + 1
        meta = _META + (count & 1) * _META_WORDS
        words[meta] = stamp.generation
        words[meta + 1] = stamp.version
        words[meta + 2] = _DTYPES.index(dtype)
        fence()
        words[_READY] = count

    @property
    def stamp(self) -> Stamp | None:
        """The version of the newest weights; None before the first."""
        words = self._words
        while True:
            ready = words[_READY]
            if ready == 0:
                return None
            meta = _META + (ready & 1) * _META_WORDS
            stamp = Stamp(words[meta], words[meta + 1])
            if words[_WRITING] <= ready + 1:
                return stamp

    def read(
        self, out: Float32, newer_than: Stamp | None = None, policy_id: int = POLICY_ID
    ) -> Stamp | None:
        """Copy the newest weights into ``out``, float32 ``[size]``.

        Returns:
            Their version; None, without copying, when there are none other than ``newer_than``.

        Raises:
            UnknownPolicyError: the board has the weights of another policy.
        """
        words = self._words
        if policy_id != words[_POLICY]:
            raise UnknownPolicyError(policy_id)

        # The copy is repeated if the writer has begun to overwrite the buffer meanwhile.
        while True:
            ready = words[_READY]
            fence()
            meta = _META + (ready & 1) * _META_WORDS
            stamp = Stamp(words[meta], words[meta + 1])
            if ready == 0 or stamp == newer_than:
                return None

            self._copy(ready & 1, _DTYPES[words[meta + 2] & 1], out)
            fence()
            if words[_WRITING] <= ready + 1:
                return stamp

    def _copy(self, index: int, dtype: WireDtype, out: Float32) -> None:
        """Copy a buffer into ``out``, as float32."""
        raw = self._buffers[index][: self.size * _ITEM_NBYTES[dtype]]
        if dtype == "fp32":
            np.copyto(out, raw.view(np.float32))
        else:
            np.copyto(out, from_bf16(raw.view(np.uint16)))

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last array over it."""
        self.arena.close()


def board_of(boards: Sequence[WeightsBoard], policy_id: int) -> WeightsBoard:
    """Return the board of a policy; ``boards[i]`` is that of policy i.

    Raises UnknownPolicyError where there is none.
    """
    if not 0 <= policy_id < len(boards):
        raise UnknownPolicyError(policy_id)
    return boards[policy_id]


def _nbytes(size: int) -> int:
    """The size of a board: a page of words, and two buffers."""
    return PAGE + 2 * _buffer_nbytes(size)


def _buffer_nbytes(size: int) -> int:
    """The size of a buffer for ``size`` float32 values, in whole pages."""
    return -(-size * 4 // PAGE) * PAGE
