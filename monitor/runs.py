"""`penstock runs`: lists the runs in a folder. Reads only the ends of long files."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.configs.errors import UserError, printable
from penstock.configs.load import CONFIG_FILE
from penstock.configs.yaml_text import parse
from penstock.core.files import CONFIG_NBYTES, open_regular, read_regular
from penstock.core.formatting import clock, count, finite, number
from penstock.core.run_dir import SUPERVISOR_FILE
from penstock.monitor.record import METRICS, objects

STATES = {
    "return": "ended", "env_steps": "ended", "learner_steps": "ended", "minutes": "ended",
    "callback": "ended", "stopped": "ended", "profiled": "ended",
    "interrupted": "stopped", "terminated": "stopped",
}  # fmt: skip
TAILS_NBYTES = (1 << 16, 1 << 21)  # the second where a line is longer than the first
CONNECT_S = 1.0
HEADER_MOST_NBYTES = 1 << 24
BEST = ("checkpoints", "best", "checkpoint.safetensors")
FORM_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError)

Row = dict[str, Any]


def find(folder: str) -> list[Row]:
    """The runs in a folder and in its groups of seeds, the oldest first. Raises UserError if the
    folder does not exist."""
    base = Path(folder)
    if not base.is_dir():
        raise UserError(
            f"there is no folder {folder}; give a folder that contains runs, or train one first"
        )
    configs = [path for depth in ("", "*/", "*/*/") for path in base.glob(depth + CONFIG_FILE)]
    return sorted((row(path.parent) for path in configs), key=lambda found: found["started"])


def row(run_dir: Path) -> Row:
    """One run: environment, algorithm, state, steps and returns."""
    config = _config(run_dir / CONFIG_FILE)
    summary = read_object(run_dir / "summary.json")
    line = _last_line(run_dir / METRICS)
    is_old = (run_dir / SUPERVISOR_FILE).exists()  # the summary, where the run was resumed since
    last = summary | line if is_old else line | summary
    found = best(run_dir)
    return {
        "run_dir": str(run_dir),
        "env": _at(config, "env", "id"),
        "algorithm": _at(config, "algo", "name"),
        "state": state(run_dir),
        "env_steps": finite(last.get("env_steps")),
        "return_last": finite(last.get("episode_return_mean")),
        "return_best": finite(last.get("eval_return_best", found and found.mean)),
        "seconds": finite(last.get("time_s")),
        "started": (run_dir / CONFIG_FILE).stat().st_mtime,
    }


def show(rows: list[Row]) -> None:
    """Print a table on standard output, without a limit of its width if that is not a terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("run", "environment", "algorithm", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "return", "best", "duration", "started"):
        table.add_column(name, justify="right", no_wrap=True)
    for found in rows:
        table.add_row(*_cells(found))
    width = None if sys.stdout.isatty() else 250
    Console(width=width, markup=False, highlight=False).print(table)


def _cells(found: Row) -> list[str]:
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(found["started"]))
    texts = [found[name] or "-" for name in ("run_dir", "env", "algorithm", "state")]
    returns = [number(found[name]) for name in ("return_last", "return_best")]
    return [
        *map(printable, texts),
        count(found["env_steps"]),
        *returns,
        clock(found["seconds"]),
        began,
    ]


def reached(run_dir: Path, names: Iterable[str]) -> dict[str, float]:
    """The highest values of counters with these ``names`` that earlier processes of a run have
    written, as far as there are any."""
    rows = read_object(run_dir / "summary.json"), _last_line(run_dir / METRICS)
    known = {name: [value for row in rows if (value := finite(row.get(name)))] for name in names}
    return {name: max(values) for name, values in known.items() if values}


def state(run_dir: Path) -> str:
    """State of a run: running, ended (by one of its limits), stopped (by the user) or died."""
    return state_by(read_object(run_dir / SUPERVISOR_FILE), read_object(run_dir / "summary.json"))


def state_by(living: Row, summary: Row) -> str:
    """`state` from the contents of `supervisor.json` and `summary.json`; empty for no file."""
    if living:
        here = living.get("host") in (None, socket.gethostname())
        return "running" if not here or _answers(str(living.get("socket"))) else "died"
    return STATES.get(str(summary.get("exit_reason")), "died")


def _answers(path: str) -> bool:
    """Whether a supervisor of any user listens at the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(CONNECT_S)
        try:
            asker.connect(path)
        except (PermissionError, BlockingIOError, TimeoutError):
            return True
        except (OSError, ValueError):  # ValueError for an invalid path
            return False
        return True


def read_object(path: Path) -> Row:
    """A JSON object from a file; empty if there is none."""
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _last_line(path: Path) -> Row:
    """The last valid line of a file of JSON objects; empty if there is none."""
    with suppress(OSError), open_regular(path) as file:
        for nbytes in TAILS_NBYTES:
            file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
            if found := objects(file.read()):
                return found[-1]
    return {}


class Best(NamedTuple):
    """The mean return of the best checkpoint; by an evaluation of ``episodes`` after
    ``trained_steps``, played in this ``way``, or without these by the return in training."""

    mean: float | None
    way: str | None = None
    episodes: int | None = None
    trained_steps: int | None = None


def best(run_dir: Path) -> Best | None:
    """The best checkpoint's return, read from the header of its file; None if there is none."""
    with suppress(OSError), open_regular(run_dir.joinpath(*BEST)) as file:
        return best_in(file)
    return None


def best_in(file: BinaryIO) -> Best | None:
    """`best` from the opened file `BEST` of a run."""
    try:
        (nbytes,) = struct.unpack("<Q", file.read(8))
        head = json.loads(file.read(min(nbytes, HEADER_MOST_NBYTES)))
        meta = json.loads(head["__metadata__"]["penstock"])["meta"]
        if "evaluation" not in meta or "play" not in meta:
            return Best(finite(meta["best_return"]))
        play = meta["play"]
        about = str(play["way"]), int(play["episodes"]), int(play["trained_steps"])
        return Best(finite(meta["evaluation"]["mean"]), *about)
    except (*FORM_ERRORS, OSError, RecursionError, struct.error):
        return None


def _config(path: Path) -> Any:
    """The settings of a config; None if it cannot be read, so that other runs are still listed."""
    try:
        return parse(read_regular(path, CONFIG_NBYTES), str(path))[0]
    except (OSError, ValueError, UserError):
        return None


def _at(config: Any, section: str, key: str) -> str | None:
    found = config.get(section) if isinstance(config, dict) else None
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, str) else None
