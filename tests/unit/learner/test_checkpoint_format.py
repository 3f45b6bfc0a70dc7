"""Checkpoints are restored exactly, written atomically, and damage is refused in one sentence."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from full_disk import full_disk
from penstock.configs.errors import UserError
from penstock.core.params import ParamLayout
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import FILE, Checkpoint, DamagedCheckpointError
from penstock.transport.checksum import crc32

LAYOUT = ParamLayout((("hidden.weight", (2, 3)), ("hidden.bias", (3,)), ("mean", ())))
GENERATOR = np.random.default_rng(0)


def make(value: float = 1.0) -> Checkpoint:
    arrays = {
        "optimizer.exp_avg": np.arange(10, dtype=np.float32) * value,
        "optimizer.steps": np.array(7.0, np.float32),
        "rng.torch": np.arange(256, dtype=np.uint8),
        "every.other": np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
    }
    meta = {
        "counters": {"env_steps": 10**12, "solved_at_s": None},
        "rng": GENERATOR.bit_generator.state,  # integers of 128 bits
        "spec": {"unroll": 3},
    }
    return Checkpoint(LAYOUT, np.arange(10, dtype=np.float32) * value, arrays, meta)


def assert_equal(a: Checkpoint, b: Checkpoint) -> None:
    assert a.layout == b.layout
    assert a.meta == b.meta
    assert a.weights.tobytes() == b.weights.tobytes()
    assert a.arrays.keys() == b.arrays.keys()
    for name, array in a.arrays.items():
        assert (array.dtype, array.shape) == (b.arrays[name].dtype, b.arrays[name].shape)
        np.testing.assert_array_equal(array, b.arrays[name])


def test_saved_checkpoint_is_loaded_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "last"
    assert not checkpoint_format.exists(folder)
    checkpoint_format.save(folder, make())
    assert checkpoint_format.exists(folder)
    assert_equal(checkpoint_format.load(folder), make())
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_policy_id_is_stored_only_if_not_0(tmp_path: Path) -> None:
    checkpoint_format.save(tmp_path, make())
    with safe_open(tmp_path / FILE, "numpy") as file:  # as versions before wrote it
        assert "policy_id" not in json.loads(file.metadata()["penstock"])
    assert checkpoint_format.load(tmp_path).policy_id == 0
    checkpoint_format.save(tmp_path, replace(make(), policy_id=3))
    assert checkpoint_format.load(tmp_path).policy_id == 3


@pytest.mark.parametrize("policy_id", [-1, 2**31, True, 1.0, "1", None])
def test_invalid_policy_id_is_damage(tmp_path: Path, policy_id: Any) -> None:
    checkpoint_format.save(tmp_path, replace(make(), policy_id=policy_id))
    with pytest.raises(DamagedCheckpointError, match="its policy_id is"):
        checkpoint_format.load(tmp_path)


def test_newer_checkpoint_replaces_the_older_and_remains_of_a_crash(tmp_path: Path) -> None:
    checkpoint_format.save(tmp_path, make(1.0))
    (tmp_path / f".{FILE}.tmp").write_bytes(b"half a checkpoint")
    checkpoint_format.save(tmp_path, make(2.0))
    assert_equal(checkpoint_format.load(tmp_path), make(2.0))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_nonfinite_weights_are_loaded_unchanged(tmp_path: Path) -> None:
    odd = make()
    odd.weights[:3] = np.nan, np.inf, -0.0
    checkpoint_format.save(tmp_path, odd)
    assert_equal(checkpoint_format.load(tmp_path), odd)


def assert_refused_and_previous_whole(folder: Path, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        checkpoint_format.save(folder, make(2.0))
    assert "and any before it is whole; free some space" in str(refused.value)
    assert_equal(checkpoint_format.load(folder), make(1.0))
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_interrupted_write_leaves_the_previous_checkpoint_intact(tmp_path: Path) -> None:
    checkpoint_format.save(tmp_path, make(1.0))
    with full_disk(100):
        assert_refused_and_previous_whole(tmp_path, "File too large")


def test_full_disk_at_sync_leaves_the_previous_checkpoint_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_format.save(tmp_path, make(1.0))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert_refused_and_previous_whole(tmp_path, "No space left on device")


def test_file_is_synced_before_its_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        events.append(("fsync", name, os.fstat(fd).st_size > 700))
        fsync(fd)

    def noted_replace(self: Path, target: Path) -> Path:
        events.append(("replace", target.name, True))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    checkpoint_format.save(tmp_path, make())
    assert events[:2] == [("fsync", f".{FILE}.tmp", True), ("replace", FILE, True)]
    assert events[2][:2] == ("fsync", tmp_path.name)


def test_missing_checkpoint_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} holds no {FILE}; give the folder"):
        checkpoint_format.load(tmp_path)


def test_file_larger_than_memory_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a sparse one, by which the kernel or the library would end the process."""
    checkpoint_format.save(tmp_path, make())
    nbytes = (tmp_path / checkpoint_format.FILE).stat().st_size
    monkeypatch.setattr(checkpoint_format, "available_nbytes", lambda: nbytes - 1)
    with pytest.raises(UserError, match="bytes of memory are free; end other programs") as raised:
        checkpoint_format.load(tmp_path)
    assert not isinstance(raised.value, DamagedCheckpointError), "a run would set it aside"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    checkpoint_format.save(tmp_path, make())
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match="is damaged or no checkpoint of penstock"):
        checkpoint_format.load(tmp_path)


