"""`actors.envs=auto`: the number of environments of an actor, found before the roles start.

The number is part of every slot: learner and actors, and a run before and after a resume, need the
same one. So the command that starts a run chooses it once, and it is in the run's config from then
on. It times what an actor does in a step, with the run's environment and network, for rising
numbers of environments (`Sections.envs_choices`), until twice as many make a step little cheaper.
That is done in a process of its own, as environments are the user's code, and cached by
`core.user_cache`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from statistics import median
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING, Any

from penstock.configs.cross_checks import contradictions
from penstock.configs.errors import UserError
from penstock.configs.load import load_run
from penstock.configs.schema import Config
from penstock.configs.transports import TRANSPORTS
from penstock.core.machine import version_of
from penstock.core.notes import note_logger
from penstock.core.processes import coreless_s
from penstock.core.run_dir import Resume, has_checkpoint
from penstock.core.user_cache import cached_times, digest, timed_once
from penstock.launch.alone import alone

if TYPE_CHECKING:
    from penstock.actors.rollout import Rollout
    from penstock.core.params import Float32, Stamp
    from penstock.envs import BatchedEnv

FOLDER = "envs"  # in the cache folder
FORMAT = 1
LEAST_GAIN = 1.1  # factor by which twice as many environments must make a step cheaper
PASS_S = 0.01  # an unroll that is timed takes about so long
MOST_STEPS = 32  # of an unroll that is timed
LEAST_ROUNDS = 3  # of unrolls, however long they take
MAKING_S = 10.0  # more environments are not tried where making them is expected to take longer
BUDGET_S = 0.5  # of each number and the one before it, beside making them
SMALLEST = "the smallest allowed number"
OF_ACTORS = {"count", "envs", "nice", "unroll"}  # options on which a step does not depend

logger = note_logger(__name__)
Seconds = dict[int, float]
"""Of one agent step of one actor, by its number of environments."""


def with_envs(config: Config, path: Path, resume: Resume) -> tuple[Config, str]:
    """``config`` with a number in place of `actors.envs` auto, and a sentence about it.

    Unchanged, with an empty sentence, where the option is a number. A run in ``path`` that is
    resumed keeps its own. Raises UserError where that is not known, or contradicts another option.
    """
    if config.actors.envs != "auto":
        return config, ""
    if resume != "no" and has_checkpoint(path):
        envs, why = _envs_of(path), "as the run began"
    elif TRANSPORTS.one_process(config.transport.kind) or len(config.envs_choices) == 1:
        envs, why = config.actor_envs, SMALLEST
    else:
        envs, why = _timed(config)
    changed = _with(config, envs)
    if found := contradictions(changed):
        raise UserError("; ".join(each.text for each in found))
    slots = config.learner.batch_slots if config.algo.trains_on == "unrolls" else 1
    what = "batch" if config.algo.trains_on == "unrolls" else "slot"
    steps = envs * config.actors.unroll * slots
    return changed, (
        f"actors.envs: {envs} environments for each actor, {why}; a {what} has {steps:,} agent "
        "steps"
    )


def check_not_auto(config: Config, several: str) -> None:
    """Raise UserError for `actors.envs` auto where ``several`` need the same number, and each finds
    its own."""
    if config.actors.envs == "auto":
        raise UserError(
            f"actors.envs auto is found at the start of one run on one host, and {several} need "
            "the same number; set actors.envs to a number, such as "
            f"actors.envs={config.actor_envs}"
        )


def cached_choices() -> list[str]:
    """What is cached of this machine, the newest first: the task and what was chosen."""
    found = ((task, _times(entries)) for _, task, entries in cached_times(FOLDER))
    return [f"{task}: {enough(times)}, {_shown(times)}" for task, times in found if times]


def enough(seconds: Seconds) -> int:
    """The smallest number of environments after which a step becomes little cheaper, of rising
    ones, each twice the one before."""
    for envs, each_s in seconds.items():
        if each_s <= LEAST_GAIN * seconds.get(2 * envs, math.inf):
            return envs
    raise ValueError("nothing was timed")


def measure(config: Mapping[str, Any]) -> list[list[float]]:
    """Time an actor's step for rising numbers of environments; returns number and seconds of each.

    ``config`` is a config as JSON. Called by `alone`, since it imports the environment, and torch
    where the network needs it.
    """
    from penstock.algos.acting import make_inference, timed
    from penstock.envs import probe

    settings = Config.model_validate(config)
    choices, info = settings.envs_choices, probe(settings.env)
    settings, _ = timed(_with(settings, choices[0]), info)
    make_inference(settings, info, 0)  # imports its library, which is no part of what follows
    seconds: Seconds = {}
    with ExitStack() as kept:  # the environments of the number before
        before: Callable[[], float] | None = None
        for envs in choices:
            with ExitStack() as stack:
                began_s = time.perf_counter()
                play = stack.enter_context(_unrolls(_with(settings, envs)))
                making_s = time.perf_counter() - began_s
                if before is None:
                    [seconds[envs]] = race([play])
                else:  # by the ratio, as the machine may be busier than it was
                    fewer_s, own_s = race([before, play])
                    seconds[envs] = seconds[envs // 2] * own_s / fewer_s
                if enough(seconds) != envs or 2 * making_s > MAKING_S:
                    break
                kept.close()
                before = play
                kept.enter_context(stack.pop_all())
    return [[*entry] for entry in seconds.items()]


def own_seconds(call: Callable[[], object]) -> float:
    """The seconds of a call: by the clock, as it may wait outside this thread, without the time in
    which other programs had its core."""
    began_s = time.perf_counter()
    before_s = coreless_s(os.getpid())
    call()
    lost_s = coreless_s(os.getpid()) - before_s
    taken_s = time.perf_counter() - began_s - (0.0 if math.isnan(lost_s) else lost_s)
    return max(taken_s, 1e-9)  # the two clocks are not read at the same instant


def race(plays: Sequence[Callable[[], float]], rounds: int = LEAST_ROUNDS) -> list[float]:
    """The median of the seconds that each of ``plays`` returns.

    They are called in turns, at least ``rounds`` times and for at least `BUDGET_S`, so that other
    programs on the machine slow all of them alike.
    """
    found = [[play() for play in plays]]
    ends_s = time.perf_counter() + BUDGET_S
    while len(found) < rounds or time.perf_counter() < ends_s:
        found.append([play() for play in plays])
    return list(map(median, zip(*found, strict=True)))


@contextmanager
def playing(config: Config) -> Iterator[tuple[BatchedEnv, Rollout]]:
    """The environments of one actor, and what plays them, with made-up weights; imports both."""
    from penstock.actors.rollout import Rollout
    from penstock.algos.acting import make_inference
    from penstock.algos.recorded import make_recorders
    from penstock.envs import make
    from penstock.profiling.ledger import TimeLedger

    threads = config.actors.env_threads
    with closing(make(config.env, config.actor_envs, threads, stagger=0)) as game:
        inference = make_inference(config, game.info, 0)
        inference.refresh(_made_up)
        yield game, Rollout(game, inference, 0, TimeLedger(), make_recorders(config, game))


def _made_up(out: Float32, newer_than: Stamp | None) -> Stamp:
    """Stands in for `Link.read_weights`."""
    from penstock.core.params import Stamp

    out.fill(0.01)  # also of a variance
    return Stamp(0, 1)


@contextmanager
def _unrolls(config: Config) -> Iterator[Callable[[], float]]:
    """Plays an unroll, and returns the seconds of an agent step."""
    from penstock.algos.samples import slot_spec

    with playing(config) as (game, rollout):

        def unroll(steps: int) -> Callable[[], float]:
            actors = config.actors.model_copy(update={"unroll": steps})
            spec = slot_spec(config.model_copy(update={"actors": actors}), game.info)
            columns = spec.views(spec.zeros())
            rollout.forget_slots()

            return lambda: own_seconds(lambda: rollout.fill(columns, 0)) / (steps * spec.envs)

        play = unroll(1)
        play()  # the first step also prepares
        steps = int(PASS_S / (play() * config.actor_envs))
        yield unroll(max(1, min(steps, config.actors.unroll, MOST_STEPS)))


def code_of(env: str) -> list[int]:
    """Size and time of change of the file of an environment `module:name`; empty for others."""
    path = f"{env.partition(':')[0].replace('.', os.sep)}.py"
    for folder in (*sys.path, "") if ":" in env else ():
        with suppress(OSError):
            found = os.stat(os.path.join(folder, path))
            return [found.st_size, found.st_mtime_ns]
    return []


def reason(error: Exception) -> str:
    """Why a measurement in another process failed, as a part of a note."""
    if isinstance(error, TimeoutExpired):
        return f"it took longer than {error.timeout:g} s; raise run.start_timeout_s"
    return str(error)


def _timed(config: Config) -> tuple[int, str]:
    """The number, and why; the smallest where the environment cannot be timed, as it will fail in
    the roles as well, or is on other hosts only."""
    given = config.model_dump(mode="json", include={"env", "algo", "model"})
    given["actors"] = config.actors.model_dump(mode="json", exclude=OF_ACTORS)
    about = {
        "format": FORMAT,
        "task": f"environments of {config.env.id}, {config.algo.name}",
        "options": digest(json.dumps([given, config.transport.frame_stack], sort_keys=True)),
        "choices": config.envs_choices,
        "code": code_of(config.env.id),
        "gymnasium": version_of("gymnasium"),
    }

    def read(entries: Any) -> Seconds | None:
        times = _times(entries)
        is_sound = times and [*times] == config.envs_choices[: len(times)]
        return times if is_sound else None

    def time_now() -> list[list[Any]]:
        logger.info(f"timing steps of {config.env.id} for actors.envs=auto, which takes seconds")
        request = {"config": config.model_dump(mode="json")}
        found: list[list[Any]] = alone(
            f"{__name__}:measure",
            request,
            seconds=BUDGET_S * len(config.envs_choices),
            start_s=config.run.start_timeout_s,
            threads=config.actors.threads,
        )
        return found

    try:
        times, cached = timed_once(FOLDER, about, read, time_now)
    except (UserError, RuntimeError, TimeoutExpired) as error:
        return config.actor_envs, f"{SMALLEST}, as a step could not be timed ({reason(error)})"
    when = "by an earlier run" if cached else "now"
    return enough(times), f"{_shown(times)}, timed {when}"


def _shown(times: Seconds) -> str:
    """`301 µs a step (others, in µs: 8: 402; 32: 290)`."""
    micros = {n: f"{1e6 * s:,.0f}" if s >= 1e-4 else f"{1e6 * s:.3g}" for n, s in times.items()}
    chosen = micros.pop(enough(times))
    rest = "; ".join(f"{envs}: {text}" for envs, text in micros.items())
    return f"{chosen} µs a step" + f" (others, in µs: {rest})" * bool(rest)


def _times(entries: Any) -> Seconds:
    """The times of a file's entries; empty where one of them is not sound."""
    found: Seconds = {}
    for entry in entries if type(entries) is list else ():
        match entry:
            case [int(envs), float(each_s)] if envs > 0 and 0 < each_s < math.inf:
                found[envs] = each_s
            case _:
                return {}
    return found


def _envs_of(path: Path) -> int:
    """The number with which the run in ``path`` began."""
    try:
        return load_run(path).actor_envs
    except UserError:
        raise UserError(
            f"{path} holds a checkpoint and no config.yaml that can be read, so the number of "
            "environments that its run began with is not known; set actors.envs to that number"
        ) from None


def _with(config: Config, envs: int) -> Config:
    actors = config.actors.model_copy(update={"envs": envs})
    return config.model_copy(update={"actors": actors})
