"""Contract of `checkpoint.store` over a folder, and over S3 as moto simulates it on loopback."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.core.params import ParamLayout
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_store import (
    MANIFEST,
    CheckpointStore,
    CheckpointWriter,
    ReplacedError,
    Uploader,
    _Upload,
    take_newer,
)

LAYOUT = ParamLayout((("w", (4,)),))
FIRST = CheckpointWriter(0, 1)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A simulated S3, found by its environment variables as the real one is."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "simulated")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield "s3"
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a store that does not exist yet."""
    if request.param == "folder":
        return str(tmp_path / "shared" / "store")
    request.getfixturevalue("endpoint")
    bucket = f"bucket-{abs(hash(str(tmp_path)))}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/runs/pong"


def checkpoint(folder: Path, steps: int, generation: int = 0) -> Path:
    """A checkpoint whose weights are its steps; returns its file."""
    progress = {"learner_steps": steps, "generation": generation}
    weights = np.full(4, steps, np.float32)
    checkpoint_format.save(folder, Checkpoint(LAYOUT, weights, {}, {"progress": progress}))
    return folder / checkpoint_format.FILE


def put(
    url: str, folder: Path, steps: int, writer: CheckpointWriter = FIRST, keep: int = 3
) -> None:
    with checkpoint(folder, steps, writer.generation).open("rb") as file:
        CheckpointStore(url).put(file, writer, steps, keep)


def steps_of(folder: Path) -> int:
    return int(checkpoint_format.load(folder).weights[0])


def names(url: str) -> set[str]:
    fs, path = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return {name.rpartition("/")[2] for name in fs.ls(path, detail=False)}


def test_store_keeps_the_last_checkpoints_and_serves_the_newest(url: str, tmp_path: Path) -> None:
    for steps in (10, 20, 30, 40):
        put(url, tmp_path / "a", steps, keep=2)
    store = CheckpointStore(url)
    assert [entry.learner_steps for entry in store.entries()] == [30, 40]
    assert names(url) == {MANIFEST, "g0-step-30.safetensors", "g0-step-40.safetensors"}
    last = tmp_path / "b" / "checkpoints" / "last"
    assert "after 40 optimizer steps" in take_newer(store, last)
    assert steps_of(last) == 40
    assert take_newer(store, last) == ""  # the run has it


def test_empty_store_lists_no_checkpoints(url: str, tmp_path: Path) -> None:
    assert CheckpointStore(url).entries() == []
    assert take_newer(CheckpointStore(url), tmp_path / "last") == ""


def test_run_ahead_of_the_store_keeps_its_own_checkpoint(url: str, tmp_path: Path) -> None:
    put(url, tmp_path / "a", 40)
    last = tmp_path / "b" / "checkpoints" / "last"
    checkpoint(last, 41)
    assert take_newer(CheckpointStore(url), last) == ""
    checkpoint(last, 39)
    assert take_newer(CheckpointStore(url), last)
    assert steps_of(last) == 40
    checkpoint(last, 5, generation=1)  # a later life of the run, from an earlier checkpoint
    assert take_newer(CheckpointStore(url), last) == ""


@pytest.mark.parametrize("later", [CheckpointWriter(0, 2), CheckpointWriter(1, 0)])
def test_upload_by_a_replaced_learner_is_refused(
    url: str, tmp_path: Path, later: CheckpointWriter
) -> None:
    put(url, tmp_path / "a", 10)
    put(url, tmp_path / "a", 20, later)
    with pytest.raises(ReplacedError, match="others train on without it"):
        put(url, tmp_path / "a", 30)
    assert [entry.learner_steps for entry in CheckpointStore(url).entries()] == [10, 20]


def test_damaged_newest_checkpoint_falls_back_to_the_previous(url: str, tmp_path: Path) -> None:
    for steps in (10, 20):
        put(url, tmp_path / "a", steps)
    fs, path = fsspec.core.url_to_fs(url)
    data = bytearray(fs.cat_file(f"{path}/g0-step-20.safetensors"))
    data[-3] ^= 1
    fs.pipe_file(f"{path}/g0-step-20.safetensors", bytes(data))
    last = tmp_path / "b" / "checkpoints" / "last"
    assert "g0-step-10" in take_newer(CheckpointStore(url), last)
    assert steps_of(last) == 10


def test_missing_newest_checkpoint_falls_back_to_the_previous(url: str, tmp_path: Path) -> None:
    for steps in (10, 20):
        put(url, tmp_path / "a", steps)
    fs, path = fsspec.core.url_to_fs(url)
    fs.rm_file(f"{path}/g0-step-20.safetensors")
    last = tmp_path / "b" / "checkpoints" / "last"
    assert "g0-step-10" in take_newer(CheckpointStore(url), last)
    assert steps_of(last) == 10
    fs.rm_file(f"{path}/g0-step-10.safetensors")
    assert take_newer(CheckpointStore(url), last) == ""
    with pytest.raises(UserError, match="none of the 2 checkpoints"):
        take_newer(CheckpointStore(url), tmp_path / "c" / "checkpoints" / "last")


