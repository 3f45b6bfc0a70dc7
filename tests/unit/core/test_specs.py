"""Slot specs that come from a peer: plain dtypes, sizes and numbers of columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.core.params import ParamLayout
from penstock.core.specs import SlotSpec, plain_dtype
from penstock.envs import space_json
from penstock.replay.remote import batch_codec
from penstock.transport.wire import WireError


@pytest.mark.parametrize(
    "text",
    ["1,", "i4,(00)f4", "(1", "O", "|O", "f4,f4", "", "float", "int128", "i4" * 9, "V\n", 7, None],
)
def test_a_text_that_is_no_plain_dtype_is_refused_and_not_evaluated(text: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # numpy's own words for some
        plain_dtype(text)
    with pytest.raises(ValueError):  # noqa: PT011
        SlotSpec.from_dict(
            {"unroll": 1, "envs": 1, "side": 0, "columns": [["a", text, [], "unroll"]]}
        )


@pytest.mark.parametrize(
    "dtype", ["float32", "bool", "uint8", "complex128", "<f4", "|u1", "|b1", "<U5", "|S3", "i8"]
)
def test_plain_dtypes_are_read(dtype: str) -> None:
    assert plain_dtype(dtype) == np.dtype(dtype)
    assert plain_dtype(np.dtype(dtype).str) == np.dtype(dtype)


LONG = [2] * 50_000


@pytest.mark.parametrize(
    "read",
    [
        lambda: SlotSpec.from_dict(
            {"unroll": 1, "envs": 1, "side": 0, "columns": [["a", "<f4", LONG, "unroll"]]}
        ),
        lambda: ParamLayout.from_list([["a", LONG]]),
        lambda: batch_codec.read_shape([["a", "<f4", LONG]]),
        lambda: space_json.from_json({"Box": [0, 1, LONG, "<f4"]}),
    ],
)
def test_a_shape_of_more_extents_than_an_array_has_is_refused_before_its_size_is_computed(
    read: Callable[[], object],
) -> None:
    """The product of the million extents that fit a message takes 20 seconds."""
    with pytest.raises((ValueError, WireError), match="50000 extents; an array has at most 32"):
        read()


def test_a_description_of_too_many_columns_is_refused() -> None:
    columns = [[str(i), "|u1", [], "unroll"] for i in range(5000)]
    with pytest.raises(ValueError, match="5000 columns; at most 4096"):
        SlotSpec.from_dict({"unroll": 1, "envs": 1, "side": 0, "columns": columns})


def test_a_column_without_bytes_that_numpy_refuses_is_refused() -> None:
    columns = [["obs", "<f4", [0, 2**31 - 1, 71_582_789], "unroll+1"]]
    with pytest.raises(ValueError, match=r"column obs of shape .* is too large"):
        SlotSpec.from_dict({"unroll": 4, "envs": 3, "side": 0, "columns": columns})
