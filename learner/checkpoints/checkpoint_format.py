"""Checkpoints: one safetensors file, `checkpoint.safetensors`, in a folder of its own.

A checkpoint appears complete or not at all: it is written under another name, synced and renamed. A
failure on the way leaves the previous one untouched. Tensors are the network's parameters and
buffers by name and any other arrays; other values are JSON in the file's metadata, and so is a
CRC-32 of each tensor with its name, type and shape. A second entry of the metadata is the CRC-32 of
that JSON. Every read verifies all data that it returns: a flipped bit on a disk is refused,
wherever it lies. Format 1, of earlier versions, has no checksums and can still be read.

Imports no torch, so that an evaluation in numpy needs none.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from penstock.configs.errors import UserError
from penstock.core.files import DAMAGE, open_private, sync_folder
from penstock.core.params import MAX_POLICY_ID, POLICY_ID, Float32, ParamLayout
from penstock.core.run_dir import CHECKPOINT
from penstock.transport.checksum import crc32
from penstock.transport.shm.arena import available_nbytes

FILE = CHECKPOINT
TEMPORARY = f".{FILE}.tmp"
FORMAT = 2
WITHOUT_CHECKSUMS = 1  # the format of earlier versions
ABOUT, CHECKSUM = "penstock", "crc32"  # keys of the file's metadata
MODEL, OTHER = "model/", "state/"


class DamagedCheckpointError(UserError):
    """The file cannot be read as a checkpoint, or a checksum in it is wrong.

    ``fault`` is the message without the next step.
    """

    def __init__(self, fault: str) -> None:
        super().__init__(
            f"{fault}; take another one of the run: checkpoints/last, checkpoints/best or one of "
            "checkpoints/step-N"
        )
        self.fault = fault


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint."""

    layout: ParamLayout
    """Names and shapes of the network's parameters and buffers."""
    weights: Float32
    """The flat vector of ``layout``."""
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Other arrays by name, such as the optimizer's."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Other values, as JSON."""
    verified: bool = True
    """Whether the file had checksums, which files of an older version have not."""
    policy_id: int = POLICY_ID
    """The policy whose weights these are."""


def exists(folder: Path) -> bool:
    """Whether the folder holds a checkpoint."""
    return (folder / FILE).is_file()


def save(folder: Path, checkpoint: Checkpoint, temporary: str = TEMPORARY) -> None:
    """Replace the folder's checkpoint.

    Args:
        folder: made if there is none.
        checkpoint: its new content.
        temporary: name of the file until it is complete; of two processes that save into one folder
            each has another.

    Raises:
        UserError: if the file cannot be written. The old checkpoint is complete then.
    """
    parameters = checkpoint.layout.views(checkpoint.weights)
    tensors = {MODEL + name: array for name, array in parameters.items()}
    tensors |= {OTHER + name: array for name, array in checkpoint.arrays.items()}
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    about = {
        "format": FORMAT,
        "layout": checkpoint.layout.to_list(),
        "meta": checkpoint.meta,
        "checksums": {name: _checksum(name, array) for name, array in contiguous.items()},
    }
    if checkpoint.policy_id != POLICY_ID:  # absent: POLICY_ID, as in files of earlier versions
        about["policy_id"] = checkpoint.policy_id
    text = json.dumps(about)
    data = to_bytes(contiguous, {ABOUT: text, CHECKSUM: str(crc32(text.encode()))})
    try:
        with replacing(folder, temporary) as path, open(path, "xb", opener=open_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"checkpoint {folder / FILE} of {len(data)} bytes could not be written "
            f"({error.strerror}), and any before it is whole; free some space or set run.dir to "
            "another disk"
        ) from error


def load(folder: Path) -> Checkpoint:
    """Read a folder's checkpoint into memory.

    Raises:
        DamagedCheckpointError: if the file is not as `save` wrote it.
        UserError: if there is no checkpoint, if it is of a newer version, or if it does not fit the
            memory.
    """
    with _opened(folder, None) as (file, stored, about):
        tensors = read_tensors(folder / FILE, file)
        verified = about["format"] != WITHOUT_CHECKSUMS
        if verified:
            _verify(tensors, about["checksums"])
        weights, others = _weights(tensors, stored), _others(tensors)
        return Checkpoint(stored, weights, others, about["meta"], verified, _policy_id(about))


def read_tensors(path: Path, file: Any) -> dict[str, npt.NDArray[Any]]:
    """Read all tensors of a file of safetensors.

    Args:
        path: where the file is.
        file: the same file, opened by `safe_open`.

    Returns:
        The tensors by name.

    Raises:
        UserError: if the file does not fit the memory, such as a sparse one, which takes no room on
            the disk. It may be whole. For such tensors safetensors raises what is no `Exception`.
    """
    nbytes, free = path.stat().st_size, available_nbytes()
    if nbytes > free:
        raise UserError(
            f"{path} has {nbytes:,} bytes, and {free:,} bytes of memory are free; end other "
            "programs, or take another file"
        )
    return {name: file.get_tensor(name) for name in list(file.keys())}


def read_meta(folder: Path, layout: ParamLayout | None = None) -> Mapping[str, Any]:
    """Read the ``meta`` of a folder's checkpoint, from the head of its file.

    Raises:
        DamagedCheckpointError: if that head is damaged. The rest is not read.
        UserError: if there is no checkpoint, if it is of a newer version, or if it is of another
            network than ``layout``.
    """
    with _opened(folder, layout) as (_, _, about):
        meta: Mapping[str, Any] = about["meta"]
        return meta


