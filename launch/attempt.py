"""A try at a run, which leaves no trace in its folder where nothing came of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE
from penstock.launch.record import EVALUATIONS, METRICS, SUMMARY

REPLACED = (CONFIG_FILE, SUMMARY)
APPENDED = (METRICS, EVALUATIONS)
CHECKPOINTS = "checkpoints"
LOGS = "logs"  # what every run's folder has from its first moment on


def missing(path: Path) -> list[Path]:
    """The folder at ``path`` and those around it that do not exist, from within."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


class Attempt:
    """What was in the folder ``path`` before; to be made while its lock is held. ``new`` is what
    was `missing` before that."""

    def __init__(self, path: Path, new: list[Path]) -> None:
        self._path = path
        self._new = new
        held = [name for name in REPLACED if (path / name).is_file()]
        self._texts = {name: (path / name).read_bytes() for name in held}
        logs = [name for name in APPENDED if (path / name).is_file()]
        self._sizes = {name: (path / name).stat().st_size for name in logs}
        self._saved = (path / CHECKPOINTS).exists()

    def put_back(self) -> None:
        """Give a run that was there before its files back."""
        with suppress(OSError):  # what ended the try is told, not this
            for name, text in self._texts.items():
                temporary = self._path / f"{name}.tmp"
                temporary.write_bytes(text)
                temporary.replace(self._path / name)
            for name, size in self._sizes.items():
                os.truncate(self._path / name, size)

    def undo(self) -> None:
        """`put_back`, and remove what was not there: the whole folder, if it was new and no other
        run has come to lie in it, as that of another rank does."""
        if self._new:
            with suppress(OSError):
                for entry in self._path.iterdir():
                    _remove(entry)
                for folder in self._new:
                    folder.rmdir()  # fails where it holds something
            return
        self.put_back()
        for name in {*REPLACED, *APPENDED} - {*self._texts, *self._sizes}:
            (self._path / name).unlink(missing_ok=True)
        if not self._saved:
            shutil.rmtree(self._path / CHECKPOINTS, ignore_errors=True)


def _remove(entry: Path) -> None:
    if not entry.is_dir():
        entry.unlink(missing_ok=True)
    elif not (entry / LOGS).exists():  # else it is a run itself
        shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def undone_where_refused(path: Path, new: list[Path]) -> Iterator[Attempt]:
    """An attempt that any UserError undoes."""
    attempt = Attempt(path, new)
    try:
        yield attempt
    except UserError:
        attempt.undo()
        raise
