"""The workers of a parameter server, and the settings that they must share."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.configs.learner import OPTIMIZERS, LearnerConfig
from penstock.learner.extras.parameter_server.protocol import NOTHING, ServerHeader, Tally
from penstock.learner.progress import BOOKED
from penstock.transport.checksum import crc32

AGREED = {"pace", "count", "staleness", "significance", "spare", "optimizer", "momentum"}
AGREED |= {"weight_decay", "lr", "lr_scaling", "lr_warmup_updates", "lr_end_fraction"}
AGREED |= {"lr_decay_steps", "eps", "grad_clip", "server_shards"}


def rules(cfg: LearnerConfig, shard: int = 0) -> int:
    """Checksum of the settings on which all learners and their server must agree, and of the number
    of the server's shard."""
    optimizer = OPTIMIZERS.specs[cfg.optimizer]
    settings = cfg.model_dump(mode="json", include=AGREED.union(optimizer.options))
    more = {"codec": cfg.reduce.codec, "shard": shard}
    text = json.dumps(settings | more, sort_keys=True)
    return crc32(text.encode())


@dataclass
class Member:
    """A living worker."""

    number: int  # its number in the pace
    rank: int
    token: int
    size: int  # of its parameters
    counts: npt.NDArray[np.float64]
    """Those of its counts since it began that the run's counts include, laid out as `BOOKED`."""
    pull: ServerHeader | None = None
    answered: int = 0
    sent_state: int = 0  # number of the last request for the state that was answered
    lag: int = -1
    checkpoint: bool = False
    recent: Tally = NOTHING[len(BOOKED) :]