@pytest.mark.parametrize("data", [b"garbage", b"\xff" * 4096, b"\0" * 4096, b"PK\x03\x04" * 99])
def test_garbage_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(UserError, match="is damaged or no checkpoint of penstock"):
        checkpoint_format.load(tmp_path)


ABOUT: dict[str, Any] = {"format": 1, "layout": LAYOUT.to_list(), "meta": {}}


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"other": "{}"},
        {"penstock": "{not json"},
        {"penstock": "[]"},
        {"penstock": json.dumps(ABOUT | {"layout": 5})},
        {"penstock": json.dumps(ABOUT | {"layout": [["x", [10**12]]]})},
        {"penstock": json.dumps(ABOUT | {"layout": [["x", [-1]]]})},
        {"penstock": json.dumps(ABOUT)},  # none of its tensors is there
    ],
)
def test_foreign_safetensors_file_is_refused(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    save_file({"model/x": np.zeros(3, np.float32)}, tmp_path / FILE, metadata)
    with pytest.raises(UserError, match="is damaged or no checkpoint of penstock"):
        checkpoint_format.load(tmp_path)


def test_other_format_version_is_named(tmp_path: Path) -> None:
    metadata = {"penstock": json.dumps(ABOUT | {"format": 3})}
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / FILE, metadata)
    with pytest.raises(UserError, match="has format 3, this version reads 1 and 2"):
        checkpoint_format.load(tmp_path)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            [("hidden.weight", (2, 4)), ("hidden.bias", (4,)), ("mean", ())],
            r"has hidden.weight \[2, 3\] where this one has hidden.weight \[2, 4\]",
        ),
        (
            [("hidden.weight", (2, 3)), ("convs.0", (3,)), ("mean", ())],
            r"has hidden.bias \[3\] where this one has convs.0 \[3\]",
        ),
        (
            [("hidden.weight", (2, 3)), ("hidden.bias", (3,))],
            r"has mean \[\] where .* nothing",
        ),
        ([*LAYOUT.entries, ("more", (1,))], r"has nothing more where this one has more \[1\]"),
    ],
)
def test_checkpoint_of_another_network_names_the_first_difference(
    tmp_path: Path, entries: list[tuple[str, tuple[int, ...]]], words: str
) -> None:
    checkpoint_format.save(tmp_path, make())
    with pytest.raises(UserError, match=words):
        checkpoint_format.read_meta(tmp_path, ParamLayout(tuple(entries)))


def test_empty_entries_of_an_older_layout_are_ignored(tmp_path: Path) -> None:
    """By them 0.1 described choices and parts of observations."""
    entries = (*LAYOUT.entries[:2], ("choices.0", (0, 3)), *LAYOUT.entries[2:])
    checkpoint_format.save(tmp_path, replace(make(), layout=ParamLayout(entries)))
    checkpoint_format.read_meta(tmp_path, LAYOUT)
    found = checkpoint_format.load(tmp_path)
    np.testing.assert_array_equal(found.weights, make().weights)
    with pytest.raises(UserError, match=r"has mean \[\] where .* nothing"):
        checkpoint_format.read_meta(tmp_path, ParamLayout(LAYOUT.entries[:2]))


def refused_or_harmless(folder: Path, data: bytes) -> bool:
    """Whether these bytes in the file's place are refused; what is read must be what was saved."""
    (folder / FILE).write_bytes(data)
    try:
        found = checkpoint_format.load(folder)
    except DamagedCheckpointError:
        return True
    assert_equal(found, make())
    return False


def test_any_flipped_bit_is_refused(tmp_path: Path) -> None:
    checkpoint_format.save(tmp_path, make())
    data = (tmp_path / FILE).read_bytes()
    flips = np.random.default_rng(12).choice(8 * len(data), 2048, replace=False).tolist()
    refused = 0
    for bit in flips:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        refused += refused_or_harmless(tmp_path, bytes(flipped))
    assert refused > 0.99 * len(flips)


