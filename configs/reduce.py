"""The section `learner.reduce`: how the gradients of several learners become one.

A codec is known to the config by a `CodecSpec`, registered in `CODECS` (`configs.registry`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Literal

from pydantic import AfterValidator, Strict

from penstock.configs.registry import ExtraOptions, OpenSection, OptionsRegistry
from penstock.configs.section import Section
from penstock.configs.value_types import Count, Positive, Switch, Text, ValueDescription

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
    options: type[ExtraOptions] = ExtraOptions
    """The codec's own options, written ``learner.reduce.NAME``."""


class ReduceOptions(Section):
    """Options that do not depend on the codec."""

    codec: Annotated[
        str,
        Strict(),
        AfterValidator(lambda name: CODECS.checked(name)),
        ValueDescription("a codec's name"),
    ] = "none"
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


class CodecRegistry(OptionsRegistry[CodecSpec]):
    """The gradient codecs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Values of `learner.reduce.codec`, the default first."""
        first, *others = self.specs
        return first, AUTO, *others

    def listed(self) -> str:
        sent = [
            f"{' and '.join(map(_title, group))} {sends}"
            for sends, group in groupby(self.specs.values(), key=lambda spec: spec.sends)
        ]
        return f"Form in which gradients are sent: {', '.join(sent)}."


def _title(spec: CodecSpec) -> str:
    return f"`{spec.name}`" + (f" ({spec.long_name})" if spec.long_name else "")


CODECS = CodecRegistry("codec", "learner.reduce", ReduceOptions, choice="codec", reserved=(AUTO,))


class ReduceConfig(ReduceOptions, OpenSection):
    """How the gradients of several learners are summed (`learner.count` above 1)."""

    registries = (CODECS,)
