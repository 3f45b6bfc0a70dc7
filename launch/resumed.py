"""Resuming: which run, from which checkpoint, and with which changed options."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.configs.code_references import references_in_training
from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE, Resolved, load_run, presets, resolve_target
from penstock.configs.model import ModelConfig
from penstock.configs.schema import Config
from penstock.core import used_names
from penstock.core.run_dir import Resume, has_checkpoint

SHOWN = 4
FOLDER = "run.dir"
LONGEST = 40  # characters of a value


def resolve_resumed(
    target: str | Config, overrides: Sequence[str], resume: Resume, source: str | None = None
) -> Resolved:
    """Resolve the config of a run that may resume another one.

    If the target is the folder of a run, the config is that of this run, with ``run.dir`` set to
    the folder, under the overrides. A network reads observations as in the run that is resumed.

    Args:
        target: as of `resolve_target`, or a run's folder.
        overrides: ``key=value``.
        resume: "no", "auto" or "must".
        source: what ``--resume-from`` names, if it is given.

    Raises UserError.
    """
    folder = None if isinstance(target, Config) or target in presets() else Path(target)
    if folder is not None and os.path.isdir(folder):  # `Path.is_dir` raises for a long name
        if not (folder / CONFIG_FILE).is_file():
            raise UserError(
                f"{target} is a folder without a {CONFIG_FILE}, so it is not a run; give the "
                "folder of a run, or a preset, a YAML file, a gymnasium id or module:function"
            )
        if resume == "no" and source is None:
            raise UserError(
                f"{target} already holds a run; resume it with --resume auto, or train "
                f"{folder / CONFIG_FILE} run.dir=OTHER for a new run with the same options"
            )

        way = f"train {folder / CONFIG_FILE} run.dir={folder}"
        used_names.check(references_in_training(load_run(folder)), (), str(folder), way)
        target, overrides = str(folder / CONFIG_FILE), [f"run.dir={folder}", *overrides]

    resolved = resolve_target(target, overrides)
    if source is None:
        check_folder_named(resolved.config, resume)
    stored = _stored_model(resolved.config.run.dir, resume, source)
    if stored is not None and _reading(stored) != _reading(resolved.config.model):
        resolved = resolve_target(target, [*_reading(stored), *overrides])
    return resolved


def _reading(model: ModelConfig) -> list[str]:
    """The options by which a network reads observations, as overrides."""
    return [f"model.scale={model.scale}", f"model.filters={model.filters}"]


def _stored_model(run_dir: str | None, resume: Resume, source: str | None) -> ModelConfig | None:
    """The network of the run that is resumed, whose observations must be read as before.

    None if no run is resumed, or if its config is not known.
    """
    folders: list[Path] = []
    if run_dir is not None and resume != "no":
        folders.append(Path(run_dir))
    if source:
        # The source is a run, a checkpoint in it, or the file of a checkpoint.
        folders += [Path(source), *Path(source).absolute().parents[:3]]

    for folder in folders:
        with suppress(UserError):
            return load_run(folder).model
    return None


def check_folder_named(config: Config, resume: Resume) -> None:
    """Raise UserError where a run in a new folder is to be resumed."""
    if resume != "no" and config.run.dir is None:
        raise UserError(
            f"--resume {resume} needs the folder of the run, and a new one would be created; name "
            "the folder with run.dir="
        )


def find_source(source: str, path: Path, resume: Resume) -> tuple[Path | None, Resume]:
    """Find the checkpoint that ``--resume-from`` names. Writes nothing.

    Args:
        source: a checkpoint's folder or file, or a run's folder, which stands for its newest
            checkpoint that is whole.
        path: folder of the run that begins from it.
        resume: "no"; or "auto": the run's own checkpoint comes first, if it has any.

    Returns:
        The folder of the checkpoint, or None if the run's own is taken; and how the run in ``path``
        is then resumed.

    Raises UserError.
    """
    folder = _checkpoint_folder(Path(source))
    if resume == "must":
        raise UserError(
            "--resume must uses the run's own checkpoint and --resume-from another one; leave out "
            "one of the two"
        )

    if folder.resolve().is_relative_to(path.resolve()):
        if resume == "auto":
            raise UserError(
                f"--resume auto uses the last checkpoint of {path}, and --resume-from names an "
                "older one of the same run; leave out one of the two"
            )
        return folder, "auto"

    if has_checkpoint(path) and resume == "auto":
        return None, resume
    return folder, resume


def begin_from(path: Path, folder: Path) -> str:
    """Make the checkpoint in ``folder`` the newest of the run in ``path``.

    Returns a note about it. Raises UserError.
    """
    from penstock.learner.checkpoints.checkpoint_history import begin_from as copy

    steps = copy(path / "checkpoints" / "last", folder).meta.get("progress", {})
    return f"starts from {folder}, after {steps.get('learner_steps', 0):,} optimizer steps"


def take_from_store(config: Config, path: Path, resume: Resume) -> str:
    """Take the newest checkpoint of `checkpoint.store`, if it is newer than the run's own.

    Args:
        config: that of the run.
        path: folder of the run.
        resume: "no" takes nothing.

    Returns a note about the checkpoint that was taken; empty if none was.

    Raises UserError if the store cannot be read, or if a run that begins anew would replace the
    checkpoints in it.
    """
    url = config.checkpoint.store
    if url is None:
        return ""

    from penstock.learner.checkpoints.checkpoint_store import CheckpointStore, take_newer

    store = CheckpointStore(url)
    if resume == "no":
        if store.entries():
            raise UserError(
                f"checkpoint.store {url} holds the checkpoints of a run; resume that by --resume "
                "auto, or name another place"
            )
        return ""
    return take_newer(store, path / "checkpoints" / "last")


def _checkpoint_folder(source: Path) -> Path:
    from penstock.learner.checkpoints import checkpoint_format
    from penstock.learner.checkpoints.checkpoint_history import newest_whole

    if checkpoint_format.exists(source):
        return source
    if source.name == checkpoint_format.FILE and source.is_file():
        return source.parent
    if has_checkpoint(source):
        return newest_whole(source / "checkpoints" / "last")[0]
    raise UserError(
        f"--resume-from {source} is not a checkpoint; give a folder that contains a "
        f"{checkpoint_format.FILE}, such as RUN/checkpoints/best, that file, or the folder of a run"
    )


def differences(path: Path, config: Config, resume: Resume) -> str:
    """Compare the options of a run with those with which it is resumed.

    Args:
        path: folder of the run.
        config: the options with which it is resumed.
        resume: "no" compares nothing.

    Returns a sentence with the changed options; empty if there are none. Raises UserError if the
    run cannot be resumed with them.
    """
    if resume == "no" or not has_checkpoint(path):
        return ""
    try:
        before = load_run(path)
    except UserError:  # weights were copied here, or another version wrote it
        return ""

    if before.algo.name != config.algo.name:
        raise UserError(
            f"algo.name is {config.algo.name}, and the run in {path} was trained with "
            f"{before.algo.name}, whose network and optimizer state do not fit; set "
            f"algo.name={before.algo.name}, or run.dir to another folder"
        )

    old, new = dict(_flat(before.model_dump())), dict(_flat(config.model_dump()))
    changed = [
        f"{name} {_text(old.get(name))} -> {_text(new.get(name))}"
        for name in {**old, **new}
        if name != FOLDER and old.get(name) != new.get(name)
    ]
    if not changed:
        return ""
    more = [f"and {len(changed) - SHOWN} more"] if len(changed) > SHOWN else []
    return f"resumed with changed options: {', '.join(changed[:SHOWN] + more)}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
