"""The sockets in a run's folder by which actors of this host join a learner that was started alone.

    RUN/sockets/          mode 0700: only processes of this user have access
    RUN/sockets/wire      the connector of rank 0; that of rank r is wire-r

Sockets are the default, because a port of 127.0.0.1 is open to every user of the host. An actor
finds the socket by the run's folder, before and after a restart of the learner. The file of a
socket remains after its connector has ended, and the next connector replaces it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock.configs.errors import UserError

FOLDER, SOCKET = "sockets", "wire"
PATH_NBYTES = 107 - len("-9999")  # what a Unix socket's path may have, but for the rank


def address_in(run_dir: Path) -> str:
    """The ``ipc://`` address of rank 0 in a run's folder, which need not exist yet.

    Raises UserError where the path is too long for a Unix socket.
    """
    path = run_dir.absolute() / FOLDER / SOCKET
    for candidate in (path, Path(os.path.relpath(path))):
        if len(os.fsencode(candidate)) <= PATH_NBYTES:
            return f"ipc://{candidate}"
    raise UserError(
        f"the path {path} of the socket for actors is longer than the {PATH_NBYTES} bytes that the "
        "system allows; set run.dir to a shorter path, or give --bind ipc://PATH"
    )


def address_of(connect: str) -> str:
    """The address to which an actor connects: ``connect`` itself, or the socket in a run's folder.

    Raises UserError if ``connect`` is neither an address nor a folder.
    """
    if connect.startswith(("tcp://", "ipc://")):
        return connect
    if "://" not in connect and (os.sep in connect or Path(connect).is_dir()):
        return address_in(Path(connect))
    raise UserError(
        f"--connect {connect} is neither an address nor a folder; give the folder of a run on this "
        "host, or an address such as tcp://10.0.0.1:7700"
    )


def make_folder(run_dir: Path) -> None:
    """Make the folder of the sockets. Raises UserError if that fails, or if others have access."""
    path = run_dir / FOLDER
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise UserError(
            f"the folder {path} for the sockets of actors cannot be created ({error.strerror}); "
            "choose another place with --bind ipc://PATH"
        ) from error
    if found.st_mode != stat.S_IFDIR | 0o700 or found.st_uid != os.geteuid():
        raise UserError(
            f"{path}, the folder for the sockets of actors, must belong to this user and have mode "
            "0700; remove it, or choose another place with --bind ipc://PATH"
        )
