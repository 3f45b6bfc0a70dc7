"""A description of a network in words, printed at the start of a run."""

from __future__ import annotations

from typing import Any

from penstock.configs.model import ModelConfig
from penstock.models.fitting import AnyShape
from penstock.models.general import ActorCriticHeads, GeneralShape, is_small
from penstock.models.layout import DenseShape, MlpShape


def in_words(shape: AnyShape, model: ModelConfig, parameters: int) -> str:
    """Returns a line: `network: nature_cnn, lstm 256, shared critic, 2,000,000 parameters`.

    ``parameters`` is the number of those that are trained, critics included.
    """
    return f"network: {layers_in_words(shape, model)}, {parameters:,} parameters"


def layers_in_words(shape: AnyShape, model: ModelConfig) -> str:
    """Returns the parts of a network: `nature_cnn, lstm 256, shared critic`."""
    if isinstance(shape, GeneralShape):
        return ", ".join(_general(shape, model))
    return _mlp(model) if isinstance(shape, MlpShape | DenseShape) else "nature_cnn"


def _mlp(model: ModelConfig) -> str:
    return f"mlp {'-'.join(map(str, model.hidden))} {model.activation}"


def _general(shape: GeneralShape[Any], model: ModelConfig) -> list[str]:
    """Returns encoders, core and critic of a network, those that it has."""
    encoders = [model.entry] if model.entry is not None else _encoders(shape, model)
    encoders_text = " and ".join(encoders)
    core = [f"{model.core} {model.core_size}"] if model.core != "none" else []
    if not isinstance(shape.heads, ActorCriticHeads):
        return [encoders_text, *core]

    critic = "separate critic" if shape.is_separate else "shared critic"
    return [encoders_text, *core, critic]


def _encoders(shape: GeneralShape[Any], model: ModelConfig) -> list[str]:
    """Returns what reads the parts of an observation, each kind once."""
    kinds: list[str] = []
    for part in shape.inputs:
        if part.choices:
            kinds.append(f"embeddings of {sum(part.choices):,} choices")
        if not part.is_image:
            kinds.append(_mlp(model))
        elif is_small(model, part.shape):
            kinds += (f"small_cnn {'-'.join(map(str, model.filters))}", _mlp(model))
        else:
            kinds.append("impala_cnn" if model.kind == "impala_cnn" else "nature_cnn")
    return [*dict.fromkeys(kinds)]
