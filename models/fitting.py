"""Which network fits an environment and an algorithm. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from gymnasium import spaces

from penstock.configs.errors import UserError
from penstock.configs.model import ModelConfig
from penstock.configs.schema import Config
from penstock.configs.sections import EnvKind
from penstock.core.observations import MASK, ObservationPart, Spaces, bounds_of
from penstock.core.params import ParamLayout
from penstock.models.actions import action_spec
from penstock.models.general import (
    LEAST_LARGE,
    LEAST_SMALL,
    ActorCriticHeads,
    GeneralShape,
    Input,
    SingleHead,
    channels_last,
    is_small,
    sides,
)
from penstock.models.layout import CnnShape, DenseShape, MlpShape, QCnnShape

LEAST_PIXELS = {"small_cnn": LEAST_SMALL, "nature_cnn": LEAST_LARGE, "impala_cnn": 8}
"""What the convolutions of each need in each direction."""

ActorCriticShape = MlpShape | CnnShape | GeneralShape[ActorCriticHeads]
HeadShape = DenseShape | QCnnShape | GeneralShape[SingleHead]
AnyShape = ActorCriticShape | HeadShape


def parts_of(game: Spaces) -> tuple[ObservationPart, ...]:
    """The parts of a game's observations; none where an observation is one array."""
    return getattr(game, "parts", ())


def mask_of(game: Spaces) -> ObservationPart | None:
    """The action mask among the parts of a game's observations."""
    return next((part for part in parts_of(game) if part.name == MASK), None)


def kind_of(config: Config, game: Spaces) -> EnvKind:
    """The kind of environment (`env.kind`) by its spaces; small images are numbers like others."""
    images = [part for part in _read(config, game)[0] if part.is_image]
    if any(not is_small(config.model, part.shape) for part in images):
        return "pixels"
    return "continuous" if isinstance(game.action_space, spaces.Box) else "vector"


def actor_critic_shape(config: Config, game: Spaces) -> ActorCriticShape:
    """Policy and value."""
    model, actions = config.model, action_spec(config, game)
    inputs, mask, scale = _read(config, game)
    only = inputs[0]
    general = GeneralShape(inputs, mask, ActorCriticHeads(actions), model, _layout)
    if only.part or only.low or model.core != "none" or model.entry is not None:
        return general
    if _is_fast_cnn(model, only):
        channels, height, width = only.shape
        normalize = model.normalize_observations
        return CnnShape(channels, height, width, actions, scale, model.log_std_init, normalize)
    if only.is_image or model.critic == "shared":
        return general
    size, hidden = math.prod(only.shape), tuple(model.hidden)
    normalize, log_std = model.normalize_observations, model.log_std_init
    return MlpShape(size, actions, hidden, model.activation, scale, normalize, log_std)


def q_shape(config: Config, game: Spaces, *, duelling: bool = False) -> HeadShape:
    """Q-values of actions to choose from.

    Where observations have an action mask, the values of what it forbids must not be part of a
    target: `models.torch_heads.HeadNet.allowed_outputs` leaves them out.
    """
    model, actions = config.model, _choices(game, config.algo.name)
    inputs, mask, scale = _read(config, game)
    only = inputs[0]
    if not (only.part or only.low) and model.entry is None and _is_fast_cnn(model, only):
        channels, height, width = only.shape
        normalize = model.normalize_observations
        return QCnnShape(channels, height, width, actions, scale, duelling, normalize)
    return _head_shape(model, inputs, mask, scale, SingleHead(actions, duelling))


def gaussian_shape(config: Config, game: Spaces) -> DenseShape | GeneralShape[SingleHead]:
    """Means, then logarithms of standard deviations, of each value in an action."""
    if not isinstance(game.action_space, spaces.Box):
        raise UserError(
            f"action space {game.action_space} is not a Box, the only kind that algo.name "
            f"{config.algo.name} plays; set algo.name=ppo or algo.name=dqn"
        )
    return _head_shape(config.model, *_read(config, game), SingleHead(2 * action_size(game)))


def _head_shape(
    model: ModelConfig,
    inputs: tuple[Input, ...],
    mask: ObservationPart | None,
    scale: float,
    head: SingleHead,
) -> DenseShape | GeneralShape[SingleHead]:
    only = inputs[0]
    if only.part or only.low or model.entry is not None or only.is_image:
        return GeneralShape(inputs, mask, head, model, _layout)
    return DenseShape(
        math.prod(only.shape),
        head.outputs,
        tuple(model.hidden),
        model.activation,
        scale,
        head.duelling,
        model.normalize_observations,
    )


def scales_of(shape: AnyShape) -> list[list[float]]:
    """Returns for each array of an observation what is subtracted, and the factor that follows."""
    if isinstance(shape, GeneralShape):
        return [[each.low, 1 / each.span] for each in shape.inputs]
    return [[0.0, shape.obs_scale]]


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


