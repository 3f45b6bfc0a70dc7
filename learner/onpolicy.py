"""What on-policy algorithms have in common on a learner: how a batch is dealt into updates, rewards
brought to one scale, and a batch for a learner that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.algos.slots import RETURN
from penstock.core.specs import SlotSpec
from penstock.learner.sources.staging import torch_dtype

AddOthers = Callable[[Tensor], None]
MOST_REWARD = 10.0  # deviations
EPSILON = 1e-8  # added to a variance


class Share(NamedTuple):
    """The environments of one update, and their agent steps."""

    envs: slice | Tensor
    steps: int


def deal(alive: npt.NDArray[np.bool_], updates: int, epochs: int) -> list[Share]:
    """Deal the environments of a batch out to ``updates`` equal shares, once for each epoch.

    ``alive`` is ``[T, E]``. The first epoch takes them in their order, without copying anything;
    the others by torch's global random generator, which is in the checkpoint.
    """
    steps = np.count_nonzero(alive, axis=0)
    size = len(steps) // updates
    shares = []
    for first in range(0, size * updates, size):
        envs = slice(first, first + size)
        shares.append(Share(envs, int(steps[envs].sum())))
    for _ in range(epochs - 1):
        if updates == 1:
            shares.append(shares[0])
            continue
        for part in torch.randperm(len(steps)).split(size):
            shares.append(Share(part, int(steps[part.numpy()].sum())))
    return shares


def pieces(envs: slice | Tensor, size: int) -> Iterator[slice | Tensor]:
    """The environments of an update, at most ``size`` at a time."""
    if isinstance(envs, Tensor):
        yield from envs.split(size)
        return
    for first in range(envs.start, envs.stop, size):
        yield slice(first, min(first + size, envs.stop))


def empty_batch(spec: SlotSpec, device: torch.device) -> dict[str, Tensor]:
    """A batch of one environment in which nobody is alive: with it a learner without samples takes
    part in what all learners sum up."""
    return {
        c.name: torch.zeros(
            (*spec.rows_of(c)[:-1], 1, *c.shape), dtype=torch_dtype(c.dtype), device=device
        )
        for c in spec.columns
    }


class RewardScale:
    """Divides rewards by the deviation of the discounted return over all samples so far, and clips
    them to ± `MOST_REWARD` (Engstrom et al. 2020, arXiv 2005.12729, appendix A.1)."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        """Number of returns, their sum and that of their squares."""

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor], add_others: AddOthers) -> Tensor:
        """Take in the returns of a batch, and those of other learners; the rewards, scaled."""
        returns, mask = batch[RETURN].flatten().double(), batch["alive"].flatten().double()
        living = returns * mask
        more = torch.stack((mask.sum(), living.sum(), living.dot(living)))
        add_others(more)
        self.sums += more
        number = self.sums[0].clamp(min=1)
        variance = self.sums[2] / number - (self.sums[1] / number).square()
        scale = (variance.clamp_(min=0) + EPSILON).rsqrt_().float()
        return (batch["reward"] * scale).clamp_(-MOST_REWARD, MOST_REWARD)

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Arrays by name."""
        return {"sums": self.sums.cpu().numpy().copy()}

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from a `state_dict`; an empty one begins anew."""
        self.sums.copy_(torch.from_numpy(np.array(state.get("sums", np.zeros(3)))))
