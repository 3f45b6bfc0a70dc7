"""Nested state encoded as bytes is restored exactly, and damage is detected."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from penstock.core.state_bytes import from_bytes, to_bytes


def test_values_and_arrays_come_back_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    numbers = [0.1, -0.0, float("inf"), 2**200, -7, True, None, "é\0", ""]
    arrays = {
        "fortran": np.asfortranarray(rng.random((3, 4))),
        "strided": rng.integers(0, 9, (6, 6))[::2, ::-3],
        "scalar": np.float32(0.3),
        "zero": np.array(7, np.int16),
        "empty": np.zeros((0, 3), np.uint8),
        "flags": rng.random(11) < 0.5,
    }
    nan = np.array([0x7FF8000000000001, 0xFFF8000000000002], np.uint64).view(np.float64)
    back = from_bytes(
        to_bytes({"numbers": numbers, "deep": [{"arrays": arrays}, (1, 2)], "nan": nan})
    )
    assert back["numbers"] == numbers
    assert struct.pack("d", back["numbers"][1]) == struct.pack("d", -0.0)
    assert back["deep"][1] == [1, 2]
    assert back["nan"].tobytes() == nan.tobytes()
    found = back["deep"][0]["arrays"]
    assert found.pop("scalar") == arrays.pop("scalar")
    for name, array in arrays.items():
        assert isinstance(array, np.ndarray)
        assert np.array_equal(found[name], array), name
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].flags.writeable


def test_random_states_of_numpy_come_back() -> None:
    for name in ("PCG64", "MT19937", "Philox", "SFC64"):
        rng = np.random.Generator(getattr(np.random, name)(5))
        rng.random(3)
        state = from_bytes(to_bytes(rng.bit_generator.state))
        other = np.random.Generator(getattr(np.random, name)(6))
        other.bit_generator.state = state
        assert np.array_equal(rng.random(5), other.random(5))


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes"])
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        to_bytes({"a": [value]})


def test_objects_in_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="no column has dtype"):
        to_bytes(np.array([object()]))


def test_truncated_bytes_are_refused() -> None:
    whole = to_bytes({"a": np.arange(10), "b": [1, {"c": np.ones((2, 3))}]})
    for length in range(len(whole)):
        with pytest.raises(ValueError):  # noqa: PT011  # whichever part is missing
            from_bytes(whole[:length])


@pytest.mark.parametrize(
    "place",
    [
        "[0, 'O', [1]]",
        "[-8, '<f8', [1]]",
        "[0, '<f8', [-1]]",
        "[0, '<f8', [99]]",
        "[0]",
        "7",
        "[0, '<f8', [0, 1000000000000000000000000000000]]",
    ],
)
def test_invalid_array_offsets_are_refused(place: str) -> None:
    text = f'{{"$array": {place}}}'.replace("'", '"').encode()
    made = np.frombuffer(len(text).to_bytes(8, "little") + text + bytes(16), np.uint8)
    with pytest.raises(ValueError):  # noqa: PT011
        from_bytes(made)


def test_bytes_are_read_once() -> None:
    """A text of some hundred bytes could otherwise ask for any amount of memory."""
    text = b'[{"$array": [0, "<f8", [2]]}, {"$array": [0, "<f8", [2]]}]'
    made = np.frombuffer(len(text).to_bytes(8, "little") + text + bytes(16), np.uint8)
    with pytest.raises(ValueError, match="at byte 0, expected at 16"):
        from_bytes(made)
