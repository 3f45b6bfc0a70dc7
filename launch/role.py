"""The program of every child: ``python -m penstock.launch.role NAME CONTROL_FD STATUS_FD``.

`penstock.launch.engines.shim` executes it, and ends it with its supervisor. It turns SIGTERM into
`RoleContext.stopping`, and the end of the role's main function into one report and an exit code: 0
for success, 1 for a failure, 2 for a mistake of the user.

The first control message contains the role's arguments. The program may be started before it is
known which role it will be. It then has two further arguments: the module to import until the
message comes, or ``module:function`` to call a function of it too, and the niceness meanwhile.
Nothing else is slow to import before the role's own module.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.configs.secrets import redacted
from penstock.core.control import Channel, Message
from penstock.core.imports import gc_paused
from penstock.core.notes import notes_to
from penstock.core.place import (
    exit_refused,
    is_of_environment,
    original_error,
    place,
    users_traceback,
)
from penstock.core.processes import SHIM_DIED
from penstock.core.role import (
    EXIT_REJOIN,
    LOST_SHIM,
    RoleContext,
    RunEndedError,
    StoreAddress,
)
from penstock.profiling.dump import stacks_path, write_stacks_on_signal
from penstock.profiling.status import Phase, StatusPage

BACKSTOP_S = 1.0
"""Seconds after the end of the supervisor's grace at which a role ends itself."""
TEXT_LIMIT = 8_000
"""Most characters of each text in an error report: both fit a control message, even if each
character takes 12 bytes of JSON."""


