"""The space of a sweep: which values its options take, from a YAML file.

    learner.lr: {low: 1e-4, high: 1e-2, log: true}
    algo.entropy_cost: [0.003, 0.01, 0.03]

Each end of a range and each choice is checked as an option of the config, before a trial starts.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from penstock.configs.errors import UserError
from penstock.configs.keys import options
from penstock.configs.load import resolve
from penstock.configs.messages import show
from penstock.configs.schema import Config
from penstock.configs.yaml_text import parse
from penstock.core.formatting import finite
from penstock.launch.run_group import fixed_cores

Options = dict[str, Any]

MOST_TRIALS = 1000
FORM = "a list of choices, or {low: A, high: B} with two numbers, and log: true for a log scale"
FIXED_SECTIONS = ("run", "stop", "eval", "checkpoint")
"""Sections of options that must be equal in all trials."""
VARIABLE_OPTIONS = ("run.seed",)
"""The exceptions among the options of these sections."""
WEIGHTS_OPTIONS = ("model", "env", "algo.name", "learner.optimizer")
"""Options on which the shapes or the meaning of a checkpoint depend."""


@dataclass(frozen=True)
class ChoiceList:
    """An option that takes one of several values."""

    values: tuple[Any, ...]

    def sample(self, rng: random.Random) -> Any:
        """Returns one of the values, all equally probable."""
        return rng.choice(self.values)

    @property
    def checked_values(self) -> tuple[Any, ...]:
        """The values with which the config is checked: all of them."""
        return self.values


@dataclass(frozen=True)
class NumberRange:
    """An option that takes a number from ``low`` to ``high``, both included."""

    low: float
    high: float
    log: bool = False
    """Whether the logarithm is uniformly distributed, instead of the number."""
    whole: bool = False
    """Whether it takes whole numbers only."""

    def sample(self, rng: random.Random) -> float:
        """Returns a random number of the range.

        A whole number n is drawn from [n, n + 1), as by Ray Tune, so that both ends are as likely
        as the numbers between them.
        """
        high = self.high + 1 if self.whole else self.high
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(high)))
        else:
            value = rng.uniform(self.low, high)
        return self.clipped(math.floor(value) if self.whole else value)

    def clipped(self, value: float) -> float:
        """Returns the number of the range that is nearest to ``value``."""
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else value

    @property
    def checked_values(self) -> tuple[float, ...]:
        """The values with which the config is checked: both ends."""
        return (self.low, self.high)


Parameter = ChoiceList | NumberRange


@dataclass(frozen=True)
class Space:
    """The parameters of a sweep by the name of their option, and the configs at their values."""

    parameters: Mapping[str, Parameter]
    configs: Sequence[Config]
    """One for each choice and each end of a range, with all other options of the target."""

    @property
    def is_grid(self) -> bool:
        """Whether the number of combinations is finite."""
        return all(isinstance(parameter, ChoiceList) for parameter in self.parameters.values())

    def grid(self) -> list[Options]:
        """Returns all combinations of the choices; requires `is_grid`.

        Raises:
            UserError: there are more than `MOST_TRIALS`.
        """
        choices = [parameter.checked_values for parameter in self.parameters.values()]
        number = math.prod(map(len, choices))
        if number > MOST_TRIALS:
            raise UserError(
                f"the grid of the space has {number} combinations, and a sweep has at most "
                f"{MOST_TRIALS} trials; draw some of them with --trials N"
            )
        return [
            dict(zip(self.parameters, values, strict=True))
            for values in itertools.product(*choices)
        ]

    def samples(self, number: int, seed: int) -> list[Options]:
        """Returns random combinations; the same ``seed`` gives the same ones."""
        rng = random.Random(seed)
        return [
            {name: parameter.sample(rng) for name, parameter in self.parameters.items()}
            for _ in range(number)
        ]


def read_space(path: Path, target: str, overrides: Sequence[str]) -> Space:
    """Read the space in a YAML file, and check it.

    Args:
        path: path of the file.
        target: target of the trials, as of `penstock train`.
        overrides: options of all trials, each ``key=value``.

    Raises:
        UserError: the file cannot be read, a parameter is not `FORM`, its option does not exist,
            does not take one of the values, or must be equal in all trials. The message has a line
            for each mistake.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"--space {path} cannot be read: {reason}; name a YAML file") from None

    values, lines = parse(text, str(path))
    if not isinstance(values, dict) or not values:
        raise UserError(
            f"--space {path} holds no map of options; write lines such as "
            "`learner.lr: {low: 1e-4, high: 1e-2, log: true}`"
        )

    base = resolve(target, overrides)
    overridden = {override.partition("=")[0].strip() for override in overrides}
    mistakes: list[str] = []
    parameters: dict[str, Parameter] = {}
    configs: list[Config] = []

    for name, value in values.items():
        place = f"{path}:{lines[(name,)]}"
        try:
            _check_name(name, overridden)
            parameters[name] = _parameter(name, value, base)
            configs += _configs(name, parameters[name], target, overrides, place=place)
        except UserError as error:
            mistake = str(error)
            mistakes.append(mistake if mistake.startswith(place) else f"{place}: {mistake}")

    if mistakes:
        raise UserError("\n".join(mistakes))
    return Space(parameters, configs)


