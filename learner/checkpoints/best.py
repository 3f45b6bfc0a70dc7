"""`checkpoints/best` of a run that goes on: what is to be beaten, or out of the way.

Means of another game say nothing of this one, and weights of another network cannot be played here:
they are kept under another name. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.configs.same_env import same_game
from penstock.configs.sections import EnvConfig
from penstock.core.notes import note_logger
from penstock.core.params import ParamLayout
from penstock.learner.checkpoints import checkpoint_format

logger = note_logger(__name__)

ENV = "env"  # in a checkpoint's meta: the game that it was trained in
EVALUATION = "evaluation"  # there: how it was evaluated, with `ENV` and "mean", if it was


def best_meta(folder: Path, layout: ParamLayout, env: EnvConfig) -> Mapping[str, Any] | None:
    """The meta of the best checkpoint, in ``folder``; None where there is none. One that is of
    another game than ``env`` or another network, or damaged, is moved beside it."""
    if not checkpoint_format.exists(folder):
        return None
    try:
        meta = checkpoint_format.read_meta(folder, layout)
        if same_game(meta.get(EVALUATION, meta).get(ENV, {}), env):
            return meta
        why = f"{folder} is the best of another game (env.*)"
    except UserError as error:
        why = str(error)
    logger.info("%s; it is kept as %s", why, _set_aside(folder))
    return None


def _set_aside(folder: Path) -> Path:
    number = 1
    while (kept := folder.with_name(f"{folder.name}-before-{number}")).exists():
        number += 1
    return folder.rename(kept)
