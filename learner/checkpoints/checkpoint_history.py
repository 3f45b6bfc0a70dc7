"""The checkpoints that a run keeps, and which of them it resumes from.

    checkpoints/last              the newest
    checkpoints/step-12000        older ones, by their optimizer steps (`checkpoint.keep`)
    checkpoints/best              the best, which is none of these
    checkpoints/best-before-1     a best of another environment or network, or a damaged one
    checkpoints/damaged-1         one that was found damaged, unchanged
    checkpoints/step-9000-before-1    one newer than the checkpoint that the run went back to

Each is a folder with one `checkpoint.FILE`. A file is never written to once it has its name, so
that a hard link keeps its content: ``last`` gets a second name, ``step-N``, before it is replaced,
and a newest checkpoint exists at every moment. Only files in folders ``step-N`` that read as
checkpoints are removed, and such a folder once it is empty; symbolic links are left alone.

A best checkpoint of another environment cannot be compared with this run's means, and one of
another network cannot be evaluated here, so `usable_best_meta` moves it aside. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.core.files import open_private
from penstock.core.notes import note_logger
from penstock.core.params import ParamLayout
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import (
    FILE,
    TEMPORARY,
    Checkpoint,
    DamagedCheckpointError,
)

# Keys of a checkpoint's meta.
ENV = "env"  # environment of the training
EVALUATION = "evaluation"  # how the checkpoint was evaluated, with `ENV` and "mean"; absent if not
PLAY = "play"  # how to play the policy, by the run's last evaluation
REQUEST = "evaluate"  # the learner's request to evaluate it (`learner.evaluation_requests`)

REQUESTED = ".requested"  # the folder of a checkpoint that the evaluator is to take
STEPS = re.compile(r"step-(\d{1,19})")

logger = note_logger(__name__)


def checkpoint_folder(run_dir: str | Path, which: str) -> Path:
    """Returns the folder of the checkpoint "best" or "last" of a run.

    For "best" that is the last one if there is no best yet.
    """
    folder = Path(run_dir) / "checkpoints" / which
    if which == "best" and not checkpoint_format.exists(folder):
        folder = folder.with_name("last")
    return folder


def older(last: Path) -> list[Path]:
    """Returns the folders ``step-N`` beside ``last`` that hold a checkpoint, the newest first."""
    try:
        named = [path for path in last.parent.iterdir() if STEPS.fullmatch(path.name)]
    except OSError:
        return []
    folders = [path for path in named if not path.is_symlink() and checkpoint_format.exists(path)]
    return sorted(folders, key=_steps, reverse=True)


def any_exists(last: Path) -> bool:
    """Whether the run has a checkpoint, damaged or not."""
    return checkpoint_format.exists(last) or bool(older(last))


def newest_meta(last: Path) -> Mapping[str, Any] | None:
    """Returns the meta of the run's newest readable checkpoint; None where there is none."""
    return next((meta for _, meta in _readable((last, *older(last)))), None)


def newest_undamaged(last: Path) -> tuple[Path, Checkpoint, list[str]]:
    """Read the newest checkpoint that is undamaged: ``last``, else one of `older`.

    Returns:
        Its folder, its content, and a sentence on each newer one that is damaged, the newest first.

    Raises:
        UserError: if there is none, if all are damaged, or if the newest is of another version.
    """
    if not any_exists(last):
        checkpoint_format.load(last)  # raises the error

    faults: list[str] = []
    for folder in (last, *older(last)):
        if not checkpoint_format.exists(folder):
            faults.append(f"{folder} holds no {FILE}")
            continue
        try:
            return folder, checkpoint_format.load(folder), faults
        except DamagedCheckpointError as error:
            faults.append(error.fault)
    raise UserError(
        f"none of the {len(faults)} checkpoints beside {last} is whole, and the run is left as it "
        f"is: {faults[0]}; start from another one with --resume-from, into a new run.dir"
    )


def keep_previous(last: Path, steps: int | None = None) -> Path | None:
    """Give ``last`` its second name, ``step-N``, before another checkpoint replaces it.

    A damaged one is set aside instead.

    Args:
        last: folder of the newest checkpoint.
        steps: optimizer steps of the next checkpoint. If ``last`` has as many, it gets no second
            name.

    Returns:
        The new folder of ``last`` if it was damaged and set aside, else None.

    Raises:
        OSError: if the second name cannot be given.
    """
    if not checkpoint_format.exists(last):
        return None
    try:
        last_steps = int(checkpoint_format.read_meta(last)["progress"]["learner_steps"])
    except (UserError, LookupError, TypeError, ValueError):
        return set_aside(last)

    if last_steps != steps:
        link(last / FILE, last.with_name(f"step-{last_steps}"))
    return None


def prune(last: Path, keep: int) -> None:
    """Remove the oldest checkpoints, so that ``keep`` remain with ``last``.

    Damaged ones are not removed.
    """
    folders = older(last)
    if len(folders) < keep:
        return
    readable = [folder for folder, _ in _readable(folders)]
    for folder in readable[keep - 1 :]:
        remove(folder)


def remove(folder: Path) -> None:
    """Remove the checkpoint in ``folder``, and the folder unless it holds other files.

    A symbolic link is left alone.
    """
    if folder.is_symlink():
        return
    with contextlib.suppress(OSError):
        for name in (TEMPORARY, FILE):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def restore(last: Path, whole: Path) -> list[Path]:
    """Make the checkpoint in ``whole`` the newest one.

    ``last`` and all that are newer than ``whole`` are damaged, and set aside.

    Returns:
        The new folders of the damaged ones.
    """
    newer = [folder for folder in older(last) if _steps(folder) > _steps(whole)]
    damaged = [folder for folder in (last, *newer) if checkpoint_format.exists(folder)]
    aside = [set_aside(folder) for folder in damaged]

    link(whole / FILE, last)
    return aside


