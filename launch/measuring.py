"""Times what `penstock.autotune` chooses by before the roles start: an actor's step, a connector's
slot and a learner's update; and what `penstock profile` advises by, an actor's step with threads.

Each is timed in a process of its own (`alone`), as it imports the environment, which is the user's
code, and torch.
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
from penstock.launch.alone import alone

if TYPE_CHECKING:
    from penstock.actors.rollout import Rollout
    from penstock.core.observations import Spaces
    from penstock.core.params import Float32, Stamp
    from penstock.envs import BatchedEnv

PASS_S = 0.01  # an unroll that is timed takes about so long
# A step may wait rarely and long, which the mean of a longer unroll shows.
THREADS_PASS_S = 0.5
MOST_STEPS = 32  # of an unroll that is timed
LEAST_ROUNDS = 3  # of unrolls, however long they take
MAKING_S = 10.0  # more environments are not tried where making them is expected to take longer
BUDGET_S = 0.5  # of each number and the one before it, beside making them
MESSAGE_S = 60e-6  # of a connector for each slot, beside what is timed (docs/scaling.md)
CONNECTOR_S = 10.0  # for receiving and training


class TimedUnroll(NamedTuple):
    """An unroll that is played again with each call."""

    steps: int
    """Agent steps in it."""
    play: Callable[[], float]
    """Returns the seconds of an agent step."""


def step_seconds(config: Config) -> list[list[Any]]:
    """Numbers of environments and the seconds of an agent step with each, as `time_steps`."""
    seconds = BUDGET_S * len(config.envs_choices)
    return _alone(time_steps.__name__, config, seconds, config.actors.threads)


def connector_seconds(config: Config) -> list[list[Any]]:
    """The seconds of an agent step in a connector and in a learner, as `time_connector`."""
    return _alone(time_connector.__name__, config, CONNECTOR_S, config.learner.first_threads)


def thread_trials(config: Config) -> list[list[Any]]:
    """What an actor does with rising numbers of `actors.env_threads`, as `time_threads`."""
    seconds = 2 * THREADS_PASS_S * len(thread_choices(config))
    return _alone(time_threads.__name__, config, seconds, config.actors.threads)


def thread_choices(config: Config) -> list[int]:
    """Numbers of `actors.env_threads` from that of ``config`` up to a thread for each environment,
    of which each halves the environments of a thread."""
    envs, now = config.actor_envs, config.actors.env_threads
    halved = {-(-envs // 2**k) for k in range(envs.bit_length())}
    return [now, *sorted(number for number in halved if now < number <= MOST_SMALL)]


def _alone(name: str, config: Config, seconds: float, threads: int) -> list[list[Any]]:
    """What the function ``name`` of this file returns in a process of its own, with the errors of
    `alone`."""
    found: list[list[Any]] = alone(
        f"{__name__}:{name}",
        {"config": config.model_dump(mode="json")},
        seconds=seconds,
        start_s=config.run.start_timeout_s,
        threads=threads,
    )
    return found


def time_steps(config: Mapping[str, Any]) -> list[list[Any]]:
    """Time an actor's step for rising numbers of environments; returns number and seconds of each.

    ``config`` is a config as JSON.
    """
    from penstock.envs import probe

    settings = Config.model_validate(config)
    choices, info = settings.envs_choices, probe(settings.env)
    settings = _prepared(with_number(settings, choices[0]), info)
    seconds: Seconds = {}
    with ExitStack() as kept:  # the environments of the number before
        before: Callable[[], float] | None = None
        for envs in choices:
            with ExitStack() as stack:
                began_s = time.perf_counter()
                play = stack.enter_context(_unrolls(with_number(settings, envs))).play
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


def time_threads(config: Mapping[str, Any]) -> list[list[Any]]:
    """Time an actor's step for rising numbers of threads that step its environments, until twice as
    many gain little; returns the number, agent steps per second, and how many cores the actor keeps
    busy with all programs that it has started. Empty where threads do not step the environment.

    ``config`` is a config as JSON, with a number of environments.
    """
    from penstock.envs import probe, uses_threads

    settings = Config.model_validate(config)
    if not uses_threads(settings.env):
        return []
    settings = _prepared(settings, probe(settings.env))
    found: list[list[Any]] = []
    for threads in thread_choices(settings):
        began_s = time.perf_counter()
        with _unrolls(with_threads(settings, threads), THREADS_PASS_S) as unroll:
            making_s = time.perf_counter() - began_s
            step_s, cpu_s = mean_step(unroll)
        found.append([threads, 1 / step_s, cpu_s / step_s])
        gains = len(found) == 1 or found[-1][1] > LEAST_GAIN * found[-2][1]
        if not gains or making_s > MAKING_S:
            break
    return found


def with_threads(config: Config, threads: int) -> Config:
    """``config`` with so many threads that step the environments of each actor."""
    actors = config.actors.model_copy(update={"env_threads": threads})
    return config.model_copy(update={"actors": actors})


def mean_step(unroll: TimedUnroll) -> tuple[float, float]:
    """The seconds of an agent step, and its processor time with that of the programs that this
    process has started: means over at least `BUDGET_S`."""
    steps_s: list[float] = []
    spent_before_s, ends_s = spent_s(), time.perf_counter() + BUDGET_S
    while not steps_s or time.perf_counter() < ends_s:
        steps_s.append(unroll.play())
    spent = spent_s() - spent_before_s
    return fmean(steps_s), spent / (len(steps_s) * unroll.steps)


def spent_s() -> float:
    """Processor time of this process so far, and of the programs that it has started and that
    run."""
    import psutil

    spent = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            times = child.cpu_times()
            spent += times.user + times.system
    return spent


def _prepared(config: Config, spaces: Spaces) -> Config:
    """``config`` with the form of inference that an actor takes, whose library is then imported and
    no part of what is timed."""
    from penstock.algos.acting import make_inference
    from penstock.autotune.forms import with_acting_form

    config, _ = with_acting_form(config, spaces)
    make_inference(config, spaces, 0)
    return config


def time_connector(config: Mapping[str, Any]) -> list[list[Any]]:
    """Time what a connector does with a slot (decompress, check, process), and an update of the
    learner; returns the seconds of an agent step in both, as the only entry of the list.

    ``config`` is a config as JSON.
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

    settings = Config.model_validate(config)
    plain = settings.learner.model_copy(update={"compile": False})  # that would take minutes
    settings = settings.model_copy(update={"learner": plain})
    with playing(settings) as (game, rollout):
        info, spec = game.info, slot_spec(settings, game.info)
        payload, header = spec.zeros(), np.zeros((), HEADER)
        steps = header["steps"] = header["produced_steps"] = rollout.fill(spec.views(payload), 0)
    encoder, decoder = SlotEncoder(spec, settings.transport.codec), SlotDecoder(spec)
    parts = [bytes(part) for part in encoder.encode(header, payload, 1)]
    receive = make_receive(settings.algo, info)
    columns = spec.views(payload)

    def take() -> None:
        decoder.decode(decode(parts), payload)
        receive(columns)

    [slot_s] = race([lambda: own_seconds(take)])
    trainer = make_trainer(with_training_form(settings, info)[0], info)
    assert isinstance(trainer, Trainer)
    slots = settings.learner.batch_slots
    batch = StagingBatch(spec, slots, trainer.device)
    batch.gather([Slot(0, header, tuple(payload), columns)] * slots)

    def train() -> None:
        trainer.step(batch)
        device_of(trainer.device).synchronize()

    train()  # the first update also prepares
    [batch_s] = race([lambda: own_seconds(train)], rounds=1)
    return [[(slot_s + MESSAGE_S) / steps, batch_s / batch.steps]]


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
    from penstock.envs.make import FirstIndex
    from penstock.profiling.ledger import TimeLedger

    threads, envs = config.actors.env_threads, config.actor_envs
    first = FirstIndex.MEASURED + envs  # half as many may be open too
    with closing(make(config.env, envs, threads, first=first, stagger=True)) as game:
        inference = make_inference(config, game.info, 0)
        inference.refresh(_made_up)
        yield game, Rollout(game, inference, 0, TimeLedger(), make_recorders(config, game))


def _made_up(out: Float32, newer_than: Stamp | None) -> Stamp:
    """Stands in for `Link.read_weights`."""
    from penstock.core.params import Stamp

    out.fill(0.01)  # also of a variance
    return Stamp(0, 1)


@contextmanager
def _unrolls(config: Config, pass_s: float = PASS_S) -> Iterator[TimedUnroll]:
    """An unroll of an actor that takes about ``pass_s``, or of a single step that takes longer."""
    from penstock.algos.samples import slot_spec

    with playing(config) as (game, rollout):

        def unroll(steps: int) -> TimedUnroll:
            actors = config.actors.model_copy(update={"unroll": steps})
            spec = slot_spec(config.model_copy(update={"actors": actors}), game.info)
            columns = spec.views(spec.zeros())
            rollout.forget_slots()

            count = steps * spec.envs
            return TimedUnroll(count, lambda: own_seconds(lambda: rollout.fill(columns, 0)) / count)

        single = unroll(1)
        single.play()  # the first step also prepares
        steps = int(pass_s / (single.play() * config.actor_envs))
        yield unroll(max(1, min(steps, config.actors.unroll, MOST_STEPS)))
