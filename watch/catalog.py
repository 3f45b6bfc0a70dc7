"""The runs below a folder, by name. A request can name only what was found here.

Links that lead out of the folder, and folders of other users, are left out.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, NamedTuple

from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE
from penstock.core.files import is_trusted
from penstock.monitor.run_folder.record import METRICS
from penstock.watch.watched_run import WatchedRun

DEPTH = 3  # levels of folders that are searched below the given one
MOST_RUNS = 2000
MOST_FOLDERS = 20_000  # searched folders
MOST_LOADED = 24  # runs whose measurements are kept in memory
SEARCHED_EVERY_S = 3.0
# The name of the run that is the given folder itself.
ALONE = "."

FolderId = tuple[int, int]
"""The device and inode of a folder, which change if it is replaced."""


class RunLocation(NamedTuple):
    """A folder that contains a run."""

    path: Path
    identity: FolderId


class RunCatalog:
    """Finds the runs in ``folder``: the folder itself, if it is a run, or those below it."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if there is no such folder, or it belongs to another user."""
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}; give a run, or a folder that contains runs"
            )
        if not is_trusted(folder.stat().st_uid):
            raise UserError(
                f"{folder} belongs to another user; watch it as that user, or give a folder of "
                "your own"
            )
        self.folder = folder
        self._lock = threading.Lock()
        self._runs: dict[str, WatchedRun] = {}
        """The runs that the last search has found, by name."""
        self._searched_s = float("-inf")
        """When that search was."""
        self._loaded: OrderedDict[str, WatchedRun] = OrderedDict()
        """The runs that were requested, the last request last."""

    def names(self) -> list[str]:
        """Returns the names of all runs: paths below the folder, or `ALONE`."""
        with self._lock:
            self._search()
            return list(self._runs)

    def run(self, name: str) -> WatchedRun:
        """Returns the run with this name.

        Of more than `MOST_LOADED` runs, the one whose last request is longest ago is unloaded.

        Raises UserError for a name that is not one of `names`.
        """
        with self._lock:
            if name not in self._runs:
                self._search()
            if name not in self._runs:
                raise UserError(f"no run is named {name[:80]!r} here; choose one of the list")

            run = self._runs[name]
            self._loaded[name] = run
            self._loaded.move_to_end(name)
            while len(self._loaded) > MOST_LOADED:
                _, oldest = self._loaded.popitem(last=False)
                oldest.unload()
            return run

    def path(self, name: str) -> Path | None:
        """Returns the folder of the run with this name; None where it has been deleted.

        No file of the run is read for it.
        """
        run = self._runs.get(name)
        return None if run is None else run.folder

    def rows(self) -> list[dict[str, Any]]:
        """Returns what the list shows of each run, the newest first."""
        names = self.names()
        folder_name = self.folder.resolve().name
        rows = []
        for name in names:
            if name in self._runs:  # else it was deleted just now
                title = folder_name if name == ALONE else name
                rows.append({"name": name, "title": title, **self._runs[name].row()})
        return sorted(rows, key=lambda row: -row["started"])

    def _search(self) -> None:
        """Search the folder for runs, at most every `SEARCHED_EVERY_S`."""
        if time.monotonic() < self._searched_s + SEARCHED_EVERY_S:
            return
        self._searched_s = time.monotonic()
        folders = _find_runs(self.folder)
        self._runs = {name: self._run_in(name, folder) for name, folder in folders.items()}

    def _run_in(self, name: str, folder: RunLocation) -> WatchedRun:
        """Returns the run of a folder; another one than before if the folder was replaced."""
        run = self._runs.get(name)
        if run is None or run.seen_as != folder.identity:
            self._loaded.pop(name, None)
            run = WatchedRun(folder.path, folder.identity)
        return run


def _find_runs(folder: Path) -> dict[str, RunLocation]:
    """Returns the folders of runs in ``folder``, by the names of the runs.

    Folders are searched level by level. Below a run, and in folders whose name begins with a dot,
    no runs are searched for.
    """
    root = Path(os.path.realpath(folder))
    runs: dict[str, RunLocation] = {}
    visited: set[FolderId] = set()
    queue = deque([(folder, ALONE, 0)])  # path, name and depth
    searched = 0

    while queue and len(runs) < MOST_RUNS and searched < MOST_FOLDERS:
        path, name, depth = queue.popleft()
        searched += 1
        try:
            status = path.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in visited or not is_trusted(status.st_uid):
                continue
            if not Path(os.path.realpath(path)).is_relative_to(root):
                continue
            visited.add(identity)
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError:
            continue

        entry_names = {entry.name for entry in entries}
        if METRICS in entry_names or CONFIG_FILE in entry_names:
            runs[name] = RunLocation(path, identity)
        elif depth < DEPTH:
            for entry in entries:
                if entry.is_dir() and not entry.name.startswith("."):
                    inner_name = entry.name if name == ALONE else f"{name}/{entry.name}"
                    queue.append((Path(entry.path), inner_name, depth + 1))
    return runs
