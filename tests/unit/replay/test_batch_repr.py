"""A printed batch shows dtypes and shapes."""

from __future__ import annotations

import numpy as np

from penstock.replay.batch import Batch


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
