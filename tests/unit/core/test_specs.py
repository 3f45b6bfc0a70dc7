from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.specs import SlotSpec, plain_dtype


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


def test_a_column_without_bytes_that_numpy_refuses_is_refused() -> None:
    columns = [["obs", "<f4", [0, 2**31 - 1, 71_582_789], "unroll+1"]]
    with pytest.raises(ValueError, match=r"column obs of shape .* is too large"):
        SlotSpec.from_dict({"unroll": 4, "envs": 3, "side": 0, "columns": columns})
