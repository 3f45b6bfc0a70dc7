"""Which network fits an environment and an algorithm. Imports no torch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

from gymnasium.spaces import Box, Discrete, MultiDiscrete

from penstock.configs.errors import UserError
from penstock.configs.model import ModelConfig
from penstock.configs.schema import Config
from penstock.configs.sections import EnvKind
from penstock.core.observations import MASK, ObservationPart, Spaces, bounds_of
from penstock.core.params import ParamLayout
from penstock.models.actions import ActionSpec, action_spec
from penstock.models.core_inputs import CoreInputs
from penstock.models.general import (
    LEAST_LARGE,
    LEAST_SMALL,
    ActorCriticHeads,
    GeneralShape,
    Input,
    channels_last,
    is_small,
    plain_mlp,
    sides,
)
from penstock.models.layout import CnnShape, DenseShape, MlpShape, QCnnShape, SingleHead

LEAST_PIXELS = {"small_cnn": LEAST_SMALL, "nature_cnn": LEAST_LARGE, "impala_cnn": 8}
"""Least height and width, in pixels, of an image that the convolutions of each kind can read."""

ActorCriticShape = MlpShape | CnnShape | GeneralShape[ActorCriticHeads]
HeadShape = DenseShape | QCnnShape | GeneralShape[SingleHead]
AnyShape = ActorCriticShape | HeadShape
Heads = TypeVar("Heads", ActorCriticHeads, SingleHead)


class NetworkInputs(NamedTuple):
    """How networks read an observation."""

    arrays: tuple[Input, ...]
    """The arrays of an observation; exactly one if it has no parts."""
    mask: ObservationPart | None
    """The action mask among the parts."""
    scale: float
    """The factor that brings an observation of one array near 1."""


def parts_of(spaces: Spaces) -> tuple[ObservationPart, ...]:
    """Returns the parts of an environment's observations; none where they are one array."""
    return getattr(spaces, "parts", ())


def mask_of(spaces: Spaces) -> ObservationPart | None:
    """Returns the action mask among the parts of an environment's observations."""
    return next((part for part in parts_of(spaces) if part.name == MASK), None)


def kind_of(config: Config, spaces: Spaces) -> EnvKind:
    """Returns the kind of environment (`env.kind`) by its spaces.

    Small images are numbers like others.
    """
    images = [array for array in _read(config, spaces).arrays if array.is_image]
    if any(not is_small(config.model, image.shape) for image in images):
        return "pixels"
    return "continuous" if isinstance(spaces.action_space, Box) else "vector"


def actor_critic_shape(config: Config, spaces: Spaces) -> ActorCriticShape:
    """Returns the network of a policy and a value.

    It is a fused one where `models.layout` has one for the observations and the config.

    Raises:
        UserError: if no network fits the spaces.
    """
    model = config.model
    actions = action_spec(config, spaces)
    observation = _read(config, spaces)
    array = observation.arrays[0]

    if _is_fast_cnn(model, array):
        channels, height, width = array.shape
        return CnnShape(
            channels=channels,
            height=height,
            width=width,
            actions=actions,
            obs_scale=observation.scale,
            log_std_init=model.log_std_init,
            normalize=model.normalize_observations,
            layer_norm=model.layer_norm,
        )

    if _needs_general(model, array) or array.is_image or model.critic == "shared":
        return _general_shape(config, observation, ActorCriticHeads(actions), actions)
    return MlpShape(
        inputs=math.prod(array.shape),
        actions=actions,
        hidden=tuple(model.hidden),
        activation=model.activation,
        obs_scale=observation.scale,
        normalize=model.normalize_observations,
        log_std_init=model.log_std_init,
        layer_norm=model.layer_norm,
    )


def q_shape(
    config: Config,
    spaces: Spaces,
    *,
    duelling: bool = False,
    quantiles: int = 1,
    noisy: bool = False,
    shows_epsilon: bool = False,
) -> HeadShape:
    """Returns the network of Q-values of actions to choose from; `SingleHead` has the options.

    Where observations have an action mask, the values of what it forbids must not be part of a
    target: `models.torch_heads.HeadNet.allowed_outputs` leaves them out.

    Raises:
        UserError: if actions are no choices, or no network fits the observations.
    """
    model = config.model
    counts = _counts(spaces, config.algo.name)
    head = SingleHead(
        sum(counts),
        duelling,
        quantiles=quantiles,
        noisy=noisy,
        counts=counts if len(counts) > 1 else (),
        shows_epsilon=shows_epsilon,
    )
    observation = _read(config, spaces)
    array = observation.arrays[0]

    if _is_fast_cnn(model, array):
        channels, height, width = array.shape
        return QCnnShape(
            channels=channels,
            height=height,
            width=width,
            head=head,
            obs_scale=observation.scale,
            normalize=model.normalize_observations,
            layer_norm=model.layer_norm,
        )
    return _head_shape(config, spaces, observation, head)


