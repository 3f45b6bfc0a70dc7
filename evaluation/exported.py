"""A policy in one file: weights, network and spaces; neither the run nor the environment is needed.

It is a safetensors file: the network's tensors by name, and JSON in its metadata. It
contains no code, so a file from an untrusted source can be read. A custom network (`model.entry`)
is named in it and must be importable. Nothing makes the environment that it names but evaluation,
which takes registered ones only.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.numpy import save as to_bytes

from penstock.algos.samples import network_shape
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.params import Float32, ParamLayout
from penstock.envs import EnvInfo
from penstock.envs.packing import Packer
from penstock.envs.space_json import from_json, to_json
from penstock.envs.vector_env import checked_actions
from penstock.learner.checkpoints.checkpoint_format import read_tensors

KEY = "penstock_policy"
FORMAT = 1
SECTIONS = ("env", "algo", "model", "actors", "eval")  # of the config that are stored

Spaces = tuple[spaces.Space[Any], spaces.Space[Any]]


class Exported(NamedTuple):
    """What a file holds."""

    config: Config
    spaces: Spaces
    """Of observations and of actions, as the environment has them."""
    info: EnvInfo
    weights: Float32
    play: Mapping[str, Any] | None
    """How to play it, as `estimates.evidence`; None if the run was not evaluated."""


def write(
    path: Path,
    config: Config,
    own: Spaces,
    info: EnvInfo,
    weights: Float32,
    play: Mapping[str, Any] | None = None,
    half: bool = False,
) -> int:
    """Write or replace a file; its size in bytes. With ``half`` parameters are stored as float16,
    but statistics of observations as float32. Raises UserError."""
    if not path.name or path.is_dir():
        example = path / "agent.safetensors"
        raise UserError(f"{path} is a folder; name a file in it, such as {example}")
    layout = network_shape(config, info).layout
    about = {
        "format": FORMAT,
        "config": config.model_dump(mode="json", include=set(SECTIONS)),
        "spaces": [to_json(space) for space in own],
        "layout": layout.to_list(),
        "play": play,
    }
    tensors = {
        name: np.ascontiguousarray(array, _stored_dtype(name, half))
        for name, array in layout.views(weights).items()
    }
    if not all(np.isfinite(array).all() for array in tensors.values()):
        raise UserError(
            f"{path}: a number of the policy is not finite{' as a 16-bit float' if half else ''}; "
            + ("leave out --half" if half else "export another checkpoint")
        )
    data = to_bytes(tensors, {KEY: json.dumps(about)})
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror}; name another file") from error
    return len(data)


def read(path: Path) -> Exported:
    """What `write` wrote. Raises UserError for any other file."""
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {})[KEY])
            tensors = read_tensors(path, file)
        if about["format"] != FORMAT:
            raise UserError(
                f"{path} has format {about['format']}, this version reads {FORMAT}; export it again"
            )
        config = Config.model_validate(about["config"])
        observations, actions = map(from_json, about["spaces"])
        packer = Packer(config.env.id, observations)
        choices = checked_actions(config.env.id, actions)
        own = observations, actions
        info = EnvInfo(packer.space, choices, 1, f"of {path}", packer.parts, own)
        layout = network_shape(config, info).layout
        if layout != ParamLayout.from_list(about["layout"]):
            raise ValueError("its network is built otherwise in this version")
        parts = [_checked(name, tensors[name], shape) for name, shape in layout.entries]
        play = about.get("play")  # absent in files of earlier versions
        if play is not None and not isinstance(play, dict):
            raise TypeError("its way to play is no object")
        weights = np.concatenate(parts)
        return Exported(config, own, info, weights, play)
    except UserError:
        raise
    except Exception as error:  # spaces and their checks raise what they like, assertions too
        what = "its config is of another version" if isinstance(error, ValidationError) else error
        raise UserError(
            f"{path} is damaged or no policy that penstock has exported ({what}); make one with "
            "penstock export RUN FILE, or give the folder of a run"
        ) from error


def _stored_dtype(name: str, half: bool) -> type[np.float16] | type[np.float32]:
    return np.float16 if half and not name.startswith("normalizer.") else np.float32


def _checked(name: str, array: npt.NDArray[Any], shape: tuple[int, ...]) -> Float32:
    if array.shape != shape or array.dtype not in (np.float16, np.float32):
        raise ValueError(f"{name} is {array.dtype}{[*array.shape]}, its network says {[*shape]}")
    return array.ravel().astype(np.float32)
