"""Which network fits a game and an algorithm. Imports no torch."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from penstock.configs.algorithms import DqnConfig, ImpalaConfig, SacConfig
from penstock.configs.errors import UserError
from penstock.configs.schema import Config, ModelConfig
from penstock.models.layout import (
    ActorCriticShape,
    CnnShape,
    DenseShape,
    HeadShape,
    MlpShape,
    NetShape,
    QCnnShape,
)

MIN_PIXELS = 36  # what the convolutions need in each direction


class Spaces(Protocol):
    """What a network needs to know about a game: the spaces of a single environment."""

    @property
    def observation_space(self) -> Any: ...
    @property
    def action_space(self) -> Any: ...


def net_shape(config: Config, game: Spaces) -> NetShape:
    """The network that actors get; UserError where none fits the game."""
    match config.algo:
        case ImpalaConfig():
            return actor_critic_shape(config.model, game)
        case DqnConfig():
            return q_shape(config.model, config.algo, game)
        case SacConfig():
            return gaussian_shape(config.model, game)


def actor_critic_shape(model: ModelConfig, game: Spaces) -> ActorCriticShape:
    """Policy and value over actions to choose from."""
    actions, shape, scale = _choices(game, "impala"), *_observations(game)
    if _takes_cnn(model, shape):
        channels, height, width = shape
        return CnnShape(channels, height, width, actions, scale)
    return MlpShape(math.prod(shape), actions, tuple(model.hidden), model.activation, scale)


def q_shape(model: ModelConfig, algo: DqnConfig, game: Spaces) -> HeadShape:
    """Q-values of actions to choose from."""
    actions, shape, scale = _choices(game, "dqn"), *_observations(game)
    if _takes_cnn(model, shape):
        channels, height, width = shape
        return QCnnShape(channels, height, width, actions, scale, algo.duelling)
    hidden = tuple(model.hidden)
    return DenseShape(
        math.prod(shape), actions, hidden, model.activation, scale, duelling=algo.duelling
    )


def gaussian_shape(model: ModelConfig, game: Spaces) -> DenseShape:
    """Means, then logarithms of standard deviations, of each value in an action."""
    if not isinstance(game.action_space, spaces.Box):
        raise UserError(
            f"action space {game.action_space} is not a Box, the only kind that algo.name sac "
            "plays; set algo.name=dqn or algo.name=impala"
        )
    shape, scale = _observations(game)
    if model.kind == "auto" and len(shape) == 3 and sorted(shape)[1] >= MIN_PIXELS:
        raise UserError(
            f"observations of shape {list(shape)} look like frames, and algo.name sac reads them "
            "as a flat vector only; set model.kind=mlp if that is meant, or env.wrappers to a "
            "wrapper of yours that makes them few"
        )
    outputs = 2 * action_size(game)
    return DenseShape(math.prod(shape), outputs, tuple(model.hidden), model.activation, scale)


def action_size(game: Spaces) -> int:
    """Values in one action of a Box."""
    return math.prod(game.action_space.shape)


def _choices(game: Spaces, algo: str) -> int:
    """Actions of a Discrete space."""
    space = game.action_space
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    way_out = (
        "set algo.name=sac"
        if isinstance(space, spaces.Box)
        else "wrap the environment so that it takes one whole number"
    )
    raise UserError(
        f"action space {space} is not Discrete, the only kind that algo.name {algo} plays; "
        f"{way_out}"
    )


def _observations(game: Spaces) -> tuple[tuple[int, ...], float]:
    """Shape of an observation, and the factor that brings it near 1."""
    space = game.observation_space
    if not isinstance(space, spaces.Box):
        raise UserError(
            f"observation space {space} is not a Box, the only kind that networks "
            "read; add gymnasium.wrappers:FlattenObservation to env.wrappers"
        )
    return space.shape, 1 / 255 if space.dtype == np.uint8 else 1.0


def _takes_cnn(model: ModelConfig, shape: tuple[int, ...]) -> bool:
    fits = len(shape) == 3 and min(shape[1:]) >= MIN_PIXELS
    channels_last = len(shape) == 3 and min(shape[:2]) >= MIN_PIXELS
    if fits or model.kind == "mlp":
        return model.kind != "mlp"
    if model.kind == "auto" and not channels_last:
        return False
    raise UserError(
        f"observations of shape {list(shape)} do not fit nature_cnn, which reads [channels, "
        f"height, width] of at least {MIN_PIXELS} pixels each way; bring them into that form "
        "with env.wrappers, or set model.kind=mlp"
    )
