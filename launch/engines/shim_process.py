"""Starts the program of a role on this host: a shim (`shim.py`), a control channel, a status page.

`LocalHandle` gives it its work. Imports little, as `early_roles` does this before the command
itself is imported.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from penstock.core.control import Channel
from penstock.core.processes import SHIM_DIED, THREAD_VARIABLES, python
from penstock.profiling.status import LOG_AT, ROLE_AT, TAIL_AT, TAIL_NBYTES, StatusPage

OPENMP_WAIT = {"OMP_WAIT_POLICY": "passive"}
"""Threads of torch that wait for each other sleep instead of spinning, which would keep the thread
that they wait for from its core."""
MARK = "PENSTOCK_ROLE"
"""Variable that marks the environment of a role, and of what it starts."""
END_S = 5.0
"""A role may take this long to end after its guard."""
BOOT = "import sys; sys.path.append(sys.argv.pop(1)); import shim; shim.main()"
"""Program of the shim; its first argument is the folder of `shim.py`."""


class ShimProcess:
    """The shim of one role, whose program waits for the first message on ``channel``.

    ``page`` is the role's status page, and ``status_fd`` the descriptor of that.
    """

    def __init__(
        self, name: str, threads: int, saves: bool, ahead: str = "", nice: int = 0
    ) -> None:
        """Start the program of the role ``name``.

        Args:
            name: name of the role, such as "learner-0".
            threads: number of threads of numerical libraries, which read it when they are imported.
            saves: whether the role has time to save its state when its supervisor or its shim dies;
                otherwise it is killed.
            ahead: ``module`` to import, or ``module:function`` to import and call, before the first
                message; empty for neither.
            nice: added to the niceness until the first message, if there is something ``ahead``.

        Raises:
            OSError: no process, descriptor or memory is left. Nothing was started.
        """
        self.mark = f"{MARK}={os.urandom(16).hex()}"
        with ExitStack() as undo:
            self.channel, role_end = Channel.pair()
            undo.callback(self.channel.close)

            with role_end:
                self.page, self.status_fd = StatusPage.create()
                undo.callback(self.page.close)
                undo.callback(os.close, self.status_fd)

                # The shim's command is followed by the command that it executes as the role.
                control = role_end.fileno()
                early_arguments = [ahead, nice] if ahead else []
                role_command = python(
                    "penstock.launch.role", name, control, self.status_fd, *early_arguments
                )
                self.process = subprocess.Popen(
                    [*self._shim_command(control, saves), *role_command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(control, self.status_fd),
                    # Ctrl-C does not reach a process group of its own. A session of its own would
                    # make niceness void: Linux divides the cores equally among sessions (autogroup,
                    # sched(7)).
                    process_group=0,
                    env={
                        **OPENMP_WAIT,
                        **os.environ,
                        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
                    },
                )
            undo.pop_all()

    def _shim_command(self, control: int, saves: bool) -> list[str]:
        """Returns the command of the shim without that of the role, which follows it.

        The arguments after the folder are those of a `shim.ShimPlan`.

        Args:
            control: descriptor of the role's end of the channel.
            saves: whether the role has time to save when its shim dies.
        """
        status_layout = ",".join(map(str, (ROLE_AT, TAIL_AT, TAIL_NBYTES, LOG_AT)))
        shim_died = SHIM_DIED if saves else signal.SIGKILL
        plan = [os.getpid(), self.status_fd, status_layout, control, int(shim_died), self.mark]
        program = [sys.executable, "-I", "-S", "-c", BOOT, str(Path(__file__).parent)]
        return [*program, *map(str, plan)]

    def discard(self) -> None:
        """End the role, which has no work yet, with its guard.

        Returns once the role has closed its end of the channel.
        """
        self.process.kill()
        self.process.wait()

        poller = select.poll()
        poller.register(self.channel, 0)  # a closed channel is reported in any case
        poller.poll(END_S * 1000)

        self.channel.close()
        self.page.close()
        os.close(self.status_fd)
