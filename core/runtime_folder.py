"""Private folders for the sockets of this user's processes, in the system's temporary folder.

A folder is locked while its owner lives; the kernel releases the lock when its last holder has
died, however it died. So one without a holder is stale, and whoever makes a new folder removes it.
`systemd-tmpfiles`, which respects such locks, does not clean up during a long run. The folder is
not put into XDG_RUNTIME_DIR: logging out removes that, and runs outlast logins.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from penstock.configs.errors import UserError
from penstock.core.files import try_lock

PREFIX = "penstock-run-"
RANDOM_NBYTES = 10
NAME = re.compile(f"{PREFIX}[0-9a-f]{{{2 * RANDOM_NBYTES}}}")
# The longest path of a Unix socket.
UNIX_PATH_NBYTES = 107
# The longest path of a folder; the names of its sockets follow.
PATH_NBYTES = 80
# The flags with which a folder is opened.
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class RuntimeFolder:
    """A new folder of mode 0700 with a short path, until `remove`.

    with RuntimeFolder() as path:
        ...
    """

    def __init__(self) -> None:
        """Make the folder, and remove those whose owners have ended.

        Raises UserError if none can be made.
        """
        places = [Path(tempfile.gettempdir()), Path("/tmp")]
        for place in places:
            sweep(place)
        self.path, self._descriptor = _make(places)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder with all files in it. Call it once."""
        _remove(self.path, self._descriptor)
        os.close(self._descriptor)


def sweep(place: Path) -> None:
    """Remove the folders in ``place`` whose owners were killed.

    A folder is removed only if it is a directory of this user with mode 0700, has a name as `_make`
    gives it, and is not locked. Within it only what is not a folder is removed.
    """
    with suppress(OSError):
        for path in [path for path in place.iterdir() if NAME.fullmatch(path.name)]:
            with suppress(OSError):
                _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    """Remove a folder if it is one of this user's, and nobody holds its lock. Raises OSError."""
    descriptor = os.open(path, FOLDER)
    try:
        status = os.fstat(descriptor)
        is_own = status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700
        if is_own and try_lock(descriptor):
            _remove(path, descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path, descriptor: int) -> None:
    """Remove the files and sockets in an open folder, then the folder."""
    with suppress(OSError):
        for name in os.listdir(descriptor):
            if not stat.S_ISDIR(os.lstat(name, dir_fd=descriptor).st_mode):
                os.unlink(name, dir_fd=descriptor)
        path.rmdir()  # only an empty folder can be removed so


def _make(places: list[Path]) -> tuple[Path, int]:
    """Make a folder in the first of ``places`` that is writable and has a short path.

    Returns:
        The path of the folder, and the descriptor that locks it.

    Raises:
        UserError: there is no such place.
    """
    name = PREFIX + secrets.token_hex(RANDOM_NBYTES)
    for place in places:
        path = place / name
        if len(os.fsencode(path)) > PATH_NBYTES:
            continue

        # The folder is locked before it gets the name by which `sweep` of another process would
        # find and remove it.
        with suppress(OSError):
            hidden = place / f".{name}"
            hidden.mkdir(mode=0o700)
            descriptor = os.open(hidden, FOLDER)
            try_lock(descriptor)
            hidden.rename(path)
            return path, descriptor

    raise UserError(
        f"no folder for sockets can be made in {places[0]}; set TMPDIR to a writable folder with a "
        "short path"
    )
