"""The section `model`: the network."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.configs.section import Section
from penstock.configs.value_types import (
    CoreInputNames,
    Filters,
    Large,
    LogStd,
    Options,
    Sizes,
    Switch,
    Text,
)

KINDS = ("auto", "mlp", "small_cnn", "nature_cnn", "impala_cnn")
CORES = ("lstm", "gru")
ALL_ONE_HOT = 1_000_000
"""Value of `env.embed_above` above which no number of choices is, as in earlier versions."""


def complete_stored(sections: object) -> None:
    """Add the options that an earlier version did not write to the sections of a config.

    The config was stored or received. These options get the value that has the effect of that
    version; ``sections`` that are no config are left as they are.
    """
    match sections:
        case {"model": dict(model)}:
            model.setdefault("scale", "bytes")
            model.setdefault("filters", [])
    match sections:
        case {"env": dict(env)}:
            env.setdefault("embed_above", ALL_ONE_HOT)


class ModelConfig(Section):
    """The neural network."""

    kind: Literal["auto", "mlp", "small_cnn", "nature_cnn", "impala_cnn"] = Field(
        default="auto", json_schema_extra={"enum": [*KINDS, *CORES]}
    )
    """The encoder. `mlp` has fully connected layers of `hidden` widths; `small_cnn` has
    convolutions before them, for images of few pixels such as boards; `nature_cnn` is the
    three-layer convolutional network for images; `impala_cnn` is IMPALA's residual one, slower and
    often better. `auto` chooses by the observations: `small_cnn` for images of 5 to 35 pixels each
    way, `nature_cnn` from 36 on, otherwise `mlp`. Of observations with several parts, images go
    through the convolutions and the rest through fully connected layers. `lstm` and `gru` are
    accepted for `auto` with that `core`: with any other encoder set `core`."""
    hidden: Sizes = Field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers of `mlp` and `small_cnn`. Wider or more layers fit more and take
    longer."""
    filters: Filters = Field(default_factory=lambda: [16, 32])
    """Channels of each convolution of `small_cnn`, of 3 x 3 pixels; all but the first take every
    second pixel. More fit more and take longer. An empty list is no convolution: by `kind` `auto`,
    small images are then flattened for an `mlp`, as they are in runs and policies of versions
    without this option."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation between the layers of `mlp`; convolutions always use relu."""
    layer_norm: Switch = False
    """Whether the outputs of each layer and each convolution of the encoder are shifted and scaled
    to mean 0 and variance 1 for each observation, before the activation (layer normalisation). It
    keeps Q-learning without a target network stable (`algo.name` `pqn`). A step takes longer with
    it. A network of `entry` is not changed by it."""
    core: Literal["none", "lstm", "gru"] = "none"
    """Recurrent layer after the encoder, for environments whose observations do not show the whole
    state; not with DQN, SAC and TD3. It runs step by step: `learner.micro_batch` should hold the
    unrolls of many environments, or all sequences of a batch."""
    core_size: Large = 128
    """Width of the recurrent layer; not used with `core` `none`."""
    core_inputs: CoreInputNames = Field(default_factory=list)
    """What the recurrent layer reads besides the observation: the last `action`, the last `reward`,
    or both, as IMPALA and R2D2 do. Use it where an observation does not show what the action before
    it has done. The reward is clipped and scaled as `algo.reward_clip` and `algo.reward_scale`
    say, and then compressed by a logarithm: 1 becomes 0.69, and 100 becomes 4.6."""
    critic: Literal["auto", "shared", "separate"] = "auto"
    """Whether the value function shares the policy's network up to its last layer, or has a network
    of its own. `auto` gives it its own where the network is an `mlp` without `core`."""
    normalize_observations: Switch = False
    """Whether observations are shifted and scaled to mean 0 and standard deviation 1 by running
    statistics over all samples (with replay, over all sampled batches), and clipped to ± 10. Use it
    where values differ much in scale. If all observations are frames, each pixel has its own
    statistics, taken from 32 observations of each batch. Frames beside other inputs are only scaled
    to 0 ... 1. Pixels of small images (`kind` `small_cnn`) are numbers like others."""
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
    def _expand_core(cls, data: Any) -> Any:
        """Replace a `kind` that is a recurrent layer by `auto` with that `core`."""
        if isinstance(data, dict) and data.get("kind") in CORES:
            return {**data, "kind": "auto", "core": data["kind"]}
        return data
