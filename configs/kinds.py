"""Kinds of environment, and the defaults that an algorithm has for each.

The kind is found from the environment's id, without making the environment; `env.kind` names that
of any other. The defaults are a YAML file of the algorithm (`AlgorithmSpec.defaults`): for each
kind a `source` and sections with options. They lie below everything that is set, so they apply
where neither a preset nor the user sets an option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from penstock.configs.sections import EnvKind
from penstock.configs.yaml_text import KeyPath, parse

KINDS = tuple(kind for kind in get_args(EnvKind) if kind != "auto")
OTHERWISE = "vector"  # the kind of an environment whose id matches no pattern

_CONTINUOUS = (
    "Ant|HalfCheetah|Hopper|Humanoid|HumanoidStandup|InvertedDoublePendulum|InvertedPendulum"
    "|Pusher|Reacher|Swimmer|Walker2d|Pendulum|MountainCarContinuous|LunarLanderContinuous"
    "|BipedalWalker|BipedalWalkerHardcore"
)
_PATTERNS = (
    ("atari", re.compile(r"ALE/\w+-v\d+")),
    ("continuous", re.compile(rf"(.*[:/])?({_CONTINUOUS})-v\d+|dm_control/.*")),
    ("pixels", re.compile(r"(.*[:/])?(CarRacing|Doom|Vizdoom\w+)(-MultiBinary)?-v\d+")),
    ("vector", re.compile(r"(.*[:/])?(CartPole|Acrobot|MountainCar|LunarLander|MinAtar)-v\d+")),
)
# Options of `algo` that scale rewards, each in another way.
_REWARDS = ("normalize_rewards", "reward_clip", "reward_scale")
# Options of `learner` by which the learning rate falls.
_DECAY = ("lr_end_fraction", "lr_decay_steps")


@dataclass(frozen=True)
class KindDefaults:
    """The defaults of an algorithm for one kind of environment."""

    source: str
    """Where the values were published."""
    values: dict[str, Any]
    """Sections with options."""
    places: dict[KeyPath, str]
    """``file:line`` of each option."""


def known_kind(env_id: str) -> str | None:
    """Returns the kind of environment, by its id; None where the id does not show it."""
    return next((kind for kind, ids in _PATTERNS if ids.fullmatch(env_id)), None)


def kind_of(env: Mapping[str, Any]) -> str:
    """Returns the kind of the environment of a section ``env``."""
    kind = env.get("kind", "auto")
    if kind in KINDS:
        return str(kind)
    return known_kind(str(env.get("id"))) or OTHERWISE


def defaults(path: Path, kind: str) -> KindDefaults:
    """Read the defaults for one kind from an algorithm's file."""
    file = "/".join(path.parts[-3:])
    values, lines = parse(path.read_text(encoding="utf-8"), file)
    sections = values[kind]
    source = sections.pop("source")
    places = {option[1:]: f"{file}:{line}" for option, line in lines.items() if option[0] == kind}
    return KindDefaults(source=source, values=sections, places=places)


def without_replaced(default_values: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns defaults without those that another option in ``values`` replaces.

    Of several ways to scale rewards or to lower the learning rate, the one that is set counts. With
    another number of updates, `publish_every` would no longer be once for each batch. Where a
    learner may have a single actor, that one plays a batch alone, with all of its environments.
    """
    sections = {name: dict(section) for name, section in default_values.items()}
    algo = _map(values.get("algo"))
    learner = _map(values.get("learner"))
    actors = _map(values.get("actors"))

    if any(name in algo for name in _REWARDS):
        for name in _REWARDS:
            sections["algo"].pop(name, None)
    if any(name in learner for name in _DECAY) and isinstance(sections["learner"]["lr"], dict):
        sections["learner"]["lr"] = sections["learner"]["lr"]["from"]
    if "epochs" in algo or "updates_per_batch" in learner:
        sections["learner"].pop("publish_every", None)

    fewest_actors, _ = _ends(actors.get("count"))
    _, most_learners = _ends(learner.get("count", 1))
    may_be_alone = fewest_actors is not None and fewest_actors < 2 * (most_learners or 1)
    if may_be_alone and "batch_slots" in sections["learner"]:
        sections["actors"]["envs"] *= sections["learner"].pop("batch_slots")
    return sections


def _ends(count: Any) -> tuple[int | None, int | None]:
    """Returns the ends of a count such as 4 or 1..4; None where it is no number."""
    numbers = [int(digits) for digits in re.findall(r"\d+", str(count))]
    return (numbers[0], numbers[-1]) if numbers else (None, None)


def _map(value: Any) -> dict[str, Any]:
    """Returns a section; empty in place of a value that is no map, which is refused later."""
    return value if isinstance(value, dict) else {}