def check_keeps_weights(space: Space) -> None:
    """Raise UserError if trials of the space cannot take over each other's weights."""
    for name in space.parameters:
        # An option contains those whose names continue its own after a dot.
        prefix = f"{name}."
        fixed_prefixes = [f"{option}." for option in WEIGHTS_OPTIONS]
        if any(prefix.startswith(fixed) or fixed.startswith(prefix) for fixed in fixed_prefixes):
            raise UserError(
                f"--pbt copies weights between trials, and {name} changes what they fit; take it "
                "out of the space, or leave out --pbt"
            )


def overrides_of(options: Mapping[str, Any]) -> list[str]:
    """Returns the options of a trial as overrides, each ``key=value``; JSON is YAML."""
    return [f"{name}={json.dumps(value)}" for name, value in options.items()]


def with_fixed_cores(target: str, overrides: Sequence[str]) -> list[str]:
    """Returns the overrides of a trial with numbers in place of ``auto`` (`fixed_cores`).

    Overrides that contradict each other are returned unchanged, as the trial's own process refuses
    them.
    """
    try:
        config = resolve(target, overrides)
    except UserError:
        return [*overrides]
    return [*overrides, *fixed_cores(config)]


def _check_name(name: str, overridden: set[str]) -> None:
    """Raise UserError if an option cannot be a parameter: trials share it, or it is overridden."""
    section = name.partition(".")[0]
    if section in FIXED_SECTIONS and name not in VARIABLE_OPTIONS:
        raise UserError(
            f"{name} must be equal in all trials, so that they can be compared; set it on the "
            f"command line, {name}=VALUE"
        )
    if name in overridden:
        raise UserError(f"{name} is set on the command line as well; leave out one of the two")


def _parameter(name: str, value: Any, base: Config) -> Parameter:
    """Returns the parameter that the value of an entry of the file describes.

    Args:
        name: name of the option.
        value: a list of choices, or a map with the ends of a range.
        base: config of the target, which decides whether the option takes whole numbers.

    Raises:
        UserError: the value is not `FORM`, or its range is empty.
    """
    if isinstance(value, list) and value:
        return ChoiceList(tuple(value))

    if not isinstance(value, dict) or not {"low", "high"} <= value.keys() <= {"low", "high", "log"}:
        raise UserError(f"{name} is {show(value)}; it must be {FORM}")

    low = value["low"]
    high = value["high"]
    log = value.get("log", False)
    if finite(low) is None or finite(high) is None or not isinstance(log, bool):
        raise UserError(f"{name} is {show(value)}; it must be {FORM}")
    if low >= high:
        raise UserError(f"{name} has low {low} and high {high}; low must be below high")
    if log and low <= 0:
        raise UserError(f"{name} has low {low} on a log scale; it must be above 0")
    return NumberRange(low, high, log=log, whole=_is_whole(name, low, high, base))


def _is_whole(name: str, low: float, high: float, base: Config) -> bool:
    """Returns whether an option whose range has such ends takes whole numbers only."""
    option = options(base.algo.name).get(name)
    if option is None:  # an entry of a map such as env.kwargs
        return isinstance(low, int) and isinstance(high, int)
    if low % 1 or high % 1:
        return False

    # An option that takes fractions accepts a number with one.
    try:
        TypeAdapter(option.hint).validate_python((low + high) / 2 + 0.25)
    except ValidationError:
        return True
    return False


def _configs(
    name: str, parameter: Parameter, target: str, overrides: Sequence[str], *, place: str
) -> Iterator[Config]:
    """Yields the config with each value of a parameter that is checked.

    Raises:
        UserError: the option does not take a value; the message begins with ``place``.
    """
    for value in parameter.checked_values:
        [override] = overrides_of({name: value})
        try:
            yield resolve(target, [*overrides, override])
        except UserError as error:
            raise UserError(str(error).replace(f"override {override}", place)) from None
