"""Which network fits a game and an algorithm. Imports no torch."""

from __future__ import annotations

import math

import numpy as np
from gymnasium import spaces

from penstock.configs.errors import UserError
from penstock.configs.model import ModelConfig
from penstock.configs.schema import Config
from penstock.core.observations import MASK, ObservationPart, Spaces
from penstock.core.params import ParamLayout
from penstock.models.actions import action_spec
from penstock.models.general import GeneralShape, Input, channels_last
from penstock.models.layout import CnnShape, DenseShape, HeadShape, MlpShape, NetShape, QCnnShape

MIN_PIXELS = 36  # what the convolutions of nature_cnn need in each direction
MIN_PIXELS_IMPALA = 8

ActorCriticShape = MlpShape | CnnShape | GeneralShape
AnyShape = NetShape | GeneralShape


def parts_of(game: Spaces) -> tuple[ObservationPart, ...]:
    """The parts of a game's observations; none where an observation is one array."""
    return getattr(game, "parts", ())


def mask_of(game: Spaces) -> ObservationPart | None:
    """The action mask among the parts of a game's observations."""
    return next((part for part in parts_of(game) if part.name == MASK), None)


def actor_critic_shape(config: Config, game: Spaces) -> ActorCriticShape:
    """Policy and value."""
    model, actions, parts = config.model, action_spec(config, game), parts_of(game)
    mask = mask_of(game)
    if parts:
        visible = [part for part in parts if part is not mask]
        inputs = tuple(_input(model, p.name, p.shape, p.dtype, p) for p in visible if p.nbytes)
    else:
        shape, scale = _observations(game, config.algo.name)
        inputs = (_input(model, "obs", shape, game.observation_space.dtype.str, None),)
    _check_inputs(model, inputs, mask)
    general = GeneralShape(inputs, mask, actions, model, _layout)
    if parts or model.core != "none" or model.entry is not None:
        return general
    if _is_fast_cnn(model, inputs[0]):
        channels, height, width = inputs[0].shape
        return CnnShape(channels, height, width, actions, scale, model.log_std_init)
    if inputs[0].is_image or model.critic == "shared":
        return general
    size, hidden, normalize = math.prod(shape), tuple(model.hidden), model.normalize_observations
    scale = 1.0 if normalize else scale
    return MlpShape(size, actions, hidden, model.activation, scale, normalize, model.log_std_init)


def q_shape(config: Config, game: Spaces, *, duelling: bool = False) -> HeadShape:
    """Q-values of actions to choose from."""
    model, algo = config.model, config.algo.name
    actions, shape, scale = _choices(game, algo), *_observations(game, algo)
    _check_axes(model, shape)
    if _takes_cnn(model, frames := _with_channel(shape, game.observation_space.dtype.str)):
        channels, height, width = frames
        return QCnnShape(channels, height, width, actions, scale, duelling)
    hidden = tuple(model.hidden)
    return DenseShape(math.prod(shape), actions, hidden, model.activation, scale, duelling)


