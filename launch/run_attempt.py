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
from penstock.core.run_dir import RunFolderGuard
from penstock.monitor.run_folder.record import EVALUATIONS, METRICS, RESERVED, SUMMARY

REPLACED = (CONFIG_FILE, SUMMARY, VERSIONS)
"""Files that a run replaces, so that those of an earlier run must be kept in memory."""
APPENDED = (METRICS, EVALUATIONS)
"""Files to which a run appends. Lines of a refused attempt stay behind those of an earlier run."""
CHECKPOINTS = "checkpoints"
CHECKPOINT_NAME = re.compile(r"\.?checkpoint\.[a-z.]+")
LOGS = "logs"
LOG_NAME = re.compile(
    r"[a-z_]+-\d+\.(log|stacks)(\.\d+)?|(callbacks|wandb)\.log|supervisor\.stacks"
    r"|events\.jsonl(\.1)?"
)


def missing_folders(path: Path) -> list[Path]:
    """The folder at ``path`` and its parents that do not exist, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


class Attempt:
    """The state of a run's folder before the run, to which it can be brought back."""

    def __init__(self, path: Path, new_folders: list[Path]) -> None:
        """Create it while holding the folder's lock.

        Args:
            path: folder of the run.
            new_folders: `missing_folders` from before the folder was made.
        """
        replaced = [name for name in REPLACED if (path / name).is_file()]
        appended = [name for name in APPENDED if (path / name).is_file()]
        self._path = path
        self._folder = RunFolderGuard(path)
        self._new_folders = new_folders
        self._contents = {name: (path / name).read_bytes() for name in replaced}
        self._earlier_files = {*replaced, *appended}
        self._had_checkpoints = (path / CHECKPOINTS).exists()

    def restore_earlier_run(self) -> None:
        """Restore the files of an earlier run that this one has replaced."""
        if not self._folder.is_in_place():
            return

        with suppress(OSError):  # the failure of the run is reported, not this
            for name, content in self._contents.items():
                temporary = self._path / f"{name}.tmp"
                with open(temporary, "wb", opener=open_private) as file:
                    file.write(content)
                temporary.replace(self._path / name)

    def undo(self) -> None:
        """Restore the files of an earlier run, and remove those of this run.

        New files are removed by their names only, since others may be the user's. A new folder is
        removed too if it is then empty.
        """
        if not self._folder.is_in_place():
            return

        self.restore_earlier_run()
        with suppress(OSError):
            for name in {*REPLACED, *APPENDED, RESERVED} - self._earlier_files:
                (self._path / name).unlink(missing_ok=True)
            if not self._had_checkpoints:
                _remove_files(self._path / CHECKPOINTS, CHECKPOINT_NAME)
            if self._new_folders:
                _remove_files(self._path / LOGS, LOG_NAME)
            for folder in self._new_folders:
                folder.rmdir()  # fails where it holds something


def _remove_files(folder: Path, name: re.Pattern[str]) -> None:
    """Remove the files below ``folder`` whose name matches, and the folders that hold no others.

    Symbolic links are not followed.
    """
    if folder.is_symlink():
        return
    for parent, _, file_names in os.walk(folder, topdown=False):
        for file_name in filter(name.fullmatch, file_names):
            Path(parent, file_name).unlink()
        with suppress(OSError):
            Path(parent).rmdir()


@contextmanager
def undone_on_user_error(path: Path, new_folders: list[Path]) -> Iterator[Attempt]:
    """Yields the `Attempt` of these arguments, and undoes it if the block raises UserError."""
    attempt = Attempt(path, new_folders)
    try:
        yield attempt
    except UserError:
        attempt.undo()
        raise