@contextlib.contextmanager
def _opened(
    folder: Path, layout: ParamLayout | None
) -> Iterator[tuple[Any, ParamLayout, Mapping[str, Any]]]:
    """Open a folder's checkpoint for the ``with`` block.

    Errors that a damaged file causes in the block become DamagedCheckpointError. Raises as
    `read_meta`.
    """
    path = folder / FILE
    if not path.is_file():
        raise UserError(
            f"{folder} holds no {FILE}; give the folder of a run that has saved a checkpoint"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            about = _about(path, file.metadata() or {})
            stored = ParamLayout.from_list(about["layout"])
            check_layout(path, stored, layout or stored)
            yield file, stored, about
    except UserError:
        raise
    except (SafetensorError, *DAMAGE) as error:
        raise DamagedCheckpointError(
            f"{path} is damaged or no checkpoint of penstock ({error})"
        ) from error


def _about(path: Path, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """The JSON of the file's metadata, with a verified checksum."""
    text = metadata[ABOUT]
    if CHECKSUM in metadata and str(crc32(text.encode())) != metadata[CHECKSUM]:
        raise ValueError("the checksum of its metadata is wrong")
    about: Mapping[str, Any] = json.loads(text)
    if about["format"] not in (WITHOUT_CHECKSUMS, FORMAT):
        raise UserError(
            f"{path} has format {about['format']}, this version reads {WITHOUT_CHECKSUMS} and "
            f"{FORMAT}; use the version of penstock that wrote it"
        )
    if about["format"] == FORMAT and CHECKSUM not in metadata:
        raise ValueError("the checksum of its metadata is missing")
    if not isinstance(about["meta"], dict):
        raise TypeError("its meta is no object")
    return about


def _policy_id(about: Mapping[str, Any]) -> int:
    policy_id = about.get("policy_id", POLICY_ID)
    if type(policy_id) is not int or not 0 <= policy_id <= MAX_POLICY_ID:
        raise ValueError(f"its policy_id is {policy_id!r}")
    return policy_id


def _checksum(name: str, array: npt.NDArray[Any]) -> int:
    """Returns the checksum of a tensor's bytes, name, type and shape."""
    head = f"{name} {array.dtype.str} {array.shape}".encode()
    return int(crc32(array.reshape(-1).view(np.uint8), crc32(head)))


def _verify(tensors: Mapping[str, npt.NDArray[Any]], checksums: Mapping[str, int]) -> None:
    """Raise ValueError unless ``tensors`` are those of ``checksums``, unchanged."""
    if tensors.keys() != checksums.keys():
        raise ValueError("its tensors are not those of its metadata")
    for name, array in tensors.items():
        if _checksum(name, array) != checksums[name]:
            raise ValueError(f"the checksum of {name} is wrong")


@contextlib.contextmanager
def replacing(folder: Path, temporary: str = TEMPORARY) -> Iterator[Path]:
    """Replace the folder's checkpoint by the file that the ``with`` block makes.

    The block makes it at the yielded path. The folder is made if there is none. After an exception
    in the block the old checkpoint is left complete.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / temporary
    try:
        path.unlink(missing_ok=True)  # after a crash it may be a second name of a checkpoint
        yield path
        path.replace(folder / FILE)
    finally:
        # The file is there after an exception, and after a rename between two names of one file,
        # which does nothing.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    sync_folder(folder)


def check_layout(path: Path, stored: ParamLayout, wanted: ParamLayout) -> None:
    """Check that the checkpoint at ``path`` is of this run's network.

    Args:
        path: names the checkpoint in the error.
        stored: layout of the network in the checkpoint.
        wanted: layout of the run's network.

    Raises:
        UserError: with the first parameter that differs.
    """
    stored, wanted = stored.filled, wanted.filled
    if stored == wanted:
        return
    rows = max(len(stored.entries), len(wanted.entries))
    for i in range(rows):
        ours, theirs = (dict(enumerate(x.entries)).get(i) for x in (wanted, stored))
        if ours != theirs:
            raise UserError(
                f"{path} is of another network: it has {_describe(theirs)} where this one has "
                f"{_describe(ours)}; set env.id and model.* as they were, or another run.dir"
            )


def _describe(entry: tuple[str, tuple[int, ...]] | None) -> str:
    """Returns name and shape of a parameter; "nothing more" for None."""
    return "nothing more" if entry is None else f"{entry[0]} {list(entry[1])}"


def _weights(tensors: Mapping[str, npt.NDArray[Any]], layout: ParamLayout) -> Float32:
    """Returns the flat vector of ``layout``.

    Raises LookupError where a parameter is missing, ValueError where it has another dtype or shape.
    """
    parts = []
    for name, shape in layout.entries:
        part = tensors[MODEL + name]
        if part.shape != shape or part.dtype != np.float32:
            raise ValueError(f"{name} is {part.dtype}{list(part.shape)}, its layout says {shape}")
        parts.append(part.ravel())
    return np.concatenate(parts)


def _others(tensors: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    return {k.removeprefix(OTHER): v for k, v in tensors.items() if k.startswith(OTHER)}
