"""The runs below a folder, by name. A request can name only what was found here.

Links that lead out of the folder, and folders of other users, are left out.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE
from penstock.monitor.run_folder.files import is_trusted
from penstock.monitor.run_folder.record import METRICS
from penstock.watch.watched_run import WatchedRun

DEPTH = 3  # of folders below the given one
MOST_RUNS = 2000
MOST_FOLDERS = 20_000  # that are searched
MOST_LOADED = 24  # runs whose measurements are kept in memory
SEARCHED_EVERY_S = 3.0
ALONE = "."  # the name of the run that is the given folder itself


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
        self._searched_s = float("-inf")
        self._loaded: OrderedDict[str, WatchedRun] = OrderedDict()

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
            found = self._loaded[name] = self._runs[name]
            self._loaded.move_to_end(name)
            while len(self._loaded) > MOST_LOADED:
                self._loaded.popitem(last=False)[1].unload()
            return found

    def path(self, name: str) -> Path | None:
        """Returns the folder of the run with this name; None where it has been deleted.

        No file of the run is read for it.
        """
        run = self._runs.get(name)
        return None if run is None else run.folder

    def rows(self) -> list[dict[str, Any]]:
        """Returns what the list shows of each run, the newest first."""
        names = self.names()
        here = self.folder.resolve().name
        found = [
            {"name": name, "title": here if name == ALONE else name, **self._runs[name].row()}
            for name in names
            if name in self._runs
        ]
        return sorted(found, key=lambda row: -row["started"])

    def _search(self) -> None:
        if time.monotonic() < self._searched_s + SEARCHED_EVERY_S:
            return
        self._searched_s = time.monotonic()
        root = Path(os.path.realpath(self.folder))
        found: dict[str, tuple[Path, tuple[int, int]]] = {}
        seen: set[tuple[int, int]] = set()
        waiting = [(self.folder, ALONE, 0)]
        searched = 0
        while waiting and len(found) < MOST_RUNS and searched < MOST_FOLDERS:
            path, name, depth = waiting.pop(0)
            searched += 1
            try:
                about = path.stat()
                if (about.st_dev, about.st_ino) in seen or not is_trusted(about.st_uid):
                    continue
                if not Path(os.path.realpath(path)).is_relative_to(root):
                    continue
                seen.add((about.st_dev, about.st_ino))
                entries = sorted(os.scandir(path), key=lambda entry: entry.name)
            except OSError:
                continue
            here = {entry.name for entry in entries}
            if METRICS in here or CONFIG_FILE in here:
                found[name] = path, (about.st_dev, about.st_ino)
                continue
            if depth < DEPTH:
                for entry in entries:
                    if entry.is_dir() and not entry.name.startswith("."):
                        inner = entry.name if name == ALONE else f"{name}/{entry.name}"
                        waiting.append((Path(entry.path), inner, depth + 1))
        self._runs = {
            name: self._known(name, path, seen_as) for name, (path, seen_as) in found.items()
        }

    def _known(self, name: str, path: Path, seen_as: tuple[int, int]) -> WatchedRun:
        """The run of a folder; another one if the folder was replaced."""
        run = self._runs.get(name)
        if run is None or run.seen_as != seen_as:
            self._loaded.pop(name, None)
            run = WatchedRun(path, seen_as)
        return run
