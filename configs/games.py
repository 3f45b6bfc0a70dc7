"""Runs that are played by games at the port of `penstock serve-env`, in place of actors.

A seat of a game is a stream of its own, whose slots have one environment. So such a run has
`actors.envs` 1, as many slots in a batch as an ordinary run has environments in one, and as
`actors.count` the number of all environments: batches and memory are those of that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.configs.policy_lag import lent_by_batch, updates_of_batch
from penstock.configs.section import Contradiction
from penstock.configs.transports import AUTO
from penstock.configs.value_types import MOST_PROCESSES

if TYPE_CHECKING:
    from penstock.configs.sections import Sections

GAMES_ID = "games"
"""The `env.id` of games whose spaces are known from what the first of them has sent."""
SAME_HOST = (AUTO, "shm")
"""The transports with which samples stay in the learner's memory."""

DEFAULTS = (
    "actors.games=true",
    "eval.every_steps=null",
    "eval.every_s=null",
    "stop.confirm_episodes=0",
)
"""Options of such a run, over those of its target and under those of the user."""
PRESET_DEFAULTS = ("transport.frame_stack=null", "transport.max_policy_lag=1000")
"""Options of such a run in place of a preset's, where the user has set none."""


def seat_options(cfg: Sections) -> list[str]:
    """Returns the options by which slots of one seat have the place of slots of ``actors.envs``."""
    envs = cfg.actor_envs
    seats = min(cfg.first_actors * envs, MOST_PROCESSES)
    options = [f"actors.count={seats}", "actors.envs=1"]
    if cfg.transport.connectors == AUTO:
        options.append("transport.connectors=1")
    if cfg.algo.trains_on == "unrolls":
        options.append(f"learner.batch_slots={cfg.learner.batch_slots * envs}")
    return options


def check_games(cfg: Sections) -> Iterator[Contradiction]:
    """Yields the options that have no meaning where games play."""
    if not cfg.actors.games:
        return

    if cfg.actors.envs != 1:
        yield Contradiction(
            ("actors.envs",),
            f"actors.envs {cfg.actors.envs} is of actors that step environments together, and each "
            "seat of a game of this run has slots of its own; set actors.envs=1",
        )
    if cfg.transport.first_connectors != 1:
        yield Contradiction(
            ("transport.connectors",),
            f"transport.connectors {cfg.transport.connectors} shares out actors, and games connect "
            "to one service of each learner; set transport.connectors=1",
        )
    if cfg.transport.kind not in SAME_HOST:
        yield Contradiction(
            ("transport.kind",),
            f"transport.kind {cfg.transport.kind} brings samples from actors, and here games play "
            "at the port of a process beside the learner; set transport.kind=auto",
        )
    if cfg.transport.frame_stack is not None:
        yield Contradiction(
            ("transport.frame_stack",),
            f"transport.frame_stack {cfg.transport.frame_stack} is of environments that stack "
            "frames, and games send whole observations; set transport.frame_stack=null",
        )
    if cfg.env.record:
        yield Contradiction(
            ("env.record",),
            f"env.record {', '.join(cfg.env.record)} names values of an environment's `info`, and "
            "games send observations and rewards alone; set env.record=[]",
        )
    if lent_by_batch(cfg):
        yield Contradiction(
            ("transport.max_policy_lag",),
            f"transport.max_policy_lag {cfg.transport.max_policy_lag} is below the "
            f"{updates_of_batch(cfg)} optimizer steps of a batch, and an unroll of a slow game "
            "spans several batches; set transport.max_policy_lag=1000",
        )
    if cfg.league.bots:
        yield Contradiction(
            ("league.bots",),
            f"league.bots {', '.join(cfg.league.bots)} are scripted players of an environment, and "
            "games that connect have their own; set league.bots={}, and let the game play such a "
            "seat without sending rows for it",
        )
    evaluation = {
        "eval.every_steps": cfg.eval.every_steps,
        "eval.every_s": cfg.eval.every_s,
        "stop.confirm_episodes": cfg.stop.confirm_episodes or None,
    }
    if cfg.has_evaluator:
        options = [option for option, value in evaluation.items() if value is not None]
        yield Contradiction(
            tuple(options),
            f"{' and '.join(options)} would evaluate in an environment, and here games play in "
            "their own programs; set eval.every_steps=null, eval.every_s=null and "
            "stop.confirm_episodes=0",
        )
    if cfg.learner.most_count > cfg.learner.first_count:
        yield Contradiction(
            ("learner.count",),
            f"learner.count {cfg.learner.count} starts learners as hosts come and go, and games "
            f"connect to fixed ports; set learner.count={cfg.learner.first_count}",
        )
