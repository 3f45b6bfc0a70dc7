"""The section `learner.reduce`: how several learners make one gradient of theirs.

What a config knows of a codec is its `CodecSpec`, registered in `CODECS` (`configs.registry`).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Literal

from pydantic import AfterValidator, Strict
from pydantic.fields import FieldInfo

from penstock.configs.registry import ExtraOptions, OpenSection, OptionsRegistry
from penstock.configs.section import Section
from penstock.configs.value_types import Count, Positive, Switch, Text, ValueDescription

AUTO = "auto"
"""Not a codec: one is chosen by measurement when the learners start."""


@dataclass(frozen=True, eq=False)
class CodecSpec:
    """What can be known of a codec without importing torch."""

    name: str
    sends: str
    """What gradients are sent as, for the docs: the end of the sentence "`name` ..."."""
    entry_point: str
    """``module:Class`` that makes it (`core.interfaces.CodecFactory`), imported in a learner."""
    long_name: str = ""
    loss: Literal["none", "rounding", "lossy"] = "lossy"
    """`rounding`: relative error up to a few per cent; `lossy`: more variance, or late values."""
    tried_by_auto: bool = True
    unfit: Mapping[str, str] = field(default_factory=dict)
    """By each `learner.optimizer` that it does not go with: why, and what to set."""
    own_momentum: bool = False
    """Whether it applies momentum and clipping in the optimizer's place."""
    every_pace: bool = False
    """Whether it may be named with a `learner.pace` other than `bsp`, which reduces nothing."""
    options: type[ExtraOptions] = ExtraOptions
    """They are written ``learner.reduce.NAME``."""


def _registered(name: str) -> str:
    if CODECS.specs and name not in CODECS.names:
        raise ValueError(f"{name} is not a codec")
    return name


class ReduceOptions(Section):
    """Options that do not depend on the codec."""

    codec: Annotated[
        str, Strict(), AfterValidator(_registered), ValueDescription("a codec's name")
    ] = "none"
    """`auto` measures network and coding at the start and says what it chose."""
    bucket_mb: Positive = 1.0
    """Megabytes of gradients that travel together, while the backward pass makes the next."""
    overlap: Switch = True
    """Send gradients while the backward pass goes on; false waits for its end."""
    wait_s: Positive = 0.5
    """Seconds that a learner waits for samples before the others step without it."""
    timeout_s: Positive = 30.0
    """Seconds after which an exchange of gradients counts as stuck."""
    check_every: Count = 1000
    """Optimizer steps between two checks that all learners hold the same parameters."""
    interface: Text | None = None
    """Network interface that learners of several machines use, such as `eth0`; null: found by the
    machine's name."""


class CodecRegistry(OptionsRegistry[CodecSpec]):
    """The gradient codecs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Values of `learner.reduce.codec`, the default first."""
        first, *others = self.specs
        return first, AUTO, *others

    def describe(self, choice: FieldInfo) -> FieldInfo:
        """Lists what gradients are sent as."""
        sent = [
            f"{' and '.join(map(_title, group))} {sends}"
            for sends, group in groupby(self.specs.values(), key=lambda spec: spec.sends)
        ]
        described = copy(choice)
        listed = f"What gradients are sent as: {', '.join(sent)}."
        described.description = f"{listed} {choice.description}"
        return described


def _title(spec: CodecSpec) -> str:
    return f"`{spec.name}`" + (f" ({spec.long_name})" if spec.long_name else "")


CODECS = CodecRegistry("codec", "learner.reduce", ReduceOptions, choice="codec", reserved=(AUTO,))


class ReduceConfig(ReduceOptions, OpenSection):
    """How gradients are summed over the learners of a run (`learner.count` above 1)."""

    registry = CODECS
