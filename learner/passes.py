"""How the passes of a learner's network are computed: their number format, size and compilation.

*Size* is how many observations go through the network at a time (`learner.micro_batch`). On a CPU:
as many as fit the cache, or were timed to be faster (`autotune.forms`). On a GPU small passes are
bound by kernel launches, so a pass is a whole update, if its saved activations fit into a quarter
of the free memory. The first pass, of at most `ROWS` observations, measures them. It slightly
overestimates, since saved weights count too.

`torch.compile` (`learner.compile`) compiles the network's forward and backward pass alone. The loss
reads schedules, which give other numbers in each batch, and torch.compile compiles a function again
for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.device.choice import device_of
from penstock.device.interface import Device
from penstock.models.compute_form import (
    ROWS,
    ComputeForm,
    Precision,
    gains_by_bf16,
    order_by_rule,
)
from penstock.models.fitting import AnyShape

# A pass takes one part in so many of the free memory: gradients of activations need some of it,
# and so may another learner.
SHARE = 4


def trunk_dtype(precision: str, device: torch.device, shape: AnyShape) -> torch.dtype:
    """Returns the dtype of `learner.precision` for a network on a device.

    `auto` depends on no measurement: bf16 on a GPU if the network gains by it, fp32 on a CPU.
    """
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" and gains_by_bf16(shape) else "fp32"
    return torch.bfloat16 if precision == "bf16" else torch.float32


def form_of(config: Config, device: torch.device, shape: AnyShape) -> ComputeForm | None:
    """Returns the form of a CPU learner's passes; None on a GPU.

    What is `auto` or null in the config follows a rule, and not a measurement.
    """
    learner = config.learner
    if device_of(device).runs_behind:
        return None

    precision: Precision = "bf16" if learner.precision == "bf16" else "fp32"
    order = order_by_rule(shape, precision, learns=True)
    if order != "auto" and learner.memory_format != "auto":
        order = learner.memory_format
    return ComputeForm(precision, order, learner.micro_batch or ROWS)


class PassSize:
    """How many observations go through the network at a time."""

    def __init__(self, wanted: int | None, device: Device) -> None:
        """``wanted`` is `learner.micro_batch`."""
        self.rows = wanted or ROWS
        """Observations in one pass."""
        self.unknown = wanted is None and device.runs_behind
        """Whether a pass must be `measured`."""
        self._device = device

    @contextmanager
    def measured(self, rows: int) -> Iterator[None]:
        """Surrounds the forward pass of ``rows`` observations, and sets the size of later ones."""
        # Saved activations by their place in memory, so that none counts twice.
        saved_nbytes: dict[tuple[int, int], int] = {}

        def count(tensor: Tensor) -> Tensor:
            place = int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())
            nbytes = tensor.numel() * tensor.itemsize
            saved_nbytes[place] = max(saved_nbytes.get(place, 0), nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            yield
        self.unknown = False
        row_nbytes = max(1, sum(saved_nbytes.values()) // rows)
        self.rows = max(rows, self._device.free_nbytes() // SHARE // row_nbytes)


def compile_network(net: nn.Module) -> None:
    """Compile ``net``'s forward at its first call, in place.

    The instance's own `forward` replaces that of its class, as `nn.Module` allows: so the network
    stays of its class, and its parameters keep their names. `torch.compile(net)` would wrap it.

    A call of the network raises UserError if the compiler is not found or fails.
    """
    from torch._dynamo.exc import TorchDynamoException  # takes 1.4 s to import

    compiled = torch.compile(net.forward)

    def forward(*arguments: Any) -> Any:
        try:
            return compiled(*arguments)
        except TorchDynamoException as error:
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise UserError(
                f"learner.compile: torch.compile failed with {type(error).__name__}: {reason}; "
                "set learner.compile=false"
            ) from error

    net.forward = forward
