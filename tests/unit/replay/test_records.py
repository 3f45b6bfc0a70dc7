"""Reading records: every field equals numpy's own reading, in its own memory."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.replay.table import RecordReader

FIELDS = [
    ("obs", "<f4", (4,)),
    ("pixels", "|u1", (3, 5)),
    ("one", "<f8", (1,)),
    ("half", "<f2", (3,)),
    ("action", "<i8"),
    ("flag", "|b1"),
]
NAMES = [field[0] for field in FIELDS]


@pytest.fixture(params=[True, False], ids=["aligned", "packed"])
def records(request: pytest.FixtureRequest) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    dtype = np.dtype(FIELDS, align=request.param)
    made = np.zeros(100, dtype)
    rng = np.random.default_rng(0)
    for name in NAMES:
        made[name] = rng.integers(0, 2 if name == "flag" else 100, made[name].shape)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_column_equals_the_numpy_field_of_the_rows(
    records: np.ndarray[tuple[int], np.dtype[np.void]], name: str
) -> None:
    reader, rows = RecordReader(records), np.array([7, 99, 7, 0])
    expected = records[name][rows]
    column = reader.column(reader.take(rows), name)
    assert (column.dtype, column.shape) == (expected.dtype, expected.shape)
    assert column.flags.c_contiguous
    assert column.flags.writeable
    np.testing.assert_array_equal(column, expected)
    records[name] = 0
    np.testing.assert_array_equal(column, expected)


@pytest.mark.parametrize("name", NAMES)
def test_field_is_read_into_part_of_an_array(
    records: np.ndarray[tuple[int], np.dtype[np.void]], name: str
) -> None:
    reader, rows = RecordReader(records), np.arange(6)
    expected = records[name][rows].reshape(3, 2, *records[name].shape[1:])
    out = np.zeros((4, *expected.shape[1:]), expected.dtype)
    reader.write(reader.take(rows).reshape(3, 2), name, out[:-1])
    np.testing.assert_array_equal(out[:-1], expected)
    assert not out[-1].any()
