"""Reads what the heads of a run's checkpoints say of them, without reading the weights."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from penstock.core.formatting import finite
from penstock.core.run_dir import CHECKPOINT
from penstock.monitor.run_folder.files import FORM_ERRORS, Row, names_in, open_in, stamp

FOLDER = "checkpoints"
BEST = "best"
HEAD_NBYTES = 1 << 24  # a longer head is damaged
MOST_LISTED = 500
# The steps of so many checkpoints are read, the newest ones.
MOST_HEADS = 20
UNREADABLE = (OSError, struct.error, *FORM_ERRORS)


class Best(NamedTuple):
    """The mean return of the best checkpoint.

    It is that of an evaluation of ``episodes`` after ``trained_steps``, played in this ``way``,
    greedy or sampled. Without these it is the return in training.
    """

    mean: float | None
    way: str | None = None
    episodes: int | None = None
    trained_steps: int | None = None


def best(run_dir: Path, *, follow_links: bool = False) -> Best | None:
    """Returns the return of the best checkpoint; None if there is none, or it is damaged.

    Args:
        run_dir: the folder of the run.
        follow_links: as for `files.open_in`.
    """
    try:
        meta = _read_meta(run_dir, BEST, follow_links=follow_links)
        if "evaluation" not in meta or "play" not in meta:
            return Best(finite(meta["best_return"]))

        play = meta["play"]
        return Best(
            mean=finite(meta["evaluation"]["mean"]),
            way=str(play["way"]),
            episodes=int(play["episodes"]),
            trained_steps=int(play["trained_steps"]),
        )
    except UNREADABLE:
        return None


def checkpoints(run_dir: Path) -> list[Row]:
    """Lists the checkpoints of a run, newest first.

    Returns:
        Rows with ``name``, ``nbytes`` and ``written``, in seconds since 1970; the newest
        `MOST_HEADS` also with ``trained_steps``, None where these cannot be read.
    """
    base = run_dir / FOLDER
    rows: list[Row] = []
    if base.is_symlink():
        return rows

    with suppress(OSError):
        for path in sorted(base.iterdir())[:MOST_LISTED]:
            if path.is_symlink() or not path.is_dir():
                continue
            files = [stamp(path, name) for name in names_in(base, path.name, MOST_LISTED)]
            if files:
                written_s = max(written_ns for _, _, written_ns in files) * 1e-9
                nbytes = sum(size for _, size, _ in files)
                rows.append({"name": path.name, "nbytes": nbytes, "written": written_s})

    rows.sort(key=lambda row: -row["written"])
    for row in rows[:MOST_HEADS]:
        row["trained_steps"] = _trained_steps(run_dir, row["name"])
    return rows


def _trained_steps(run_dir: Path, name: str) -> float | None:
    """Returns the trained steps of a checkpoint; None if they cannot be read."""
    try:
        meta = _read_meta(run_dir, name, follow_links=False)
        return finite(meta["progress"]["trained_steps"])
    except UNREADABLE:
        return None


def _read_meta(run_dir: Path, name: str, *, follow_links: bool) -> Mapping[str, Any]:
    """Reads what the learner has written into the head of a checkpoint's file.

    The file has safetensors' format: the length of the head in 8 bytes, then the head as JSON.

    Raises:
        UNREADABLE: one of these if the head is missing or damaged.
    """
    with open_in(run_dir, FOLDER, name, CHECKPOINT, follow_links=follow_links) as file:
        (nbytes,) = struct.unpack("<Q", file.read(8))
        head = from_json(file.read(nbytes) if nbytes <= HEAD_NBYTES else b"")
    meta: Mapping[str, Any] = from_json(head["__metadata__"]["penstock"])["meta"]
    return meta
