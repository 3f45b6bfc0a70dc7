"""A policy in one file: weights, network and spaces; neither the run nor the environment is needed.

It is a safetensors file: the network's tensors by name, and JSON in its metadata.

It may come from a stranger. It contains no code, and what it names is imported only if the caller
allows that name. The sizes that it claims are compared with those that it has before any memory of
these sizes is taken.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
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
from penstock.configs import code_references
from penstock.configs.errors import UserError
from penstock.configs.model import complete_stored
from penstock.configs.schema import Config
from penstock.core.params import Float32, ParamLayout
from penstock.envs import EnvInfo
from penstock.envs.space_json import MOST_NBYTES, from_json, to_json
from penstock.learner.checkpoints.checkpoint_format import read_tensors

KEY = "penstock_policy"
FORMAT = 1
SUFFIX = ".safetensors"
ONNX_SUFFIX = ".onnx"
SUFFIXES = (SUFFIX, ONNX_SUFFIX)
"""Of the formats that `penstock export` writes."""
SECTIONS = ("env", "algo", "model", "actors", "eval")
"""Sections of the config that are stored."""
# Memory that a space may take for each byte of a large file: a network of ours has at least one
# parameter, of 2 bytes or 4, for each number that it reads.
SPACE_NBYTES_PER_BYTE = 16

Spaces = tuple[spaces.Space[Any], spaces.Space[Any]]


class Exported(NamedTuple):
    """What a file of an exported policy holds."""

    config: Config
    spaces: Spaces
    """Spaces of observations and of actions, as the environment has them."""
    info: EnvInfo
    weights: Float32
    """Flat vector of the network's parameters."""
    play: Mapping[str, Any] | None
    """How to play it, as `estimates.evidence`; None if the run was not evaluated."""


def write(
    path: Path,
    config: Config,
    env_spaces: Spaces,
    info: EnvInfo,
    weights: Float32,
    *,
    play: Mapping[str, Any] | None = None,
    half: bool = False,
) -> int:
    """Write a policy to a file, or replace that.

    Args:
        path: of the file, which ends in `SUFFIX`.
        config: the config of the run.
        env_spaces: spaces of observations and of actions, as the environment has them.
        info: the environment as Penstock packs its observations and actions.
        weights: flat vector of the network's parameters.
        play: how to play it (`estimates.evidence`).
        half: whether parameters are stored as float16. Statistics of observations stay float32.

    Returns: the size of the file in bytes.

    Raises:
        UserError: if it cannot be written, or a number of the policy is not finite.
    """
    check_path(path, SUFFIX)
    layout = network_shape(config, info).layout
    about = {
        "format": FORMAT,
        "config": config.model_dump(mode="json", include=set(SECTIONS)),
        "spaces": [to_json(space) for space in env_spaces],
        "layout": layout.to_list(),
        "play": play,
    }
    tensors = {
        name: np.ascontiguousarray(array, _stored_dtype(name, half))
        for name, array in layout.views(weights).items()
    }
    if not all(np.isfinite(array).all() for array in tensors.values()):
        precision = " as a 16-bit float" if half else ""
        advice = "leave out --half" if half else "export another checkpoint"
        raise UserError(f"{path}: a number of the policy is not finite{precision}; {advice}")

    data = to_bytes(tensors, {KEY: json.dumps(about)})
    replace_file(path, data)
    return len(data)


def check_path(path: Path, suffix: str) -> None:
    """Raise UserError unless ``path`` names a file that ends in ``suffix``, one of `SUFFIXES`."""
    if not path.name or path.is_dir():
        example = path / f"agent{suffix}"
        raise UserError(f"{path} is a folder; name a file in it, such as {example}")
    if path.suffix.lower() == suffix:
        return

    if path.suffix.lower() in SUFFIXES:
        raise UserError(
            f"{path} does not end in {suffix}, and only penstock export writes other formats; "
            f"name the file {path.with_suffix(suffix).name}, or run penstock export RUN {path.name}"
        )
    names = " or ".join(path.with_suffix(known).name for known in SUFFIXES)
    raise UserError(
        f"{path} ends in neither of {' and '.join(SUFFIXES)}, the formats of an exported policy; "
        f"name the file {names}"
    )


