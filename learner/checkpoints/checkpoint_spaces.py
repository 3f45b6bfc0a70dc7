"""The spaces on which a checkpoint was trained, and whether they are those of an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gymnasium import spaces

from penstock.configs.errors import UserError
from penstock.envs import EnvInfo
from penstock.envs.space_difference import SpaceDifference, difference
from penstock.envs.space_json import MOST_NBYTES, claimed_nbytes, from_json, to_json
from penstock.learner.checkpoints.checkpoint_format import (
    FILE,
    Checkpoint,
    DamagedCheckpointError,
)

# The key in a checkpoint's meta of the spaces of observations and actions.
SPACES = "spaces"


def spaces_as_json(info: EnvInfo) -> list[Any]:
    """Returns the spaces of observations and actions as JSON, for the meta."""
    return [to_json(space) for space in info.spaces]


def check_spaces(folder: Path, stored: Checkpoint, info: EnvInfo, env_id: str) -> spaces.Space[Any]:
    """Check that a checkpoint was trained on the spaces of an environment.

    A checkpoint of an earlier version, which has no spaces, is compared by the dtype of its
    observations; its network shows their number.

    Args:
        folder: where the checkpoint is.
        stored: its content.
        info: describes the environment.
        env_id: the environment's name, for the error.

    Returns:
        The observation space in training, whose parts may be in another order.

    Raises:
        UserError: with the first column that differs.
        DamagedCheckpointError: if the spaces in the checkpoint cannot be read.
    """
    path = folder / FILE
    if SPACES in stored.meta:
        observations, actions = stored_spaces(path, stored, info)
        differs = difference((observations, actions), info.spaces)
    else:
        observations = info.spaces[0]
        differs = _dtype_difference(stored, info)

    if differs is not None:
        raise UserError(
            f"{path} is of another network or environment: {differs.column} {differs.trained} in "
            f"training, {differs.present} in {env_id} now; set env.id and model.* as they were, "
            "correct the environment, or set another run.dir"
        )
    return observations


def stored_spaces(
    path: Path, stored: Checkpoint, info: EnvInfo
) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Returns the spaces of observations and actions on which a checkpoint was trained.

    Those of ``info``, where a checkpoint of an earlier version has none. ``path`` is the place of
    the checkpoint, for messages. Raises DamagedCheckpointError if they cannot be read.
    """
    if SPACES not in stored.meta:
        return info.spaces
    # The same spaces take as much memory as the environment's, which may be more.
    most_nbytes = max(MOST_NBYTES, *map(claimed_nbytes, spaces_as_json(info)))
    try:
        observations, actions = (from_json(encoded, most_nbytes) for encoded in stored.meta[SPACES])
    except (LookupError, TypeError, ValueError, AssertionError) as error:
        raise DamagedCheckpointError(f"{path} has spaces that cannot be read") from error
    return observations, actions


def _dtype_difference(stored: Checkpoint, info: EnvInfo) -> SpaceDifference | None:
    """Compare the dtype of observations in a checkpoint with the environment's.

    Returns None if they are the same, or the checkpoint does not tell its own.
    """
    columns = stored.meta.get("spec", {}).get("columns", [])
    trained_dtype = next((dtype for name, dtype, *_ in columns if name == "obs"), None)

    # Slots hold all kinds of floats as float32.
    dtype = info.observation_space.dtype
    present_dtype = "<f4" if dtype.kind == "f" else dtype.str
    if trained_dtype in (None, present_dtype):
        return None
    return SpaceDifference(
        "observations", trained=f"of dtype {trained_dtype}", present=f"of dtype {present_dtype}"
    )
