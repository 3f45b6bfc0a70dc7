"""A custom network, named by `model.entry`: a torch module of this form.

    class Net(torch.nn.Module):
        def __init__(self, shapes: dict[str, tuple[int, ...]], outputs: int, **settings): ...
        def forward(self, arrays: dict[str, Tensor]) -> Tensor: ...

``shapes`` are those of the arrays in an observation, by name; "obs" where there is only one.
``outputs`` is how many numbers decide an action, ``settings`` are `model.settings`. ``arrays`` are
float32 ``[B, *shape]``, pixels from 0 to 1. What `forward` returns is either

    features [B, width]                     to which memory (`model.core`) and heads are added
    outputs [B, outputs] and values [B]     logits, or means and then logs of deviations; with
                                            PPO and IMPALA only

With DQN it must give features: the head of Q-values is added, duelling or not. With SAC the policy
and each critic have a network of this class, of parameters of its own; the critics' layers, of
`model.hidden` widths, read its features and the action.

Rows are independent of each other; parameters and buffers are float32. Learners have it in `eval`,
as actors do, so that dropout drops nothing: the probability of an action is to be the recorded one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.configs.errors import UserError
from penstock.core.loading import load
from penstock.models.general import GeneralShape, SingleHead

ROWS = 3  # of the batch that is tried


def make_own(shape: GeneralShape[Any]) -> tuple[nn.Module, int | None]:
    """Make the custom network of a shape, and try it on a batch of zeros.

    Raises:
        UserError: if it cannot be made, fails, or does not fit.
    """
    entry = shape.model.entry
    assert entry is not None
    purpose = f"model.entry {entry}"
    kind = _load(entry, purpose)
    shapes = {given.name: given.shape for given in shape.inputs}
    rows = {name: torch.zeros(ROWS, *extents) for name, extents in shapes.items()}
    try:
        net = kind(shapes, shape.outputs, **shape.model.settings)
        with torch.no_grad():
            found = net.eval()(rows)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise UserError(
            f"{purpose} failed with {type(error).__name__}: {text}, for observations of "
            f"{_brief(shapes)} and {shape.outputs} outputs; correct it, or model.settings"
        ) from error
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if tensor.dtype != torch.float32:
            raise UserError(
                f"{purpose} has {name} in {tensor.dtype}, and weights travel as float32; make it "
                "float32, or keep it out of the module's parameters and buffers"
            )
    for module in net.modules():
        if isinstance(module, nn.RNNBase):  # cuDNN has its gradients in training alone
            module.dropout = 0.0
            module.train()
    return net, _width(found, shape, purpose)


def _width(found: Any, shape: GeneralShape[Any], purpose: str) -> int | None:
    if isinstance(found, Tensor) and found.ndim == 2 and len(found) == ROWS and found.shape[1]:
        return found.shape[1]
    if isinstance(shape.heads, SingleHead):
        raise UserError(
            f"{purpose} returned {_described(found)} for {ROWS} observations, and with an "
            f"algorithm that is no actor-critic it must return features of shape [{ROWS}, width], "
            "to which the head is added; correct its forward, or set algo.name=ppo"
        )
    both = isinstance(found, tuple) and len(found) == 2
    wanted = [(ROWS, shape.outputs), (ROWS,)]
    if not both or [tuple(tensor.shape) for tensor in found] != wanted:
        raise UserError(
            f"{purpose} returned {_described(found)} for {ROWS} observations, and it must return "
            f"features of shape [{ROWS}, width], or outputs and values of shapes "
            f"[{ROWS}, {shape.outputs}] and [{ROWS}]; correct its forward"
        )
    model = shape.model
    for key, value in (("core", model.core), ("critic", model.critic)):
        if value in ("lstm", "gru", "separate"):
            raise UserError(
                f"{purpose} returns outputs and values, and model.{key} {value} needs features; "
                f"make it return features of shape [B, width], or set model.{key} to its default"
            )
    return None


def _load(entry: str, purpose: str) -> type[nn.Module]:
    """Returns the class that ``entry`` names; UserError if it is no class of torch modules.

    Nothing else is called: a module that the user allows may have imported any function.
    """
    network = load(entry, purpose, "model.entry")
    if not (isinstance(network, type) and issubclass(network, nn.Module)):
        raise UserError(f"{purpose} is no class of torch.nn.Module; derive it from that")
    return network


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)}"
    if isinstance(found, tuple) and all(isinstance(each, Tensor) for each in found):
        return " and ".join(f"{list(each.shape)}" for each in found)
    return f"a {type(found).__name__}"


def _brief(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