def make_newest(last: Path, source: Path) -> Checkpoint:
    """Make a copy of the checkpoint in ``source`` the newest of a run.

    Newer ones of the run are kept as ``step-N-before-1``.

    Returns:
        The content of the checkpoint.

    Raises:
        UserError: if the source is damaged, if no run has written it, or if the copy cannot be
            written.
    """
    checkpoint = checkpoint_format.load(source)
    progress = checkpoint.meta.get("progress", {})
    steps = progress.get("learner_steps", 0) if isinstance(progress, dict) else None
    if type(steps) is not int:
        raise UserError(
            f"{source} holds weights, but not the state of a run; resume from a checkpoint that a "
            "run has written"
        )
    if source.resolve() == last.resolve():
        return checkpoint

    # A checkpoint beside `last` is of this run, so a second name of its file is enough.
    is_of_other_run = source.resolve().parent != last.resolve().parent
    try:
        keep_previous(last)
        for folder in older(last):
            if _steps(folder) > steps:
                _move(folder, f"{folder.name}-before")
        link(source / FILE, last, copy=is_of_other_run)
    except OSError as error:
        raise UserError(
            f"{source} cannot be copied to {last}: {error.strerror}; free some space or set "
            "run.dir to another disk"
        ) from error
    return checkpoint


def set_aside(folder: Path) -> Path:
    """Move a damaged checkpoint to a folder of its own; returns that folder."""
    return _move(folder, "damaged")


def link(file: Path, folder: Path, *, copy: bool = False) -> None:
    """Give ``file`` a second name in ``folder``, replacing any checkpoint there.

    Args:
        file: a checkpoint's file.
        folder: where it gets the second name.
        copy: whether to copy the file in any case. Else it is copied only where the file system has
            no hard links.

    Raises:
        OSError: if the file cannot be written, or ``folder`` is a symbolic link.
    """
    if folder.is_symlink():
        raise OSError(0, f"{folder} is a symbolic link")

    with checkpoint_format.replacing(folder) as path:
        if not copy and _hard_link(file, path):
            return
        with file.open("rb") as source, open(path, "xb", opener=open_private) as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())


def _hard_link(file: Path, name: Path) -> bool:
    """Give ``file`` the second name ``name``; returns False on a file system without hard links."""
    try:
        os.link(file, name)
    except OSError:
        return False
    return True


def _move(folder: Path, name: str) -> Path:
    """Move the checkpoint of ``folder`` to a new folder ``name-N`` beside it.

    N is the lowest free number from 1. Returns the new folder.
    """
    number = 1
    while True:
        target = folder.with_name(f"{name}-{number}")
        try:
            target.mkdir(mode=0o700)
            break
        except FileExistsError:
            number += 1
    (folder / FILE).rename(target / FILE)

    # A folder `step-N` goes with its checkpoint, unless it holds other files; `last` stays.
    if STEPS.fullmatch(folder.name):
        with contextlib.suppress(OSError):
            folder.rmdir()
    return target


def _readable(folders: Iterable[Path]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yields those of the folders whose checkpoint can be read, with its meta."""
    for folder in folders:
        with contextlib.suppress(UserError):
            yield folder, checkpoint_format.read_meta(folder)


def _steps(folder: Path) -> int:
    """Returns the optimizer steps in the name of a folder ``step-N``; -1 for another folder."""
    match = STEPS.fullmatch(folder.name)
    return int(match[1]) if match else -1


def usable_best_meta(folder: Path, layout: ParamLayout, env: EnvConfig) -> Mapping[str, Any] | None:
    """Returns the meta of the best checkpoint, or moves it aside if it is of no use to this run.

    It is moved beside ``folder`` if it is of another environment or network, or damaged.

    Args:
        folder: `checkpoints/best`.
        layout: of the run's network.
        env: the run's environment.

    Returns:
        The meta; None where there is no best checkpoint, or where it was moved.
    """
    if not checkpoint_format.exists(folder):
        return None
    try:
        meta = checkpoint_format.read_meta(folder, layout)
        # The environment of its evaluation counts; before one, that of its training.
        if env.is_same(meta.get(EVALUATION, meta).get(ENV, {})):
            return meta
        reason = f"{folder} is the best of another game (env.*)"
    except UserError as error:
        reason = str(error)

    with contextlib.suppress(FileNotFoundError):  # another process has moved it already
        logger.info("%s; it is kept as %s", reason, _keep_beside(folder))
    return None


@contextlib.contextmanager
def best_locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Lock the best checkpoint, which is in ``folder``, during the ``with`` block.

    Learner and evaluator both replace it, and the learner must not replace one that the evaluator
    has written.

    Args:
        folder: `checkpoints/best`.
        wait: whether to wait while another process of this host holds the lock.

    Yields:
        Whether the checkpoint is locked; True also on a file system without locks. It is False
        where another process holds the lock and ``wait`` is false.
    """
    descriptor = -1
    is_locked = True

    try:
        with contextlib.suppress(OSError):  # a file system without locks
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(folder.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                is_locked = False
        yield is_locked
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _keep_beside(folder: Path) -> Path:
    """Move ``folder`` to the first free name ``FOLDER-before-N`` beside it; returns that."""
    number = 1
    while (target := folder.with_name(f"{folder.name}-before-{number}")).exists():
        number += 1
    return folder.rename(target)
