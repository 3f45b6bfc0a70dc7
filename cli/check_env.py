"""`penstock check-env`: plays an environment with random actions, and reports errors and speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.sections import EnvConfig
from penstock.core.loading import load
from penstock.core.notes import notes_to
from penstock.core.place import brief_with_place, exit_refused
from penstock.envs import make
from penstock.envs.checking.checks import Checker, cost, refused_by_gymnasium
from penstock.envs.checking.vector import REPEATED_STEPS, check_vector, draw_for
from penstock.envs.make import FirstIndex, makers
from penstock.envs.space_difference import brief

# The longest duration of each part of the check.
PART_S = 15.0
# The duration of the speed measurement.
RATE_S = 2.0
SHOWN_KEYS = 20  # of an info


def check(
    target: str,
    overrides: list[str],
    steps: int,
    envs: int,
    beat: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Check the environment of a target by playing it with random actions.

    Args:
        target: a TARGET of the command line.
        overrides: options of the config as ``key=value``.
        steps: the number of steps to play.
        envs: the number of environments in the speed measurement.
        beat: called after each reset of a vector, as a sign of progress.

    Returns:
        A report of JSON values: "env" is the environment's id, "problems" are dictionaries with
        "kind", "text" and "traceback", "notes" are sentences, and "figures" are measurements by
        name.

    Raises:
        UserError: the target has no environment, or one that calls sys.exit.
    """
    env = resolve(target, overrides).env
    try:
        return _report(env, steps, envs, beat)
    except SystemExit as error:
        raise exit_refused(f"environment {env.id}", error) from error


def _report(
    env: EnvConfig, steps: int, envs: int, beat: Callable[[], object] | None
) -> dict[str, Any]:
    made, found = makers(env), Checker()
    figures: dict[str, Any] = {}
    refused: str | None = None
    logged: list[str] = []

    _check_constructor(found, env)
    if made.single and not made.vector:
        figures |= _play(found, env.id, made.single, steps)
        if not found.problems:
            compared = min(steps, REPEATED_STEPS)
            found.determinism(made.single, compared, PART_S, numbered=made.takes_index)
        if not found.problems:
            refused = refused_by_gymnasium(made.single)
    elif made.vector:
        numbered = made.takes_index
        figures |= check_vector(found, made.vector, steps, PART_S, numbered=numbered)

    if not found.problems:
        try:
            with notes_to(logged.append):
                figures = _rate(env, envs, beat) | figures
        except UserError as error:
            found.add("vector", str(error))
        except Exception as error:
            text = f"a vector of {envs} environments raised {brief_with_place(error)}; correct it"
            found.add("vector", text, error=error)

    return {
        "env": env.id,
        "problems": [problem._asdict() for problem in found.problems],
        "notes": [*_notes(found, figures, refused), *_missing(found, figures, env), *logged],
        "figures": figures,
    }


def hung(target: str, clause: str) -> dict[str, Any]:
    """The report on an environment with a call that does not return; ``clause`` describes the
    call."""
    text = f"{clause}; correct the environment, or raise --hang-s if it is only slow"
    problem = {"kind": "hang", "text": text, "traceback": ""}
    return {"env": target, "problems": [problem], "notes": [], "figures": {}}


def describe(report: dict[str, Any]) -> str:
    """The report as text."""
    figures, problems = report["figures"], report["problems"]
    lines = [f"environment   {report['env']}"]
    games = f" of {figures['games']} games" if "games" in figures else ""
    for name in ("observations", "actions", "how"):
        if name in figures:
            lines.append(f"{name:12}  {figures[name]}")
    if "steps" in figures:
        lines.append(
            f"played        {figures['steps']:,} steps{games}, {figures['episodes']:,} episodes"
        )
    if "step_ms" in figures:
        times = "  ".join(f"{name} {value:.3g} ms" for name, value in figures["step_ms"].items())
        lines.append(f"one step      {times}{games and ','}{games}")
    if "steps_per_s" in figures:
        text = f"{figures['steps_per_s']:,.0f} steps/s in a vector of {figures['envs']}"
        lines.append(f"one core      {text}, without inference")

    lines += [f"note          {text}" for text in report["notes"]]
    for problem in problems:
        lines += [problem["traceback"]] if problem["traceback"] else []
        lines.append(f"problem       {problem['text']}")
    count = len(problems)
    lines.append(f"{count} problem{'s' * (count > 1)}" if count else "no problems found")
    return "\n".join(lines)


