"""`actors.envs=auto`: the number of environments of an actor, found before the roles start.

The number is part of every slot: learner and actors, and a run before and after a resume, need the
same one. So the command that starts a run chooses it once, and it is in the run's config from then
on: the number after which twice as many environments make an actor's step little cheaper. Steps are
timed for rising numbers (`Sections.envs_choices`) by `penstock.launch.measuring`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from penstock.configs.cross_checks import contradictions
from penstock.configs.errors import UserError
from penstock.configs.load import load_run
from penstock.configs.schema import Config
from penstock.configs.transports import TRANSPORTS
from penstock.core.machine import version_of
from penstock.core.notes import note_logger
from penstock.core.run_dir import Resume, has_checkpoint
from penstock.core.user_cache import cached_times, digest, timed_once

FOLDER = "envs"  # name in the cache folder
FORMAT = 1
LEAST_GAIN = 1.1  # factor by which twice as many environments must make a step cheaper
SMALLEST = "the smallest allowed number"
OF_ACTORS = {"count", "envs", "nice", "unroll"}  # options on which a step does not depend

logger = note_logger(__name__)
Seconds = dict[int, float]
"""Seconds of one agent step of one actor, by its number of environments."""
Measure = Callable[[Config], list[list[Any]]]
"""Times what a config needs in another process. Raises UserError, RuntimeError or TimeoutExpired
where that fails."""


def with_envs(config: Config, path: Path, resume: Resume, measure: Measure) -> tuple[Config, str]:
    """Replace `actors.envs` auto by a number.

    Args:
        config: the config of a run that has not started.
        path: the run's folder; a run in it that is resumed keeps its number.
        resume: whether that run is resumed.
        measure: returns numbers of environments, each with the seconds of a step.

    Returns:
        The config with the number, and a sentence about it. The config is unchanged and the
        sentence empty where the option is a number already.

    Raises:
        UserError: if the number is not known, or contradicts another option.
    """
    if config.actors.envs != "auto":
        return config, ""

    if resume != "no" and has_checkpoint(path):
        envs = _envs_of(path)
        why = "as the run began"
    elif TRANSPORTS.one_process(config.transport.kind) or len(config.envs_choices) == 1:
        envs = config.actor_envs
        why = SMALLEST
    else:
        envs, why = _timed(config, measure)

    changed = with_number(config, envs)
    if invalid := contradictions(changed):
        raise UserError("; ".join(contradiction.text for contradiction in invalid))

    # The sentence says how many steps come at once: a batch, or with replay a slot.
    unit = "slot"
    steps = envs * config.actors.unroll
    if config.algo.trains_on == "unrolls":
        unit = "batch"
        steps *= config.learner.batch_slots
    return changed, (
        f"actors.envs: {envs} environments for each actor, {why}; a {unit} has {steps:,} agent "
        "steps"
    )


def check_not_auto(config: Config, several: str) -> None:
    """Refuse `actors.envs` auto where ``several`` need the same number, and each finds its own.

    Raises:
        UserError: if the option is auto.
    """
    if config.actors.envs == "auto":
        raise UserError(
            f"actors.envs auto is found at the start of one run on one host, and {several} need "
            "the same number; set actors.envs to a number, such as "
            f"actors.envs={config.actor_envs}"
        )


def cached_choices() -> list[str]:
    """Returns a line with task and choice for each cached timing of this machine, newest first."""
    timings = ((task, _times(entries)) for _, task, entries in cached_times(FOLDER))
    return [f"{task}: {enough(times)}, {_shown(times)}" for task, times in timings if times]


def enough(seconds: Seconds) -> int:
    """Returns the smallest number of environments whose double makes a step little cheaper.

    ``seconds`` are in the order of rising numbers, each twice the one before.
    """
    for envs, each_s in seconds.items():
        if each_s <= LEAST_GAIN * seconds.get(2 * envs, math.inf):
            return envs
    raise ValueError("nothing was timed")


def code_of(env: str) -> list[int]:
    """Returns size and time of change of the file of an environment `module:name`.

    Empty for an environment that is named by its id, or whose file is not found.
    """
    if ":" not in env:
        return []

    path = f"{env.partition(':')[0].replace('.', os.sep)}.py"
    for folder in (*sys.path, ""):
        with suppress(OSError):
            status = os.stat(os.path.join(folder, path))
            return [status.st_size, status.st_mtime_ns]
    return []


def reason(error: Exception) -> str:
    """Returns why a measurement in another process failed, as a part of a note."""
    if isinstance(error, TimeoutExpired):
        return f"it took longer than {error.timeout:g} s; raise run.start_timeout_s"
    return str(error)


def _timed(config: Config, measure: Measure) -> tuple[int, str]:
    """Choose a number by timing, or by an earlier run's times.

    Returns:
        The number of environments, and the reason. It is the smallest number where the environment
        cannot be timed: it will fail in the roles as well, or is on other hosts only.
    """

    def read(entries: Any) -> Seconds | None:
        times = _times(entries)
        is_sound = times and [*times] == config.envs_choices[: len(times)]
        return times if is_sound else None

    def time_now() -> list[list[Any]]:
        logger.info(f"timing steps of {config.env.id} for actors.envs=auto, which takes seconds")
        return measure(config)

    cache_key = _cache_key(config)
    try:
        times, cached = timed_once(FOLDER, cache_key, read, time_now)
    except (UserError, RuntimeError, TimeoutExpired) as error:
        return config.actor_envs, f"{SMALLEST}, as a step could not be timed ({reason(error)})"

    when = "by an earlier run" if cached else "now"
    return enough(times), f"{_shown(times)}, timed {when}"


def _cache_key(config: Config) -> dict[str, Any]:
    """Returns what the times belong to, as plain data; any other value needs new times."""
    sections = config.model_dump(mode="json", include={"env", "algo", "model"})
    sections["actors"] = config.actors.model_dump(mode="json", exclude=OF_ACTORS)
    options = [sections, config.transport.frame_stack]
    return {
        "format": FORMAT,
        "task": f"environments of {config.env.id}, {config.algo.name}",
        "options": digest(json.dumps(options, sort_keys=True)),
        "choices": config.envs_choices,
        "code": code_of(config.env.id),
        "gymnasium": version_of("gymnasium"),
    }


def _shown(times: Seconds) -> str:
    """Returns times as text: `301 µs a step (others, in µs: 8: 402; 32: 290)`."""
    micros = {
        envs: f"{1e6 * each_s:,.0f}" if each_s >= 1e-4 else f"{1e6 * each_s:.3g}"
        for envs, each_s in times.items()
    }
    text = f"{micros.pop(enough(times))} µs a step"
    if micros:
        others = "; ".join(f"{envs}: {each_micros}" for envs, each_micros in micros.items())
        text += f" (others, in µs: {others})"
    return text


def _times(entries: Any) -> Seconds:
    """Returns the times in the entries of a cache file; empty where one of them is not sound."""
    times: Seconds = {}
    for entry in entries if type(entries) is list else ():
        match entry:
            case [int(envs), float(each_s)] if envs > 0 and 0 < each_s < math.inf:
                times[envs] = each_s
            case _:
                return {}
    return times


def _envs_of(path: Path) -> int:
    """Returns the number with which the run in ``path`` began.

    Raises:
        UserError: if its config cannot be read.
    """
    try:
        return load_run(path).actor_envs
    except UserError:
        raise UserError(
            f"{path} holds a checkpoint and no config.yaml that can be read, so the number of "
            "environments that its run began with is not known; set actors.envs to that number"
        ) from None


def with_number(config: Config, envs: int) -> Config:
    """Returns ``config`` with so many environments of each actor."""
    actors = config.actors.model_copy(update={"envs": envs})
    return config.model_copy(update={"actors": actors})
