"""Actors of 0.1.0 and of this release read the config that a learner sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fixtures.public_surface import surface
from penstock.algos.dqn.config import DqnConfig
from penstock.configs.for_actors import (
    LEARNERS_ALONE,
    SECTIONS,
    WITHOUT_EFFECT,
    for_actors,
    read_for_actor,
)
from penstock.configs.load import presets, resolve

FIXTURES = Path(__file__).parents[2] / "fixtures"
OF_0_1_0: dict[str, dict[str, str]] = json.loads((FIXTURES / "0.1.0" / "surface.json").read_text())[
    "options"
]


def names(sent: dict[str, Any]) -> set[str]:
    """The dotted names of the options that are sent."""
    return {f"{section}.{name}" for section, options in sent.items() for name in options}


@pytest.mark.parametrize("algorithm", OF_0_1_0)
def test_each_later_option_of_actors_has_its_rule(algorithm: str) -> None:
    for option in surface()["options"][algorithm].keys() - OF_0_1_0[algorithm].keys():
        section, _, name = option.partition(".")
        owner = algorithm if section == "algo" else section
        ruled = name in LEARNERS_ALONE.get(owner, ()) or name in WITHOUT_EFFECT.get(owner, {})
        assert ruled or section not in SECTIONS, (
            f"{option} would keep actors of earlier releases out of every run; add it to "
            "LEARNERS_ALONE or WITHOUT_EFFECT in configs/for_actors.py"
        )


@pytest.mark.parametrize("preset", presets())
def test_presets_are_sent_with_options_of_0_1_0_alone(preset: str) -> None:
    config = resolve(preset)
    if config.algo.name not in OF_0_1_0:
        pytest.skip("actors of 0.1.0 do not know the algorithm")
    if config.env.record:
        pytest.skip("actors of 0.1.0 record nothing of an environment's own")
    if isinstance(config.algo, DqnConfig) and config.algo.quantiles > 1:
        pytest.skip("actors of 0.1.0 have no network of quantiles")
    sent = for_actors(config)
    # An actor of 0.1.0 cannot play for a run with opponents, and has to refuse it.
    assert ("league" in sent) is config.league.has_matches
    sent.pop("league", None)
    assert names(sent) <= OF_0_1_0[config.algo.name].keys()


@pytest.mark.parametrize("preset", presets())
def test_actor_of_this_release_reads_all_options_that_it_needs(preset: str) -> None:
    config = resolve(preset)
    received = read_for_actor(
        json.loads(json.dumps(for_actors(config, scaled=True, filtered=True, embedded=True)))
    )
    for section in ("model", "transport", "weights"):
        assert getattr(received, section) == getattr(config, section)
    assert received.env.id == config.env.id
    assert received.env.kwargs == config.env.kwargs
    assert received.actors.count == config.first_actors
    assert received.actors.unroll == config.actors.unroll
    assert received.algo.discount == config.algo.discount


def test_an_option_with_an_effect_is_sent() -> None:
    assert "connectors" not in for_actors(resolve("cartpole"))["transport"]
    two = resolve("cartpole", ["transport.connectors=2"])
    assert for_actors(two)["transport"]["connectors"] == 2


def test_what_an_actor_plays_of_a_league_is_sent_and_a_mirror_game_needs_nothing() -> None:
    assert "league" not in for_actors(resolve("cartpole", ["league.snapshot_steps=5"]))
    league = ["league.mirror=0.5", "league.pool=/home/me/pool", "league.bots={random: 0.25}"]
    config = resolve("cartpole", league)
    sent = for_actors(config)
    assert sent["league"] == {"mirror": 0.5, "bots": {"random": 0.25}, "chairs": 4, "seats": None}
    received = read_for_actor(json.loads(json.dumps(sent))).league
    assert received.pool_share == config.league.pool_share == 0.25


def test_a_scale_that_is_not_sent_is_that_of_earlier_releases() -> None:
    config = resolve("cartpole")
    assert read_for_actor(for_actors(config)).model.scale == "bytes"
    assert read_for_actor(for_actors(config, scaled=True)).model.scale == "bounds"
    assert read_for_actor(for_actors(config)).model.filters == []
    assert read_for_actor(for_actors(config)).env.embed_above == 1_000_000
    assert read_for_actor(for_actors(config, embedded=True)).env.embed_above == 1000
    assert read_for_actor(for_actors(config, filtered=True)).model.filters == [16, 32]


def test_auto_is_sent_as_a_number() -> None:
    config = resolve("cartpole", ["actors.count=auto", "actors.envs=auto"])
    sent = for_actors(config)["actors"]
    assert (sent["count"], sent["envs"]) == (config.first_actors, config.actor_envs)


def test_actor_does_not_repeat_cross_checks_of_the_learner() -> None:
    """A batch of many updates makes this lag possible, and an actor does not know the batch."""
    config = resolve("cartpole_ppo", ["learner.updates_per_batch=32", "transport.max_policy_lag=1"])
    assert read_for_actor(for_actors(config)).transport.max_policy_lag == 1
    with pytest.raises(ValidationError, match="max_policy_lag"):
        type(config).model_validate(for_actors(config))


def test_an_option_of_the_future_is_refused() -> None:
    sent = for_actors(resolve("cartpole"))
    sent["env"]["of_the_future"] = 1
    with pytest.raises(ValidationError, match="of_the_future"):
        read_for_actor(sent)
