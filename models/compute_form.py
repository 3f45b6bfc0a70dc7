"""The forms in which a network may be computed, and which of them are tried. No torch here.

A form is a precision, an order of images in memory, and a number of observations in one pass. It
changes rounding and speed only: parameters, gradients and optimizer state are float32 in each. So
two learners of a group, or a run before and after a resume, may have different forms.

The form *by rule* is the one that is used where nothing is timed. A run on a CPU times it together
with others, and changes to the fastest (`penstock.autotune.forms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from penstock.configs.value_types import MemoryFormat
from penstock.models.actions import Choices
from penstock.models.fitting import AnyShape
from penstock.models.general import GeneralShape
from penstock.models.layout import CnnShape, MlpShape, QCnnShape

S = TypeVar("S", bound=AnyShape)
Precision = Literal["fp32", "bf16"]
ROWS = 256  # observations of a pass by rule: about as many images fit a processor's cache
FEWER_ROWS = (128, 64)  # further observations of a pass that are tried for images
MORE_ROWS = (1024, 4096)  # further observations of a pass that are tried for an mlp
MOST_ROWS = 1 << 20  # most observations of a pass in a form that is read from a file
MANY_INPUTS = 256  # inputs of an mlp; with fewer, bf16 gains less than the casts take
LEAST_GAIN = 1.1  # factor by which another form must be faster than that by rule
# Factor on the time of passes smaller than by rule. There are more of them, and each also computes
# a loss and cuts a batch, which is not timed.
SMALLER_PASS = 1.25


class ComputeForm(NamedTuple):
    """One way to compute a network; the values are those of the options of the same names."""

    precision: Precision
    memory_format: MemoryFormat
    """`auto` where there are no images."""
    rows: int
    """Observations in one pass (`learner.micro_batch`, or `actors.envs`)."""

    def __str__(self) -> str:
        return f"{self.short} observations a pass"

    @property
    def short(self) -> str:
        """The values alone: `bf16, channels_last, 256`."""
        order = "" if self.memory_format == "auto" else f", {self.memory_format}"
        return f"{self.precision}{order}, {self.rows}"

    @classmethod
    def read(cls, value: Any) -> ComputeForm | None:
        """Returns the form that a JSON list describes; None where it describes none."""
        if type(value) is not list or len(value) != len(cls._fields):
            return None

        precision, memory_format, rows = value
        if precision not in get_args(Precision) or memory_format not in get_args(MemoryFormat):
            return None

        is_count = type(rows) is int and 0 < rows <= MOST_ROWS
        return cls(precision, memory_format, rows) if is_count else None


class Options(NamedTuple):
    """The options of a form as the user has set them; `auto` and None leave the choice open."""

    precision: Literal["auto", "fp32", "bf16"]
    memory_format: MemoryFormat
    rows: int | None


def gains_by_bf16(shape: AnyShape) -> bool:
    """Returns whether bf16 is tried for a network.

    The network must be large enough for it to pay, and of a kind that was seen to learn as well
    with it. Continuous control from many numbers was not tried.
    """
    if isinstance(shape, MlpShape):
        return shape.inputs >= MANY_INPUTS and isinstance(shape.actions, Choices)
    if isinstance(shape, GeneralShape):
        return shape.has_large_images
    return shape.convolutional


class UpdateSize(NamedTuple):
    """Number of observations in one update, which is divided into passes."""

    rows: int
    unit: int = 1
    """Observations that no pass divides: those of an environment's unroll, where they belong
    together."""

    def divided(self, about: int) -> int:
        """Returns the observations of a pass, if passes are equally large and as few as possible.

        A pass has at most ``about`` observations, rounded up to a whole number of units. A small
        last pass would cost more than larger ones save, so all are equal.
        """
        units = self.rows // self.unit
        passes = max(1, _ceil_div(self.rows, about))
        return _ceil_div(units, passes) * self.unit


def training_forms(
    shape: AnyShape, options: Options, update: UpdateSize, *, has_bf16: bool
) -> list[ComputeForm]:
    """Returns the forms of a learner that are timed, the one by rule first.

    Where the options leave nothing open there is one. ``has_bf16`` says whether the processor
    computes bf16 fast.
    """
    pass_rows = [options.rows or ROWS]
    if options.rows is None and shape.convolutional:
        largest = min(ROWS, update.rows)
        fewer_rows = [update.divided(about) for about in FEWER_ROWS]
        pass_rows += [rows for rows in fewer_rows if rows < largest]
    elif options.rows is None:
        more_rows = [update.divided(about) for about in MORE_ROWS]
        pass_rows += [rows for rows in more_rows if rows > ROWS]

    distinct_rows = list(dict.fromkeys(pass_rows))
    return _forms(shape, options, distinct_rows, has_bf16=has_bf16, learns=True)


def acting_forms(
    shape: AnyShape, options: Options, envs: int, *, has_bf16: bool
) -> list[ComputeForm]:
    """Returns the forms of an actor's inference over ``envs`` environments, the one by rule first.

    A network without convolutions has one, which is fp32 by rule. ``has_bf16`` says whether the
    processor computes bf16 fast.
    """
    if not shape.convolutional and options.precision == "auto":
        options = options._replace(precision="fp32")
    return _forms(shape, options, [envs], has_bf16=has_bf16, learns=False)


def order_by_rule(shape: AnyShape, precision: Precision, *, learns: bool) -> MemoryFormat:
    """Returns the order of images on a CPU where nothing was timed; `auto` where there are none.

    `models.frame_order` and `models.torch_encoders` compute images in this order. ``learns`` says
    whether the network is trained, rather than only acting.
    """
    if not _has_images(shape):
        return "auto"

    is_impala = isinstance(shape, GeneralShape) and shape.model.kind == "impala_cnn"
    trains_in_fp32 = learns and precision == "fp32"
    return "channels_last" if is_impala or trains_in_fp32 else "contiguous"


def in_memory_format(shape: S, memory_format: MemoryFormat) -> S:
    """Returns the shape of the same network with its images, if any, in the given order."""
    if isinstance(shape, CnnShape | QCnnShape | GeneralShape):
        return replace(shape, memory_format=memory_format)
    return shape


def fastest(seconds: Mapping[ComputeForm, float], by_rule: ComputeForm) -> ComputeForm:
    """Returns the form that takes the least time.

    Of forms that are slower by less than `LEAST_GAIN`, the one that differs least from ``by_rule``
    is taken, so that noise decides as little as possible. Times of passes that are smaller than by
    rule count `SMALLER_PASS` times.

    Args:
        seconds: time of each form, in seconds per observation.
        by_rule: the form by rule.
    """
    costs = {}
    for form, form_seconds in seconds.items():
        factor = SMALLER_PASS if form.rows < by_rule.rows else 1.0
        costs[form] = form_seconds * factor

    limit = LEAST_GAIN * min(costs.values())
    candidates = [form for form in costs if costs[form] <= limit]

    def rank(form: ComputeForm) -> tuple[int, float]:
        equal_values = [a for a, b in zip(form, by_rule, strict=True) if a == b]
        return len(equal_values), -costs[form]

    return max(candidates, key=rank)


def _forms(
    shape: AnyShape, options: Options, pass_rows: Iterable[int], *, has_bf16: bool, learns: bool
) -> list[ComputeForm]:
    """Returns all combinations of what the options leave open, the one by rule first."""
    precisions: list[Precision] = ["fp32"]
    if options.precision != "auto":
        precisions = [options.precision]
    elif has_bf16 and gains_by_bf16(shape):
        precisions.append("bf16")

    order = order_by_rule(shape, precisions[0], learns=learns)
    orders: list[MemoryFormat] = [order]
    if order != "auto":
        if options.memory_format != "auto":
            orders = [options.memory_format]
        else:
            orders.append("contiguous" if order == "channels_last" else "channels_last")

    return [
        ComputeForm(precision, order, rows)
        for rows, precision, order in product(pass_rows, precisions, orders)
    ]


def _has_images(shape: AnyShape) -> bool:
    """Returns whether a form decides the order of images in memory.

    A custom network (`model.entry`) decides that itself.
    """
    is_custom = isinstance(shape, GeneralShape) and shape.model.entry is not None
    return shape.convolutional and not is_custom


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
