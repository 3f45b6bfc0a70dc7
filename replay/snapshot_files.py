"""A folder of raw files that appears whole or not at all.

    ckpt/replay.json            what there is: sizes and checksums of the files, and their folder
    ckpt/replay-<number>/*.bin  the bytes

Files are written into a folder of a new number and synced; then `replay.json` is replaced in one
step, which makes them the snapshot, and only then the folder before is removed. Whatever fails on
the way, or kills the process, leaves the snapshot before untouched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from penstock.replay.errors import ReplayError

Array = npt.NDArray[Any]

MANIFEST = "replay.json"
FORMAT = 1
PREFIX = "replay-"
ARRAY = "$array"


class _File:
    def __init__(self, path: Path) -> None:
        self.stream: IO[bytes] = path.open("wb")
        self.nbytes = self.crc32 = 0

    def write(self, array: Array) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self.stream.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.nbytes += data.nbytes


class FolderWriter:
    """A new snapshot below ``folder``, not there for readers before `finish`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        taken = [int(p.name[len(PREFIX) :]) for p in _generations(folder)]
        self._inside = folder / f"{PREFIX}{max(taken, default=0) + 1}"
        self._inside.mkdir()
        self._files: dict[str, _File] = {}

    def append(self, name: str, array: Array) -> None:
        """Bytes of ``array`` at the end of the file ``name``."""
        if name not in self._files:
            self._files[name] = _File(self._inside / f"{name}.bin")
        self._files[name].write(array)

    def finish(self, about: dict[str, Any]) -> None:
        """Make it the snapshot; ``about`` is JSON-ready but for arrays, which become files."""
        body = {
            "about": self._extract(about),
            "folder": self._inside.name,
            "files": {n: {"nbytes": f.nbytes, "crc32": f.crc32} for n, f in self._files.items()},
        }
        for file in self._files.values():
            _sync(file.stream)
            file.stream.close()
        _sync_folder(self._inside)
        text = json.dumps(body)
        whole = {"format": FORMAT, "crc32": zlib.crc32(text.encode()), "body": text}
        temporary = self._folder / f".{MANIFEST}.tmp"
        with temporary.open("wb") as stream:
            stream.write(json.dumps(whole).encode())
            _sync(stream)
        temporary.replace(self._folder / MANIFEST)
        _sync_folder(self._folder)
        for path in _generations(self._folder):
            if path != self._inside:
                shutil.rmtree(path, ignore_errors=True)

    def abandon(self) -> None:
        """Remove what was written."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # what it has not written yet does not fit either
                file.stream.close()
        shutil.rmtree(self._inside, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self._folder / f".{MANIFEST}.tmp").unlink(missing_ok=True)

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
    """The snapshot of ``folder``. Raises ReplayError where there is none, or a damaged one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
            self._inside = folder / Path(body["folder"]).name
            self._check_sizes()
            self.about: dict[str, Any] = self._insert(body["about"])

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """What goes wrong inside is because the snapshot is damaged or none."""
        try:
            yield
        except ReplayError:
            raise
        except (
            OSError,
            LookupError,
            ArithmeticError,
            AttributeError,
            TypeError,
            ValueError,
        ) as error:
            raise ReplayError(
                f"{self.folder} is damaged or no snapshot of a replay ({error}); load another one"
            ) from error

    def read(self, name: str, parts: Iterator[Array]) -> None:
        """Fill arrays, one after the other, with the bytes of a file, all of them."""
        about, crc32, nbytes = self._files[name], 0, 0
        with self._path(name).open("rb") as stream:
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
            nbytes = self._path(name).stat().st_size
            if nbytes != about["nbytes"]:
                raise ValueError(f"{name} has {nbytes} bytes, not {about['nbytes']}")

    def _path(self, name: str) -> Path:
        return self._inside / f"{Path(name).name}.bin"

    def _insert(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._insert(child) for child in value]
        if not isinstance(value, dict):
            return value
        if ARRAY not in value:
            return {key: self._insert(child) for key, child in value.items()}
        dtype, shape = np.dtype(value["dtype"]), tuple(value["shape"])
        nbytes = self._files[value[ARRAY]]["nbytes"]
        array = np.empty(nbytes // dtype.itemsize, dtype).reshape(shape)
        self.read(value[ARRAY], iter([array]))
        return array


def _generations(folder: Path) -> list[Path]:
    paths = folder.glob(f"{PREFIX}*")
    return [path for path in paths if path.name[len(PREFIX) :].isdigit() and path.is_dir()]


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
