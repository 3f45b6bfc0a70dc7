"""How the options of a resume differ from those that the run had."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.configs.load import load_run
from penstock.configs.schema import Config
from penstock.launch.folders import Resume

SHOWN = 4
FOLDER = "run.dir"  # written in many ways, and found
LONGEST = 40  # characters of a value


def check_folder_named(config: Config, resume: Resume) -> None:
    """Raise UserError where a run in a new folder is to be resumed."""
    if resume != "no" and config.run.dir is None:
        raise UserError(
            f"--resume {resume} needs the folder of the run, and a new one would be made; name the "
            "folder with run.dir="
        )


def differences(path: Path, config: Config, resume: Resume) -> str:
    """A sentence on what ``config`` changes of the run in ``path``; empty where there is nothing to
    tell. Raises UserError where that run cannot go on so."""
    if resume == "no" or not (path / "checkpoints" / "last").exists():
        return ""
    try:
        before = load_run(path)
    except UserError:  # weights were copied here, or another version wrote it
        return ""
    if before.algo.name != config.algo.name:
        raise UserError(
            f"algo.name is {config.algo.name}, and the run in {path} was trained by "
            f"{before.algo.name}, whose network and optimizer state are not its own; set "
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
    return f"resumed with other options than before: {', '.join(changed[:SHOWN] + more)}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
