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
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

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

# Keys of the file's metadata: a JSON object that describes the checkpoint, and the CRC-32 of its
# text.
HEAD = "penstock"
CHECKSUM = "crc32"

# Prefixes of tensors: parameters and buffers of the network, and all other arrays.
MODEL = "model/"
OTHER = "state/"


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


class _OpenFile(NamedTuple):
    """A checkpoint's file that is open, and whose metadata was verified."""

    file: Any
    """The open file, as `safe_open` returns it."""
    layout: ParamLayout
    """Layout of the network in the file."""
    head: Mapping[str, Any]
    """The JSON object of the file's metadata."""


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
    data = _to_bytes(checkpoint)

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


def _to_bytes(checkpoint: Checkpoint) -> bytes:
    """Returns the content of the file that holds ``checkpoint``."""
    parameters = checkpoint.layout.views(checkpoint.weights)
    tensors = {MODEL + name: array for name, array in parameters.items()}
    tensors |= {OTHER + name: array for name, array in checkpoint.arrays.items()}
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}

    head = {
        "format": FORMAT,
        "layout": checkpoint.layout.to_list(),
        "meta": checkpoint.meta,
        "checksums": {name: _checksum(name, array) for name, array in contiguous.items()},
    }
    # Files of earlier versions have no policy_id, and hold the policy `POLICY_ID`.
    if checkpoint.policy_id != POLICY_ID:
        head["policy_id"] = checkpoint.policy_id

    text = json.dumps(head)
    return to_bytes(contiguous, {HEAD: text, CHECKSUM: str(crc32(text.encode()))})


def load(folder: Path) -> Checkpoint:
    """Read a folder's checkpoint into memory.

    Raises:
        DamagedCheckpointError: if the file is not as `save` wrote it.
        UserError: if there is no checkpoint, if it is of a newer version, or if it does not fit the
            memory.
    """
    with _opened(folder) as opened:
        tensors = read_tensors(folder / FILE, opened.file)
        has_checksums = opened.head["format"] != WITHOUT_CHECKSUMS
        if has_checksums:
            _verify(tensors, opened.head["checksums"])

        return Checkpoint(
            layout=opened.layout,
            weights=_weights(tensors, opened.layout),
            arrays=_other_arrays(tensors),
            meta=opened.head["meta"],
            verified=has_checksums,
            policy_id=_policy_id(opened.head),
        )


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
    nbytes = path.stat().st_size
    free_nbytes = available_nbytes()
    if nbytes > free_nbytes:
        raise UserError(
            f"{path} has {nbytes:,} bytes, and {free_nbytes:,} bytes of memory are free; end other "
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
    with _opened(folder, layout) as opened:
        meta: Mapping[str, Any] = opened.head["meta"]
        return meta


@contextlib.contextmanager
def _opened(folder: Path, layout: ParamLayout | None = None) -> Iterator[_OpenFile]:
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
            head = _read_head(path, file.metadata() or {})
            stored_layout = ParamLayout.from_list(head["layout"])
            check_layout(path, stored_layout, layout or stored_layout)
            yield _OpenFile(file, stored_layout, head)
    except UserError:
        raise
    except (SafetensorError, *DAMAGE) as error:
        raise DamagedCheckpointError(
            f"{path} is damaged or no checkpoint of penstock ({error})"
        ) from error


def _read_head(path: Path, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Returns the JSON object of a file's metadata.

    Raises:
        UserError: if the file at ``path`` has another format than this version reads.
        LookupError, TypeError, ValueError: if the metadata is not as `save` wrote it.
    """
    text = metadata[HEAD]
    if CHECKSUM in metadata and str(crc32(text.encode())) != metadata[CHECKSUM]:
        raise ValueError("the checksum of its metadata is wrong")

    head: Mapping[str, Any] = json.loads(text)
    if head["format"] not in (WITHOUT_CHECKSUMS, FORMAT):
        raise UserError(
            f"{path} has format {head['format']}, this version reads {WITHOUT_CHECKSUMS} and "
            f"{FORMAT}; use the version of penstock that wrote it"
        )
    if head["format"] == FORMAT and CHECKSUM not in metadata:
        raise ValueError("the checksum of its metadata is missing")
    if not isinstance(head["meta"], dict):
        raise TypeError("its meta is no object")
    return head


def _policy_id(head: Mapping[str, Any]) -> int:
    """Returns the policy of a checkpoint. Raises ValueError for a value that is none."""
    policy_id = head.get("policy_id", POLICY_ID)
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


def check_layout(path: Path, stored: ParamLayout, expected: ParamLayout) -> None:
    """Check that the checkpoint at ``path`` is of this run's network.

    Args:
        path: names the checkpoint in the error.
        stored: layout of the network in the checkpoint.
        expected: layout of the run's network.

    Raises:
        UserError: with the first parameter that differs.
    """
    stored_layout = stored.filled
    run_layout = expected.filled
    if stored_layout == run_layout:
        return

    for stored_entry, run_entry in zip_longest(stored_layout.entries, run_layout.entries):
        if stored_entry != run_entry:
            raise UserError(
                f"{path} is of another network: it has {_describe(stored_entry)} where this one "
                f"has {_describe(run_entry)}; set env.*, model.* and algo.* as they were, or "
                "another run.dir"
            )


def _describe(entry: tuple[str, tuple[int, ...]] | None) -> str:
    """Returns name and shape of a parameter; "nothing more" for None."""
    return "nothing more" if entry is None else f"{entry[0]} {list(entry[1])}"


def _weights(tensors: Mapping[str, npt.NDArray[Any]], layout: ParamLayout) -> Float32:
    """Returns the flat vector of ``layout``.

    Raises LookupError where a parameter is missing, ValueError where it has another dtype or shape.
    """
    parameters = []
    for name, shape in layout.entries:
        array = tensors[MODEL + name]
        if array.shape != shape or array.dtype != np.float32:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, its layout says {shape}")
        parameters.append(array.ravel())
    return np.concatenate(parameters)


def _other_arrays(tensors: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Returns the tensors that are not of the network, by the names that they had in `save`."""
    return {
        name.removeprefix(OTHER): array for name, array in tensors.items() if name.startswith(OTHER)
    }
