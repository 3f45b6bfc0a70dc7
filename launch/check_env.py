"""`penstock check-env`: plays an environment by chance, says what is wrong with it and how fast it
is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import psutil
from gymnasium import spaces

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.schema import EnvConfig
from penstock.core.observations import MASK, views
from penstock.envs import VectorGame, make
from penstock.envs.checks import Checker, growth_nbytes
from penstock.envs.checks_vector import check_vector
from penstock.envs.loading import load
from penstock.envs.make import makers

PART_S = 15.0  # at most, of each part of the check
REPEATED_STEPS = 300  # of the play that must come out alike
READINGS = 30  # of the memory
LEAK_NBYTES = 100  # a step: 1 GB in ten million
RATE_S = 2.0


def check(target: str, overrides: list[str], steps: int, envs: int) -> dict[str, Any]:
    """Everything, JSON-ready: "problems", "notes" and "figures". Raises UserError where nothing can
    be made of the target."""
    env = resolve(target, overrides).env
    made, found = makers(env), Checker()
    figures: dict[str, Any] = {}
    if made.single and not made.vector:
        _check_constructor(found, env)
        figures |= _play(found, made.single, steps)
        if not found.problems:
            found.determinism(made.single, min(steps, REPEATED_STEPS), PART_S)
    elif made.vector:
        check_vector(found, made.vector, min(steps, REPEATED_STEPS))
    if not found.problems:
        try:
            figures = _rate(env, envs) | figures
        except UserError as error:
            found.add("vector", str(error))
    return {
        "env": env.id,
        "problems": [problem._asdict() for problem in found.problems],
        "notes": list(_notes(found, figures)),
        "figures": figures,
    }


def hung(target: str, clause: str) -> dict[str, Any]:
    """The report on an environment of which a call does not come back, as a clause says."""
    text = f"{clause}; end what it waits for, or give --hang-s where it is only slow"
    problem = {"kind": "hang", "text": text}
    return {"env": target, "problems": [problem], "notes": [], "figures": {}}


def describe(report: dict[str, Any]) -> str:
    """Lines for a person."""
    figures, problems = report["figures"], report["problems"]
    lines = [f"environment   {report['env']}"]
    for name in ("observations", "actions", "how"):
        if name in figures:
            lines.append(f"{name:12}  {figures[name]}")
    if "steps" in figures:
        lines.append(f"played        {figures['steps']:,} steps, {figures['episodes']:,} episodes")
    if "step_ms" in figures:
        times = "  ".join(f"{name} {value:.3g} ms" for name, value in figures["step_ms"].items())
        lines.append(f"one step      {times}")
    if "steps_per_s" in figures:
        text = f"{figures['steps_per_s']:,.0f} steps/s in a vector of {figures['envs']}"
        lines.append(f"one core      {text}, without any network")
    lines += [f"note          {text}" for text in report["notes"]]
    lines += [f"problem       {problem['text']}" for problem in problems]
    count = len(problems)
    lines.append(f"{count} problem{'s' * (count > 1)}" if count else "nothing is wrong with it")
    return "\n".join(lines)


def _check_constructor(found: Checker, env: EnvConfig) -> None:
    module, _, name = env.id.rpartition(":")
    if module and "-v" not in name:
        found.pickling(load(env.id, f"environment {env.id}"))


def _play(found: Checker, single: Any, steps: int) -> dict[str, Any]:
    """Play a single environment; what is to be told of it."""
    env = single()
    process, resident = psutil.Process(), [0] * 0
    try:
        if not found.check_spaces("given", env):
            return {}
        played, count = found.play(env, steps, 0, PART_S), 0
        while taken := sum(1 for _ in islice(played, max(steps // READINGS, 1))):
            count += taken
            resident.append(process.memory_info().rss)
    finally:
        found.close(env)
    grown = growth_nbytes(resident, count) if len(resident) > READINGS // 2 else 0.0
    if grown > LEAK_NBYTES:
        found.add(
            "memory",
            f"memory grows by {grown:,.0f} bytes a step, {grown * 1e7 / 1e9:,.0f} GB in ten "
            "million steps; do not keep what a step made, and let go of it in reset",
        )
    times_ms = np.array(found.times_s or [0.0]) * 1e3
    return {
        "observations": _brief(env.observation_space),
        "actions": _brief(env.action_space),
        "steps": count,
        "episodes": len(found.returns),
        "step_ms": {
            "p50": float(np.percentile(times_ms, 50)),
            "p99": float(np.percentile(times_ms, 99)),
            "max": float(times_ms.max()),
        },
        "grown_nbytes": grown,
    }


def _notes(found: Checker, figures: dict[str, Any]) -> Iterator[str]:
    """What may be as meant, and is worth a thought."""
    if figures.get("steps") and not figures["episodes"] and not found.problems:
        yield (
            f"no episode ended in {figures['steps']:,} steps; returns are shown of whole episodes "
            "only: end them, or give env.kwargs.max_episode_steps where gymnasium makes it"
        )
    if found.ends_where_it_begins:
        yield (
            "the last observation of every episode is one that an episode begins with; if a "
            "wrapper resets within the step that ends an episode, leave it out: the final "
            "observation is lost, and Penstock resets where an episode has ended"
        )
    times = figures.get("step_ms")
    if times and times["max"] > 20 and times["max"] > 100 * times["p50"]:
        yield (
            f"one step took {times['max']:.0f} ms and the median {times['p50']:.3g} ms; all "
            "environments of an actor wait for the slowest"
        )
    if found.returns and len(set(found.returns)) == 1 and len(found.returns) > 3:
        yield (
            f"every episode returned {found.returns[0]:g} to play by chance; where no reward "
            "tells better from worse, nothing can be learnt"
        )


def _rate(env: EnvConfig, envs: int) -> dict[str, Any]:
    """Steps a second of a vector, driven as an actor does, by one thread."""
    game = make(env, envs)
    try:
        info, rng = game.info, np.random.default_rng(0)
        out = np.zeros((envs, *info.observation_space.shape), info.observation_space.dtype)
        game.reset_into(0, out)
        for _ in range(3):
            game.step_into(_actions(game, out, rng), out)
        steps, spent_s, until = 0, 0.0, time.perf_counter() + RATE_S
        while time.perf_counter() < until:
            actions = _actions(game, out, rng)
            since = time.perf_counter()
            game.step_into(actions, out)
            spent_s += time.perf_counter() - since
            steps += envs
    finally:
        game.close()
    return {
        "observations": _brief(info.observation_space),
        "actions": _brief(info.action_space),
        "how": info.how,
        "envs": envs,
        "steps_per_s": steps / spent_s,
    }


def _actions(game: VectorGame, shown: Any, rng: np.random.Generator) -> Any:
    """Actions by chance, as a policy would give them."""
    space = game.info.action_space
    if isinstance(space, spaces.Box):
        return rng.uniform(-1, 1, (game.count, *space.shape)).astype(np.float32)
    counts = np.array([space.n]) if isinstance(space, spaces.Discrete) else space.nvec.ravel()
    liking = rng.random((game.count, int(counts.sum())))
    if any(part.name == MASK for part in game.info.parts):
        liking += views(game.info.parts, shown)[MASK]
    parts = np.split(liking, np.cumsum(counts)[:-1], axis=1)
    chosen = np.stack([part.argmax(1) for part in parts], 1).astype(np.int32)
    return chosen.reshape(game.count, *(space.shape or ()))


def _brief(space: object) -> str:
    text = " ".join(str(space).split())
    return text if len(text) <= 100 else f"{text[:97]}..."
