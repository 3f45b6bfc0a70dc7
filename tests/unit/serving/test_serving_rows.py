"""Rows of bytes: where columns lie, how they are read, and which rows are at fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from penstock.core.observations import views
from penstock.envs.packing import Packer
from penstock.serving.rows import ObservationReader, RowLayout
from served_games import PARTS

ONE_CHOICE = spaces.Discrete(3)


def batch_of(space: spaces.Space[Any], count: int) -> Any:
    space_of_batch = batch_space(space, count)
    space_of_batch.seed(1)
    batch = space_of_batch.sample()
    if isinstance(batch, dict) and "action_mask" in batch:
        batch["action_mask"][:, 0] = 1
    return batch


def assert_equal(space: spaces.Space[Any], one: Any, other: Any) -> None:
    """Compare packed rows, without what lies between their parts."""
    parts = Packer("game", space).parts
    if not parts:
        np.testing.assert_array_equal(one, other)
    for name, array in views(parts, one).items():
        np.testing.assert_array_equal(array, views(parts, other)[name], name)


def test_a_single_array_begins_a_row_whose_length_is_a_multiple_of_8() -> None:
    layout = RowLayout(spaces.Box(-1, 1, (3,), np.float32), "obs")
    assert layout.to_json() == [["obs", "<f4", [3], 0]]
    assert layout.nbytes == 16


def test_columns_lie_at_multiples_of_their_item_size() -> None:
    layout = RowLayout(
        spaces.Tuple(
            [
                spaces.Box(0, 255, (3,), np.uint8),
                spaces.Discrete(4),
                spaces.Dict({"b": spaces.Box(-1, 1, (1,), np.float32)}),
                spaces.MultiBinary(2),
            ]
        ),
        "obs",
    )
    assert layout.to_json() == [
        ["0", "|u1", [3], 0],
        ["1", "<i8", [], 8],
        ["2.b", "<f4", [1], 16],
        ["3", "|i1", [2], 20],
    ]
    assert layout.nbytes == 24


@pytest.mark.parametrize(
    "space",
    [
        PARTS,
        spaces.Discrete(6, start=2),
        spaces.MultiDiscrete([3, 2], start=[1, 0]),
        spaces.MultiBinary(9),
        spaces.Box(0, 255, (4, 4, 1), np.uint8),
        spaces.Box(-5, 5, (3,), np.float64),
        spaces.Tuple([spaces.Box(-1, 1, (2, 2), np.float16), spaces.Discrete(3)]),
    ],
    ids=lambda space: type(space).__name__,
)
def test_rows_are_packed_as_the_environment_packs_its_observations(
    space: spaces.Space[Any],
) -> None:
    batch = batch_of(space, 7)
    reader = ObservationReader("game", space, ONE_CHOICE)
    rows = np.zeros((7, reader.layout.nbytes), np.uint8)
    reader.layout.write(batch, rows)
    packed, faults = reader.read(rows)

    packer = Packer("game", space)
    expected = np.zeros((7, *packer.space.shape), packer.space.dtype)
    packer.write(batch, expected)
    assert not faults
    if expected.dtype == np.float64:  # slots have float32
        expected = expected.astype(np.float32)
    assert_equal(space, packed, expected)


def rows_of_parts(count: int) -> tuple[ObservationReader, Any, Any]:
    """A reader, rows of it, and the records in them."""
    reader = ObservationReader("game", PARTS, ONE_CHOICE)
    rows = np.zeros((count, reader.layout.nbytes), np.uint8)
    reader.layout.write(batch_of(PARTS, count), rows)
    return reader, rows, rows.view(reader.layout.dtype)[:, 0]


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("inner.speed", np.nan, "nan at [0] of its observation inner.speed"),
        ("inner.speed", -np.inf, "-inf at [0] of its observation inner.speed"),
        ("place", 6, "place of the observation has 6, which is not in Discrete(4, start=2)"),
        ("place", 2**63 - 1, "place of the observation has 9223372036854775807"),
        ("ways", -1, "ways of the observation has -1"),
        ("lamps", 2, "lamps of the observation has 2"),
        ("action_mask", 0, "no action allowed by its action_mask"),
    ],
)
def test_a_row_at_fault_is_named_and_leaves_the_others_alone(
    column: str, value: Any, reason: str
) -> None:
    reader, rows, records = rows_of_parts(5)
    sound, _ = reader.read(rows.copy())
    records[column][3] = value
    packed, faults = reader.read(rows)
    assert [*faults] == [3]
    assert reason in faults[3]
    assert_equal(PARTS, np.delete(packed, 3, 0), np.delete(sound, 3, 0))


def test_a_mask_may_allow_nothing_where_no_seat_acts() -> None:
    reader, rows, records = rows_of_parts(3)
    records["action_mask"] = 0
    records["inner.speed"][2] = np.nan
    _, faults = reader.read(rows, acts=np.array([False, True, False]))
    assert [*faults] == [1, 2]
    assert "no action allowed" in faults[1]
    assert "nan" in faults[2]


def test_bytes_that_are_no_flag_are_read_as_true() -> None:
    reader, rows, records = rows_of_parts(2)
    records["flags"] = 1
    expected, _ = reader.read(rows.copy())
    records["flags"] = 200
    packed, _ = reader.read(rows)
    assert_equal(PARTS, packed, expected)


def test_a_number_beyond_those_of_a_network_is_a_fault() -> None:
    space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    reader = ObservationReader("game", space, spaces.Discrete(2))
    rows = np.zeros((2, reader.layout.nbytes), np.uint8)
    reader.layout.write(np.array([[0.5, 1.0], [0.5, 1e300]]), rows)
    packed, faults = reader.read(rows)
    assert packed.dtype == np.float32
    assert faults == {1: "the observation has inf at [1] of its observation"}
