"""Copies of a run's checkpoints where all its hosts can reach them: `checkpoint.store`.

A store is a folder, or a prefix of an object store that fsspec can open:

    STORE/g2-step-12000.safetensors    checkpoints, by generation of the run and optimizer steps
    STORE/manifest.json                which of them count, the newest last

A file counts only once the manifest names it, and the manifest is written last. So a reader never
sees a part of a checkpoint. A learner that was separated from the others may still upload: the
manifest names generation and epoch of the group of learners that wrote each checkpoint, and
`CheckpointStore.put` refuses one that is older than the newest. Only files that the manifest has
named are ever deleted. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.configs.errors import UserError
from penstock.core.files import sync_folder
from penstock.core.notes import note_logger
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints import checkpoint_history as history

MANIFEST = "manifest.json"
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
PROTOCOLS = {"file", *OBJECT_STORES}
MANIFEST_NBYTES = 1 << 20  # more of a manifest is not read
COPY_NBYTES = 1 << 22  # size of the pieces in which a checkpoint is copied
NAME = re.compile(r"g\d{1,10}-step-\d{1,19}\.safetensors")
FETCHED = ".fetched"  # folder beside checkpoints/last

logger = note_logger(__name__)


class CheckpointWriter(NamedTuple):
    """Which learners wrote a checkpoint: a later generation or epoch replaces an earlier one."""

    generation: int
    """How often the run was resumed."""
    epoch: int
    """Epoch of the group of learners; 0 for an only learner."""


class Entry(NamedTuple):
    """A checkpoint of the manifest."""

    name: str
    generation: int
    epoch: int
    learner_steps: int
    nbytes: int

    @property
    def writer(self) -> CheckpointWriter:
        return CheckpointWriter(self.generation, self.epoch)


class ReplacedError(UserError):
    """Other learners of the run have gone on without the one that wants to save."""

    def __init__(self, place: object, own: CheckpointWriter, other: CheckpointWriter) -> None:
        super().__init__(
            f"{place} is of generation {other.generation}, epoch {other.epoch} of the run, and "
            f"this learner is of {own.generation}, {own.epoch}: others train on without it, so it "
            "does not save"
        )


class CheckpointStore:
    """One store, by its path or URL. Not thread-safe."""

    def __init__(self, url: str) -> None:
        """Open the store at ``url``.

        Raises:
            UserError: for a URL that nothing here can open, or that does not answer.
        """
        import fsspec

        # Other protocols of fsspec run templates of a file, or extract and cache what they read.
        protocol, _ = fsspec.core.split_protocol(url)
        if "::" in url or (protocol or "file") not in PROTOCOLS:
            raise UserError(
                f"checkpoint.store is {url!r}, which is neither a folder nor an object store; give "
                "a path without ::, or a URL of s3://, gs:// or az://"
            )

        self.url = url.rstrip("/")
        self._is_folder = (protocol or "file") == "file"
        try:
            self._fs, self._path = fsspec.core.url_to_fs(url)
        except Exception as error:  # any library may open it, and may connect now
            raise UserError(
                f"checkpoint.store is {url!r}, which cannot be opened ({_text(error)}); give a "
                "path, or a URL that answers and whose package is installed, such as "
                "s3://bucket/folder with penstock[s3]"
            ) from error

    def entries(self) -> list[Entry]:
        """Returns the checkpoints that the manifest names, the newest last.

        The list is empty in a store without a manifest.

        Raises:
            UserError: if the store cannot be read, or its manifest is not one.
        """
        self._fs.invalidate_cache()
        try:
            text = self._fs.cat_file(self._path_of(MANIFEST), start=0, end=MANIFEST_NBYTES)
        except FileNotFoundError:
            self._check_bucket()
            return []
        except Exception as error:  # each library has its own
            raise UserError(
                f"checkpoint.store {self.url} cannot be read: {_text(error)}"
            ) from error

        try:
            return [_entry(value) for value in json.loads(text)["checkpoints"]]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(
                f"{self.url}/{MANIFEST} is no list of checkpoints ({_text(error)}); name another "
                "checkpoint.store, or remove that file if it is of no run"
            ) from error

    def _check_bucket(self) -> None:
        """Raise UserError where the bucket of an object store does not exist."""
        bucket = self._path.partition("/")[0]
        if not self._is_folder and not self._fs.exists(bucket):
            raise UserError(
                f"checkpoint.store {self.url} cannot be read: there is no bucket {bucket!r}; make "
                "it, or name another one"
            )

    def put(self, file: BinaryIO, writer: CheckpointWriter, learner_steps: int, keep: int) -> None:
        """Add a checkpoint, and remove all but the last ``keep``.

        Args:
            file: the checkpoint's file, open for reading.
            writer: the learners that wrote it.
            learner_steps: optimizer steps of the run when it was written.
            keep: number of checkpoints that stay in the store, with this one.

        Raises:
            ReplacedError: if a later writer has added a checkpoint.
            UserError: if the store cannot be read, or its manifest is not one.
            Exception: of the store's library, if the checkpoint cannot be written.
        """
        entries = self.entries()
        if entries and entries[-1].writer > writer:
            raise ReplacedError(self.url, writer, entries[-1].writer)

        # The checkpoint counts once the manifest names it.
        nbytes = os.fstat(file.fileno()).st_size
        name = f"g{writer.generation}-step-{learner_steps}.safetensors"
        file.seek(0)
        self._write(name, file, nbytes)

        new_entry = Entry(
            name,
            generation=writer.generation,
            epoch=writer.epoch,
            learner_steps=learner_steps,
            nbytes=nbytes,
        )
        entries = [*(entry for entry in entries if entry.name != name), new_entry]
        remaining = entries[-keep:]
        values = [entry._asdict() for entry in remaining]
        manifest = json.dumps({"checkpoints": values}, indent=1).encode()
        self._write(MANIFEST, BytesIO(manifest), len(manifest))

        # The manifest names these no longer.
        for entry in entries[:-keep]:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path_of(entry.name))

    def fetch(self, entry: Entry, folder: Path) -> None:
        """Copy a checkpoint to ``folder``, where it has the name of a run's checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(self._path_of(entry.name), str(folder / checkpoint_format.FILE))

    def _write(self, name: str, file: BinaryIO, nbytes: int) -> None:
        """Replace a file of the store at once, by the ``nbytes`` bytes of ``file``.

        An object store does that by itself. In a folder the file is written under another name and
        renamed.
        """
        if self._is_folder:
            self._fs.makedirs(self._path, exist_ok=True)
        written_name = f"{name}.part" if self._is_folder else name
        with self._fs.open(self._path_of(written_name), "wb") as copy:
            shutil.copyfileobj(file, copy, COPY_NBYTES)

        self._fs.invalidate_cache()
        size = self._fs.info(self._path_of(written_name))["size"]
        if size != nbytes:
            raise OSError(f"{self.url}/{name} has {size} bytes instead of {nbytes}")
        if self._is_folder:
            self._rename(written_name, name)

    def _rename(self, temporary: str, name: str) -> None:
        """Sync a file to the disk, then give it its name: older files may be deleted after that."""
        with open(self._path_of(temporary), "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._path_of(temporary), self._path_of(name))
        with contextlib.suppress(OSError):  # a file system that syncs no folders
            sync_folder(Path(self._path))

    def _path_of(self, name: str) -> str:
        """Returns the path of a file of the store, as fsspec takes it."""
        return posixpath.join(self._path, name)


class _Upload(NamedTuple):
    """A checkpoint that is to be copied to the store."""

    file: BinaryIO
    """The checkpoint's file, open for reading."""
    writer: CheckpointWriter
    learner_steps: int


class Uploader:
    """Copies checkpoints to a store in a thread, the newest first; older ones may be skipped."""

    def __init__(self, store: CheckpointStore, keep: int, event: Callable[..., object]) -> None:
        """Make an uploader, whose thread starts with the first checkpoint.

        Args:
            store: where checkpoints are copied.
            keep: number of checkpoints that stay there.
            event: is called as `RoleContext.event` where a copy fails, but not again before one has
                succeeded.
        """
        self._store = store
        self._keep = keep
        self._event = event
        self._has_failed = False  # whether the last copy failed; only the thread writes it

        # The condition guards these three; it is notified of every change.
        self._changed = threading.Condition()
        self._next: _Upload | None = None
        self._is_copying = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)

    def offer(self, path: Path, writer: CheckpointWriter, learner_steps: int) -> None:
        """Copy the file at ``path`` as it is now, also if it is replaced meanwhile.

        It takes the place of a checkpoint that waits to be copied.
        """
        upload = _Upload(path.open("rb"), writer, learner_steps)
        with self._changed:
            if self._next is not None:
                self._next.file.close()
            self._next = upload
            self._changed.notify_all()

        if self._thread.ident is None:
            self._thread.start()

    def close(self, wait_s: float) -> bool:
        """Wait for the last copy, for at most ``wait_s`` seconds, and end the thread.

        Returns:
            Whether the last checkpoint is in the store.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._next is None and not self._is_copying, timeout=wait_s
            )

            self._is_closing = True
            self._changed.notify_all()
        return done and not self._has_failed

    def _run(self) -> None:
        """Copy what is offered until `close`; the main function of the thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._next is not None)
                if self._next is None or self._is_closing:
                    return
                upload, self._next = self._next, None
                self._is_copying = True

            with upload.file:
                self._copy(upload)

            with self._changed:
                self._is_copying = False
                self._changed.notify_all()

    def _copy(self, upload: _Upload) -> None:
        """Copy a checkpoint. A failure is reported once, and training goes on."""
        steps = upload.learner_steps
        try:
            self._store.put(upload.file, upload.writer, steps, keep=self._keep)
        except Exception as error:  # each library has its own
            if not self._has_failed:
                text = f"the checkpoint of step {steps} was not copied to {self._store.url}"
                self._event("store", f"{text}: {_text(error)}; the next one is tried again")
            self._has_failed = True
        else:
            self._has_failed = False


