"""The small files of a run: its options, its state, and its row in a list of runs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE
from penstock.configs.yaml_text import parse
from penstock.core.files import CONFIG_NBYTES
from penstock.core.formatting import finite
from penstock.core.machine import VERSIONS
from penstock.core.run_dir import SUPERVISOR_FILE
from penstock.monitor.run_folder.checkpoints import best
from penstock.monitor.run_folder.files import Row, read_json, read_text, stamp
from penstock.monitor.run_folder.lines import Lines, last_line
from penstock.monitor.run_folder.record import EVALUATIONS, METRICS, SUMMARY

# By exit reason, the state of a run that has ended; "died" for any other.
STATES = {
    "return": "ended", "env_steps": "ended", "learner_steps": "ended", "minutes": "ended",
    "callback": "ended", "stopped": "ended", "profiled": "ended",
    "interrupted": "stopped", "terminated": "stopped",
}  # fmt: skip
# The least time between two questions to a supervisor whether it lives.
STATE_EVERY_S = 4.0
CONNECT_S = 1.0
LISTED = ("env.id", "algo.name", "run.seed", "run.interval_s")  # options in a list of runs

NO_FILE = (0, 0, 0)  # the `stamp` of a file that is not there


class RunFolder:
    """The small files of a run, and the ends of the long ones, read again when they have changed.

    Safe to use from several threads.
    """

    def __init__(self, folder: Path, *, follow_links: bool = False) -> None:
        """``follow_links``: as for `files.open_in`."""
        self.folder = folder
        self.lock = threading.RLock()
        """Held while files are read."""
        self._follow_links = follow_links
        # Stamps of the files behind each of the following, when it was read last.
        self._stamps: dict[str, object] = {}
        self._config: dict[str, Any] = {}
        self._row: Row = {}
        self._state = ""
        self._state_until_s = float("-inf")  # until then `_state` is taken as true

    @property
    def options(self) -> dict[str, Any]:
        """The options by dotted name, as in `config.yaml`; empty if it cannot be read."""
        return dict(flat(self.config))

    @property
    def config(self) -> dict[str, Any]:
        """The contents of `config.yaml`; empty if it cannot be read."""
        with self.lock:
            if self._changed("config", CONFIG_FILE):
                text = self._text(CONFIG_FILE, CONFIG_NBYTES + 1)
                value = None
                with suppress(ValueError, UserError, RecursionError):
                    value = parse(text, CONFIG_FILE)[0] if len(text) <= CONFIG_NBYTES else None
                self._config = value if isinstance(value, dict) else {}
            return self._config

    @property
    def summary(self) -> Row:
        """The contents of `summary.json` of a run that has ended; empty while it is in progress."""
        if stamp(self.folder, SUPERVISOR_FILE) != NO_FILE:
            return {}
        return self._json(SUMMARY)

    @property
    def starts(self) -> Lines:
        """Machine and versions at each start, as in `versions.json`, the oldest first; empty if
        they cannot be read."""
        value = self._json(VERSIONS).get("starts")
        starts = value if isinstance(value, list) else []
        return [start for start in starts if isinstance(start, dict)]

    @property
    def state(self) -> str:
        """Either running, ended (by one of its limits), stopped (by the user) or died; as of some
        seconds ago."""
        with self.lock:
            may_live = stamp(self.folder, SUPERVISOR_FILE) != NO_FILE
            is_outdated = may_live and time.monotonic() > self._state_until_s
            if self._changed("state", SUPERVISOR_FILE, SUMMARY) or is_outdated:
                supervisor = self._json(SUPERVISOR_FILE)
                self._state = _state_by(supervisor, self._json(SUMMARY))
                self._state_until_s = time.monotonic() + STATE_EVERY_S
            return self._state

    def row(self) -> Row:
        """Returns what a list of runs shows of this one. Reads only the ends of long files."""
        with self.lock:
            if self._changed("row", METRICS, SUMMARY, CONFIG_FILE, SUPERVISOR_FILE, EVALUATIONS):
                self._row = self._make_row()
            return {**self._row, "state": self.state}

    def _make_row(self) -> Row:
        """Reads the row anew, without the state; times are in seconds since 1970."""
        text = self._text(CONFIG_FILE, CONFIG_NBYTES + 1)
        options = _listed_options(text) if len(text) <= CONFIG_NBYTES else {}
        figures = last_line(self.folder, METRICS, follow_links=self._follow_links) | self.summary
        checkpoint = best(self.folder, follow_links=self._follow_links)
        return_in_checkpoint = None if checkpoint is None else checkpoint.mean
        return {
            "env": options.get("env.id"),
            "algorithm": options.get("algo.name"),
            "seed": options.get("run.seed"),
            "interval_s": _number(options.get("run.interval_s")),
            "env_steps": finite(figures.get("env_steps")),
            "return_last": finite(figures.get("episode_return_mean")),
            "return_best": finite(figures.get("eval_return_best", return_in_checkpoint)),
            "seconds": finite(figures.get("time_s")),
            "error": short_text(figures.get("error")),
            "started": stamp(self.folder, CONFIG_FILE)[2] * 1e-9,
            "written": stamp(self.folder, METRICS)[2] * 1e-9,
        }

    def _text(self, name: str, most_nbytes: int) -> str:
        """Returns the beginning of a file; empty if it cannot be read."""
        text = read_text(self.folder, name, most=most_nbytes, follow_links=self._follow_links)
        return text or ""

    def _json(self, name: str) -> Row:
        return read_json(self.folder, name, follow_links=self._follow_links)

    def _changed(self, value_name: str, *names: str) -> bool:
        """Whether files have changed since the last call for the same value.

        Args:
            value_name: what is made of the files.
            names: of the files.
        """
        current = tuple(stamp(self.folder, name) for name in names)
        previous, self._stamps[value_name] = self._stamps.get(value_name), current
        return previous != current


def highest_counters(run_dir: Path, names: Iterable[str]) -> dict[str, float]:
    """Returns the highest values of counters that earlier processes of a run have written.

    Args:
        run_dir: the folder of the run.
        names: of the counters; those without a value, or with 0, are left out.
    """
    summary = read_json(run_dir, SUMMARY, follow_links=True)
    newest = last_line(run_dir, METRICS, follow_links=True)

    highest = {}
    for name in names:
        values = [finite(row.get(name)) for row in (summary, newest)]
        numbers = [value for value in values if value]
        if numbers:
            highest[name] = max(numbers)
    return highest


def versions(start: Row) -> Row:
    """Returns machine and versions of one of `RunFolder.starts`, by their names; those of packages
    are not nested."""
    packages = start.get("packages")
    names = {**start, **(packages if isinstance(packages, dict) else {})}
    return {name: value for name, value in names.items() if name not in ("packages", "time")}


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the options of a config by dotted name, each beginning with ``prefix``."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def short_text(value: Any) -> str | None:
    """Returns a text, cut to 2000 characters; None for anything else."""
    return value[:2000] if isinstance(value, str) else None


def _state_by(supervisor: Row, summary: Row) -> str:
    """Returns the state of a run.

    Args:
        supervisor: the contents of `supervisor.json`; empty if there is none.
        summary: the contents of `summary.json`; empty if there is none.
    """
    if not supervisor:
        return STATES.get(str(summary.get("exit_reason")), "died")

    # A supervisor on another host cannot be asked, and counts as alive.
    is_here = supervisor.get("host") in (None, socket.gethostname())
    if is_here and not _answers(str(supervisor.get("socket"))):
        return "died"
    return "running"


def _answers(path: str) -> bool:
    """Whether a supervisor of any user listens at the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_S)
        try:
            connection.connect(path)
        except (PermissionError, BlockingIOError, TimeoutError):
            return True  # a supervisor of another user, or a busy one
        except (OSError, ValueError):  # ValueError for an invalid path
            return False
        return True


def _listed_options(text: str) -> dict[str, str]:
    """Returns the options of a `config.yaml` that a list of runs shows, by dotted name.

    It reads lines of `section:` and of `  option: value`, as Penstock writes them. Parsing all of
    the file takes some hundred times as long.
    """
    options: dict[str, str] = {}
    section = ""

    for line in text.splitlines():
        key, _, value = line.partition(":")
        if line and line[0] not in " -#":
            section = key
        elif line[:2] == "  " and (name := f"{section}.{key[2:]}") in LISTED:
            options.setdefault(name, value.strip().strip("'\"")[:200])
    return options


def _number(text: str | None) -> float | None:
    """Returns the number that a text is; None for anything else."""
    try:
        return finite(float(text or ""))
    except ValueError:
        return None
