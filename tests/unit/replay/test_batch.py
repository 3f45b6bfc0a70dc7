"""A batch: how it is printed, and the bytes in which it is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.replay.batch import Batch
from penstock.replay.remote.batch_codec import pack, read_shape, unpack
from penstock.transport.wire import WireError


def test_rows_of_one_draw_are_interleaved_into_its_batches() -> None:
    batch = Batch(obs=(np.arange(12).reshape(6, 2), {"x": np.arange(6.0)}), keys=np.arange(6))
    shape, frames = pack(batch, 3)
    read = read_shape(shape.meta)
    for k in range(3):
        dealt = unpack(read, frames[k].tobytes())
        assert dealt.obs[0].tolist() == [[2 * k, 2 * k + 1], [2 * k + 6, 2 * k + 7]]
        assert dealt.obs[1]["x"].tolist() == [k, k + 3]
        assert dealt["keys"].tolist() == [k, k + 3]


@pytest.mark.parametrize(
    "meta",
    [None, [], [["a", "|O", [1]]], [["a", "nonsense", [1]]], [["a", "<f4", [-1]]], [["a", "<f4"]],
     [["a", "<f4", "x"]], [3], [["a", "<f4", [1]]] * 2000],
)  # fmt: skip
def test_malformed_batch_description_is_refused(meta: Any) -> None:
    with pytest.raises(WireError):
        read_shape(meta)


def test_a_frame_of_another_size_is_refused() -> None:
    shape, frames = pack(Batch(a=np.arange(5)))
    with pytest.raises(WireError, match="size"):
        unpack(shape, frames[0].tobytes()[:-1])


def test_a_batch_is_printed_as_dtypes_and_shapes() -> None:
    batch = Batch(
        obs={"image": np.zeros((32, 84, 84), np.uint8), "pair": (np.zeros((32, 2)), None)},
        reward=np.zeros(32, np.float32),
        weights=None,
    )
    assert str(batch) == (
        "Batch(obs={image: uint8[32, 84, 84], pair: (float64[32, 2], None)}, "
        "reward=float32[32], weights=None)"
    )


def test_a_number_is_sent_beside_the_arrays() -> None:
    shape, frames = pack(Batch(reward=np.zeros((5, 2)), burn_in=3))
    read = unpack(read_shape(shape.meta), frames[0].tobytes())
    assert (read.burn_in, read.reward.shape) == (3, (5, 2))
