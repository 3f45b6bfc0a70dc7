"""Measurements before the roles of a run start.

`penstock.autotune` chooses by an actor's step, a connector's slot and a learner's update;
`penstock profile` advises by an actor's step with several threads. Each is timed in a process of
its own (`call_in_process`), as it imports the environment, which is the user's code, and torch. A
function `..._seconds` or `thread_trials` starts that process, and `time_...` is what it executes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.autotune.envs import LEAST_GAIN, Seconds, enough, with_number
from penstock.configs.schema import Config
from penstock.configs.value_types import MOST_SMALL
from penstock.core.processes import coreless_s
from penstock.launch.alone import call_in_process

if TYPE_CHECKING:
    from penstock.actors.rollout import Rollout
    from penstock.core.interfaces import Environments
    from penstock.core.observations import Spaces
    from penstock.core.params import Float32, Stamp

PASS_S = 0.01
"""An unroll that is timed takes about so long."""
THREADS_PASS_S = 0.5
"""The same for unrolls with threads. A step may wait rarely and long, which the mean of a longer
unroll shows."""
MOST_STEPS = 32
"""Most steps of an unroll that is timed."""
LEAST_ROUNDS = 3
"""Unrolls are timed at least this often, however long they take."""
MAKING_S = 10.0
"""More environments are not tried if making them is expected to take longer than this."""
BUDGET_S = 0.5
"""Time for measuring each number of environments and the one before it, beside making them."""
MESSAGE_S = 60e-6
"""Time of a connector for each slot, beside what is timed here (docs/scaling.md)."""
CONNECTOR_S = 10.0
"""Time for measuring a connector and a learner."""


class TimedUnroll(NamedTuple):
    """An unroll that is played again with each call."""

    steps: int
    """Agent steps in it."""
    play: Callable[[], float]
    """Returns the seconds of an agent step."""


def step_seconds(config: Config) -> list[list[Any]]:
    """Time an actor's step in a process of its own; returns what `time_steps` does."""
    seconds = BUDGET_S * len(config.envs_choices)
    return _alone(time_steps.__name__, config, seconds, config.actors.threads)


def connector_seconds(config: Config) -> list[list[Any]]:
    """Time connector and learner in a process of their own; returns what `time_connector` does."""
    return _alone(time_connector.__name__, config, CONNECTOR_S, config.learner.first_threads)


def thread_trials(config: Config) -> list[list[Any]]:
    """Time an actor with several `actors.env_threads`, in a process of its own.

    Returns: what `time_threads` does.
    """
    seconds = 2 * THREADS_PASS_S * len(thread_choices(config))
    return _alone(time_threads.__name__, config, seconds, config.actors.threads)


