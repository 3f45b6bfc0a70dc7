"""Damaged or forged snapshots, and which files replacing a snapshot may remove."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.replay.buffer import Replay
from penstock.replay.errors import DamagedSnapshotError, ReplayError
from penstock.replay.samplers import Prioritized, Uniform
from penstock.replay.sequences import Sequences
from penstock.replay.snapshot import MANIFEST, MARKER, FolderReader, FolderWriter, discard
from snapshot_rows import assert_equal, files, made

FLIPS = 150


def test_flipped_bit_is_detected_or_harmless(tmp_path: Path) -> None:
    replay, _ = made(20, capacity=20, sampler=Prioritized(fast=False))
    replay.save(tmp_path)
    expected = replay.sample(8)
    data = [(p, p.read_bytes()) for p in files(tmp_path) if p.stat().st_size]
    rng = random.Random(0)
    harmless = 0
    for _ in range(FLIPS):
        path, whole = rng.choice(data)
        bit = rng.randrange(8 * len(whole))
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            loaded = Replay.load(tmp_path)
        except ReplayError:
            pass
        else:
            harmless += path.name != MARKER
            assert_equal(loaded.sample(8), expected)
            loaded.close()
        path.write_bytes(whole)
    assert harmless < FLIPS // 10
    replay.close()


def set_at(name: str, at: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        *path, last = name.split(".")
        for key in path:
            state = state[key]
        if at is None:
            state[last] = value
        else:
            state[last][at] = value

    return change


TAMPERED = [
    set_at("table.prev", 3, 99), set_at("table.prev", 3, -2), set_at("table.prev", 0, 0),
    set_at("table.next", 3, 99), set_at("table.next", 3, 1 << 30), set_at("table.next", 3, 3),
    set_at("table.length", 2, 9), set_at("table.length", 2, -1), set_at("table.length", 2, 1),
    set_at("table.generation", 1, -1), set_at("table.generation", 1, 1 << 40),
    set_at("table.valid", slice(None), 255), set_at("table.valid", 0, 0),
    set_at("table.stored", None, 3), set_at("table.stored", None, -1),
    set_at("table.inserted", None, 1 << 63), set_at("table.stored", None, 0.5),
    set_at("table.order", 0, 99), set_at("table.order", 0, -1), set_at("table.order", None, [0, 0]),
    set_at("table.free", None, [0, 1]), set_at("table.free", None, [99]),
    set_at("table.slots", None, 1 << 62), set_at("table.evicted", None, {"ttl": -1}),
    set_at("others.state.leaves", 0, np.nan), set_at("others.state.leaves", 0, -1.0),
    set_at("others.state.leaves", 0, np.inf), set_at("others.state.leaves", slice(None), 1.0),
    set_at("others.state.highest", None, float("inf")), set_at("others.state.rng", None, {}),
    set_at("others.options.capacity", None, 1 << 62),
    set_at("others.options.discount", None, float("nan")),
    set_at("table.spec.unroll", None, 1 << 40), set_at("others.options.n_step", None, "3"),
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"sampler": Prioritized(fast=False)}, {"sequences": Sequences(4)}, {"max_times_sampled": 5}],
)
def test_resealed_unchanged_snapshot_is_loaded(tmp_path: Path, options: dict[str, Any]) -> None:
    """So the tests below are refused because of their changes."""
    replay, _ = made(150, capacity=60, **options)
    replay.save(tmp_path)
    seal(tmp_path, lambda state: None)
    assert_equal(Replay.load(tmp_path).sample(8), replay.sample(8))


@pytest.mark.parametrize("change", TAMPERED)
def test_inconsistent_snapshot_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """Its checksums are right: it was made so."""
    replay, _ = made(150, capacity=60, sampler=Prioritized(fast=False))
    replay.save(tmp_path)
    replay.close()
    seal(tmp_path, change)
    with pytest.raises(ReplayError):
        Replay.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        set_at("others.state.sampler.end", None, 1 << 40),
        set_at("others.state.sampler.end", None, -1),
        set_at("others.state.sampler.ahead", 0, -1),
        set_at("others.state.sampler.ahead", 0, 1 << 40),
        set_at("others.state.rows", 0, -1), set_at("others.state.rows", 0, 1 << 40),
        set_at("others.state.before", 0, 99), set_at("others.state.after", 0, -2),
        set_at("others.state.searched", 0, 99), set_at("others.state.position", 0, -5),
        set_at("others.state.before", slice(None), 3),
    ],
)  # fmt: skip
def test_invalid_sequence_state_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    replay, _ = made(150, capacity=60, sampler=Uniform(), sequences=Sequences(4, pad=True))
    for _ in range(3):  # so that rows are drawn ahead
        replay.sample(2)
    replay.save(tmp_path)
    replay.close()
    seal(tmp_path, change)
    with pytest.raises(ReplayError):
        Replay.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        set_at("others.state.used", slice(None), 5), set_at("others.state.used", 0, -1),
        set_at("others.state.used", None, np.zeros(1, np.int32)),
    ],
)  # fmt: skip
def test_invalid_draw_counts_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    replay, _ = made(20, capacity=60, max_times_sampled=5)
    replay.save(tmp_path)
    replay.close()
    seal(tmp_path, change)
    with pytest.raises(ReplayError):
        Replay.load(tmp_path)


def seal(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a snapshot anew with another state, as whoever made it up would."""
    reader = FolderReader(folder)
    about = reader.about
    blocks = {n: (reader._data_folder / f"{n}.bin").read_bytes() for n in reader._files}
    change(about)
    writer = FolderWriter(folder)
    for name, data in blocks.items():
        if not name.startswith("array-"):
            writer.append(name, np.frombuffer(data, np.uint8))
    writer.finish(about)


