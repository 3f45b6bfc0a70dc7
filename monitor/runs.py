"""`penstock runs`: lists the runs in a folder. Reads only the ends of long files."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from penstock.configs.errors import UserError, printable
from penstock.configs.load import CONFIG_FILE
from penstock.core.formatting import clock, count, number
from penstock.monitor.run_folder.files import Row
from penstock.monitor.run_folder.folder import RunFolder

FIGURES = (
    *("env", "algorithm", "state", "env_steps"),
    *("return_last", "return_best", "seconds", "started"),
)


def find(folder: str) -> list[Row]:
    """Returns the runs in a folder and in its groups of seeds, the oldest first.

    Raises:
        UserError: if the folder does not exist.
    """
    base = Path(folder)
    if not base.is_dir():
        raise UserError(
            f"there is no folder {folder}; give a folder that contains runs, or train one first"
        )

    # A run has a config. Runs with several seeds are in a folder of their group, which may itself
    # be in a folder.
    configs = [path for depth in ("", "*/", "*/*/") for path in base.glob(depth + CONFIG_FILE)]
    return sorted((row(path.parent) for path in configs), key=lambda run: run["started"])


def row(run_dir: Path) -> Row:
    """Returns the figures of one run: environment, algorithm, state, steps and returns."""
    figures = RunFolder(run_dir, follow_links=True).row()
    return {"run_dir": str(run_dir), **{name: figures[name] for name in FIGURES}}


def show(rows: list[Row]) -> None:
    """Print a table on standard output; if that is not a terminal, up to 250 columns wide."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("run", "environment", "algorithm", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "training return", "best", "duration", "started"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in rows:
        table.add_row(*_cells(run))

    width = None if sys.stdout.isatty() else 250
    Console(width=width, markup=False, highlight=False).print(table)


def _cells(run: Row) -> list[str]:
    """Returns the texts of a run in the order of the table's columns."""
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["started"]))
    texts = [run[name] or "-" for name in ("run_dir", "env", "algorithm", "state")]
    returns = [number(run[name]) for name in ("return_last", "return_best")]
    return [
        *map(printable, texts),
        count(run["env_steps"]),
        *returns,
        clock(run["seconds"]),
        began,
    ]