def gaussian_shape(config: Config, game: Spaces) -> DenseShape:
    """Means, then logarithms of standard deviations, of each value in an action."""
    model, algo = config.model, config.algo.name
    if not isinstance(game.action_space, spaces.Box):
        raise UserError(
            f"action space {game.action_space} is not a Box, the only kind that algo.name {algo} "
            "plays; set algo.name=ppo or algo.name=dqn"
        )
    shape, scale = _observations(game, algo)
    is_framed = len(shape) > 2 or game.observation_space.dtype == np.uint8
    if model.kind == "auto" and is_framed and _is_large(shape):
        raise UserError(
            f"observations of shape {list(shape)} look like frames, and algo.name {algo} reads "
            "them as a flat vector only; set model.kind=mlp if that is meant, or env.wrappers to a "
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
    way_out = "sac" if isinstance(space, spaces.Box) else "ppo"
    raise UserError(
        f"action space {space} is not Discrete, the only kind that algo.name {algo} plays; "
        f"set algo.name={way_out}"
    )


def _observations(game: Spaces, algo: str) -> tuple[tuple[int, ...], float]:
    """Shape of an observation of one array, and the factor that brings it near 1."""
    space = game.observation_space
    if parts := parts_of(game):
        names = ", ".join(part.name for part in parts)
        raise UserError(
            f"observations have the parts {names}, and algo.name {algo} reads a single array; set "
            "algo.name=ppo, or add gymnasium.wrappers:FlattenObservation to env.wrappers"
        )
    if not isinstance(space, spaces.Box):
        raise UserError(
            f"observation space {space} is not a Box, the only kind that networks "
            "read; add gymnasium.wrappers:FlattenObservation to env.wrappers"
        )
    return space.shape, 1 / 255 if space.dtype == np.uint8 else 1.0


def _input(
    model: ModelConfig, name: str, shape: tuple[int, ...], dtype: str, part: ObservationPart | None
) -> Input:
    frames = _with_channel(shape, dtype)
    is_image = _is_image(model, frames)
    read = frames if is_image and model.entry is None else shape or (1,)
    return Input(name, read, dtype, part, is_image)


def _with_channel(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Bytes of two axes are a gray frame, which is read as one channel."""
    return (1, *shape) if len(shape) == 2 and dtype == "|u1" else shape


def _is_large(shape: tuple[int, ...]) -> bool:
    """Whether two of the axes are long enough to be those of a picture."""
    return len(shape) > 1 and sorted(shape)[-2] >= MIN_PIXELS


def _check_axes(model: ModelConfig, shape: tuple[int, ...]) -> None:
    """UserError for pictures with more axes than convolutions read."""
    if len(shape) > 3 and _is_large(shape) and model.kind != "mlp" and model.entry is None:
        raise UserError(
            f"observations of shape {list(shape)} look like frames, and convolutions read "
            "[channels, height, width]; name wrappers in env.wrappers that bring them into that "
            "form (gymnasium.wrappers:GrayscaleObservation before a FrameStackObservation), or "
            "set model.kind=mlp to read them as a flat vector"
        )


def _is_image(model: ModelConfig, shape: tuple[int, ...]) -> bool:
    kind = "auto" if model.entry is not None else model.kind
    if len(shape) != 3 or kind == "mlp":
        return False
    pixels = shape[:2] if channels_last(shape) else shape[1:]
    return min(pixels) >= (MIN_PIXELS_IMPALA if kind == "impala_cnn" else MIN_PIXELS)


def _is_fast_cnn(model: ModelConfig, only: Input) -> bool:
    """Whether `CnnShape` computes it."""
    plain = model.kind != "impala_cnn" and model.critic != "separate"
    return only.is_image and plain and not channels_last(only.shape)


def _check_inputs(
    model: ModelConfig, inputs: tuple[Input, ...], mask: ObservationPart | None
) -> None:
    shapes = ", ".join(f"{part.name} {list(part.shape)}" for part in inputs)
    if not inputs:
        raise UserError(
            f"observations hold nothing{f' but {mask.name}' if mask else ''}; correct the "
            "environment's observation space"
        )
    for part in inputs:
        _check_axes(model, part.shape)
    images = [part.is_image for part in inputs]
    is_own = model.entry is not None
    if not is_own and model.kind in ("nature_cnn", "impala_cnn") and not any(images):
        least = MIN_PIXELS_IMPALA if model.kind == "impala_cnn" else MIN_PIXELS
        raise UserError(
            f"observations {shapes} do not fit {model.kind}, which reads [channels, "
            f"height, width] of at least {least} pixels each way; bring them into that form "
            "with env.wrappers, or set model.kind=mlp"
        )
    if model.normalize_observations and all(images):
        raise UserError(
            f"model.normalize_observations does nothing for observations {shapes}, since frames "
            "are scaled to 0 ... 1 only; set model.normalize_observations=false"
        )


def _takes_cnn(model: ModelConfig, shape: tuple[int, ...]) -> bool:
    fits = len(shape) == 3 and min(shape[1:]) >= MIN_PIXELS
    is_last = len(shape) == 3 and min(shape[:2]) >= MIN_PIXELS
    if fits or model.kind == "mlp":
        return model.kind != "mlp"
    if model.kind == "auto" and not is_last:
        return False
    raise UserError(
        f"observations of shape {list(shape)} do not fit nature_cnn, which reads [channels, "
        f"height, width] of at least {MIN_PIXELS} pixels each way; bring them into that form "
        "with env.wrappers, or set model.kind=mlp"
    )


def _layout(shape: GeneralShape) -> ParamLayout:
    from penstock.models.torch_general import layout

    return layout(shape)
