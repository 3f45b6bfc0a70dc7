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
from penstock.configs.games import GAMES_ID
from penstock.configs.load import CONFIG_FILE, Resolved, load_run, presets, resolve_target
from penstock.configs.model import ModelConfig
from penstock.configs.schema import Config
from penstock.core import used_names
from penstock.core.run_dir import Resume, has_checkpoint

MAX_CHANGES = 4
"""Most changed options in one sentence."""
FOLDER = "run.dir"
"""The option that is never a change: the same folder is written in many ways."""
MAX_VALUE_LENGTH = 40
"""Most characters of a value in a sentence."""


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
    if isinstance(target, str) and target != GAMES_ID and target not in presets():
        folder = Path(target)
        if os.path.isdir(folder):  # `Path.is_dir` raises for a long name
            _check_run_folder(target, folder, resume, source)
            target = str(folder / CONFIG_FILE)
            overrides = [f"run.dir={folder}", *overrides]

    resolved = resolve_target(target, overrides)
    if source is None:
        check_run_dir_given(resolved.config, resume)
    stored_model = _stored_model(resolved.config.run.dir, resume, source)
    if stored_model is not None:
        reading = _reading_options(stored_model)
        if reading != _reading_options(resolved.config.model):
            resolved = resolve_target(target, [*reading, *overrides])
    return resolved


def _check_run_folder(target: str, folder: Path, resume: Resume, source: str | None) -> None:
    """Raise UserError if ``folder``, which the user has named as the ``target``, is not that of a
    run that may be resumed."""
    config_file = folder / CONFIG_FILE
    if not config_file.is_file():
        raise UserError(
            f"{target} is a folder without a {CONFIG_FILE}, so it is not a run; give the "
            "folder of a run, or a preset, a YAML file, a gymnasium id or module:function"
        )
    if resume == "no" and source is None:
        raise UserError(
            f"{target} already holds a run; resume it with --resume auto, or give "
            f"{config_file} run.dir=OTHER for a new run with the same options"
        )

    # The config of a folder may name code, which must be allowed or used before.
    remedy = f"train {config_file} run.dir={folder}"
    used_names.check(references_in_training(load_run(folder)), (), str(folder), remedy)


def _reading_options(model: ModelConfig) -> list[str]:
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


def check_run_dir_given(config: Config, resume: Resume) -> None:
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


def start_from_checkpoint(path: Path, folder: Path) -> str:
    """Make the checkpoint in ``folder`` the newest of the run in ``path``.

    Returns a note about it. Raises UserError.
    """
    from penstock.learner.checkpoints import checkpoint_history

    checkpoint = checkpoint_history.make_newest(path / "checkpoints" / "last", folder)
    learner_steps = checkpoint.meta.get("progress", {}).get("learner_steps", 0)
    return f"starts from {folder}, after {learner_steps:,} optimizer steps"


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
    """The folder of the checkpoint that a ``source`` of `find_source` means. Raises UserError."""
    from penstock.learner.checkpoints import checkpoint_format
    from penstock.learner.checkpoints.checkpoint_history import newest_undamaged

    if checkpoint_format.exists(source):
        return source
    if source.name == checkpoint_format.FILE and source.is_file():
        return source.parent
    if has_checkpoint(source):
        folder, _, _ = newest_undamaged(source / "checkpoints" / "last")
        return folder
    raise UserError(
        f"--resume-from {source} is not a checkpoint; give a folder that contains a "
        f"{checkpoint_format.FILE}, such as RUN/checkpoints/best, that file, or the folder of a run"
    )


def describe_changed_options(path: Path, config: Config, resume: Resume) -> str:
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
        previous_config = load_run(path)
    except UserError:  # weights were copied here, or another version wrote it
        return ""

    if previous_config.algo.name != config.algo.name:
        raise UserError(
            f"algo.name is {config.algo.name}, and the run in {path} was trained with "
            f"{previous_config.algo.name}, whose network and optimizer state do not fit; set "
            f"algo.name={previous_config.algo.name}, or run.dir to another folder"
        )

    previous = dict(_flatten(previous_config.model_dump()))
    present = dict(_flatten(config.model_dump()))
    changes: list[str] = []
    for name in {**previous, **present}:
        old_value = previous.get(name)
        new_value = present.get(name)
        if name != FOLDER and old_value != new_value:
            changes.append(f"{name} {_short_text(old_value)} -> {_short_text(new_value)}")
    if not changes:
        return ""
    shown = changes[:MAX_CHANGES]
    if len(changes) > MAX_CHANGES:
        shown.append(f"and {len(changes) - MAX_CHANGES} more")
    return f"resumed with changed options: {', '.join(shown)}"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the names of all options with their values, such as "learner.lr"."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short_text(value: Any) -> str:
    """A value of an option, shortened to `MAX_VALUE_LENGTH`."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."
