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
from penstock.envs.make import ADAPTERS, FirstIndex, makers
from penstock.envs.space_difference import brief

# The longest duration of each part of the check.
PART_S = 15.0
# The duration of the speed measurement.
RATE_S = 2.0
# The most keys of an info that a note lists.
SHOWN_KEYS = 20
# A step is slow if it takes longer than this, and than this multiple of the median.
SLOW_STEP_MS = 20
SLOW_STEP_RATIO = 100


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
        return _report(env, steps=steps, envs=envs, beat=beat)
    except SystemExit as error:
        raise exit_refused(f"environment {env.id}", error) from error


def _report(
    env: EnvConfig, *, steps: int, envs: int, beat: Callable[[], object] | None
) -> dict[str, Any]:
    """Run the checks, the later ones only if there is no problem so far; returns as `check`."""
    env_makers = makers(env)
    checker = Checker()
    figures: dict[str, Any] = {}
    gymnasium_refusal: str | None = None
    logged_notes: list[str] = []

    # The environment by itself: a single one, or a vector that is made as a whole.
    _check_constructor(checker, env)
    if env_makers.single and not env_makers.vector:
        figures |= _play(checker, env.id, env_makers.single, steps)
        if not checker.problems:
            checker.determinism(
                env_makers.single,
                min(steps, REPEATED_STEPS),
                PART_S,
                numbered=env_makers.takes_index,
            )
        if not checker.problems:
            gymnasium_refusal = refused_by_gymnasium(env_makers.single)
    elif env_makers.vector:
        figures |= check_vector(
            checker,
            env_makers.vector,
            steps,
            PART_S,
            numbered=env_makers.takes_index,
            of_games=env_makers.of_games,
        )

    # A vector as an actor makes it. Its figures do not replace those from above.
    if not checker.problems:
        try:
            with notes_to(logged_notes.append):
                figures = _rate(env, envs, beat) | figures
        except UserError as error:
            checker.add("vector", str(error))
        except Exception as error:
            text = f"a vector of {envs} environments raised {brief_with_place(error)}; correct it"
            checker.add("vector", text, error=error)

    notes = [
        *_notes(checker, figures, gymnasium_refusal),
        *_unseen_keys(checker, figures, env),
        *logged_notes,
    ]
    return {
        "env": env.id,
        "problems": [problem._asdict() for problem in checker.problems],
        "notes": notes,
        "figures": figures,
    }


def hang_report(target: str, clause: str) -> dict[str, Any]:
    """Returns the report, as of `check`, on an environment with a call that does not return.

    ``clause`` describes the call.
    """
    text = f"{clause}; correct the environment, or raise --hang-s if it is only slow"
    problem = {"kind": "hang", "text": text, "traceback": ""}
    return {"env": target, "problems": [problem], "notes": [], "figures": {}}


def describe(report: dict[str, Any]) -> str:
    """Returns the report of `check` as text, a line for each figure that was measured."""
    figures = report["figures"]
    problems = report["problems"]
    lines = [f"environment   {report['env']}"]

    for name in ("observations", "actions", "how"):
        if name in figures:
            lines.append(f"{name:12}  {figures[name]}")

    # A vector of the user's own has several games, which were played together.
    games = f" of {figures['games']} games" if "games" in figures else ""
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
        if problem["traceback"]:
            lines.append(problem["traceback"])
        lines.append(f"problem       {problem['text']}")

    if not problems:
        lines.append("no problems found")
    elif len(problems) == 1:
        lines.append("1 problem")
    else:
        lines.append(f"{len(problems)} problems")
    return "\n".join(lines)


def _check_constructor(checker: Checker, env: EnvConfig) -> None:
    """Check that a function or class of the user, named as module:name, can be pickled."""
    module, _, name = env.id.rpartition(":")
    is_gymnasium_id = "-v" in name
    is_of_adapter = env.id.startswith(tuple(ADAPTERS))
    if module and not is_gymnasium_id and not is_of_adapter:
        checker.pickling(load(env.id, f"environment {env.id}"))


def _play(checker: Checker, name: str, make_single: Any, steps: int) -> dict[str, Any]:
    """Play a single environment and return its figures; none if its spaces are not usable."""
    env = make_single()
    try:
        if not checker.check_spaces(name, env):
            return {}
        played = checker.play(env, steps, seed=0, seconds=PART_S)
        figures = cost(checker, played, steps)
    finally:
        checker.close(env)

    return {
        "observations": brief(env.observation_space),
        "actions": brief(env.action_space),
        **figures,
    }


