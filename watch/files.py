"""Reads the files of a run folder that may have been made by another program.

No link is followed below the run folder, only regular files of this user are opened, and sizes are
bounded. So a folder from elsewhere can show nothing but its own files.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from penstock.core.files import CHUNK_NBYTES, LINE_NBYTES, TEXT_NBYTES, CompleteLines

PROBES = 8  # places of a file at which the length of its lines is measured
PROBED_LINES = 8  # at each

Row = dict[str, Any]


def open_in(folder: Path, *parts: str) -> int:
    """A descriptor of a regular file below ``folder``, opened for reading.

    Raises OSError for a link, for anything but a regular file, and for the file of another user.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(_name(part), flags | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = inner
        found = os.open(_name(parts[-1]), flags, dir_fd=at)
    finally:
        os.close(at)
    about = os.fstat(found)
    if not stat.S_ISREG(about.st_mode) or not is_trusted(about.st_uid):
        os.close(found)
        raise PermissionError(f"{parts[-1]} is no regular file of this user")
    return found


def is_trusted(uid: int) -> bool:
    """Whether files and processes of a user may be shown to this user: its own, and root's."""
    return uid in (os.geteuid(), 0)


def names_in(folder: Path, part: str, most: int) -> list[str]:
    """The names of the files in a subfolder that is no link, sorted; at most ``most``."""
    found: list[str] = []
    with suppress(OSError):
        if stat.S_ISLNK(os.lstat(folder / part).st_mode):
            return []
        with os.scandir(folder / part) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    found.append(entry.name)
                if len(found) >= most:
                    break
    return sorted(found)


def read_text(folder: Path, *parts: str, most: int = TEXT_NBYTES) -> str | None:
    """The text of a file, at most its first ``most`` bytes; None if it cannot be read."""
    try:
        with open(open_in(folder, *parts), "rb") as file:
            return file.read(most).decode(errors="replace")
    except OSError:
        return None


def read_json(folder: Path, *parts: str) -> Row:
    """The JSON object of a file; empty if there is none."""
    try:
        found = json.loads(read_text(folder, *parts) or "")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_tail(folder: Path, *parts: str, most: int) -> str | None:
    """The last ``most`` bytes of a file as text, from the first complete line on."""
    try:
        with open(open_in(folder, *parts), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            text = file.read(most).decode(errors="replace")
    except OSError:
        return None
    return text if size <= most else text.partition("\n")[2]


def read_sample(folder: Path, *parts: str, nbytes: int) -> list[Row]:
    """The objects of lines at even distances over a file, and of its last lines, in their order.

    Reads about ``nbytes``, however long the file is; a line that does not fit the distance at which
    lines are read is left out. Empty if the file cannot be read.
    """
    try:
        with open(open_in(folder, *parts), "rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            last_from = max(0, size - nbytes // 16)
            found: list[Row] = []
            longest = max(
                _longest_line(os.pread(file.fileno(), nbytes // 16, at), bool(at))
                for at in (size * k // PROBES for k in range(PROBES))
            )
            window = 2 * longest + 256  # contains a whole line, and lines vary in length
            count = max(1, (nbytes - nbytes // 16) // window)
            for at in range(0, last_from, max(window, last_from // count)):
                data = os.pread(file.fileno(), window, at)
                first = data.find(b"\n") + 1 if at else 0
                if at + first <= last_from:  # later lines are read below
                    found += _objects(data[first : data.find(b"\n", first) + 1])
            data = os.pread(file.fileno(), size - last_from, last_from)
            first = data.find(b"\n") + 1 if last_from else 0
            return found + _objects(data[first : data.rfind(b"\n") + 1])
    except OSError:
        return []


def _longest_line(data: bytes, begins_within_a_line: bool) -> int:
    """The length of the longest of the first `PROBED_LINES` lines, or of an incomplete one."""
    lines = data.split(b"\n", PROBED_LINES + 1)
    whole = lines[begins_within_a_line:-1]
    return 1 + max(map(len, whole or lines))


def stamp(folder: Path, *parts: str) -> tuple[int, int, int]:
    """Changes when a file is replaced or written: its inode, size and time; zeros without one."""
    with suppress(OSError):
        about = os.lstat(folder.joinpath(*parts))
        return about.st_ino, about.st_size, about.st_mtime_ns
    return 0, 0, 0


def _name(part: str) -> str:
    if part in ("", ".", "..") or "/" in part or "\0" in part:
        raise PermissionError(f"{part!r} is no name of a file")
    return part


def _objects(data: bytes) -> list[Row]:
    """The objects of lines. Damaged lines, and lines that are too long, are left out."""
    found: list[Row] = []
    for line in data.split(b"\n"):
        # A quarter of the time of json.loads.
        with suppress(ValueError, RecursionError):
            value = from_json(line) if 0 < len(line) <= LINE_NBYTES else None
            if isinstance(value, dict):
                found.append(value)
    return found


class JsonLines:
    """Reads a growing file of JSON objects, each byte once.

    A file that was replaced or became shorter is read again from its start: `replaced` is then true
    for the first objects that follow.
    """

    def __init__(self, folder: Path, *parts: str, most: int | None = None) -> None:
        """``most``: bytes at the end of the file, of those not read yet, before which all are left
        out."""
        self._folder, self._parts, self._most = folder, parts, most
        self._inode = 0
        self._offset = 0
        self._lines = CompleteLines()
        self.replaced = False
        self.nbytes = 0
        """Size of the file at the last read."""

    @property
    def offset(self) -> int:
        """Bytes that were read."""
        return self._offset

    def follow(self, *parts: str) -> bool:
        """Whether the file that was read is now that of another name, and is read there from now
        on: a log that was rotated."""
        inode = stamp(self._folder, *parts)[0]
        if not self._inode or inode != self._inode:
            return False
        self._parts = parts
        return True

    def chunks(self) -> Iterator[list[Row]]:
        """The objects of new complete lines, a list per chunk. Damaged lines are left out."""
        try:
            descriptor = open_in(self._folder, *self._parts)
        except OSError:
            return
        with open(descriptor, "rb", buffering=0) as file:
            about = os.fstat(descriptor)
            self.nbytes = about.st_size
            self.replaced = bool(self._inode) and (
                about.st_ino != self._inode or about.st_size < self._offset
            )
            if about.st_ino != self._inode or about.st_size < self._offset:
                self._inode, self._offset, self._lines = about.st_ino, 0, CompleteLines()
            if self._most is not None and self.nbytes - self._offset > self._most:
                self._offset, self._lines = self.nbytes - self._most, CompleteLines(skips=True)
            file.seek(self._offset)
            while data := file.read(CHUNK_NBYTES):
                self._offset += len(data)
                yield _objects(self._lines.add(data))
                self.replaced = False
