"""The section `model`: the network."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.configs.section import Section
from penstock.configs.value_types import Large, LogStd, Options, Sizes, Switch, Text

CORES = ("lstm", "gru")


def complete_stored(sections: object) -> None:
    """Add to the sections of a config that was stored, or received, what an earlier version did not
    write."""
    match sections:
        case {"model": dict(model)}:
            model.setdefault("scale", "bytes")


class ModelConfig(Section):
    """The neural network."""

    kind: Literal["auto", "mlp", "nature_cnn", "impala_cnn"] = Field(
        default="auto",
        json_schema_extra={"enum": ["auto", "mlp", "nature_cnn", "impala_cnn", *CORES]},
    )
    """The encoder. `mlp` has fully connected layers of `hidden` widths; `nature_cnn` is the
    three-layer convolutional network for images; `impala_cnn` is IMPALA's residual one, slower and
    often better. `auto` chooses `mlp` or `nature_cnn` by the observations. Of observations with
    several parts, images go through the convolutions and the rest through fully connected layers.
    `lstm` and `gru` are accepted for `auto` with that `core`: with any other encoder set `core`."""
    hidden: Sizes = Field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers of `mlp`. Wider or more layers fit more and take longer."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation between the layers of `mlp`; convolutional networks always use relu."""
    core: Literal["none", "lstm", "gru"] = "none"
    """Recurrent layer after the encoder, for environments whose observations do not show the whole
    state; PPO and IMPALA only. It runs step by step: `learner.micro_batch` should hold the unrolls
    of many environments."""
    core_size: Large = 128
    """Width of the recurrent layer; not used with `core` `none`."""
    critic: Literal["auto", "shared", "separate"] = "auto"
    """Whether the value function shares the policy's network up to its last layer, or has a network
    of its own. `auto` gives it its own where the network is an `mlp` without `core`."""
    normalize_observations: Switch = False
    """Whether observations are shifted and scaled to mean 0 and standard deviation 1 by running
    statistics over all samples (with replay, over all sampled batches), and clipped to ± 10. Use it
    where values differ much in scale. If all observations are frames, each pixel has its own
    statistics, taken from 32 observations of each batch. Frames beside other inputs are only scaled
    to 0 ... 1."""
    scale: Literal["bounds", "bytes"] = "bounds"
    """What brings bytes and frames to 0 ... 1, or to -1 ... 1: `bounds` divides them by the bounds
    of their space, `bytes` bytes by 255 and nothing else. Runs and policies of versions without
    this option are `bytes`, and stay so."""
    gaussian: Literal["clipped", "squashed"] = "clipped"
    """How an actor-critic's continuous actions are kept within their bounds: `clipped` cuts off
    values beyond them, `squashed` applies tanh. SAC always squashes."""
    log_std_init: LogStd = 0.0
    """Initial logarithm of the standard deviation of continuous actions, for actions scaled to ± 1.
    Smaller values explore less at the start."""
    entry: Text | None = None
    """A network of your own, as `module:Class` (see examples/own_network.py). It replaces `kind`,
    `hidden` and `activation`, which are then not used, except for the layers of SAC's critics
    behind it. null: none."""
    settings: Options = Field(default_factory=dict)
    """Keyword arguments of the network that `entry` names."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("kind") in CORES:
            return {**data, "kind": "auto", "core": data["kind"]}
        return data
