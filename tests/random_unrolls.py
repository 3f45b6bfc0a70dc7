"""Batches of random unrolls and networks to try on them, for losses to be worked out by hand."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.models.actions import ActionSpec, discrete
from penstock.models.layout import MlpShape
from penstock.models.torch_heads import PolicyNetwork
from penstock.models.torch_nets import Net, build_net

ACTIONS = 3

N = TypeVar("N", bound=PolicyNetwork)


def make_net(actions: ActionSpec | None = None, seed: int = 0) -> Net:
    """Returns an actor-critic with random weights, by default of ``ACTIONS`` choices."""
    torch.manual_seed(seed)
    shape = MlpShape(4, actions or discrete(ACTIONS), (16, 16), "tanh", 1.0)
    return with_random_heads(build_net(shape))


def with_random_heads(net: N) -> N:
    """Returns a network with random numbers added: its heads start near zero, which hides much."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return net


def random_ends(
    rng: np.random.Generator, steps: int, envs: int, share: float
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Terminated, truncated and alive, ``[steps, envs]``, about a ``share`` of the rows ends each;
    a row after an end is a reset, as in NEXT_STEP autoreset."""
    terminated, truncated = (rng.random((steps, envs)) < share for _ in range(2))
    alive = np.ones((steps, envs), np.bool_)
    for t in range(1, steps):
        alive[t] = ~(terminated[t - 1] | truncated[t - 1])
        terminated[t] &= alive[t]
        truncated[t] &= alive[t]
    return terminated, truncated, alive


def make_batch(steps: int = 6, envs: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """Returns a batch of random unrolls."""
    rng = np.random.default_rng(seed)
    terminated, truncated, alive = random_ends(rng, steps, envs, 0.2)
    arrays = {
        "obs": rng.normal(size=(steps + 1, envs, 4)).astype(np.float32),
        "action": rng.integers(0, ACTIONS, (steps, envs)).astype(np.int32),
        "reward": rng.normal(size=(steps, envs)).astype(np.float32),
        "behaviour_logp": rng.normal(-1.1, 0.3, (steps, envs)).astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "alive": alive,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
