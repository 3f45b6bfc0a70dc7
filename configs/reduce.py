"""The section `learner.reduce`: how several learners make one gradient of theirs."""

from __future__ import annotations

from typing import Literal

from penstock.configs.section import Section
from penstock.configs.value_types import Count, Natural, Positive, Share, Switch, Text

Codec = Literal[
    "none",
    "auto",
    "fp16",
    "bf16",
    "int8",
    "onebit",
    "terngrad",
    "dropping",
    "dgc",
    "powersgd",
]


class ReduceConfig(Section):
    """How gradients are summed over the learners of a run (`learner.count` above 1)."""

    codec: Codec = "none"
    """What gradients are sent as: `none` as they are (fp32), `fp16` and `bf16` in half, `int8` in
    blocks, `onebit` as signs with error feedback, `terngrad` as -1, 0, 1 times a scale, `dropping`
    and `dgc` (deep gradient compression) the largest few, `powersgd` as low-rank products. `auto`
    measures network and coding at the start and says what it chose."""
    bucket_mb: Positive = 1.0
    """Megabytes of gradients that travel together, while the backward pass makes the next."""
    overlap: Switch = True
    """Send gradients while the backward pass goes on; false waits for its end."""
    block: Count = 512
    """Values that share a scale in `int8`."""
    onebit_block: Count = 4096
    """Values that share a pair of means in `onebit`."""
    warmup_updates: Natural = 100
    """Optimizer steps in fp32 before `onebit` and `powersgd` begin; for `dgc`, of each stage of its
    ladder of densities."""
    density: Share = 0.01
    """Share of the values that `dropping` sends."""
    dgc_density: Share = 0.001
    """Share of the values that `dgc` sends in the end."""
    dgc_clip: Positive | None = None
    """Bound on the norm of each learner's gradient in `dgc`, divided by the root of
    `learner.count`; null: `learner.grad_clip`, which otherwise has no effect with `dgc`."""
    reternarize: Switch = True
    """Whether `terngrad` sends sums back as -1, 0, 1 again, or exactly in a few more bits."""
    powersgd_rank: Count = 2
    """Rank of the products in `powersgd`."""
    wait_s: Positive = 0.5
    """Seconds that a learner waits for samples before the others step without it."""
    timeout_s: Positive = 30.0
    """Seconds after which an exchange of gradients counts as stuck."""
    check_every: Count = 1000
    """Optimizer steps between two checks that all learners hold the same parameters."""
    interface: Text | None = None
    """Network interface that learners of several machines use, such as `eth0`; null: found by the
    machine's name."""
