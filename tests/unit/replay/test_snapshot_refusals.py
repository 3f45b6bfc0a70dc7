"""Truncated, changed or foreign snapshots are refused in one sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from full_disk import full_disk
from penstock.replay.buffer import Replay
from penstock.replay.errors import DamagedSnapshotError, ReplayError
from penstock.replay.samplers import Prioritized, Uniform
from penstock.replay.sequences import Sequences
from penstock.replay.snapshot import MANIFEST, MARKER
from penstock.replay.sum_tree import Rows
from snapshot_rows import assert_equal, files, made


def test_truncated_or_changed_snapshot_file_is_refused(tmp_path: Path) -> None:
    replay, _ = made(20, capacity=20, sampler=Prioritized(fast=False))
    whole = tmp_path / "whole"
    replay.save(whole)
    for path in files(whole):
        if path.name == MARKER:  # only says what may be removed
            continue
        data = path.read_bytes()
        places = {0, 1, len(data) // 2, len(data) - 1} if data else set()
        for place in places:
            damaged = tmp_path / "damaged"
            for changed in (
                data[:place],
                data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :],
            ):
                shutil.copytree(whole, damaged)
                (damaged / path.relative_to(whole)).write_bytes(changed)
                with pytest.raises(ReplayError, match=r"is damaged or no snapshot|has format"):
                    Replay.load(damaged)
                shutil.rmtree(damaged)


def test_manifest_truncated_at_any_byte_is_refused(tmp_path: Path) -> None:
    made(5, capacity=20)[0].save(tmp_path)
    data = (tmp_path / MANIFEST).read_bytes()
    for length in range(len(data)):
        (tmp_path / MANIFEST).write_bytes(data[:length])
        with pytest.raises(ReplayError, match="is damaged or no snapshot of a replay"):
            Replay.load(tmp_path)


def test_a_missing_file_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=f"holds no {MANIFEST}; give the folder that Replay.save"):
        Replay.load(tmp_path)
    made()[0].save(tmp_path)
    next(p for p in files(tmp_path) if p.suffix == ".bin").unlink()
    with pytest.raises(ReplayError, match="is damaged or no snapshot of a replay"):
        Replay.load(tmp_path)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "3", '{"format": 1}', "\0", '{"format": 1, "body": 2}']
)
def test_foreign_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ReplayError, match="is damaged or no snapshot of a replay"):
        Replay.load(tmp_path)


def test_other_format_version_is_named(tmp_path: Path) -> None:
    made()[0].save(tmp_path)
    whole = json.loads((tmp_path / MANIFEST).read_bytes())
    (tmp_path / MANIFEST).write_text(json.dumps(whole | {"format": 7}))
    with pytest.raises(ReplayError, match="has format 7, this version reads 1; use the version"):
        Replay.load(tmp_path)


def test_snapshot_of_another_spec_or_sampler_names_the_difference(tmp_path: Path) -> None:
    made()[0].save(tmp_path)
    other, _ = made(0, size=4)
    with pytest.raises(ReplayError, match=r"another replay: column .*obs: snapshot .*\[3\]"):
        other.restore(tmp_path)
    with pytest.raises(ReplayError, match="state of another sampler"):
        Replay.load(tmp_path, sampler=Prioritized())


def test_other_sequences_or_max_times_sampled_are_named(tmp_path: Path) -> None:
    """The sampler's state would name sequences that are not complete, or rows never removed."""
    saved: list[dict[str, Any]] = [
        {"sequences": Sequences(3)}, {"max_times_sampled": 9}, {"n_step": 2},
    ]  # fmt: skip
    others: list[dict[str, Any]] = [
        {"sequences": Sequences(5)}, {"max_times_sampled": 2}, {"sequences": Sequences(3)},
    ]  # fmt: skip
    for options, other in zip(saved, others, strict=True):
        made(**options)[0].save(tmp_path)
        with pytest.raises(ReplayError, match=f"was saved with {next(iter(other))}=") as error:
            made(0, **other)[0].restore(tmp_path)
        assert not isinstance(error.value, DamagedSnapshotError)


def test_custom_schedule_must_be_passed_when_loading(tmp_path: Path) -> None:
    def beta(drawn: int) -> float:
        return min(1.0, 0.5 + drawn * 1e-6)

    replay, _ = made(sampler=Prioritized(beta=beta))
    replay.save(tmp_path)
    with pytest.raises(ReplayError, match=r"of your own; .* Replay.load\(folder, sampler=...\)"):
        Replay.load(tmp_path)
    loaded = Replay.load(tmp_path, sampler=Prioritized(beta=beta))
    assert_equal(replay.sample(20), loaded.sample(20))


class CountingSampler(Uniform):
    """A sampler of a user, whose length is the number of rows that it has drawn."""

    drawn = 0

    def __len__(self) -> int:
        return self.drawn

    def sample(self, count: int) -> tuple[Rows, None]:
        self.drawn += count
        return super().sample(count)


def test_custom_sampler_of_length_zero_is_used_when_loading(tmp_path: Path) -> None:
    replay, _ = made(sampler=CountingSampler())
    replay.save(tmp_path)
    loaded = Replay.load(tmp_path, sampler=CountingSampler())
    assert_equal(replay.sample(20), loaded.sample(20))


def test_full_disk_leaves_the_previous_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, add = made(size=200)
    replay.save(tmp_path)
    add()
    before = [(p, p.read_bytes()) for p in files(tmp_path)]

    def refused(words: str) -> None:
        with pytest.raises(ReplayError, match=words) as error:
            replay.save(tmp_path)
        assert "and any before it is whole; free some space" in str(error.value)
        assert [(p, p.read_bytes()) for p in files(tmp_path)] == before
        assert Replay.load(tmp_path).stats()["inserted"] == 150

    for nbytes in (0, 100, 20_000):
        with full_disk(nbytes), pytest.raises(ReplayError, match="File too large"):
            replay.save(tmp_path)
        assert [(p, p.read_bytes()) for p in files(tmp_path)] == before

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused("No space left on device")
    assert replay.table.listeners == ()


def test_loaded_replay_without_a_sampler_is_uniform(tmp_path: Path) -> None:
    made()[0].save(tmp_path)
    assert isinstance(Replay.load(tmp_path).sampler, Uniform)