def take_newer(store: CheckpointStore, last: Path) -> str:
    """Make the newest whole checkpoint of the store that of a run, if it is newer than the run's.

    Args:
        store: that of the run.
        last: folder of the run's newest checkpoint.

    Returns:
        A note about the checkpoint that was taken; empty if none was.

    Raises:
        UserError: if the store cannot be read, or if the run has no checkpoint and none of the
            store's can be used.
    """
    run_age = _age_of_newest(last)
    entries = store.entries()
    fetched = last.parent / FETCHED
    for entry in reversed(entries):
        if run_age is not None and (entry.generation, entry.learner_steps) <= run_age:
            return ""
        try:
            store.fetch(entry, fetched)
            history.make_newest(last, fetched)
            steps = f"after {entry.learner_steps:,} optimizer steps"
            return f"takes {entry.name} from {store.url}, {steps}"
        except checkpoint_format.DamagedCheckpointError as error:
            logger.info(
                "%s of %s is damaged, and an older one is tried: %s", entry.name, store.url, error
            )
        except FileNotFoundError:
            logger.info("%s is not in %s, and an older one is tried", entry.name, store.url)
        except OSError as error:
            raise UserError(
                f"{entry.name} cannot be copied from {store.url}: {_text(error)}"
            ) from error
        finally:
            history.remove(fetched)

    if entries and run_age is None:
        raise UserError(
            f"none of the {len(entries)} checkpoints in {store.url}/{MANIFEST} can be used; "
            f"restore {entries[-1].name}, or name another checkpoint.store to begin anew"
        )
    return ""


def _age_of_newest(last: Path) -> tuple[int, int] | None:
    """Returns generation and optimizer steps of a run's newest checkpoint; None if it has none."""
    meta = history.newest_meta(last)
    if meta is None:
        return None
    progress = meta.get("progress", {})
    return progress.get("generation", 0), progress.get("learner_steps", 0)


def _entry(value: Any) -> Entry:
    """Returns an entry of the manifest from its JSON ``value``, checked.

    Raises TypeError or ValueError for a value that `CheckpointStore.put` has not written.
    """
    entry = Entry(**value)
    if not NAME.fullmatch(entry.name):
        raise ValueError(f"{entry.name!r:.60} is no name of a checkpoint")

    counts: Sequence[Any] = entry[1:]
    if any(type(count) is not int or not 0 <= count < 1 << 63 for count in counts):
        raise ValueError(f"{counts!r:.60} are no counts")
    return entry


def _text(error: BaseException) -> str:
    """Returns the text of an error, or its type where it has none."""
    return (str(error) or type(error).__name__)[:300]
