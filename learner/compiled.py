"""The network by `torch.compile` (`learner.compile`).

Only the network's forward and backward pass are compiled. The loss reads schedules, which give
other numbers in each batch, and torch.compile compiles a function again for each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.configs.errors import UserError


def compile_network(net: nn.Module) -> None:
    """Compile ``net``'s forward at its first call, in place.

    A call raises UserError where the compiler is not found or fails.
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


def uncompiled() -> Any:
    """A context in which compiled networks run eagerly."""
    return torch.compiler.set_stance("force_eager")