def test_a_manifest_that_names_a_file_twice_is_refused(tmp_path: Path) -> None:
    """As a short one could ask for any amount of memory so."""
    writer = FolderWriter(tmp_path)
    writer.append("data", np.zeros(8, np.uint8))
    array = {"$array": "data", "dtype": "|u1", "shape": [8]}
    writer.finish({"table": [array] * 2})
    with pytest.raises(DamagedSnapshotError, match="data is named twice"):
        FolderReader(tmp_path)


@pytest.mark.parametrize("name", ["..", "../other", "/etc", ".", "", "replay-1/..", "other"])
def test_manifest_that_names_another_folder_is_refused(tmp_path: Path, name: str) -> None:
    replay, _ = made(20, capacity=20)
    replay.save(tmp_path)
    replay.close()
    writer = FolderWriter(tmp_path)
    about = FolderReader(tmp_path).about
    writer._data_folder = _Named(writer._data_folder, name)  # type: ignore[assignment]
    writer.finish(about)
    with pytest.raises(DamagedSnapshotError, match="is none of a snapshot"):
        FolderReader(tmp_path)


class _Named:
    """A path that says another name."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self.name = path, name

    def __truediv__(self, other: str) -> Path:
        return self._path / other

    def __fspath__(self) -> str:
        return str(self._path)


def test_links_are_not_followed(tmp_path: Path) -> None:
    replay, _ = made(20, capacity=20)
    folder, aside = tmp_path / "kept", tmp_path / "aside"
    replay.save(folder)
    (inside,) = folder.glob("replay-*/")
    inside.rename(aside)
    inside.symlink_to(aside)
    with pytest.raises(DamagedSnapshotError):
        Replay.load(folder)
    inside.unlink()
    aside.rename(inside)
    victim = tmp_path / "victim"
    victim.write_bytes(next(inside.glob("*.bin")).read_bytes())
    (folder / f".{MANIFEST}.tmp").symlink_to(victim)
    (folder / "replay-77").symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.bin").write_text("mine")
    before = victim.read_bytes()
    replay.save(folder)
    assert victim.read_bytes() == before
    assert (tmp_path / "other" / "mine.bin").read_text() == "mine"
    assert (folder / "replay-77").is_symlink()
    replay.close()


def test_discard_removes_only_files_of_a_snapshot(tmp_path: Path) -> None:
    replay, _ = made(20, capacity=20)
    for name in ("replay-3", "replay-0", "replay-\u00b2", "replay-1x", f"replay-{'9' * 200}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.bin").write_text("mine")
    (tmp_path / "replay-8").mkdir()  # looks like one: but it says something else
    (tmp_path / "replay-8" / MARKER).write_text("mine")
    (tmp_path / "replay-8" / "data.bin").write_text("mine")
    replay.save(tmp_path)
    (inside,) = (p for p in tmp_path.glob("replay-*") if (p / "records.bin").is_file())
    (inside / "notes.txt").write_text("mine")
    replay.save(tmp_path)
    assert [p.name for p in inside.iterdir() if p.name != MARKER] == ["notes.txt"]
    assert len(list(tmp_path.glob("replay-*/data.bin"))) == 6
    discard(tmp_path)
    assert not (tmp_path / MANIFEST).exists()
    assert len(list(tmp_path.glob("replay-*/data.bin"))) == 6
    assert (inside / "notes.txt").exists()
    replay.close()


def test_discard_removes_the_snapshot_completely(tmp_path: Path) -> None:
    replay, _ = made(20, capacity=20)
    replay.save(tmp_path / "kept")
    discard(tmp_path / "kept")
    discard(tmp_path / "kept")
    assert list(tmp_path.iterdir()) == []
    replay.close()


def test_snapshot_files_are_private(tmp_path: Path) -> None:
    replay, _ = made(20, capacity=20)
    replay.save(tmp_path)
    modes = {p.stat().st_mode & 0o777 for p in files(tmp_path)}
    assert modes == {0o600}
    (inside,) = tmp_path.glob("replay-*/")
    assert inside.stat().st_mode & 0o777 == 0o700
    replay.close()
