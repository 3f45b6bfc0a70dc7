"""The part of a run's config that a learner sends to actors of any release, and how they read it.

A section refuses options that it does not know. An option of a later release, sent to an actor of
an earlier one, would therefore keep the actor out even where it changes nothing. So a learner sends
only what concerns actors, and an option that 0.1.0 did not have only if it has an effect.
"""

from __future__ import annotations

from typing import Any

from penstock.configs.model import ALL_ONE_HOT, complete_stored
from penstock.configs.schema import Config

SECTIONS = ("env", "algo", "model", "actors", "transport", "weights", "run")
"""The sections that concern actors. In the others an actor has the defaults."""

OPPONENTS = ("mirror", "bots", "chairs", "seats")
"""The options of `league` that actors read; they are sent only where opponents play."""

LEARNERS_ALONE = {
    "env": ("kind",),
    "run": ("log", "metrics_host", "metrics_insecure", "metrics_port", "restarts"),
    "impala": ("entropy_cost", "teacher", "teacher_cost"),
    "ppo": (
        *("advantages", "clip", "entropy_cost", "minibatches", "rho_clip"),
        *("teacher", "teacher_cost"),
    ),
    "dqn": ("hindsight",),
    "sac": ("hindsight",),
    "distill": ("epochs", "part", "q_temperature", "teachers", "value_cost"),
}
"""Options that no actor reads, and that 0.1.0 did not have or not with all of their values, by
their section or algorithm."""

WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "env": {"record": [], "embed_above": ALL_ONE_HOT, "on_error": "fail"},
    "transport": {"connectors": 1},
    "actors": {"memory_format": "auto", "games": False},
    "model": {"scale": "bytes", "filters": [], "layer_norm": False, "core_inputs": []},
    "custom": {"data": "unrolls", "n_step": 1},
    "dqn": {"quantiles": 1, "noisy": False},
}
"""Options added after 0.1.0 with the value at which an actor plays as one without the option does,
by their section or algorithm. Each later option of `SECTIONS` has its place here or above."""


def for_actors(
    config: Config, scaled: bool = False, filtered: bool = False, embedded: bool = False
) -> dict[str, Any]:
    """Returns the config as JSON for an actor of any release that speaks the same protocol.

    Args:
        config: the config of the run.
        scaled: whether `model.scale` has an effect on the environment's network.
        filtered: whether `model.filters` has one.
        embedded: whether `env.embed_above` has one.
    """
    sections: dict[str, Any] = config.model_dump(mode="json", include=set(SECTIONS))
    if not scaled:
        sections["model"]["scale"] = "bytes"
    if not filtered:
        sections["model"]["filters"] = []
    if not embedded:
        sections["env"]["embed_above"] = ALL_ONE_HOT

    # `auto` depends on sections that are not sent, and is refused by 0.1.0.
    sections["actors"] |= {"count": config.first_actors, "envs": config.actor_envs}
    for section in SECTIONS:
        _withhold(sections[section], config.algo.name if section == "algo" else section)
    if config.league.has_matches:
        sections["league"] = config.league.model_dump(mode="json", include=set(OPPONENTS))
    return sections


def _withhold(options: dict[str, Any], owner: str) -> None:
    """Remove the options that actors do not need.

    ``owner`` is the key of the options in the two tables above: a section or an algorithm.
    """
    for name in LEARNERS_ALONE.get(owner, ()):
        options.pop(name, None)
    for name, value in WITHOUT_EFFECT.get(owner, {}).items():
        if options.get(name) == value:
            del options[name]


def read_for_actor(received: object) -> Config:
    """Returns the config that an actor plays with.

    Combinations of options are not checked: the learner did, with the sections that are missing
    here.

    Args:
        received: the JSON that `for_actors`, or an earlier release, has sent.

    Raises:
        ValidationError: of pydantic, if it is no config.
    """
    complete_stored(received)
    return Config.model_validate(received, context={Config.ALONE: True})
