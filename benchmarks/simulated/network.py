"""The network whose gradients are reduced: a Nature CNN, its layers and what they cost."""

from __future__ import annotations

import math

from penstock.configs.errors import UserError
from penstock.models.layout import CONVS, Entry, flat_features

FRAMES, SIDE, ACTIONS = 4, 84, 6
WIDTH_STEP = 16  # of the layer after the convolutions, which is scaled to the size asked for
SUFFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}


def parse_count(text: str) -> int:
    """A number of parameters such as 1700000, 1.7M or 300k. Raises UserError."""
    number, scale = text, 1.0
    if text and text[-1].lower() in SUFFIXES:
        number, scale = text[:-1], SUFFIXES[text[-1].lower()]
    try:
        count = float(number) * scale
    except ValueError:
        count = math.nan
    least = _size(WIDTH_STEP)
    if not least <= count <= 1e9:
        raise UserError(
            f"--parameters {text}: it must be a number such as 1.7M, from {least:,} (the "
            f"convolutions and {WIDTH_STEP} units) to 1G"
        )
    return round(count)


def entries(count: int) -> list[Entry]:
    """Names and shapes of a Nature CNN with policy and value heads, of about ``count`` values."""
    least, step = _size(WIDTH_STEP), _size(2 * WIDTH_STEP) - _size(WIDTH_STEP)
    return _entries(WIDTH_STEP * (1 + max(0, round((count - least) / step))))


def shares_of_backward(listed: list[Entry]) -> list[float]:
    """Of the multiplications of a backward pass, what the gradient of each parameter takes."""
    side, costs = SIDE, list[float]()
    strides = iter(CONVS)
    for _, shape in listed:
        if len(shape) == 4:
            _, kernel, stride = next(strides)
            side = (side - kernel) // stride + 1
        costs.append(math.prod(shape) * (side * side if len(shape) == 4 else 1))
    return [cost / sum(costs) for cost in costs]


def _size(features: int) -> int:
    return sum(math.prod(shape) for _, shape in _entries(features))


def _entries(features: int) -> list[Entry]:
    found, channels = list[Entry](), FRAMES
    for i, (filters, kernel, _) in enumerate(CONVS):
        found.append((f"convs.{i}.weight", (filters, channels, kernel, kernel)))
        found.append((f"convs.{i}.bias", (filters,)))
        channels = filters
    found.append(("linear.weight", (features, flat_features(SIDE, SIDE))))
    found.append(("linear.bias", (features,)))
    for name, outputs in (("policy", ACTIONS), ("value", 1)):
        found.append((f"{name}.weight", (outputs, features)))
        found.append((f"{name}.bias", (outputs,)))
    return found
