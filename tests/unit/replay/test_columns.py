"""Names, nesting and checks of the columns of a step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock.replay.columns import Leaf, flatten, leaves_of, nest_of, unflatten, validated
from penstock.replay.errors import ReplayError
from penstock.replay.layout import make_layout

NESTED = spaces.Dict(
    camera=spaces.Box(0, 255, (8, 8), np.uint8),
    arm=spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)]),
)
F32 = Leaf("obs", np.dtype(np.float32), (3,))


def test_spaces_become_names_dtypes_and_shapes() -> None:
    found = leaves_of(
        {"obs": NESTED, "action": spaces.MultiDiscrete([2, 3]), "on": spaces.MultiBinary(4)}
    )
    # gymnasium sorts the keys of a Dict made from keywords
    assert {(leaf.name, str(leaf.dtype), leaf.shape) for leaf in found} == {
        ("obs.camera", "uint8", (8, 8)),
        ("obs.arm.0", "float32", (2,)),
        ("obs.arm.1", "int64", ()),
        ("action", "int64", (2,)),
        ("on", "int8", (4,)),
    }


def test_nested_structure_is_restored_from_column_names() -> None:
    nest = nest_of("obs", ["obs.camera", "obs.arm.0", "obs.arm.1"])
    assert nest == {"camera": "obs.camera", "arm": ("obs.arm.0", "obs.arm.1")}
    assert nest_of("action", ["action"]) == "action"
    flat: dict[str, Any] = {}
    flatten(nest, {"arm": (1, 2), "camera": 3}, "obs", flat)
    assert flat == {"obs.camera": 3, "obs.arm.0": 1, "obs.arm.1": 2}
    assert unflatten(nest, flat) == {"camera": 3, "arm": (1, 2)}
    assert unflatten(nest, {"obs.camera": 3}) == {"camera": 3}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"obs": (np.float32, (3,))}, ["action"]),
        ({"obs": spaces.Text(5), "action": spaces.Discrete(2)}, ["column obs", "Text", "Box"]),
        (
            {"obs": (np.float32, (3,)), "action": "int"},
            ["column action", "'int'", "(dtype, shape)"],
        ),
        ({"obs": (np.float32, (0,)), "action": (int, ())}, ["column obs", "[0]"]),
        ({"obs": (object, (3,)), "action": (int, ())}, ["column obs", "object"]),
        ({"obs": ("M8[s]", (3,)), "action": (int, ())}, ["column obs", "datetime64", "numbers"]),
        ({"obs": (int, ()), "action": (int, ()), "burn_in": (int, ())}, ["column burn_in"]),
        ({"obs": {"a.b": (int, ())}, "action": (int, ())}, ["column obs", "'a.b'", "joined"]),
        ({"obs": (int, ()), "action": (int, ()), "reward": (int, ())}, ["column reward", "itself"]),
        ({"obs": (int, ()), "action": (int, ()), "keys": (int, ())}, ["column keys", "itself"]),
    ],
)
def test_columns_that_cannot_be_are_refused_by_name(columns: Any, words: list[str]) -> None:
    with pytest.raises(ReplayError) as refused:
        leaves_of(columns)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((2, 4), np.float32), ["obs", "shape [2, 4]", "expected [2, 3]"]),
        (np.zeros(3, np.float32), ["obs", "shape [3]", "expected [2, 3]"]),
        (np.zeros((2, 3), complex), ["obs", "dtype complex128", "expected float32"]),
        ([["a", "b", "c"]] * 2, ["obs", "dtype", "float32"]),
        ([[1.0, 2.0, 3.0], [1.0]], ["obs", "expected [2, 3]"]),
        (None, ["obs", "expected [2, 3]"]),
    ],
)
def test_unfitting_value_is_refused_with_column_and_expectation(
    value: Any, words: list[str]
) -> None:
    with pytest.raises(ReplayError) as refused:
        validated(F32, value, 2)
    assert all(word in str(refused.value) for word in words), refused.value


def test_values_that_convert_without_loss_of_kind_are_accepted() -> None:
    assert validated(F32, np.ones((2, 3)), 2).shape == (2, 3)  # float64 to float32
    assert validated(F32, np.ones((2, 3), int), 2).shape == (2, 3)
    assert validated(F32, [1, 2, 3], 1).shape == (1, 3)  # one environment without its axis
    flag, byte = Leaf("terminated", np.dtype(bool), ()), Leaf("action", np.dtype(np.uint8), ())
    assert validated(flag, True, 1).tolist() == [True]
    assert validated(byte, 7, 1).tolist() == [7]
    for leaf, value in ((flag, 1.0), (byte, -1), (byte, 300), (byte, 1.5)):
        with pytest.raises(ReplayError, match="dtype"):
            validated(leaf, value, 1)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"camera": 1}, ["obs", "keys ['camera']", "camera", "arm"]),
        (3, ["obs", "int", "mapping"]),
        ({"camera": 1, "arm": (1, 2, 3)}, ["obs.arm", "3 parts", "tuple of 2"]),
    ],
)
def test_wrong_nesting_is_refused_by_name(value: Any, words: list[str]) -> None:
    nest = nest_of("obs", ["obs.camera", "obs.arm.0", "obs.arm.1"])
    with pytest.raises(ReplayError) as refused:
        flatten(nest, value, "obs", {})
    assert all(word in str(refused.value) for word in words), refused.value


def test_small_observations_are_stored_with_their_successor_and_big_ones_as_frames() -> None:
    layout = make_layout({"obs": NESTED, "action": spaces.Discrete(2)}, 1000, 1, 1, None)
    columns = {c.name: c for c in layout.spec.columns}
    assert columns["obs.arm.0"].rows == columns["next_obs.arm.0"].rows == "unroll"
    big = make_layout({"obs": (np.uint8, (300,)), "action": (int, ())}, 1000, 1, 1, None)
    columns = {c.name: c for c in big.spec.columns}
    assert (columns["obs"].rows, columns["obs@side"].rows) == ("frames", "side")
    assert "next_obs" not in columns


def test_atari_transition_takes_at_most_7600_bytes_for_any_number_of_environments() -> None:
    """7,056 bytes of a frame and what else a row has, whatever the number of environments."""
    atari = {"obs": (np.uint8, (4, 84, 84)), "action": (np.int64, ())}
    for envs in (1, 8, 64, 256):
        spec = make_layout(atari, 100_000, envs, 4, None).spec
        nbytes = spec.payload_nbytes / (spec.unroll * spec.envs)
        assert 7056 < nbytes <= 7600


def test_a_hundred_thousand_atari_transitions_take_7600_bytes_each() -> None:
    """With all that a buffer of them has: the slot that is being written, rows of frames that two
    slots have, side rows, and what is left of the last slot."""
    atari = {"obs": (np.uint8, (4, 84, 84)), "action": (np.int64, ())}
    for envs in (1, 8, 16, 64):
        spec = make_layout(atari, 100_000, envs, 4, None).spec
        slots = math.ceil((100_000 + 3 * envs) / (spec.unroll * envs)) + 1
        assert slots * spec.payload_nbytes / 100_000 <= 7600


@pytest.mark.parametrize("stack", [3, {"obs": 3}, {"camera": 4}])
def test_frame_stack_that_no_observation_has_is_refused(stack: Any) -> None:
    with pytest.raises(ReplayError, match=r"obs uint8\[4, 84, 84\]"):
        make_layout({"obs": (np.uint8, (4, 84, 84)), "action": (int, ())}, 100, 1, stack, None)