def _check_constructor(found: Checker, env: EnvConfig) -> None:
    module, _, name = env.id.rpartition(":")
    if module and "-v" not in name:
        found.pickling(load(env.id, f"environment {env.id}"))


def _play(found: Checker, name: str, single: Any, steps: int) -> dict[str, Any]:
    """Play a single environment and return its figures."""
    env = single()
    try:
        if not found.check_spaces(name, env):
            return {}
        figures = cost(found, found.play(env, steps, 0, PART_S), steps)
    finally:
        found.close(env)
    return {
        "observations": brief(env.observation_space),
        "actions": brief(env.action_space),
        **figures,
    }


def _notes(found: Checker, figures: dict[str, Any], refused: str | None) -> Iterator[str]:
    """Observations that may be intended, and should be checked."""
    untested = not figures.get("resets_tested", True)
    if figures.get("steps") and not figures["episodes"] and not found.problems:
        reset = ", and the reset after an episode's end was not tested" if untested else ""
        yield (
            f"no episode ended in {figures['steps']:,} steps{reset}; returns are of complete "
            "episodes only: raise --steps, limit the episodes' length, or set "
            "env.kwargs.max_episode_steps for a gymnasium id"
        )
    elif untested:
        yield (
            "the reset after an episode's end was not tested with two different actions: at the "
            "ends that were played only one action was allowed"
        )
    if found.ends_where_it_begins:
        yield (
            "the last observation of every episode equals a first one; if a wrapper resets within "
            "the step that ends an episode, remove it: the final observation is lost, and Penstock "
            "resets after it"
        )

    # Steps of very different durations.
    times = figures.get("step_ms")
    if times and times["max"] > 20 and times["max"] > 100 * times["p50"]:
        yield (
            f"the slowest step took {times['max']:.0f} ms, the median {times['p50']:.3g} ms; all "
            "environments of an actor wait for the slowest"
        )
    if found.returns and len(set(found.returns)) == 1 and len(found.returns) > 3:
        yield (
            f"each of the {figures['episodes']:,} episodes of random play, {figures['steps']:,} "
            f"steps, returned {found.returns[0]:g}; that may mean that rewards are rare, so that "
            "learning begins late, or that they do not depend on the actions: check that this is "
            "intended"
        )
    if refused:
        yield f"training works with it, but gymnasium's own checker refuses it: {refused}"


def _missing(found: Checker, figures: dict[str, Any], env: EnvConfig) -> Iterator[str]:
    """A sentence on the keys of `env.record` that no step had."""
    missing = [key for key in env.record if key not in found.info_keys]
    if missing and figures.get("steps"):
        yield (
            f"env.record names {', '.join(missing)}, and the info of none of {figures['steps']:,} "
            f"steps had it; {_known(found.info_keys)}: correct the name, or raise --steps if it is "
            "rare"
        )


def _known(keys: set[str]) -> str:
    shown = sorted(keys)[:SHOWN_KEYS]
    more = f" and {len(keys) - len(shown)} more" if len(keys) > len(shown) else ""
    return f"their keys are {', '.join(shown)}{more}" if keys else "they were empty"


def _rate(env: EnvConfig, envs: int, beat: Callable[[], object] | None) -> dict[str, Any]:
    """Steps per second of a vector that one thread steps as an actor does."""
    game = make(env, envs, first=FirstIndex.RATED, beat=beat)
    try:
        info, rng = game.info, np.random.default_rng(0)
        out = np.zeros((envs, *info.observation_space.shape), info.observation_space.dtype)
        game.watch_precision()
        game.reset_into(0, out)
        for _ in range(3):
            game.step_into(draw_for(game, out, rng), out)
        steps, spent_s, until = 0, 0.0, time.perf_counter() + RATE_S
        while time.perf_counter() < until:
            actions = draw_for(game, out, rng)
            since = time.perf_counter()
            game.step_into(actions, out)
            spent_s += time.perf_counter() - since
            steps += envs
    finally:
        game.close()
    return {
        "observations": brief(info.observation_space),
        "actions": brief(info.action_space),
        "how": info.how,
        "envs": envs,
        "steps_per_s": steps / spent_s,
    }
