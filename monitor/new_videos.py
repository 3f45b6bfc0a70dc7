"""The videos of a run for sinks that pass them on, each once."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

# `penstock.evaluation.best_videos` writes the videos there.
FOLDER = "videos"
TAG = "eval/video"
"""Name of the videos in TensorBoard and Weights & Biases."""


class NewVideos:
    """Finds the videos that appear in the folder of a run.

    Those that were there before, as of a run that is resumed, are left out.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._written_ns: dict[Path, int] = {}  # by video, when it was written
        self.take()

    def take(self) -> list[Path]:
        """Returns the mp4 files that are new or were replaced since the last call, oldest first.

        The list is empty if the folder cannot be read.
        """
        try:
            paths = list(self._folder.iterdir())
        except OSError:
            # `_written_ns` remains, so that the next call does not return all again.
            return []

        previous_ns, self._written_ns = self._written_ns, {}
        for path in paths:
            if path.suffix == ".mp4" and not path.name.startswith("."):
                with suppress(OSError):  # deleted just now
                    self._written_ns[path] = path.lstat().st_mtime_ns

        oldest_first = sorted(self._written_ns.items(), key=lambda item: (item[1], item[0]))
        return [path for path, written_ns in oldest_first if previous_ns.get(path) != written_ns]
