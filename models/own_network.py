"""A custom network, named by `model.entry`: a torch module of this form.

    class Net(torch.nn.Module):
        def __init__(self, shapes: dict[str, tuple[int, ...]], outputs: int, **settings): ...
        def forward(self, arrays: dict[str, Tensor]) -> Tensor: ...

``shapes`` are those of the arrays in an observation, by name; "obs" where there is only one.
``outputs`` is how many numbers decide an action, ``settings`` are `model.settings`. ``arrays`` are
float32 ``[B, *shape]``, pixels from 0 to 1; choices above `env.embed_above` are their number, from
0. What `forward` returns is either

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

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.configs.errors import UserError
from penstock.core.loading import load
from penstock.models.general import GeneralShape
from penstock.models.layout import SingleHead

ROWS = 3  # observations of the batch by which a network is tried


class Body(NamedTuple):
    """A network before its core and heads."""

    module: nn.Module
    width: int | None
    """Number of its features; None where it returns outputs and values instead."""


def make_own(shape: GeneralShape[Any]) -> Body:
    """Make the custom network of a shape, and try it on a batch of zeros.

    Raises:
        UserError: if it cannot be made, fails, or does not fit.
    """
    entry = shape.model.entry
    assert entry is not None
    purpose = f"model.entry {entry}"
    network_class = _load(entry, purpose)

    shapes = {array.name: array.shape for array in shape.inputs}
    batch = {name: torch.zeros(ROWS, *extents) for name, extents in shapes.items()}
    try:
        net = network_class(shapes, shape.outputs, **shape.model.settings)
        with torch.no_grad():
            result = net.eval()(batch)
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

    # cuDNN computes gradients of recurrent layers in training mode alone.
    for module in net.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
            module.train()
    return Body(net, _checked_width(result, shape, purpose))


def _checked_width(result: Any, shape: GeneralShape[Any], purpose: str) -> int | None:
    """Returns the number of features in a network's result; None for outputs and values.

    Raises:
        UserError: if the result is neither, or if the heads or the config need features.
    """
    is_matrix = isinstance(result, Tensor) and result.ndim == 2
    if is_matrix and len(result) == ROWS and result.shape[1]:
        width: int = result.shape[1]
        return width

    if isinstance(shape.heads, SingleHead):
        raise UserError(
            f"{purpose} returned {_described(result)} for {ROWS} observations, and with an "
            f"algorithm that is no actor-critic it must return features of shape [{ROWS}, width], "
            "to which the head is added; correct its forward, or set algo.name=ppo"
        )

    is_pair = isinstance(result, tuple) and len(result) == 2
    expected_shapes = [(ROWS, shape.outputs), (ROWS,)]
    if not is_pair or [tuple(tensor.shape) for tensor in result] != expected_shapes:
        raise UserError(
            f"{purpose} returned {_described(result)} for {ROWS} observations, and it must return "
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
    network_class = load(entry, purpose, "model.entry")
    if not (isinstance(network_class, type) and issubclass(network_class, nn.Module)):
        raise UserError(f"{purpose} is no class of torch.nn.Module; derive it from that")
    return network_class


def _described(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {list(result.shape)}"
    if isinstance(result, tuple) and all(isinstance(element, Tensor) for element in result):
        return " and ".join(f"{list(tensor.shape)}" for tensor in result)
    return f"a {type(result).__name__}"


def _brief(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