def replace_file(path: Path, data: bytes) -> None:
    """Write a file at once, or replace that; UserError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror}; name another file") from error


def read(path: Path, allow: Sequence[str] = (), *, plays: bool = False, way: str = "") -> Exported:
    """Read a file that `write` wrote.

    Args:
        path: of the file.
        allow: patterns of names in the file that may be imported (`code_references.not_allowed`).
        plays: whether its environment will be made, so that the names in `env` count too.
        way: how to allow a name, where that is not by `--allow`.

    Raises:
        UserError: for any other file, and for a name that is not allowed.
    """
    if path.suffix.lower() == ONNX_SUFFIX:
        raise UserError(
            f"{path} is an ONNX file, which penstock only writes; give the folder of the run, or a "
            f"{SUFFIX} file"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {})[KEY])
            tensors = read_tensors(path, file)
        return _decoded(path, about, tensors, allow, plays=plays, way=way)
    except UserError:
        raise
    except Exception as error:
        # Spaces and their checks raise what they like, assertions too.
        fault: object = error
        if isinstance(error, ValidationError):
            fault = "its config is of another version"
        raise UserError(
            f"{path} is damaged or no policy that penstock has exported ({fault}); make one with "
            "penstock export RUN FILE, or give the folder of a run"
        ) from error


def _decoded(
    path: Path,
    about: dict[str, Any],
    tensors: Mapping[str, npt.NDArray[Any]],
    allow: Sequence[str],
    *,
    plays: bool,
    way: str,
) -> Exported:
    """Returns the policy of a file, from its metadata ``about`` and its ``tensors``.

    Raises UserError for another format and for names that are not allowed. Any other exception
    means that the file is damaged.
    """
    if about["format"] != FORMAT:
        raise UserError(
            f"{path} has format {about['format']!r:.80}, this version reads {FORMAT}; "
            "export it again"
        )

    # The tensors are those that the layout names, with their shapes.
    layout = ParamLayout.from_list(about["layout"])
    if tensors.keys() != dict(layout.entries).keys():
        raise ValueError("its tensors are not those of its layout")
    for name, shape in layout.entries:
        _check_tensor(name, tensors[name], shape)
    play = about.get("play")  # absent in files of earlier versions
    if play is not None and not isinstance(play, dict):
        raise TypeError("its way to play is no object")

    # Names are checked before the network is built, which imports what they name.
    complete_stored(about["config"])
    config = Config.model_validate(about["config"])
    _check_names(path, config, allow, plays=plays, way=way)

    # Spaces may take as much memory as a network of this size could need.
    most_nbytes = max(MOST_NBYTES, SPACE_NBYTES_PER_BYTE * path.stat().st_size)
    observations, actions = (from_json(encoded, most_nbytes) for encoded in about["spaces"])
    env_spaces = observations, actions
    env = config.env
    info = EnvInfo.of_spaces(env.id, env_spaces, 1, f"of {path}", env.embed_above)

    if network_shape(config, info).layout.filled != layout.filled:
        raise ValueError("its network is built otherwise in this version")
    parts = [tensors[name].ravel().astype(np.float32) for name, _ in layout.entries]
    return Exported(config, env_spaces, info, weights=np.concatenate(parts), play=play)


def _stored_dtype(name: str, half: bool) -> type[np.float16] | type[np.float32]:
    """Returns the type of a stored tensor: statistics of observations are never float16."""
    return np.float16 if half and not name.startswith("normalizer.") else np.float32


def _check_tensor(name: str, array: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError for a tensor of another shape, of no type that is stored, or not finite."""
    if array.shape != shape or array.dtype not in (np.float16, np.float32):
        raise ValueError(f"{name} is {array.dtype}{[*array.shape]}, its layout says {[*shape]}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has numbers that are not finite")


def _check_names(
    path: Path, config: Config, allow: Sequence[str], *, plays: bool, way: str
) -> None:
    """Raise UserError for a name in ``config`` that may not be imported.

    The environment's own names count only if it is made (``plays``). ``way`` is that of `read`.
    """
    named = code_references.references(config)
    if not plays:
        named = [reference for reference in named if not reference.option.startswith("env.")]
    for reference in code_references.not_allowed(named, allow):
        why = "and a policy file must not choose what is run or opened here"
        raise code_references.refusal(str(path), reference, why, way)
