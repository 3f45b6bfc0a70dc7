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

from penstock.core.files import TEXT_NBYTES, open_regular

Row = dict[str, Any]
FORM_ERRORS = (
    *(ArithmeticError, AttributeError, LookupError),
    *(RecursionError, TypeError, ValueError),
)
"""What it may raise to take figures from a file of another form: damaged, of another release, or
written by anyone."""


def open_in(folder: Path, *parts: str, follow_links: bool = False) -> BinaryIO:
    """A regular file below ``folder``, opened for reading.

    Raises OSError for anything but a regular file; without ``follow_links`` also for a link, and
    for the file of another user.
    """
    if follow_links:
        return open_regular(folder.joinpath(*parts))
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(_name(part), flags | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = inner
        descriptor = os.open(_name(parts[-1]), flags, dir_fd=at)
    finally:
        os.close(at)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not is_trusted(status.st_uid):
        os.close(descriptor)
        raise PermissionError(f"{parts[-1]} is no regular file of this user")
    return open(descriptor, "rb")


def is_trusted(uid: int) -> bool:
    """Whether files and processes of a user may be shown to this user: its own, and root's."""
    return uid in (os.geteuid(), 0)


def names_in(folder: Path, part: str, most: int) -> list[str]:
    """The names of the files in a subfolder that is no link, sorted; at most ``most``."""
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
    """The text of a file, at most its first ``most`` bytes; None if it cannot be read."""
    try:
        with open_in(folder, *parts, follow_links=follow_links) as file:
            return file.read(most).decode(errors="replace")
    except OSError:
        return None


def read_json(folder: Path, *parts: str, follow_links: bool = False) -> Row:
    """The JSON object of a file; empty if there is none."""
    try:
        value = json.loads(read_text(folder, *parts, follow_links=follow_links) or "")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_tail(folder: Path, *parts: str, most: int) -> str | None:
    """The last ``most`` bytes of a file as text, from the first complete line on."""
    try:
        with open_in(folder, *parts) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            text = file.read(most).decode(errors="replace")
    except OSError:
        return None
    return text if size <= most else text.partition("\n")[2]


def stamp(folder: Path, *parts: str) -> tuple[int, int, int]:
    """Changes when a file is replaced or written: its inode, size and time; zeros without one."""
    with suppress(OSError):
        status = os.lstat(folder.joinpath(*parts))
        return status.st_ino, status.st_size, status.st_mtime_ns
    return 0, 0, 0


def _name(part: str) -> str:
    if part in ("", ".", "..") or "/" in part or "\0" in part:
        raise PermissionError(f"{part!r} is no name of a file")
    return part