def main() -> None:
    """Run the role that the supervisor has started, and exit."""
    name, control_fd, status_fd, *ahead = sys.argv[1:]
    channel = Channel(socket.socket(fileno=int(control_fd)))
    page = StatusPage(int(status_fd))
    early_signals: list[int] = []  # SIGTERM, before the role can handle it
    signal.signal(signal.SIGTERM, lambda signum, _: early_signals.append(signum))

    # Import what the role will need, while it is not known yet which role it is.
    niceness = 0
    early_error = None
    if ahead:
        target, nice = ahead
        niceness = int(nice)
        os.nice(niceness)
        early_error = _import_ahead(target, page)

    # The descriptors that came with the arguments are kept open by this name until the exit.
    arguments, _kept_fds = channel.receive_first()
    if arguments is None:  # the supervisor has ended
        return
    faulthandler.enable()
    write_stacks_on_signal(stacks_path(Path(arguments["run_dir"]), name))
    os.nice(arguments["nice"] - niceness)
    if arguments["yields"]:
        _yield_to_learners()
    with gc_paused():
        ctx = _context(arguments, channel, page)
    _catch_signals(ctx, arguments["grace_s"])
    if early_signals:
        os.kill(os.getpid(), signal.SIGTERM)  # again, with the handler of the role

    with notes_to(lambda text: ctx.report("note", text=text), every_thread=True):
        exit_code = _run_main(arguments["main"], ctx, early_error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # Not sys.exit: a thread left behind could hold the process, and libraries that are torn down
    # in the wrong order turn a finished run into a crash.
    os._exit(exit_code)


def _yield_to_learners() -> None:
    """Do not preempt a learner when a granted slot wakes this process.

    A scheduling policy that the user has chosen, such as by `chrt --idle`, stays.
    """
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _import_ahead(target: str, page: StatusPage) -> Exception | None:
    """Import a module before the role is known, and call its function if ``target`` has one.

    Args:
        target: ``module`` or ``module:function``.
        page: the status page of the process, on which the phase is shown.

    Returns:
        The error, if any, which the role reports: a second import of an extension module can fail
        in another way.
    """
    page.begin(Phase.IMPORTING)
    module_name, _, function = target.partition(":")
    try:
        with gc_paused():
            module = importlib.import_module(module_name)
            if function:
                getattr(module, function)()
    except Exception as error:
        return error
    return None


def _context(arguments: Message, channel: Channel, status: StatusPage) -> RoleContext:
    """The context of the role, by the ``arguments`` in the supervisor's first message."""
    config = None
    if arguments["config"] is not None:
        from penstock.configs.schema import Config

        config = Config.model_validate(arguments["config"])

    same_names = (
        *("role", "index", "incarnation", "run_id", "address", "learner", "resume", "transport"),
        *("meets_at", "group_begun", "wait_s", "listen"),
    )
    same: dict[str, Any] = {name: arguments[name] for name in same_names}
    return RoleContext(
        run_dir=Path(arguments["run_dir"]),
        runtime_dir=Path(arguments["runtime_dir"]),
        curve=Path(arguments["curve"]) if arguments["curve"] else None,
        config=config,
        channel=channel,
        status=status,
        store=StoreAddress(**arguments["store"]) if arguments["store"] else None,
        insecure=arguments["insecure"],
        allow=tuple(arguments["allow"]),
        servers=tuple(arguments["servers"]),
        **same,
    )


def _catch_signals(ctx: RoleContext, grace_s: float) -> None:
    """Handle the signals of the supervisor and of the shim.

    SIGTERM is a request to stop. SHIM_DIED is one to save and end; it ends a role at once that has
    nothing to save. ``grace_s`` and `BACKSTOP_S` later the kernel kills the process. SIGINT is
    ignored, since the supervisor handles it.

    A separate thread reads the signals' wake-up pipe, so that they work while the main thread is in
    a call that does not return to Python.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: ctx.stop())
    signal.signal(SHIM_DIED, lambda *_: None)  # the thread handles it

    def wait_for_signal() -> None:
        signums: set[int] = set()
        while not signums & {signal.SIGTERM, SHIM_DIED}:
            signums = set(os.read(read_fd, 64))

        if signal.SIGTERM in signums:
            ctx.stop()
        elif ctx.holds_state:
            ctx.shim_died = True
        else:
            ctx.report("error", user=False, fault=False, message=LOST_SHIM, traceback="")
            os._exit(1)

        # Later than the supervisor, which reports the reason.
        signal.setitimer(signal.ITIMER_REAL, grace_s + BACKSTOP_S)

    threading.Thread(target=wait_for_signal, name="signals", daemon=True).start()


def _run_main(target: str, ctx: RoleContext, early_error: Exception | None = None) -> int:
    """Run the main function of the role, and report the error that ends it.

    Args:
        target: ``module:function``, which is called with ``ctx``.
        ctx: the context of the role.
        early_error: the result of `_import_ahead`.

    Returns:
        The exit code of the process.
    """
    try:
        if early_error is not None:
            raise early_error
        module, _, function = target.partition(":")
        ctx.status.begin(Phase.IMPORTING)
        with gc_paused():
            role = getattr(importlib.import_module(module), function)

        ctx.status.begin(Phase.STARTING)
        try:
            role(ctx)
        except SystemExit as error:
            if error.code == EXIT_REJOIN:
                return EXIT_REJOIN
            raise exit_refused("its code", error) from error
    except UserError as error:
        _report_user_error(ctx, error)
        return 2
    except RunEndedError as error:
        message = redacted(str(error))[:TEXT_LIMIT]
        ctx.report("error", user=False, fault=False, message=message, traceback="")
        _print(f"{ctx.name}: {error}")
        return 1
    except BaseException as error:
        _report_fault(ctx, error)
        return 1
    return 0


def _report_user_error(ctx: RoleContext, error: UserError) -> None:
    """Report a mistake that the user can correct."""
    message = redacted(str(error))[:TEXT_LIMIT]
    shown_traceback = redacted(error.traceback)[-TEXT_LIMIT:]
    ctx.report("error", user=True, message=message, traceback=shown_traceback)
    _print(f"{error.traceback}\n{ctx.name}: {error}".lstrip())


def _report_fault(ctx: RoleContext, error: BaseException) -> None:
    """Report any other error, with its place in the user's code. Call it while ``error`` is
    handled."""
    full_traceback = redacted(traceback.format_exc())
    environments_part = ""
    if is_of_environment(error):
        environments_part = redacted(users_traceback(error))

    original = original_error(error)
    words = (type(original).__name__, str(original))
    message = redacted(": ".join(word for word in words if word))
    ctx.report(
        "error",
        user=False,
        place=place(error),
        message=message[:TEXT_LIMIT],
        traceback=(environments_part or full_traceback)[-TEXT_LIMIT:],
    )
    _print(full_traceback)


def _print(text: str) -> None:
    """Print on standard error. Do it after the report, since the disk of the log may be full."""
    with contextlib.suppress(OSError, ValueError):
        print(redacted(text), file=sys.stderr)


if __name__ == "__main__":
    main()
