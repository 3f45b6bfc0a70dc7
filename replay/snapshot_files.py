"""A folder of raw files that is replaced completely or not at all.

    ckpt/replay.json            the manifest: sizes and checksums of the files, and their folder
    ckpt/replay-<number>/*.bin  the bytes, and a marker file

Files are written into a folder of a new number and synced; then `replay.json` is replaced
atomically, which makes them the snapshot, and only then the previous folder is removed. A failure
or a killed process on the way leaves the previous snapshot untouched.

Only files written here are removed: files of these names in folders of that name, with the marker
file, of this user. Symbolic links are never followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from penstock.core.files import DAMAGE, sync_folder
from penstock.core.specs import plain_dtype
from penstock.replay.errors import DamagedSnapshotError, ReplayError
from penstock.transport.shm.arena import available_nbytes

Array = npt.NDArray[Any]

MANIFEST = "replay.json"
TEMPORARY = f".{MANIFEST}.tmp"
FORMAT = 1
PREFIX = "replay-"
ARRAY = "$array"
MARKER = ".penstock-replay"
MARK = b"A snapshot of a replay of Penstock, which removes it once there is a newer one.\n"
GENERATION = re.compile(rf"{PREFIX}([0-9]{{1,15}})")
FILE = re.compile(r"[^/\0.][^/\0]*\.bin", re.DOTALL)
PRIVATE = 0o600
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _File:
    def __init__(self, path: Path) -> None:
        self.stream: IO[bytes] = _create(path)
        self.nbytes = self.crc32 = 0

    def write(self, array: Array) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self.stream.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.nbytes += data.nbytes


class FolderWriter:
    """Writes a new snapshot below ``folder``; readers do not see it before `finish`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        names = [GENERATION.fullmatch(name) for name in os.listdir(folder)]
        taken = [int(found[1]) for found in names if found]
        self._inside = folder / f"{PREFIX}{max(taken, default=0) + 1}"
        self._inside.mkdir(mode=0o700)
        self._files: dict[str, _File] = {}
        try:
            with _create(self._inside / MARKER) as marker:
                marker.write(MARK)
        except OSError:
            self.abandon()
            raise

    def append(self, name: str, array: Array) -> None:
        """Append the bytes of ``array`` to the file ``name``."""
        if name not in self._files:
            self._files[name] = _File(self._inside / f"{name}.bin")
        self._files[name].write(array)

    def finish(self, about: dict[str, Any]) -> None:
        """Make it the snapshot; ``about`` holds JSON values and arrays, which become files."""
        body = {
            "about": self._extract(about),
            "folder": self._inside.name,
            "files": {n: {"nbytes": f.nbytes, "crc32": f.crc32} for n, f in self._files.items()},
        }
        for file in self._files.values():
            _sync(file.stream)
            file.stream.close()
        sync_folder(self._inside)
        text = json.dumps(body)
        whole = {"format": FORMAT, "crc32": zlib.crc32(text.encode()), "body": text}
        before = _named_in(self._folder)
        temporary = self._folder / TEMPORARY
        temporary.unlink(missing_ok=True)
        with _create(temporary) as stream:
            stream.write(json.dumps(whole).encode())
            _sync(stream)
        temporary.replace(self._folder / MANIFEST)
        sync_folder(self._folder)
        _remove_generations(self._folder, before, but=self._inside.name)

    def abandon(self) -> None:
        """Remove the files written so far."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # bytes not written yet do not fit either
                file.stream.close()
        _remove_generation(self._inside, named=True)
        with contextlib.suppress(OSError):
            (self._folder / TEMPORARY).unlink(missing_ok=True)

    def _extract(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = f"array-{len(self._files)}"
            self.append(name, value)
            return {ARRAY: name, "dtype": value.dtype.str, "shape": list(value.shape)}
        if isinstance(value, dict):
            return {key: self._extract(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self._extract(child) for child in value]
        return value.item() if isinstance(value, np.generic) else value


class FolderReader:
    """Reads the snapshot in ``folder``.

    Raises ReplayError where there is none, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names_read: set[str] = set()
        path = folder / MANIFEST
        if not path.is_file():
            raise ReplayError(
                f"{folder} holds no {MANIFEST}; give the folder that Replay.save was given"
            )
        with self.refusing():
            whole = json.loads(path.read_bytes())
            if whole["format"] != FORMAT:
                raise ReplayError(
                    f"{path} has format {whole['format']}, this version reads {FORMAT}; use the "
                    "version of penstock that wrote it"
                )
            if zlib.crc32(whole["body"].encode()) != whole["crc32"]:
                raise ValueError("its checksum is wrong")
            body = json.loads(whole["body"])
            self._files: dict[str, dict[str, int]] = body["files"]
            if not GENERATION.fullmatch(body["folder"]):
                raise ValueError(f"its folder {body['folder']!r} is none of a snapshot")
            self._inside = folder / body["folder"]
            if self._inside.is_symlink():
                raise ValueError(f"{self._inside} is a symbolic link")
            self._check_sizes()
            self.about: dict[str, Any] = self._insert(body["about"])

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """An error inside the block becomes a ReplayError: the snapshot is damaged or is none."""
        try:
            yield
        except ReplayError:
            raise
        except DAMAGE as error:
            raise DamagedSnapshotError(
                f"{self.folder} is damaged or no snapshot of a replay ({error}); load another one"
            ) from error

    def read(self, name: str, parts: Iterator[Array]) -> None:
        """Fill ``parts``, one after the other, with all bytes of a file, which is read once."""
        # A short manifest could else ask for any amount of memory.
        if name in self._names_read:
            raise ValueError(f"{name} is named twice")
        self._names_read.add(name)

        about, crc32, nbytes = self._files[name], 0, 0
        with _open(self._path(name)) as stream:
            for part in parts:
                data = part.reshape(-1).view(np.uint8).data
                nbytes += data.nbytes
                if nbytes > about["nbytes"] or stream.readinto(data) != data.nbytes:
                    raise ValueError(f"{name} ends too early")
                crc32 = zlib.crc32(data, crc32)
        if (crc32, nbytes) != (about["crc32"], about["nbytes"]):
            raise ValueError(f"the checksum or size of {name} is wrong")

    def _check_sizes(self) -> None:
        for name, about in self._files.items():
            found = self._path(name).lstat()
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{name} is no file")
            if type(about["nbytes"]) is not int or found.st_size != about["nbytes"]:
                raise ValueError(f"{name} has {found.st_size} bytes, not {about['nbytes']}")

    def _path(self, name: str) -> Path:
        if not FILE.fullmatch(f"{name}.bin"):
            raise ValueError(f"no file of a snapshot is called {name!r}")
        path: Path = self._inside / f"{name}.bin"
        return path

    def _insert(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._insert(child) for child in value]
        if not isinstance(value, dict):
            return value
        if ARRAY not in value:
            return {key: self._insert(child) for key, child in value.items()}
        dtype, shape = plain_dtype(value["dtype"]), tuple(value["shape"])
        nbytes = self._files[value[ARRAY]]["nbytes"]
        if nbytes > available_nbytes():
            raise ValueError(f"{value[ARRAY]} of {nbytes} bytes does not fit the memory")
        array = np.empty(nbytes // dtype.itemsize, dtype).reshape(shape)
        self.read(value[ARRAY], iter([array]))
        return array


def discard(folder: Path) -> None:
    """Remove the snapshot in ``folder``, if there is one, and the folder if it is empty then.

    A symbolic link and its target are left alone.
    """
    if folder.is_symlink():
        return
    before = _named_in(folder)
    with contextlib.suppress(OSError):
        if before is not None:
            (folder / MANIFEST).unlink()
        _remove_generations(folder, before)
        folder.rmdir()


def _named_in(folder: Path) -> str | None:
    """The folder named in the snapshot's manifest; None without a valid manifest."""
    try:
        with _open(folder / MANIFEST) as stream:
            whole = json.loads(stream.read())
        sound = zlib.crc32(whole["body"].encode()) == whole["crc32"]
        named = json.loads(whole["body"])["folder"] if sound else None
    except (OSError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return None
    return named if isinstance(named, str) and GENERATION.fullmatch(named) else None


def _remove_generations(folder: Path, named: str | None, but: str = "") -> None:
    for name in os.listdir(folder):
        if GENERATION.fullmatch(name) and name != but:
            _remove_generation(folder / name, named=name == named)


def _remove_generation(path: Path, *, named: bool) -> None:
    """Remove the files of a snapshot, and their folder if it has no others.

    ``named``: a manifest names it, which suffices for snapshots of older versions; else the folder
    needs the marker file.
    """
    with contextlib.suppress(OSError):
        folder = os.open(path, FOLDER)
        try:
            marked = _is_marked(folder)
            if os.fstat(folder).st_uid != os.getuid() or not (named or marked):
                return
            for name in os.listdir(folder):
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if FILE.fullmatch(name) and stat.S_ISREG(found.st_mode):
                    os.unlink(name, dir_fd=folder)
            if os.listdir(folder) == [MARKER]:
                os.unlink(MARKER, dir_fd=folder)
        finally:
            os.close(folder)
        path.rmdir()


def _is_marked(folder: int) -> bool:
    try:
        fd = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as stream:
        return stream.read(len(MARK) + 1) == MARK


def _create(path: Path) -> IO[bytes]:
    """Open a new file that only this user can read; an existing file or link is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, PRIVATE), "wb")


def _open(path: Path) -> BufferedReader:
    return os.fdopen(
        os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
    )


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
