"""Starts the processes of the first learner and the first actor before the command has its config.

Imports take most of a start, torch's above all, and need no config. So the entry point of
`penstock train` starts the processes of the two roles without which no step can be trained, and
imports the command itself meanwhile. The local engine gives them their roles once the config is
known. If a role needs other circumstances than its process was started in, or there is no such
role, the process is discarded, and the role starts as all others do.

The processes end by themselves with the command, as those of all roles do (`shim.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself takes a while to import
    from penstock.core.role_spec import RoleSpec
    from penstock.launch.engines.shim_process import ShimProcess


class EarlyRole:
    """How the process of a role is started before the role is known.

    A NamedTuple would need `typing`.
    """

    def __init__(self, ahead: str, nice: int, saves: bool) -> None:
        """Describe the process.

        Args:
            ahead: ``module`` that it imports while it waits, or ``module:function`` that it calls.
            nice: its niceness meanwhile, by which the learner has priority.
            saves: whether it saves before it dies with the command.
        """
        self.ahead = ahead
        self.nice = nice
        self.saves = saves


EARLY_ROLES = {
    "learner-0": EarlyRole("penstock.learner.early_imports:import_modules", nice=0, saves=True),
    "actor-0": EarlyRole("penstock.actors.role", nice=5, saves=False),
}
"""The processes that are started early, by the names of their roles."""
THREADS = 1
"""Number of threads of numerical libraries in these processes."""
COMMAND = "train"
"""The command that starts them."""
OPTIONS_WITHOUT_EARLY_ROLES = (
    *("--help", "--seeds", "--parallel"),
    *("--engine", "--address", "--working-dir"),
)
"""Options with which the command starts no roles on this host, or not as its own processes."""

_waiting: dict[str, ShimProcess] = {}
"""The processes that wait for their roles, by the names of these."""
_inherited_at_start: tuple[str, dict[str, str]] | None = None
"""What the processes have inherited from this one."""


def start(arguments: Sequence[str]) -> None:
    """Start the processes if the command with these ``arguments`` is likely to need them."""
    global _inherited_at_start
    if not _is_likely(arguments):
        return

    from penstock.launch.engines.shim_process import ShimProcess

    try:
        _inherited_at_start = _inherited_state()
        for name, role in EARLY_ROLES.items():
            _waiting[name] = ShimProcess(
                name, THREADS, role.saves, ahead=role.ahead, nice=role.nice
            )
    except OSError:  # it is reported where the run's folder cannot be made, or a role not started
        return


def take(spec: RoleSpec) -> ShimProcess | None:
    """Take the process that waits for a role.

    Returns: the process, which the role ``spec`` fits, or None if one must be started now.
    """
    if spec.name not in _waiting:
        return None

    # The process was started for a role with these settings, and inherited what it cannot change.
    shim = _waiting.pop(spec.name)
    nice = EARLY_ROLES[spec.name].nice
    fits = spec.threads == THREADS and spec.nice >= nice and spec.meets_at is None
    if fits and _inherited_state() == _inherited_at_start and shim.process.poll() is None:
        return shim

    shim.discard()
    return None


def discard(needed: Collection[str] = ()) -> None:
    """End the processes that wait for a role, except those of the ``needed`` roles."""
    for name in [*_waiting]:
        if name not in needed:
            _waiting.pop(name).discard()


def _inherited_state() -> tuple[str, dict[str, str]]:
    """Returns what a process inherits from this one: current folder and environment."""
    return os.getcwd(), dict(os.environ)


def _is_likely(arguments: Sequence[str]) -> bool:
    """Returns whether the command with these arguments is likely to start roles on this host."""
    if sys.platform != "linux" or len(arguments) < 2 or arguments[0] != COMMAND:
        return False
    return not any(argument.startswith(OPTIONS_WITHOUT_EARLY_ROLES) for argument in arguments)