def gaussian_shape(config: Config, spaces: Spaces) -> DenseShape | GeneralShape[SingleHead]:
    """Returns the network of means, then logarithms of standard deviations, of an action's values.

    Raises:
        UserError: if actions are no Box, or no network fits the observations.
    """
    return numbers_shape(config, spaces, of_each=2)


def numbers_shape(
    config: Config, spaces: Spaces, *, of_each: int = 1
) -> DenseShape | GeneralShape[SingleHead]:
    """Returns the network with ``of_each`` outputs for each of an action's values.

    Raises:
        UserError: if actions are no Box, or no network fits the observations.
    """
    if not isinstance(spaces.action_space, Box):
        raise UserError(
            f"action space {spaces.action_space} is not a Box, the only kind that algo.name "
            f"{config.algo.name} plays; set algo.name=ppo or algo.name=dqn"
        )

    head = SingleHead(of_each * math.prod(spaces.action_space.shape))
    return _head_shape(config, spaces, _read(config, spaces), head)


def _head_shape(
    config: Config, spaces: Spaces, observation: NetworkInputs, head: SingleHead
) -> DenseShape | GeneralShape[SingleHead]:
    """Returns the network with one head: a fused one for a vector of numbers without memory."""
    model = config.model
    array = observation.arrays[0]
    if _needs_general(model, array) or array.is_image:
        return _general_shape(config, observation, head, action_spec(config, spaces))

    return DenseShape(
        inputs=math.prod(array.shape),
        head=head,
        hidden=tuple(model.hidden),
        activation=model.activation,
        obs_scale=observation.scale,
        normalize=model.normalize_observations,
        layer_norm=model.layer_norm,
    )


def _general_shape(
    config: Config, observation: NetworkInputs, heads: Heads, actions: ActionSpec
) -> GeneralShape[Heads]:
    """Returns the general network with these heads, whose core may read the last of ``actions``."""
    return GeneralShape(
        inputs=observation.arrays,
        mask=observation.mask,
        heads=heads,
        model=config.model,
        make_layout=_layout,
        core_inputs=CoreInputs.of(config, actions),
    )


def scales_of(shape: AnyShape) -> list[list[float]]:
    """Returns for each array of an observation what is subtracted, and the factor that follows."""
    if isinstance(shape, GeneralShape):
        return [[array.low, 1 / array.span] for array in shape.inputs]
    return [[0.0, shape.obs_scale]]


def _counts(spaces: Spaces, algo: str) -> tuple[int, ...]:
    """Returns the number of actions of each choice; UserError for actions that are no choices."""
    space = spaces.action_space
    if isinstance(space, Discrete):
        return (int(space.n),)
    if isinstance(space, MultiDiscrete):
        return tuple(int(count) for count in space.nvec.flat)

    other_algo = "sac" if isinstance(space, Box) else "ppo"
    raise UserError(
        f"action space {space} is neither Discrete nor MultiDiscrete, the kinds that algo.name "
        f"{algo} plays; set algo.name={other_algo}"
    )


def _read(config: Config, spaces: Spaces) -> NetworkInputs:
    """Returns how networks read an environment's observations; UserError if none can."""
    model = config.model
    mask = mask_of(spaces)
    if parts := parts_of(spaces):
        visible = [part for part in parts if part is not mask and part.nbytes]
        inputs = tuple(
            _input(
                model, part.name, shape=part.shape, dtype=part.dtype, part=part, bounds=part.bounds
            )
            for part in visible
        )
        _check_inputs(model, inputs, mask)
        return NetworkInputs(inputs, mask, scale=1.0)

    space = spaces.observation_space
    if not isinstance(space, Box):
        raise UserError(
            f"observation space {space} is not a Box, the only kind that networks "
            "read; add gymnasium.wrappers:FlattenObservation to env.wrappers"
        )

    normalizes = model.normalize_observations
    bounds = None if normalizes else bounds_of(space)
    array = _input(model, "obs", shape=space.shape, dtype=space.dtype.str, part=None, bounds=bounds)
    _check_inputs(model, (array,), None)
    return NetworkInputs((array,), mask=None, scale=1.0 if normalizes else 1 / array.span)