def _read(config: Config, game: Spaces) -> tuple[tuple[Input, ...], ObservationPart | None, float]:
    """The arrays of an observation, its action mask, and the factor that brings an observation of
    one array near 1. UserError for what no network reads."""
    model, mask = config.model, mask_of(game)
    if parts := parts_of(game):
        visible = [part for part in parts if part is not mask and part.nbytes]
        inputs = tuple(_input(model, p.name, p.shape, p.dtype, p, p.bounds) for p in visible)
        _check_inputs(model, inputs, mask)
        return inputs, mask, 1.0

    space = game.observation_space
    if not isinstance(space, spaces.Box):
        raise UserError(
            f"observation space {space} is not a Box, the only kind that networks "
            "read; add gymnasium.wrappers:FlattenObservation to env.wrappers"
        )

    bounds = None if model.normalize_observations else bounds_of(space)
    only = _input(model, "obs", space.shape, space.dtype.str, None, bounds)
    _check_inputs(model, (only,), None)
    return (only,), None, 1.0 if model.normalize_observations else 1 / only.span


def _input(
    model: ModelConfig,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    part: ObservationPart | None,
    bounds: tuple[float, float] | None,
) -> Input:
    frames = _with_channel(shape, dtype)
    is_image = _is_image(model, frames)
    read = frames if is_image and model.entry is None else shape or (1,)
    is_like_frames = is_image or dtype == "|u1" or len(shape) > 2 or _is_large(shape)
    scale = _scale(model, dtype, bounds if is_like_frames else None)
    return Input(name, read, dtype, part, is_image, *scale)


def _scale(
    model: ModelConfig, dtype: str, bounds: tuple[float, float] | None
) -> tuple[float, float]:
    """Returns `Input.low` and `Input.span`, which bring bytes and frames into -1 ... 1.

    They are given by the bounds of the space. Numbers without bounds stay as they are: the bounds
    of other arrays than frames are often far from what occurs.
    """
    is_bytes = dtype == "|u1"
    if bounds is None or model.scale == "bytes":
        return 0.0, 255.0 if is_bytes else 1.0

    low, high = bounds
    if low <= 0 <= high:  # nothing stays nothing
        return 0.0, max(-low, high) or 1.0
    return low, high - low or 1.0


def _with_channel(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Returns the shape with one channel in front, if it is that of a gray frame.

    Bytes of two axes are a gray frame, and so are other numbers in a small square, as those of a
    board.
    """
    is_square = len(shape) == 2 and shape[0] == shape[1] < LEAST_LARGE
    return (1, *shape) if is_square or (len(shape) == 2 and dtype == "|u1") else shape


def _is_large(shape: tuple[int, ...]) -> bool:
    """Returns whether two of the axes are long enough to be those of a picture."""
    return len(shape) > 1 and sorted(shape)[-2] >= LEAST_LARGE


def _check_axes(model: ModelConfig, shape: tuple[int, ...]) -> None:
    """Raise UserError for pictures with more axes than convolutions read."""
    if len(shape) > 3 and _is_large(shape) and model.kind != "mlp" and model.entry is None:
        raise UserError(
            f"observations of shape {list(shape)} look like frames, and convolutions read "
            "[channels, height, width]; name wrappers in env.wrappers that bring them into that "
            "form (gymnasium.wrappers:GrayscaleObservation before a FrameStackObservation), or "
            "set model.kind=mlp to read them as a flat vector"
        )


def _is_image(model: ModelConfig, shape: tuple[int, ...]) -> bool:
    if len(shape) != 3 or (model.kind == "mlp" and model.entry is None):
        return False
    least = min(sides(shape))
    if model.entry is not None:
        return least >= LEAST_LARGE
    if model.kind == "auto":
        is_cells = bool(model.filters) and least >= LEAST_SMALL and is_small(model, shape)
        return is_cells or least >= LEAST_LARGE
    return least >= LEAST_PIXELS[model.kind]


def _is_fast_cnn(model: ModelConfig, only: Input) -> bool:
    """Whether `CnnShape` computes it."""
    if not only.is_image or model.kind == "impala_cnn" or model.critic == "separate":
        return False
    return not is_small(model, only.shape) and not channels_last(only.shape)


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
    if not is_own and model.kind in LEAST_PIXELS and not any(images):
        raise UserError(
            f"observations {shapes} do not fit {model.kind}, which reads [channels, height, width] "
            f"of at least {LEAST_PIXELS[model.kind]} pixels each way; bring them into that form "
            "with env.wrappers, or set model.kind=mlp"
        )
    if model.normalize_observations and all(images) and is_own:
        raise UserError(
            f"model.normalize_observations does nothing for frames {shapes} that a network of "
            "model.entry reads; normalise them there, or set model.normalize_observations=false"
        )


def _layout(shape: GeneralShape[Any]) -> ParamLayout:
    """Returns the layout of a network's parameters; imports torch."""
    from penstock.models.torch_general import layout

    return layout(shape)
