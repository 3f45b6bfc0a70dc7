"""Reads the files of a run folder that may have been made by another program.

No link is followed below the run folder, only regular files of this user are opened, and sizes are
bounded. So a folder from elsewhere can show nothing but its own files to those who see the page.
With ``follow_links``, as commands read the folder that their user names, links are followed, and
the files of other users are opened as far as their modes allow.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from penstock.core.files import TEXT_NBYTES, is_trusted, open_regular

Row = dict[str, Any]
FORM_ERRORS = (
    *(ArithmeticError, AttributeError, LookupError),
    *(RecursionError, TypeError, ValueError),
)
"""The errors that code raises which takes figures from a file of another form: damaged, of another
release, or written by anyone."""


def open_in(folder: Path, *parts: str, follow_links: bool = False) -> BinaryIO:
    """Opens a regular file below a folder for reading.

    Args:
        folder: the folder of a run.
        parts: the names of folders on the way, then that of the file.
        follow_links: whether links are followed, and files of other users opened.

    Raises:
        OSError: for anything but a regular file; without ``follow_links`` also for a link, and for
            the file of another user.
    """
    if follow_links:
        return open_regular(folder.joinpath(*parts))

    # Each folder is opened within the one above, so that none on the way can be a link, even if
    # somebody replaces it meanwhile.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            subdirectory = os.open(_file_name(part), flags | os.O_DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = subdirectory
        descriptor = os.open(_file_name(parts[-1]), flags, dir_fd=directory)
    finally:
        os.close(directory)

    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not is_trusted(status.st_uid):
        os.close(descriptor)
        raise PermissionError(f"{parts[-1]} is no regular file of this user")
    return open(descriptor, "rb")


def names_in(folder: Path, part: str, most: int) -> list[str]:
    """Returns the names of the files in a subfolder, sorted; at most ``most``.

    Empty if the subfolder is a link or cannot be read.
    """
    names: list[str] = []
    with suppress(OSError):
        if stat.S_ISLNK(os.lstat(folder / part).st_mode):
            return []

        with os.scandir(folder / part) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
                if len(names) >= most:
                    break
    return sorted(names)


def read_text(
    folder: Path, *parts: str, most: int = TEXT_NBYTES, follow_links: bool = False
) -> str | None:
    """Returns the text of a file; None if it cannot be read.

    Args:
        folder: see `open_in`.
        parts: see `open_in`.
        most: as many bytes are read, from the beginning.
        follow_links: see `open_in`.
    """
    try:
        with open_in(folder, *parts, follow_links=follow_links) as file:
            return file.read(most).decode(errors="replace")
    except OSError:
        return None


def read_json(folder: Path, *parts: str, follow_links: bool = False) -> Row:
    """Returns the JSON object of a file; empty if there is none. The arguments are those of
    `open_in`."""
    try:
        value = json.loads(read_text(folder, *parts, follow_links=follow_links) or "")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_tail(folder: Path, *parts: str, most: int) -> str | None:
    """Returns the last ``most`` bytes of a file as text, from the first complete line on; None if
    it cannot be read."""
    try:
        with open_in(folder, *parts) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            text = file.read(most).decode(errors="replace")
    except OSError:
        return None
    return text if size <= most else text.partition("\n")[2]


def stamp(folder: Path, *parts: str) -> tuple[int, int, int]:
    """Returns what changes when a file is replaced or written: its inode, its size in bytes and
    the time of its last change in nanoseconds; zeros if there is none."""
    with suppress(OSError):
        status = os.lstat(folder.joinpath(*parts))
        return status.st_ino, status.st_size, status.st_mtime_ns
    return 0, 0, 0


def _file_name(part: str) -> str:
    """Returns ``part`` if it is the name of a file or folder; raises PermissionError for a
    path."""
    if part in ("", ".", "..") or "/" in part or "\0" in part:
        raise PermissionError(f"{part!r} is no name of a file")
    return part