def _input(
    model: ModelConfig,
    name: str,
    *,
    shape: tuple[int, ...],
    dtype: str,
    part: ObservationPart | None,
    bounds: tuple[float, float] | None,
) -> Input:
    """Returns how networks read one array of an observation.

    Args:
        model: the options of the network.
        name: of the array.
        shape: of the array, perhaps of frames without an axis of channels.
        dtype: of the array.
        part: its place in an observation of several parts.
        bounds: least and largest value in its space, if these are known and of use.
    """
    frame_shape = _with_channel(shape, dtype)
    is_image = _is_image(model, frame_shape)

    # A custom network gets arrays in the shapes that the environment gives them.
    adds_channel = is_image and model.entry is None
    input_shape = frame_shape if adds_channel else shape or (1,)

    # Bounds are of use for images, and for arrays that look like frames but are read flat.
    is_like_frames = is_image or dtype == "|u1" or len(shape) > 2 or _is_large(shape)
    low, span = _scale(model, dtype, bounds if is_like_frames else None)
    return Input(
        name=name,
        shape=input_shape,
        dtype=dtype,
        part=part,
        is_image=is_image,
        choices=() if part is None else part.choices,
        low=low,
        span=span,
    )


def _scale(
    model: ModelConfig, dtype: str, bounds: tuple[float, float] | None
) -> tuple[float, float]:
    """Returns `Input.low` and `Input.span`, which bring bytes and frames into -1 ... 1.

    They are given by the bounds of the space. Numbers without bounds stay as they are: the bounds
    of other arrays than frames are often far from what occurs.
    """
    if bounds is None or model.scale == "bytes":
        is_bytes = dtype == "|u1"
        return 0.0, 255.0 if is_bytes else 1.0

    low, high = bounds
    if low <= 0 <= high:  # 0 stays 0
        return 0.0, max(-low, high) or 1.0
    return low, high - low or 1.0


def _with_channel(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Returns the shape with one channel in front, if it is that of a gray frame.

    Bytes of two axes are a gray frame, and so are other numbers in a small square, as those of a
    board.
    """
    if len(shape) != 2:
        return shape

    is_small_square = shape[0] == shape[1] < LEAST_LARGE
    is_gray = is_small_square or dtype == "|u1"
    return (1, *shape) if is_gray else shape


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
    """Returns whether an array is read by convolutions, or by a custom network as an image."""
    if len(shape) != 3 or (model.kind == "mlp" and model.entry is None):
        return False

    shorter_side = min(sides(shape))
    if model.entry is not None:
        return shorter_side >= LEAST_LARGE
    if model.kind == "auto":
        fits_small_cnn = bool(model.filters) and shorter_side >= LEAST_SMALL
        is_cells = fits_small_cnn and is_small(model, shape)
        return is_cells or shorter_side >= LEAST_LARGE
    return shorter_side >= LEAST_PIXELS[model.kind]


def _needs_general(model: ModelConfig, array: Input) -> bool:
    """Returns whether only a `GeneralShape` is a network for observations with this first array.

    That is so if they have parts, if something is subtracted, and if the network is a custom one or
    has memory.
    """
    is_fused = model.entry is None and model.core == "none"
    return array.part is not None or array.low != 0 or not is_fused


def _is_fast_cnn(model: ModelConfig, array: Input) -> bool:
    """Returns whether the fused networks `CnnShape` and `QCnnShape` can read an array."""
    if not array.is_image or _needs_general(model, array):
        return False
    if model.kind == "impala_cnn" or model.critic == "separate":
        return False
    return not is_small(model, array.shape) and not channels_last(array.shape)


def _check_inputs(
    model: ModelConfig, inputs: tuple[Input, ...], mask: ObservationPart | None
) -> None:
    """Raise UserError for arrays that the configured network cannot read."""
    if not inputs:
        exception = f" but {mask.name}" if mask else ""
        raise UserError(
            f"observations hold nothing{exception}; correct the environment's observation space"
        )
    for array in inputs:
        _check_axes(model, array.shape)

    shapes = ", ".join(f"{array.name} {list(array.shape)}" for array in inputs)
    images = [array for array in inputs if array.is_image]
    is_custom = model.entry is not None
    if not is_custom and model.kind in LEAST_PIXELS and not images:
        raise UserError(
            f"observations {shapes} do not fit {model.kind}, which reads [channels, height, width] "
            f"of at least {LEAST_PIXELS[model.kind]} pixels each way; bring them into that form "
            "with env.wrappers, or set model.kind=mlp"
        )

    has_only_images = len(images) == len(inputs)
    if model.normalize_observations and has_only_images and is_custom:
        raise UserError(
            f"model.normalize_observations does nothing for frames {shapes} that a network of "
            "model.entry reads; normalise them there, or set model.normalize_observations=false"
        )


def _layout(shape: GeneralShape[Any]) -> ParamLayout:
    """Returns the layout of a network's parameters; imports torch for all but a `PlainMlp`."""
    if (mlp := plain_mlp(shape)) is not None:
        return mlp.layout

    from penstock.models.torch_general import layout

    return layout(shape)