def test_files_not_in_the_manifest_are_ignored_and_not_deleted(url: str, tmp_path: Path) -> None:
    put(url, tmp_path / "a", 10, keep=1)
    fs, path = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{path}/g0-step-90.safetensors", b"a part of one")
    fs.pipe_file(f"{path}/notes.txt", b"mine")
    put(url, tmp_path / "a", 20, keep=1)
    assert [entry.learner_steps for entry in CheckpointStore(url).entries()] == [20]
    assert names(url) >= {"g0-step-90.safetensors", "notes.txt"}


ENTRY = {"name": "g0-step-1.safetensors", "generation": 0, "epoch": 0, "learner_steps": 1}


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        '{"checkpoints": 7}',
        json.dumps({"checkpoints": [ENTRY]}),
        json.dumps({"checkpoints": [{**ENTRY, "nbytes": 1, "name": "../../x"}]}),
        json.dumps({"checkpoints": [{**ENTRY, "nbytes": -1}]}),
        json.dumps({"checkpoints": [{**ENTRY, "nbytes": True}]}),
        "[" * 100_000,
    ],
)
def test_manifest_of_another_format_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UserError, match="is no list of checkpoints"):
        CheckpointStore(str(tmp_path)).entries()


@pytest.mark.parametrize(
    "url",
    [
        *("nope://bucket/x", "s4://", "ftp://127.0.0.1:1/x", "reference://refs.json", "data:,x"),
        *("reference::refs.json", "simplecache::s3://bucket/x", "file::/tmp/x", "FILE:///tmp/x"),
    ],
)
def test_a_url_that_is_no_store_is_refused_before_it_is_opened(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec.core, "url_to_fs", None)
    with pytest.raises(UserError, match=r"checkpoint\.store is .*, which is neither a folder nor"):
        CheckpointStore(url)


def test_a_store_whose_package_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"checkpoint\.store is .*, which cannot be opened"):
        CheckpointStore("gs://bucket/x")


@pytest.mark.usefixtures("endpoint")
def test_a_bucket_that_does_not_exist_is_named_and_not_made() -> None:
    with pytest.raises(UserError, match="there is no bucket 'no-such-bucket-here'"):
        CheckpointStore("s3://no-such-bucket-here/x").entries()


def test_newest_checkpoint_is_uploaded_as_it_was_when_offered(url: str, tmp_path: Path) -> None:
    events: list[tuple[Any, ...]] = []
    uploader = Uploader(CheckpointStore(url), 3, lambda *event: events.append(event))
    for steps in range(10, 60, 10):
        uploader.offer(checkpoint(tmp_path / "a", steps), FIRST, steps)
    assert uploader.close(20)
    assert events == []
    found = CheckpointStore(url).entries()
    assert found[-1].learner_steps == 50
    for entry in found:
        CheckpointStore(url).fetch(entry, tmp_path / "b")
        assert steps_of(tmp_path / "b") == entry.learner_steps


def test_upload_failure_is_reported_once_and_the_next_upload_is_tried(tmp_path: Path) -> None:
    place = tmp_path / "shared"
    place.write_text("a file where the folder should be")
    events: list[tuple[Any, ...]] = []
    uploader = Uploader(CheckpointStore(str(place / "store")), 3, lambda *e: events.append(e))
    file = checkpoint(tmp_path / "a", 10)
    store = uploader._store
    for _ in range(2):
        with file.open("rb") as opened:
            uploader._copy(_Upload(opened, FIRST, 10))
    assert len(events) == 1
    assert "was not copied to" in events[0][1]
    place.unlink()
    uploader.offer(file, FIRST, 10)
    assert uploader.close(20)
    assert [entry.learner_steps for entry in store.entries()] == [10]


def test_interrupted_upload_is_never_in_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(str(tmp_path / "store"))

    class Cut(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            return b""

    file = checkpoint(tmp_path / "a", 10)
    with Cut(os.open(file, os.O_RDONLY)) as opened, pytest.raises(OSError, match="instead of"):
        store.put(opened, FIRST, 10, 3)
    assert store.entries() == []


def test_files_of_a_folder_are_synced_before_they_get_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = checkpoint(tmp_path / "a", 10)
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(fd: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        fsync(fd)

    def noted_replace(source: str, target: str) -> None:
        events.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    with file.open("rb") as opened:
        CheckpointStore(str(tmp_path / "store")).put(opened, FIRST, 10, 3)
    name = "g0-step-10.safetensors"
    assert events == [
        *(("fsync", f"{name}.part"), ("replace", name), ("fsync", "store")),
        *(("fsync", f"{MANIFEST}.part"), ("replace", MANIFEST), ("fsync", "store")),
    ]