def _notes(checker: Checker, figures: dict[str, Any], refusal: str | None) -> Iterator[str]:
    """Yield sentences on what may be intended, and should be looked at.

    ``refusal`` is the reason for which gymnasium's own checker refuses the environment, if it does.
    """
    # Episodes that do not end, and resets that were not tested.
    is_reset_untested = not figures.get("resets_tested", True)
    if figures.get("steps") and not figures["episodes"] and not checker.problems:
        reset_clause = ""
        if is_reset_untested:
            reset_clause = ", and the reset after an episode's end was not tested"
        yield (
            f"no episode ended in {figures['steps']:,} steps{reset_clause}; returns are of "
            "complete episodes only: raise --steps, limit the episodes' length, or set "
            "env.kwargs.max_episode_steps for a gymnasium id"
        )
    elif is_reset_untested:
        yield (
            "the reset after an episode's end was not tested with two different actions: at the "
            "ends that were played only one action was allowed"
        )

    # An end that looks like a beginning.
    if checker.ends_where_it_begins:
        yield (
            "the last observation of every episode equals a first one; if a wrapper resets within "
            "the step that ends an episode, remove it: the final observation is lost, and Penstock "
            "resets after it"
        )

    # Steps of very different durations.
    times = figures.get("step_ms")
    if times and times["max"] > SLOW_STEP_MS and times["max"] > SLOW_STEP_RATIO * times["p50"]:
        yield (
            f"the slowest step took {times['max']:.0f} ms, the median {times['p50']:.3g} ms; all "
            "environments of an actor wait for the slowest"
        )

    # The same return in every episode.
    if len(checker.returns) > 3 and len(set(checker.returns)) == 1:
        yield (
            f"each of the {figures['episodes']:,} episodes of random play, {figures['steps']:,} "
            f"steps, returned {checker.returns[0]:g}; that may mean that rewards are rare, so that "
            "learning begins late, or that they do not depend on the actions: check that this is "
            "intended"
        )

    if refusal:
        yield f"training works with it, but gymnasium's own checker refuses it: {refusal}"


def _unseen_keys(checker: Checker, figures: dict[str, Any], env: EnvConfig) -> Iterator[str]:
    """Yield a sentence if no step had one of the keys that `env.record` names."""
    unseen = [key for key in env.record if key not in checker.info_keys]
    if unseen and figures.get("steps"):
        yield (
            f"env.record names {', '.join(unseen)}, and the info of none of {figures['steps']:,} "
            f"steps had it; {_seen_keys(checker.info_keys)}: correct the name, or raise --steps if "
            "it is rare"
        )


def _seen_keys(keys: set[str]) -> str:
    """Returns a clause with the first `SHOWN_KEYS` of the keys that the infos had."""
    if not keys:
        return "they were empty"
    shown = sorted(keys)[:SHOWN_KEYS]
    more = f" and {len(keys) - len(shown)} more" if len(keys) > len(shown) else ""
    return f"their keys are {', '.join(shown)}{more}"


def _rate(env: EnvConfig, envs: int, beat: Callable[[], object] | None) -> dict[str, Any]:
    """Measure the speed of ``envs`` environments that one thread steps, as an actor does.

    Returns "steps_per_s", the agent steps of all of them per second, with the spaces and how the
    environments are stepped. Drawing the actions does not count.
    """
    vector = make(env, envs, whole_games=True, first=FirstIndex.RATED, beat=beat)
    envs = vector.count
    try:
        info = vector.info
        rng = np.random.default_rng(0)
        observations = np.zeros((envs, *info.observation_space.shape), info.observation_space.dtype)

        # The first steps are not measured: environments may prepare something in them.
        vector.watch_precision()
        vector.reset_into(0, observations)
        for _ in range(3):
            vector.step_into(draw_for(vector, observations, rng), observations)

        steps = 0
        spent_s = 0.0
        deadline_s = time.perf_counter() + RATE_S
        while time.perf_counter() < deadline_s:
            actions = draw_for(vector, observations, rng)
            step_began_s = time.perf_counter()
            vector.step_into(actions, observations)
            spent_s += time.perf_counter() - step_began_s
            steps += envs
    finally:
        vector.close()

    return {
        "observations": brief(info.observation_space),
        "actions": brief(info.action_space),
        "how": info.how,
        "envs": envs,
        "steps_per_s": steps / spent_s,
    }