def thread_choices(config: Config) -> list[int]:
    """Returns the numbers of `actors.env_threads` that are tried, in rising order.

    They begin with that of ``config`` and end with a thread for each environment; each number
    halves the environments of a thread.
    """
    envs = config.actor_envs
    configured = config.actors.env_threads
    # Rounded up, the environments divided by each power of two.
    numbers = {-(-envs // 2**k) for k in range(envs.bit_length())}
    return [configured, *sorted(n for n in numbers if configured < n <= MOST_SMALL)]


def _alone(name: str, config: Config, seconds: float, threads: int) -> list[list[Any]]:
    """Call a function of this file in a process of its own, as `call_in_process` does.

    Args:
        name: name of the function, which takes a config as JSON.
        config: the config.
        seconds: how long it is known to measure.
        threads: number of threads of numerical libraries in the process.

    Returns: what the function returns.
    """
    result: list[list[Any]] = call_in_process(
        f"{__name__}:{name}",
        {"config": config.model_dump(mode="json")},
        seconds=seconds,
        start_s=config.run.start_timeout_s,
        threads=threads,
    )
    return result


def time_steps(config: Mapping[str, Any]) -> list[list[Any]]:
    """Time an actor's step for rising numbers of environments, until more gain little.

    Args:
        config: a config as JSON.

    Returns: for each number that was tried, the number and the seconds of an agent step.
    """
    from penstock.envs import probe
    from penstock.envs.seats import check_options, rows_fit

    settings = Config.model_validate(config)
    spaces = probe(settings.env)
    seating = spaces.seating
    choices = [envs for envs in settings.envs_choices if rows_fit(settings.league, seating, envs)]
    if not choices:
        check_options(settings, seating)
    settings = _prepared(with_number(settings, choices[0]), spaces)

    seconds: Seconds = {}
    previous_play: Callable[[], float] | None = None
    with ExitStack() as previous_envs:
        for envs in choices:
            with ExitStack() as stack:
                began_s = time.perf_counter()
                play = stack.enter_context(_unrolls(with_number(settings, envs))).play
                making_s = time.perf_counter() - began_s

                # The machine may be busier than it was, so only the ratio of two numbers that are
                # timed in turns counts.
                if previous_play is None:
                    [seconds[envs]] = race([play])
                else:
                    previous_s, step_s = race([previous_play, play])
                    seconds[envs] = seconds[envs // 2] * step_s / previous_s
                if enough(seconds) != envs or 2 * making_s > MAKING_S:
                    break

                # The environments stay open for the comparison with the next number.
                previous_envs.close()
                previous_play = play
                previous_envs.enter_context(stack.pop_all())
    return [[*entry] for entry in seconds.items()]


def time_threads(config: Mapping[str, Any]) -> list[list[Any]]:
    """Time an actor's step for rising numbers of threads that step its environments.

    Ends once twice as many threads gain little.

    Args:
        config: a config as JSON, with a number of environments.

    Returns: for each number that was tried, the number, agent steps per second, and how many cores
    the actor keeps busy together with all programs that it has started. Empty if threads do not
    step this environment.
    """
    from penstock.envs import probe, uses_threads

    settings = Config.model_validate(config)
    if not uses_threads(settings.env):
        return []

    settings = _prepared(settings, probe(settings.env))
    trials: list[list[Any]] = []
    steps_per_s: list[float] = []
    for threads in thread_choices(settings):
        began_s = time.perf_counter()
        with _unrolls(with_threads(settings, threads), THREADS_PASS_S) as unroll:
            making_s = time.perf_counter() - began_s
            step_s, cpu_s = mean_step(unroll)

        steps_per_s.append(1 / step_s)
        trials.append([threads, steps_per_s[-1], cpu_s / step_s])
        gains = len(trials) == 1 or steps_per_s[-1] > LEAST_GAIN * steps_per_s[-2]
        if not gains or making_s > MAKING_S:
            break
    return trials


def with_threads(config: Config, threads: int) -> Config:
    """Returns ``config`` with so many threads that step the environments of each actor."""
    actors = config.actors.model_copy(update={"env_threads": threads})
    return config.model_copy(update={"actors": actors})


def mean_step(unroll: TimedUnroll) -> tuple[float, float]:
    """Play an unroll again and again for at least `BUDGET_S`.

    Returns: means of the seconds of an agent step, and of its processor time in seconds, which
    includes that of the programs that this process has started.
    """
    steps_s: list[float] = []
    begin_cpu_s = cpu_seconds()
    deadline_s = time.perf_counter() + BUDGET_S
    while not steps_s or time.perf_counter() < deadline_s:
        steps_s.append(unroll.play())

    cpu_s = cpu_seconds() - begin_cpu_s
    return fmean(steps_s), cpu_s / (len(steps_s) * unroll.steps)


def cpu_seconds() -> float:
    """Returns the processor time of this process, and of the running programs that it has started.

    In seconds, since they began.
    """
    import psutil

    total_s = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            times = child.cpu_times()
            total_s += times.user + times.system
    return total_s


def _prepared(config: Config, spaces: Spaces) -> Config:
    """Returns ``config`` with the form of inference that an actor takes.

    The library of that form is imported here, so that the import is no part of what is timed.
    """
    from penstock.algos.acting import make_inference
    from penstock.autotune.forms import with_acting_form

    config, _ = with_acting_form(config, spaces)
    make_inference(config, spaces, 0)
    return config


def time_connector(config: Mapping[str, Any]) -> list[list[Any]]:
    """Time what a connector does with a slot, and an update of the learner.

    A connector decompresses a slot, checks it and processes it.

    Args:
        config: a config as JSON.

    Returns: a list with one entry: the seconds of an agent step in a connector and in a learner.
    """
    import numpy as np

    from penstock.algos.samples import make_receive, slot_spec
    from penstock.autotune.forms import with_training_form
    from penstock.core.specs import HEADER
    from penstock.device.choice import device_of
    from penstock.learner.factory import make_trainer
    from penstock.learner.sources.staging import StagingBatch
    from penstock.learner.trainer import Trainer
    from penstock.transport.shm.store import Slot
    from penstock.transport.wire import SlotDecoder, SlotEncoder, decode

    # Compiling would take minutes.
    settings = Config.model_validate(config)
    uncompiled = settings.learner.model_copy(update={"compile": False})
    settings = settings.model_copy(update={"learner": uncompiled})

    # An actor plays one slot, which is then received again and again.
    with playing(settings) as (env, rollout):
        spaces = env.info
        spec = slot_spec(settings, spaces)
        payload = spec.zeros()
        steps = rollout.fill(spec.views(payload), 0)
    header = np.zeros((), HEADER)
    header["steps"] = steps
    header["produced_steps"] = steps

    encoder = SlotEncoder(spec, settings.transport.codec)
    decoder = SlotDecoder(spec)
    message_parts = [bytes(part) for part in encoder.encode(header, payload, 1)]
    receive = make_receive(settings.algo, spaces)
    columns = spec.views(payload)

    def receive_slot() -> None:
        decoder.decode(decode(message_parts), payload)
        receive(columns)

    [slot_s] = race([lambda: own_seconds(receive_slot)])

    # The learner trains on a batch of copies of it.
    training_config, _ = with_training_form(settings, spaces)
    trainer = make_trainer(training_config, spaces)
    assert isinstance(trainer, Trainer)
    slot_count = settings.learner.batch_slots
    batch = StagingBatch(spec, slot_count, trainer.device)
    batch.gather([Slot(0, header, tuple(payload), columns)] * slot_count)

    def train() -> None:
        trainer.step(batch)
        device_of(trainer.device).synchronize()

    train()  # the first update also prepares
    [batch_s] = race([lambda: own_seconds(train)], rounds=1)
    return [[(slot_s + MESSAGE_S) / steps, batch_s / batch.steps]]


def own_seconds(call: Callable[[], object]) -> float:
    """Time a call without the time in which other programs had the core of this thread.

    Returns: seconds by the clock, as the call may wait outside this thread; always above 0.
    """
    began_s = time.perf_counter()
    begin_coreless_s = coreless_s(os.getpid())
    call()
    lost_s = coreless_s(os.getpid()) - begin_coreless_s
    elapsed_s = time.perf_counter() - began_s

    # Not every kernel counts the time without a core.
    own_s = elapsed_s if math.isnan(lost_s) else elapsed_s - lost_s
    # The two clocks are not read at the same instant, so their difference may be negative.
    return max(own_s, 1e-9)


def race(plays: Sequence[Callable[[], float]], rounds: int = LEAST_ROUNDS) -> list[float]:
    """Call functions in turns, so that other programs on the machine slow all of them alike.

    Args:
        plays: functions that return seconds.
        rounds: the least number of calls of each; more follow until `BUDGET_S` has passed.

    Returns: the median of the seconds that each function has returned.
    """
    seconds_of_rounds = [[play() for play in plays]]
    deadline_s = time.perf_counter() + BUDGET_S
    while len(seconds_of_rounds) < rounds or time.perf_counter() < deadline_s:
        seconds_of_rounds.append([play() for play in plays])
    return [median(seconds) for seconds in zip(*seconds_of_rounds, strict=True)]


@contextmanager
def playing(config: Config) -> Iterator[tuple[Environments, Rollout]]:
    """Yields the environments of one actor, and what plays them, with made-up weights.

    Imports the libraries of both.
    """
    from penstock.actors.matches import make_environments
    from penstock.actors.rollout import Rollout
    from penstock.algos.acting import make_inference
    from penstock.algos.recorded import make_recorders
    from penstock.envs.make import FirstIndex
    from penstock.profiling.ledger import TimeLedger

    # The indices of these environments begin after those of half as many, which may be open too.
    first = FirstIndex.MEASURED + config.actor_envs
    ledger = TimeLedger()
    with closing(make_environments(config, 0, ledger, first=first, timed=False)) as env:
        inference = make_inference(config, env.info, 0)
        inference.refresh(_read_made_up_weights)
        rollout = Rollout(env, inference, 0, ledger, make_recorders(config, env))
        env.refresh(_read_made_up_weights)
        yield env, rollout


def _read_made_up_weights(out: Float32, newer_than: Stamp | None, policy_id: int = 0) -> Stamp:
    """Write made-up weights to ``out``, in place of `Link.read_weights`."""
    from penstock.core.params import Stamp

    out.fill(0.01)  # above 0, as some of them are variances
    return Stamp(0, 1)


@contextmanager
def _unrolls(config: Config, pass_s: float = PASS_S) -> Iterator[TimedUnroll]:
    """Yields an unroll of an actor that takes about ``pass_s``, or a single step if that is longer.

    Its length is at most `MOST_STEPS`, and that of the config.
    """
    from penstock.algos.samples import slot_spec

    with playing(config) as (env, rollout):

        def unroll(steps: int) -> TimedUnroll:
            """Returns an unroll of so many steps of each environment."""
            actors = config.actors.model_copy(update={"unroll": steps})
            spec = slot_spec(config.model_copy(update={"actors": actors}), env.info)
            columns = spec.views(spec.zeros())
            rollout.forget_slots()
            agent_steps = steps * spec.envs

            def play() -> float:
                return own_seconds(lambda: rollout.fill(columns, 0)) / agent_steps

            return TimedUnroll(agent_steps, play)

        single = unroll(1)
        single.play()  # the first step also prepares
        steps = int(pass_s / (single.play() * config.actor_envs))
        yield unroll(max(1, min(steps, config.actors.unroll, MOST_STEPS)))
