"""A policy as an ONNX file, for programs in which neither Python nor Penstock runs.

The graph is that of `policy_module.PolicyModule`, which torch's exporter writes, for any number of
rows. What its inputs and outputs are stands in the file too, as JSON in `metadata_props`.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import penstock
from penstock.configs.errors import UserError
from penstock.envs.space_json import to_json
from penstock.evaluation.estimates import way_of
from penstock.learner.checkpoints.exported import ONNX_SUFFIX, Exported, check_path, replace_file

if TYPE_CHECKING:
    from torch import Tensor
    from torch.onnx import ONNXProgram

    from penstock.evaluation.policy_module import GraphArray, PolicyModule

KEY = "penstock"
FORMAT = 1
OPSET = 20
LEAST_TORCH = "2.9"  # the first whose exporter traces networks by default as it is used here
# A larger file would need a second one for its parameters.
MOST_NBYTES = 2**31 - 2**20
ROWS = 2  # of the batch that the network is traced with


class OnnxFile(NamedTuple):
    """A file that was written."""

    nbytes: int
    inputs: tuple[GraphArray, ...]
    outputs: tuple[GraphArray, ...]


def write(
    path: Path, policy: Exported, *, sampled: bool = False, program: bool = False
) -> OnnxFile:
    """Write a policy to a file, or replace that.

    Args:
        path: of the file, which ends in `ONNX_SUFFIX`.
        policy: what is written.
        sampled: whether the graph also draws an action, by an input "noise".
        program: whether the parameters are an input, "weights", instead of a part of the file.

    Raises:
        UserError: if it cannot be written, or the exporter refuses the policy.
    """
    check_path(path, ONNX_SUFFIX)
    _check_installed()
    nbytes = 0 if program else policy.weights.nbytes
    if nbytes > MOST_NBYTES:
        raise UserError(
            f"{path} would have {nbytes:,} bytes of parameters, and an ONNX file holds at most "
            f"{MOST_NBYTES:,}; set --program, with which they are an input"
        )

    from penstock.evaluation.policy_module import PolicyModule

    module = PolicyModule(
        policy.config, policy.info, policy.weights, sampled=sampled, program=program
    )
    model = _graph_of(module, policy.config.model.entry)
    about = model.metadata_props.add()
    about.key = KEY
    about.value = json.dumps(metadata(policy, module))

    data: bytes = model.SerializeToString()
    replace_file(path, data)
    return OnnxFile(len(data), module.inputs, module.outputs)


def metadata(policy: Exported, module: PolicyModule) -> dict[str, Any]:
    """Returns what a file says of its policy, JSON-ready."""
    about = {
        "format": FORMAT,
        "penstock": penstock.__version__,
        "env": policy.config.env.id,
        "kwargs": dict(policy.config.env.kwargs),
        "wrappers": [str(wrapper) for wrapper in policy.config.env.wrappers],
        "algo": policy.config.algo.name,
        "spaces": [to_json(space) for space in policy.spaces],
        "inputs": [described(array) for array in module.inputs],
        "outputs": [described(array) for array in module.outputs],
        "play": way_of(policy.play),
        "state_size": module.state_size,
    }
    if any(array.name == "weights" for array in module.inputs):
        about["layout"] = module.layout.to_list()
    return about


def described(array: GraphArray) -> dict[str, Any]:
    """Returns an input or an output, JSON-ready."""
    leading = ["batch"] if array.has_batch else []
    return {
        "name": array.name,
        "dtype": array.dtype,
        "shape": [*leading, *array.shape],
        "meaning": array.meaning,
    }


def _check_installed() -> None:
    """Raise UserError where torch is too old, or what its exporter needs is missing."""
    import torch

    # torch compares its version with a text number by number, so 2.10 is later than 2.9.
    if torch.__version__ < LEAST_TORCH:
        raise UserError(
            f"torch {torch.__version__} is installed, and ONNX files need {LEAST_TORCH} or later; "
            f"run: pip install 'torch>={LEAST_TORCH}', or export a .safetensors file"
        )
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"ONNX files need {error.name}, which is not installed; run: "
            "pip install 'penstock[onnx]', or export a .safetensors file"
        ) from error


def _graph_of(module: PolicyModule, entry: str | None) -> Any:
    """Returns the graph of a module as an `onnx.ModelProto`.

    ``entry`` is the `model.entry` of its network, for the message of the UserError if torch's
    exporter refuses the module.
    """
    import torch
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    inputs = tuple(array.zeros(ROWS) for array in module.inputs)
    batch = torch.export.Dim("batch")
    shapes = (tuple({0: batch} if array.has_batch else {} for array in module.inputs),)
    try:
        with _quiet(), torch.no_grad():
            program = _exported(module, module, inputs, shapes)
            if not _takes_any_batch(program):
                # A network of the user's reads `len` of a tensor, perhaps. The exporter's usual way
                # takes it for a constant; the other one, which fails more often, does not.
                traced = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=True)
                program = _exported(traced, module, (), None)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = str(cause).strip().partition("\n")[0][:200]
        raise _refusal(entry, f"{type(cause).__name__}: {text}") from error
    if not _takes_any_batch(program):
        raise _refusal(
            entry, "its number of rows is a constant there, as len(x) is; x.shape[0] is not"
        )

    # Nodes carry the lines of code that they come from, with paths of this machine.
    ClearMetadataAndDocStringPass()(program.model)
    return program.model_proto


def _exported(
    source: Any, module: PolicyModule, inputs: tuple[Tensor, ...], shapes: Any
) -> ONNXProgram:
    """Returns the graph of ``source``, the module or what was traced of it, with its names."""
    import torch

    program = torch.onnx.export(
        source,
        inputs,
        dynamo=True,
        opset_version=OPSET,
        input_names=[array.name for array in module.inputs],
        output_names=[array.name for array in module.outputs],
        dynamic_shapes=shapes,
        external_data=False,
        verbose=False,
    )
    assert program is not None
    return program


def _takes_any_batch(program: ONNXProgram) -> bool:
    """Returns whether a graph computes any number of rows, not only those it was traced with."""
    output_shapes = [output.shape for output in program.model.graph.outputs]
    return not any(shape is None or isinstance(shape[0], int) for shape in output_shapes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what the exporter writes: warnings of its own calls, and graphs that it could not
    trace, whose errors it raises as well."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _refusal(entry: str | None, reason: str) -> UserError:
    """Returns the error for a network that torch's exporter refuses; ``entry`` is that of
    `_graph_of`."""
    network = "the network" if entry is None else f"model.entry {entry}"
    way_out = "" if entry is None else "write that in torch's operations on a whole batch, or "
    return UserError(
        f"torch's ONNX exporter refuses {network} ({reason}); {way_out}export a .safetensors file"
    )
