"""R2D2: DQN with memory, learnt from sequences in replay.

Kapturowski et al. 2019 (https://openreview.net/forum?id=r1lyTjAqYX): DQN with a recurrent network
on prioritised sequences. Actors record the state of the network before each step, so that a
sequence begins from it. They explore as those of DQN. The learner's half is
`penstock.algos.r2d2.update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.algos import slots
from penstock.algos.base import ReplayAlgorithm
from penstock.algos.dqn import algorithm as dqn
from penstock.algos.r2d2.config import R2d2Config
from penstock.core.interfaces import TransitionSequences

if TYPE_CHECKING:
    from penstock.algos.replay_update import ReplayUpdate, UpdateContext


def data(cfg: R2d2Config) -> TransitionSequences:
    """Returns the sequences that are drawn."""
    return TransitionSequences(
        length=cfg.sequence_length, burn_in=cfg.burn_in, overlap=cfg.overlap, pad=True
    )


def samples_of(batch: Mapping[str, Any]) -> int:
    """Returns the number of steps of a batch that are trained on."""
    import torch

    from penstock.algos.r2d2.update import trained_steps

    mask = torch.as_tensor(batch["mask"])
    state = torch.as_tensor(batch["state"])
    return int(trained_steps(mask, state, batch.get("burn_in", 0)).sum())


def make_update(cfg: R2d2Config, ctx: UpdateContext) -> ReplayUpdate:
    """Makes the update on a learner, where torch is imported."""
    from penstock.algos.r2d2.update import R2d2Update

    return R2d2Update(cfg, ctx)


R2D2 = ReplayAlgorithm[R2d2Config](
    columns=dqn.q_columns,
    check=dqn.check,
    process=slots.process,
    network=dqn.network,
    action_sampler=dqn.action_sampler,
    make_update=make_update,
    data=data,
    samples_of=samples_of,
    least_exploring=dqn.least_exploring,
)
