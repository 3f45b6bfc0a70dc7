"""The section `model`: the network."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.configs.section import Section
from penstock.configs.value_types import Count, Number, Options, Sizes, Switch, Text

CORES = ("lstm", "gru")


class ModelConfig(Section):
    """The network."""

    kind: Literal["auto", "mlp", "nature_cnn", "impala_cnn"] = "auto"
    """`mlp` has layers of `hidden` widths; `nature_cnn` is the three-layer convolutional network
    for frames, `impala_cnn` the residual one of IMPALA, slower and often better; `auto` takes `mlp`
    or `nature_cnn`, whichever fits the observations. Where observations have several parts, frames
    go through the convolutions and the rest through the layers. `lstm` and `gru` are short for
    `auto` with that `core`."""
    hidden: Sizes = Field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers of `mlp`."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation between the layers of `mlp`; convolutional networks always use relu."""
    core: Literal["none", "lstm", "gru"] = "none"
    """Memory after the layers, for games that do not show all that matters at every step; PPO and
    IMPALA only. It is computed row by row: `learner.micro_batch` should hold many environments'
    unrolls."""
    core_size: Count = 128
    """Width of the memory of `core`; not used where that is `none`."""
    critic: Literal["auto", "shared", "separate"] = "auto"
    """Whether the value has the policy's network up to its last layer, or one of its own; `auto`:
    its own where the network is an `mlp` without `core`."""
    normalize_observations: Switch = False
    """Whether each value of an observation, frames apart, is shifted and scaled to mean 0 and
    deviation 1 over all samples so far, and clipped to ± 10; with replay over all samples drawn so
    far."""
    gaussian: Literal["clipped", "squashed"] = "clipped"
    """How an actor-critic's actions that are numbers are kept within their bounds: `clipped` cuts
    off what lies beyond, `squashed` takes tanh. SAC always squashes."""
    log_std_init: Number = 0.0
    """Logarithm of the standard deviation of such actions at the start, where bounds are ± 1."""
    entry: Text | None = None
    """A network of one's own, as `module:Class` (see examples/own_network.py), in place of `kind`,
    `hidden` and `activation`, which are not used then, but for the layers of SAC's critics after
    it; null: none."""
    settings: Options = Field(default_factory=dict)
    """Keyword arguments of the network of `entry`."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("kind") in CORES:
            return {**data, "kind": "auto", "core": data["kind"]}
        return data
