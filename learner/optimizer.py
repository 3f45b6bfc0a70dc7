"""Adam and RMSProp over one flat vector.

All parameters of a network become views of one vector and their gradients views of another: one
call updates everything, one norm clips everything, one collective would reduce everything. The
update rules are torch's own functions; its classes would import torch._dynamo, which takes longer
than everything else at the start of a learner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from penstock.configs.schema import LearnerConfig

BETAS = (0.9, 0.999)
ALPHA = 0.99
CLIP_MARGIN = 1e-6  # as in torch's clip_grad_norm_


class FlatOptimizer:
    """Takes over ``parameters`` (float32, one device): ``values`` and ``grads`` hold them all.

    The order is that of ``parameters``, each contiguous. Gradients add up in ``grads`` until
    `zero_grad`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], cfg: LearnerConfig) -> None:
        self._cfg = cfg
        listed = list(parameters)
        self.values = flatten(listed)
        self.grads = _make_gradients(self.values, listed)
        names = ("exp_avg", "exp_avg_sq") if cfg.optimizer == "adam" else ("square_avg",)
        self._moments = {name: torch.zeros_like(self.values) for name in names}
        self._steps = torch.zeros((), device=self.values.device)

    def zero_grad(self) -> None:
        self.grads.zero_()

    @torch.no_grad()
    def step(self, count: float, env_steps: int) -> Tensor:
        """Update ``values`` by the gradient ``grads / count`` and return that gradient's norm.

        ``count`` turns a summed gradient into a mean one. The norm (float32 ``[]``, before
        clipping) is not finite if any gradient is not, and then ``values`` stay as they are.
        """
        norm: Tensor = torch.linalg.vector_norm(self.grads) / count
        is_bad = norm.isfinite().logical_not_().float()
        scale = torch.full_like(norm, count)
        if self._cfg.grad_clip is not None:
            scale.mul_(((norm + CLIP_MARGIN) / self._cfg.grad_clip).clamp_(min=1.0))
        update = self._adam if self._cfg.optimizer == "adam" else self._rmsprop
        update(learning_rate(self._cfg, env_steps), scale, is_bad)
        return norm

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Arrays by name; on a CPU they share the optimizer's memory."""
        tensors = self._moments | {"steps": self._steps}
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from a `state_dict` of the same kind of optimizer and the same parameters."""
        tensors = self._moments | {"steps": self._steps}
        if state.keys() != tensors.keys():
            raise ValueError(
                f"state of {sorted(state)}, but {self._cfg.optimizer} needs {sorted(tensors)}"
            )
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(np.array(state[name])))

    def _adam(self, lr: float, scale: Tensor, is_bad: Tensor) -> None:
        adam(
            [self.values],
            [self.grads],
            [self._moments["exp_avg"]],
            [self._moments["exp_avg_sq"]],
            [],
            [self._steps],
            fused=True,
            grad_scale=scale,
            found_inf=is_bad,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=lr,
            weight_decay=0.0,
            eps=self._cfg.eps,
            maximize=False,
        )

    def _rmsprop(self, lr: float, scale: Tensor, is_bad: Tensor) -> None:
        self.grads.div_(scale).masked_fill_(is_bad > 0, 0.0)
        rmsprop(
            [self.values],
            [self.grads],
            [self._moments["square_avg"]],
            [],
            [],
            [self._steps],
            lr=lr,
            alpha=ALPHA,
            eps=self._cfg.eps,
            weight_decay=0.0,
            momentum=0.0,
            centered=False,
        )


def learning_rate(cfg: LearnerConfig, env_steps: int) -> float:
    """``lr``, falling linearly to ``lr * lr_end_fraction`` over ``lr_decay_steps`` agent steps."""
    if cfg.lr_decay_steps is None:
        return cfg.lr
    done = min(env_steps / cfg.lr_decay_steps, 1.0)
    return cfg.lr * (1 - done * (1 - cfg.lr_end_fraction))


@torch.no_grad()
def flatten(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Move parameters into one vector, of which each becomes a view."""
    listed = list(parameters)
    values = torch.cat([parameter.flatten() for parameter in listed])
    for parameter, value in zip(listed, _parts(values, listed), strict=True):
        parameter.data = value.view(parameter.shape)
    return values


def _make_gradients(values: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """Give parameters gradients in one vector."""
    grads = torch.zeros_like(values)
    for parameter, grad in zip(parameters, _parts(grads, parameters), strict=True):
        parameter.grad = grad.view(parameter.shape)
    return grads


def _parts(vector: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    return tuple(vector.split([parameter.numel() for parameter in parameters]))