def test_checkpoint_truncated_at_any_byte_is_refused(tmp_path: Path) -> None:
    checkpoint_format.save(tmp_path, make())
    data = (tmp_path / FILE).read_bytes()
    for part in range(64):
        assert refused_or_harmless(tmp_path, data[: len(data) * part // 64])
    assert refused_or_harmless(tmp_path, data[:-1])
    assert refused_or_harmless(tmp_path, data + b"\0")


def test_flipped_bit_in_the_header_is_detected_without_reading_tensors(tmp_path: Path) -> None:
    checkpoint_format.save(tmp_path, make())
    data = (tmp_path / FILE).read_bytes()
    assert data.count(b"env_steps") == 1
    (tmp_path / FILE).write_bytes(data.replace(b"env_steps", b"env_stepr"))
    with pytest.raises(DamagedCheckpointError, match="the checksum of its metadata is wrong"):
        checkpoint_format.read_meta(tmp_path)


def test_a_checkpoint_of_an_older_version_has_no_checksums_and_is_read(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        "model/x": np.arange(3, dtype=np.float32),
        "state/y": np.zeros(2, np.uint8),
    }
    about = {"format": 1, "layout": [["x", [3]]], "meta": {"a": 1}}
    save_file(tensors, tmp_path / FILE, {"penstock": json.dumps(about)})
    found = checkpoint_format.load(tmp_path)
    assert not found.verified
    assert (found.weights.tolist(), found.meta) == ([0, 1, 2], {"a": 1})
    checkpoint_format.save(tmp_path, found)
    assert checkpoint_format.load(tmp_path).verified


LIMITS = [0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1]


@pytest.mark.parametrize("length", LIMITS)
def test_oversized_header_length_is_refused(tmp_path: Path, length: int) -> None:
    checkpoint_format.save(tmp_path, make())
    data = (tmp_path / FILE).read_bytes()
    assert refused_or_harmless(tmp_path, struct.pack("<Q", length) + data[8:])


def written(folder: Path, about: Any, tensors: dict[str, Any]) -> None:
    """A file whose head says this, with sound checksums of it."""
    text = about if isinstance(about, str) else json.dumps(about)
    offset = 0
    head: dict[str, Any] = {"__metadata__": {"penstock": text, "crc32": str(crc32(text.encode()))}}
    for name, (dtype, shape, nbytes) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    coded = json.dumps(head).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(coded)) + coded + bytes(min(offset, 4096)))


@pytest.mark.parametrize(
    "dim", [-1, 2**31, 2**62, 2**63, 10**30, 1e300, 1e400, None, "a", [], {}, 0.5]
)
@pytest.mark.parametrize("place", ["layout", "tensor", "both"])
def test_odd_shapes_are_refused(tmp_path: Path, dim: Any, place: str) -> None:
    about = {"format": 2, "layout": [["x", [3]]], "meta": {}, "checksums": {"model/x": 0}}
    if place != "tensor":
        about["layout"] = [["x", [dim, 4]]]
    shape = [3] if place == "layout" else [dim, 4]
    for nbytes in (12, 0):
        written(tmp_path, about, {"model/x": ("F32", shape, nbytes)})
        with pytest.raises(DamagedCheckpointError):
            checkpoint_format.load(tmp_path)


@pytest.mark.parametrize(
    "about",
    [
        "[" * 100_000,
        '{"format": 2, "layout": ' + "[" * 50_000 + "]" * 50_000 + "}",
        '{"format": ' + "9" * 5000 + "}",
        '{"format": 1e999}',
        '{"format": 2, "layout": [], "checksums": {}, "meta": {"x": '
        + "[" * 50_000
        + "]" * 50_000
        + "}}",
        {"format": [], "layout": [], "meta": {}},
        {"format": 2, "layout": [], "meta": [], "checksums": {}},
        {"format": 2, "layout": [], "meta": {}, "checksums": []},
        {"format": 2, "layout": [[]], "meta": {}, "checksums": {}},
        {"format": 2, "layout": {"x": 1}, "meta": {}, "checksums": {}},
        {"format": 2, "layout": [], "meta": {}},
    ],
)
def test_odd_metadata_is_refused(tmp_path: Path, about: Any) -> None:
    written(tmp_path, about, {})
    with pytest.raises(UserError, match=r"is damaged|has format"):
        checkpoint_format.load(tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_arbitrary_file_content_is_refused_as_a_user_error(data: st.DataObject) -> None:
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=8,
    )
    about = {
        name: data.draw(st.just(sound) | json_values, name)
        for name, sound in {
            "format": 2,
            "layout": [["x", [3]]],
            "meta": {},
            "checksums": {"model/x": 0},
        }.items()
    }
    assume(about["format"] != 1)  # without checksums, and still readable
    dtype = data.draw(st.sampled_from(["F32", "F64", "BF16", "F8_E4M3", "I8", "BOOL", "X"]))
    with tempfile.TemporaryDirectory() as folder:
        written(Path(folder), about, {"model/x": (dtype, [3], 12)})
        with pytest.raises(UserError):
            checkpoint_format.load(Path(folder))


def test_an_evaluation_in_numpy_needs_no_torch(tmp_path: Path) -> None:
    checkpoint_format.save(tmp_path, make())
    code = f"""
import sys
from pathlib import Path
from penstock.learner.checkpoints.checkpoint_format import load
import penstock.models.acting.numpy_mlp
print(load(Path({str(tmp_path)!r})).weights.sum(), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "45.0 False\n"
