"""The section `learner.reduce`: how several learners make one gradient of theirs.

What a config knows of a codec is its `CodecSpec`. The modules `penstock.REGISTRIES` register these
in `CODECS`. While none is registered, a config loads without a check of the codec's name and
options.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import groupby
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Strict, create_model, model_validator
from pydantic.fields import FieldInfo

import penstock
from penstock.configs.section import Section
from penstock.configs.value_types import Count, Positive, Switch, Text, ValueDescription

AUTO = "auto"
"""Not a codec: one is chosen by measurement when the learners start."""


class CodecOptions(Section):
    """Base of the options that a codec brings; they are written ``learner.reduce.NAME``."""

    @classmethod
    def of(cls, cfg: ReduceConfig) -> Self:
        """The values that ``cfg`` has of these."""
        given = cfg.model_extra or {}
        return cls.model_validate({key: given[key] for key in cls.model_fields if key in given})


@dataclass(frozen=True, eq=False)
class CodecSpec:
    """What can be known of a codec without importing torch."""

    name: str
    sends: str
    """What gradients are sent as, for the docs: the end of the sentence "`name` ..."."""
    home: str
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
    options: type[CodecOptions] = CodecOptions


class CodecRegistry:
    """Specs by name, in the order in which they were registered."""

    def __init__(self) -> None:
        self._specs: dict[str, CodecSpec] = {}

    @property
    def specs(self) -> Mapping[str, CodecSpec]:
        for module in penstock.REGISTRIES:
            import_module(module)
        return MappingProxyType(self._specs)

    def register(self, spec: CodecSpec) -> None:
        """Add a codec.

        :raises ValueError: for a name that is taken, or an option that means something else.
        """
        if spec.name in (AUTO, *self._specs):
            raise ValueError(f"codec {spec.name} exists already")
        taken = _joined(tuple(self._specs.values())).model_fields
        for name, option in spec.options.model_fields.items():
            if name in taken and repr(taken[name]) != repr(option):
                raise ValueError(f"codec {spec.name}: learner.reduce.{name} exists already")
        self._specs[spec.name] = spec

    def unregister(self, name: str) -> None:
        """Take a codec back."""
        del self._specs[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Values of `learner.reduce.codec`."""
        first, *others = self.specs
        return first, AUTO, *others

    @property
    def section(self) -> type[Section]:
        """The schema of `learner.reduce`, with the options of all codecs."""
        return _joined(tuple(self.specs.values()))

    def describe(self, codec: FieldInfo) -> FieldInfo:
        """The field `codec` with a description that lists the codecs before its own."""
        sent = [
            f"{' and '.join(map(_title, group))} {sends}"
            for sends, group in groupby(self.specs.values(), key=lambda spec: spec.sends)
        ]
        described = copy(codec)
        listed = f"What gradients are sent as: {', '.join(sent)}."
        described.description = f"{listed} {codec.description}"
        return described


CODECS = CodecRegistry()


@cache
def _joined(specs: tuple[CodecSpec, ...]) -> type[Section]:
    """One schema of `ReduceOptions` and the options of all codecs, in the order of ``specs``."""
    kinds: dict[type[Section], None] = dict.fromkeys(spec.options for spec in specs)
    kinds.pop(CodecOptions, None)
    bases: tuple[type[Section], ...] = (*reversed(kinds), ReduceOptions)
    return create_model("JoinedReduceOptions", __base__=bases)


def _title(spec: CodecSpec) -> str:
    return f"`{spec.name}`" + (f" ({spec.long_name})" if spec.long_name else "")


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


class ReduceConfig(ReduceOptions, extra="allow"):
    """How gradients are summed over the learners of a run (`learner.count` above 1).

    Those of the codecs are extra keys, all of them present where codecs are registered.
    """

    @model_validator(mode="before")
    @classmethod
    def _check_all(cls, data: Any) -> Any:
        if CODECS.specs and isinstance(data, dict):
            return CODECS.section.model_validate(data).model_dump()
        return data
