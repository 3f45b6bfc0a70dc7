"""The orders that the page can give to a live run: save now, stop, write stacks or a timeline,
record a video.

A recording makes the environment that the config names, which is code: of a run that is in progress
this user runs that code already, and others are refused. A folder from elsewhere can name the
socket of another run, so recordings and signals require that the run that replies is in the folder.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.processes import began_ticks
from penstock.core.run_dir import in_use
from penstock.evaluation.best_videos import record_newest
from penstock.monitor import stacks as process_stacks
from penstock.monitor.supervisor_client import SAVE, STACKS, TIMELINE, give_order, reach
from penstock.monitor.supervisor_client import save as order_save

STOP = "stop"
RECORD = "record"
KINDS = (SAVE, STOP, STACKS, TIMELINE, RECORD)
# The time in which a run has to carry out an order.
SAVE_S = 120.0
TIMELINE_S = 10.0


class Orders:
    """Gives orders to runs, one at a time for each kind.

    A run is asked to stop only once: a second signal would end it without its checkpoint.
    """

    def __init__(self, cancels: Callable[[], bool] = lambda: False) -> None:
        """``cancels``: whether a recording is to be ended, as the server ends."""
        self._cancels = cancels
        self._stopped: set[tuple[int, int | None]] = set()
        """The supervisors that were asked to stop: their pid, and when they began in ticks."""
        self._locks = {kind: threading.Lock() for kind in KINDS}
        """Held while an order of the kind is carried out."""

    def give(self, order: str, folder: Path) -> dict[str, Any]:
        """Carry out an order and return its result.

        Args:
            order: one of `KINDS`.
            folder: of the run.

        Raises UserError if the order is unknown, if another of its kind is being carried out, or if
        the run does not take it.
        """
        lock = self._locks.get(order)
        if lock is None:
            raise UserError(f"the order {order[:40]!r} is unknown; give {', '.join(KINDS)}")
        if not lock.acquire(blocking=False):
            raise UserError(f"another order to {order} is being carried out; wait for it")

        try:
            return self._carry_out(order, folder)
        finally:
            lock.release()

    def _carry_out(self, order: str, folder: Path) -> dict[str, Any]:
        """Carry out one of `KINDS` and return its result."""
        if order == SAVE:
            return order_save(str(folder), SAVE_S)
        if order == TIMELINE:
            return _write_timeline(folder)
        if order == RECORD:
            return self._record(folder)
        if order == STACKS:
            return process_stacks.stacks(str(folder))
        return self._stop(folder)

    def _stop(self, folder: Path) -> dict[str, Any]:
        """Send SIGINT to the supervisor, as Ctrl-C does: it saves a checkpoint and ends."""
        pid = supervisor_of(folder)
        identity = (pid, began_ticks(pid))
        if identity in self._stopped:
            raise UserError(
                "the run was asked to stop already, and is saving; a second signal would end it "
                f"without a checkpoint: kill -INT {pid}"
            )

        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise _inaccessible(pid, error) from error
        try:
            # From now on the descriptor is of that process, also where its pid is used again.
            if supervisor_of(folder) != pid:
                raise UserError("the run has just been restarted; try again")
            signal.pidfd_send_signal(pidfd, signal.SIGINT)
        except OSError as error:
            raise UserError(f"process {pid} cannot be stopped: {error.strerror}") from error
        finally:
            os.close(pidfd)

        self._stopped.add(identity)
        return {"pid": pid}

    def _record(self, folder: Path) -> dict[str, Any]:
        """Record a video of the newest weights and return the name of its file."""
        pid = supervisor_of(folder)
        try:
            cwd = os.readlink(f"/proc/{pid}/cwd")
        except OSError as error:
            raise _inaccessible(pid, error) from error
        return {"file": record_newest(folder, cwd, self._cancels)["file"]}


def supervisor_of(folder: Path) -> int:
    """Returns the pid of the supervisor of the run in ``folder``.

    That is a process of this user, which replies that the folder is its own, while the folder's
    lock is held. Raises UserError if there is none.
    """
    reached = reach(str(folder))
    pid = reached.pid
    if reached.report is None:
        raise UserError(
            f"the supervisor of {folder} (pid {pid}) does not reply, so it takes no orders; "
            f"penstock stacks {folder} shows where it hangs"
        )

    is_ours = _user_of(pid) == os.geteuid()
    if not (is_ours and in_use(folder) and _is_folder_of(pid, reached.report.get("run"), folder)):
        raise UserError(
            f"the process that replies (pid {pid}) is not that of a run in {folder}; it was "
            "copied, or moved during its run, so open the one in which the run was started"
        )
    return pid


def _user_of(pid: int) -> int | None:
    """Returns the uid of a process; None if there is no such process."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _is_folder_of(pid: int, run: object, folder: Path) -> bool:
    """Whether the path ``run`` means ``folder`` to a process.

    The process may have another root and another current folder.
    """
    if not isinstance(run, str) or "\0" in run:
        return False
    base = Path(f"/proc/{pid}/root" if run.startswith("/") else f"/proc/{pid}/cwd")
    try:
        return os.path.samefile(base / run.lstrip("/"), folder)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _inaccessible(pid, error) from error


def _inaccessible(pid: int, error: OSError) -> UserError:
    """Returns the error for a process whose entry in /proc cannot be read."""
    return UserError(
        f"process {pid} cannot be accessed: {error.strerror}; it has just ended, or runs in "
        "another container"
    )


def _write_timeline(folder: Path) -> dict[str, Any]:
    """Have a run write the timeline of its last minute."""
    reply = give_order(str(folder), TIMELINE, TIMELINE_S)
    if "error" in reply:
        raise UserError(f"no timeline was recorded: {reply['error']}")
    return {}
