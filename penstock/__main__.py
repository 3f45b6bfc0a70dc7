"""The command `penstock`, also as ``python -m penstock``."""

from __future__ import annotations

import sys

from penstock.core.imports import exit_on_interrupt, gc_paused
from penstock.launch.engines import early_roles


def main() -> None:
    """Run the command; `train` starts two processes of its run before all else."""
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


if __name__ == "__main__":
    main()
