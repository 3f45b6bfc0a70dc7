"""The videos of a run for sinks that pass them on, each once."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FOLDER = "videos"  # as in `penstock.evaluation.best_videos`, which writes them
TAG = "eval/video"
"""Name of the videos in TensorBoard and Weights & Biases."""


class NewVideos:
    """Finds the videos that appear in the folder of a run; those that were there before, as of a
    run that is resumed, are left out."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._seen: set[tuple[int, int]] = set()
        self.take()

    def take(self) -> list[Path]:
        """The mp4 files that are new or were replaced since the last call, oldest first; none if
        the folder cannot be read."""
        found = []
        try:
            listed = [Path(entry) for entry in os.scandir(self._folder)]
        except OSError:  # `_seen` remains, so that the next call does not return all again
            return []
        for path in listed:
            if path.suffix != ".mp4" or path.name.startswith("."):
                continue
            with suppress(OSError):  # deleted just now
                about = path.lstat()
                found.append((about.st_mtime_ns, about.st_ino, path))
        new = [path for ns, inode, path in sorted(found) if (ns, inode) not in self._seen]
        self._seen = {(ns, inode) for ns, inode, _ in found}
        return new
