"""Undoes the files of a run that fails before its first step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE
from penstock.core.files import open_private
from penstock.core.machine import VERSIONS
from penstock.core.run_dir import HeldFolder
from penstock.monitor.run_folder.record import EVALUATIONS, METRICS, RESERVED, SUMMARY

REPLACED = (CONFIG_FILE, SUMMARY, VERSIONS)
APPENDED = (METRICS, EVALUATIONS)
CHECKPOINTS = "checkpoints"
CHECKPOINT_NAME = re.compile(r"\.?checkpoint\.[a-z.]+")
LOGS = "logs"
LOG_NAME = re.compile(
    r"[a-z_]+-\d+\.(log|stacks)(\.\d+)?|(callbacks|wandb)\.log|supervisor\.stacks"
    r"|events\.jsonl(\.1)?"
)


def missing(path: Path) -> list[Path]:
    """The folder at ``path`` and its parents that do not exist, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


class Attempt:
    """The state of a run's folder before the run, to which it can be brought back."""

    def __init__(self, path: Path, new: list[Path]) -> None:
        self._path = path
        self._folder = HeldFolder(path)
        self._new = new
        held = [name for name in REPLACED if (path / name).is_file()]
        self._texts = {name: (path / name).read_bytes() for name in held}
        self._kept = {*held, *(name for name in APPENDED if (path / name).is_file())}
        self._saved = (path / CHECKPOINTS).exists()

    def put_back(self) -> None:
        """Restore the files of an earlier run."""
        if not self._folder.is_in_place():
            return

        with suppress(OSError):  # the failure of the run is reported, not this
            for name, text in self._texts.items():
                temporary = self._path / f"{name}.tmp"
                with open(temporary, "wb", opener=open_private) as file:
                    file.write(text)
                temporary.replace(self._path / name)

    def undo(self) -> None:
        """Restore the files of an earlier run, and remove those of this run.

        New files are removed by their names only, since others may be the user's. A new folder is
        removed too if it is then empty.
        """
        if not self._folder.is_in_place():
            return

        self.put_back()
        with suppress(OSError):
            for name in {*REPLACED, *APPENDED, RESERVED} - self._kept:
                (self._path / name).unlink(missing_ok=True)
            if not self._saved:
                _remove_files(self._path / CHECKPOINTS, CHECKPOINT_NAME)
            if self._new:
                _remove_files(self._path / LOGS, LOG_NAME)
            for folder in self._new:
                folder.rmdir()  # fails where it holds something


def _remove_files(folder: Path, name: re.Pattern[str]) -> None:
    """Remove the files below ``folder`` whose name matches, and the folders that hold no others.

    Symbolic links are not followed.
    """
    if folder.is_symlink():
        return
    for here, _, names in os.walk(folder, topdown=False):
        for each in filter(name.fullmatch, names):
            Path(here, each).unlink()
        with suppress(OSError):
            Path(here).rmdir()


@contextmanager
def undone_where_refused(path: Path, new: list[Path]) -> Iterator[Attempt]:
    """An attempt that any UserError undoes."""
    attempt = Attempt(path, new)
    try:
        yield attempt
    except UserError:
        attempt.undo()
        raise
