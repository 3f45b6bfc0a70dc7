"""The command `penstock`, also as ``python -m penstock``."""

from __future__ import annotations

import os
import sys

from penstock.core.imports import exit_on_interrupt, gc_paused
from penstock.launch.engines import early_roles


def main() -> None:
    """Run the command; `train` starts two processes of its run before all else."""
    _open_closed_streams()
    _leave_current_folder()
    try:
        with gc_paused(), exit_on_interrupt():
            early_roles.start(sys.argv[1:])
            from penstock.cli.app import main as run
        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        early_roles.discard()
        # Where a KeyboardInterrupt came out of a text that typer evaluated, Python would end by
        # SIGINT whatever the exit code is, until it has evaluated another text.
        eval("None")


def _open_closed_streams() -> None:
    """Open the null device in place of a standard stream that is closed (``>&-``): another file
    would take its descriptor, and libraries write there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            found = os.open(os.devnull, os.O_RDWR)
            os.dup2(found, number)
            if found != number:
                os.close(found)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _leave_current_folder() -> None:
    """Take the current folder from the front of the module search path, where ``python -m`` puts
    it: a user's ``queue.py`` there would be imported in place of Python's. What the user names is
    found in it nevertheless (`penstock.core.loading`)."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        if sys.path[:1] == [os.getcwd()] != [own]:
            del sys.path[0]
    except OSError:  # the current folder was removed
        return


if __name__ == "__main__":
    main()
