"""The section `learner.reduce`: how the gradients of several learners become one.

A codec is known to the config by a `CodecSpec`, registered in `CODECS` (`configs.registry`); its
options are fields of `ReduceConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Literal

from penstock.configs.registry import Registry
from penstock.configs.section import Section
from penstock.configs.value_types import Count, Natural, Positive, Share, Switch, Text

AUTO = "auto"
"""Value of `codec` that stands for a choice by measurement when the learners start."""


@dataclass(frozen=True, eq=False)
class CodecSpec:
    """What the config knows of a codec without importing torch."""

    name: str
    sends: str
    """The form in which gradients are sent, for the docs: the end of the sentence "`name` ..."."""
    entry_point: str
    """``module:Class`` that makes it (`core.interfaces.CodecFactory`), imported in a learner."""
    long_name: str = ""
    loss: Literal["none", "rounding", "lossy"] = "lossy"
    """`rounding`: relative error of up to a few per cent; `lossy`: more variance, or delayed
    values."""
    tried_by_auto: bool = True
    ruins_variance: str = ""
    """What it sends instead of values of their own size, for messages: "sends ...". An optimizer
    that divides by the variance of gradients cannot use it. Empty: values keep their size."""
    own_momentum: bool = False
    """Whether it applies momentum and clipping in the optimizer's place."""
    reduces_gradients: Callable[[ReduceConfig, int], bool] | None = None
    """For a codec that sends the momentum of an optimizer with a frozen variance: whether in the
    given update (from 0) it still sums gradients, from which momentum and variance are computed.
    None: it always does."""
    scales_layers: bool = False
    """For such a codec: whether it is for optimizers that scale layers, or for those that do
    not."""


class CodecRegistry(Registry[CodecSpec]):
    """The gradient codecs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Values of `learner.reduce.codec`, the default first."""
        first, *others = self.specs
        return first, AUTO, *others

    def listed(self) -> str:
        """Returns a sentence with the form that each codec sends; neighbours may share one."""
        forms = [
            f"{' and '.join(map(_title, codecs))} {sends}"
            for sends, codecs in groupby(self.specs.values(), key=lambda spec: spec.sends)
        ]
        return f"Form in which gradients are sent: {', '.join(forms)}."


def _title(spec: CodecSpec) -> str:
    """Returns the name of a codec, with its long name if it has one."""
    return f"`{spec.name}`" + (f" ({spec.long_name})" if spec.long_name else "")


CODECS = CodecRegistry("codec", reserved=(AUTO,))


class ReduceConfig(Section):
    """How the gradients of several learners are summed (`learner.count` above 1)."""

    codec: Annotated[str, CODECS] = "none"
    """`auto` measures the network and the codecs when the learners start, and prints its choice
    among `none`, `fp16`, `bf16` and `int8`."""
    bucket_mb: Positive | None = None
    """Size in megabytes of the buckets in which gradients are sent. Smaller buckets start earlier
    in the backward pass; larger ones have less overhead. null: 1 on a CPU, 25 on a GPU."""
    overlap: Switch = True
    """Whether gradients are sent while the backward pass computes the next; false sends them after
    it."""
    wait_s: Positive = 0.5
    """Seconds that a learner waits for samples before it joins the reduction with weight 0, so that
    the others step without it."""
    timeout_s: Positive = 30.0
    """Seconds after which a reduction counts as stuck; the learners then form a new group. It
    has to exceed a step of the slowest learner, or `local_steps` of them under `local_sgd`, since
    the others wait for it."""
    check_every: Count = 1000
    """Optimizer steps between two checks that all learners hold the same parameters."""
    interface: Text | None = None
    """Network interface that learners on several machines use, such as `eth0`; null: the one of the
    machine's host name."""
    block: Count = 512
    """Number of successive values that share a scale in `int8`. Smaller blocks are more precise and
    send more bytes."""
    variance_interval: Count | None = 512
    """Most optimizer steps between two updates of a value's variance: in `zeroone_adam` by a step
    in fp32, and after the warm-up of `onebit_adam` by the squares of each learner's own gradients,
    a part of them in every 16th step (or all of them after each interval, if that is shorter). A
    smaller value follows changing gradients sooner and sends more bytes; 1 sends more than fp32.
    null: as in the papers, the intervals of `zeroone_adam` double without end, and the variance of
    `onebit_adam` is constant."""
    warmup_updates: Natural = 100
    """Optimizer steps in fp32 before `onebit`, `onebit_adam`, `onebit_lamb` and `powersgd` begin;
    for `dgc`, optimizer steps of each stage in which its density decreases. Larger values delay the
    saving of bytes, and make the start more stable. `onebit_lamb` divides by the variance of these
    steps only, as does `onebit_adam` without `learner.reduce.variance_interval`; their authors use
    15 to 20 % of a run."""
    onebit_block: Count = 4096
    """Number of successive values that share a pair of means in `onebit`, `onebit_adam`,
    `onebit_lamb` and `zeroone_adam`. Smaller blocks are more precise and send more bytes."""
    variance_doubling: Count = 16
    """Number of variance updates after which `zeroone_adam` doubles the interval between them,
    which begins at 1. Each is an optimizer step in fp32. Larger values delay the saving of bytes,
    and make the start more stable."""
    reternarize: Switch = False
    """Whether `terngrad` reduces the sums to -1, 0, 1 again before they are sent back: a third
    fewer bytes, and more variance. If false, they are sent exactly."""
    density: Share = 0.01
    """Fraction of the values that `dropping` sends, the largest ones. Smaller values send fewer
    bytes and delay more of the gradient."""
    dgc_density: Share = 0.001
    """Fraction of the values that `dgc` sends after its warm-up, the largest ones. Smaller values
    send fewer bytes and delay more of the gradient."""
    dgc_clip: Positive | None = None
    """Bound on the norm of each learner's gradient in `dgc`, divided by the root of
    `learner.count`; null: `learner.grad_clip`, which otherwise has no effect with `dgc`."""
    powersgd_rank: Count = 2
    """Rank of the matrix products in `powersgd`. Larger values are more precise and send more
    bytes."""
