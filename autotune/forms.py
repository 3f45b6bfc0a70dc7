"""The forms in which actors and learners compute their network, where the options leave them open:
the fastest on this machine's processor.

A form is timed by real passes of the network over made-up observations: forward and backward of a
learner, or an actor's inference. That takes about a second. The times are cached in the user's
cache folder, one file for each processor, torch, number of threads and network; the choice is made
anew of the times that a file holds, among the forms that are allowed, so a damaged or foreign file
can at worst name a slower form. torch is imported only to time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from penstock.algos.base import UnrollAlgorithm
from penstock.algos.registry import algorithm
from penstock.algos.samples import network_shape, slot_spec
from penstock.configs.model import ModelConfig
from penstock.configs.schedules import over_run, with_values
from penstock.configs.schema import Config
from penstock.configs.value_types import MemoryFormat
from penstock.core.interfaces import Unrolls
from penstock.core.machine import processor
from penstock.core.observations import Spaces
from penstock.core.user_cache import cached_times, digest, timed_once
from penstock.models.compute_form import (
    ComputeForm,
    Options,
    Precision,
    UpdateSize,
    acting_forms,
    fastest,
    in_memory_format,
    training_forms,
)
from penstock.models.fitting import AnyShape
from penstock.models.general import GeneralShape
from penstock.models.summary import layers_in_words

FOLDER = "forms"  # name in the cache folder
FORMAT = 2
BUDGET_S = 1.2  # for all forms; the form by rule is timed whatever it takes
LONGEST = 4.0  # times the budget, of real time: on a machine with other work
SLOW, CLOSE = 2.0, 1.25  # times the fastest: forms that are timed again once, and more often
ROUNDS = 2  # further passes of forms that are close; the fastest counts, as others lengthen them
# Up to this many rounds are made while all passes together take less than `SHORT_S`.
MOST_ROUNDS = 20
SHORT_S = 0.1

PROBE_ROWS = 4  # observations of the pass that shows how long others are
LONG_PASS = 0.5  # share of the budget; a longer pass is replaced by a short one
SHORT_PASS = 1 / 16  # share of the budget that such a short pass takes
FEW = 2  # orders and formats that are tried with other numbers of rows
SHOWN = 3  # other forms in a sentence

# A pass of a whole update is timed with at most this many observations; more take too long.
MOST_TIMED_ROWS = 1024
WHOLE = "; an update is always one pass, since its loss needs all of it"

Seconds = dict[ComputeForm, float]
"""Of one observation, by form."""


class Task(NamedTuple):
    """What is timed: a network, in training or in inference."""

    shape: AnyShape
    observation: tuple[tuple[int, ...], str]
    """Shape and numpy dtype of one observation."""
    model: ModelConfig
    learns: bool
    threads: int
    """Threads of torch."""
    unroll: int = 1
    """Rows of an unroll that a recurrent network goes through one after the other."""
    most_rows: int = 1 << 30
    """No pass has more observations."""

    @property
    def name(self) -> str:
        """The network and what it does: `nature_cnn of [4, 84, 84], training, 1 thread`."""
        what = "training" if self.learns else "inference"
        size = [*self.observation[0]]
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{layers_in_words(self.shape, self.model)} of {size}, {what}, {threads}"


class Timing(NamedTuple):
    """A choice, and the times that it is based on."""

    form: ComputeForm
    seconds: Seconds
    """Times by form; the form by rule comes first."""
    cached: bool
    """Whether the times are those of an earlier run."""

    def __str__(self) -> str:
        by_rule = next(iter(self.seconds))
        others = sorted(self.seconds, key=self.seconds.__getitem__)
        others = [form for form in others if form not in (self.form, by_rule)][:SHOWN]
        others = [by_rule] * (by_rule != self.form) + others
        rest = "; ".join(f"{form.short}: {1e6 * self.seconds[form]:,.0f}" for form in others)
        when = "timed by an earlier run" if self.cached else "timed now"
        spent = f"{1e6 * self.seconds[self.form]:,.0f} µs an observation, {when}"
        return f"{self.form}: {spent}" + f" (others, in µs: {rest})" * bool(rest)


def with_acting_form(config: Config, spaces: Spaces) -> tuple[Config, str]:
    """Choose number format and order of images in which this processor infers fastest.

    They are chosen where `actors.precision` and `actors.memory_format` leave them open.

    Returns:
        The config with the choice, and a sentence about it. The config is unchanged and the
        sentence empty where nothing is open.
    """
    actors, envs = config.actors, config.actor_envs
    shape = network_shape(config, spaces)
    if actors.inference == "numpy":
        return config, ""

    options = Options(actors.precision, actors.memory_format, envs)
    forms = acting_forms(shape, options, envs, has_bf16=processor().has_bf16)
    if len(forms) == 1:
        return config, ""
    seen = (tuple(spaces.observation_space.shape), slot_spec(config, spaces).columns[0].dtype)
    timing = time_forms(Task(shape, seen, config.model, False, actors.threads), forms)
    form = timing.form
    chosen = {"precision": form.precision, "memory_format": form.memory_format}
    changed = config.model_copy(update={"actors": actors.model_copy(update=chosen)})
    return changed, f"actors infer in {timing}"


def with_training_form(
    config: Config, spaces: Spaces, kept: ComputeForm | None = None
) -> tuple[Config, str]:
    """Choose number format, order of images and pass size in which this processor trains fastest.

    They are chosen where the options of `learner` leave them open.

    Args:
        config: the config of the run.
        spaces: the spaces of its environment.
        kept: the form of the run's checkpoint on this processor. It stays, where the options allow
            it.

    Returns:
        The config with the choice, and a sentence about it. The config is unchanged and the
        sentence empty on a GPU, and where nothing is open.
    """
    from penstock.device.choice import device_of, pick_device  # imports torch

    learner = config.learner
    if device_of(pick_device(learner.device)).runs_behind:
        return config, ""
    shape, update = network_shape(config, spaces), update_size(config, spaces)
    whole = _is_whole(config)
    rows = min(update.rows, MOST_TIMED_ROWS) if whole else learner.micro_batch
    options = Options(learner.precision, learner.memory_format, rows)
    forms = training_forms(shape, options, update, has_bf16=processor().has_bf16)
    if len(forms) == 1:
        return config, ""

    if kept in forms:
        form, text = kept, f"{kept}: as the checkpoint's learner computed"
    else:
        recurrent = isinstance(shape, GeneralShape) and shape.state_size > 0
        unroll = config.actors.unroll + 1 if recurrent else 1
        seen = (tuple(spaces.observation_space.shape), slot_spec(config, spaces).columns[0].dtype)
        task = Task(shape, seen, config.model, True, learner.first_threads, unroll, update.rows)
        timing = time_forms(task, forms)
        form, text = timing.form, str(timing)
    names = "precision", "memory_format", "micro_batch"
    chosen = dict(zip(names, form, strict=True))
    changed = config.model_copy(update={"learner": learner.model_copy(update=chosen)})
    return changed, f"the learner computes in {text}{WHOLE if whole else ''}"


def _is_whole(config: Config) -> bool:
    """Whether each update is one pass, whatever `learner.micro_batch` is."""
    algo = algorithm(config.algo)
    if not isinstance(algo, UnrollAlgorithm):
        return False
    scheduled = over_run(config.algo, config.stop.env_steps)
    return algo.whole(algo.settled(with_values(scheduled, 0)))


def update_size(config: Config, spaces: Spaces) -> UpdateSize:
    """Returns the number of observations in one update of a learner."""
    if not isinstance(algorithm(config.algo).data(config.algo), Unrolls):
        return UpdateSize(config.replay.batch_size)
    spec, updates = slot_spec(config, spaces), config.learner.updates_per_batch
    envs = config.learner.batch_slots * spec.envs
    if config.algo.by_steps(config.model.core != "none"):
        return UpdateSize(max(1, envs * spec.unroll // updates))
    return UpdateSize(max(1, envs // updates) * (spec.unroll + 1), spec.unroll + 1)


def time_forms(task: Task, forms: Sequence[ComputeForm]) -> Timing:
    """Choose the fastest of ``forms``, of which the first is that by rule.

    The forms are timed, unless the cache holds their times.
    """

    def read(entries: Any) -> Seconds | None:
        times = _times(entries)
        is_sound = forms[0] in times and times.keys() <= set(forms)
        # The form by rule comes first.
        return {forms[0]: times[forms[0]]} | times if is_sound else None

    def measure() -> list[list[Any]]:
        return [[*form, seconds] for form, seconds in _times_of(task, forms).items()]

    seconds, cached = timed_once(FOLDER, _about(task, forms), read, measure)
    return Timing(fastest(seconds, forms[0]), seconds, cached)


def _times_of(task: Task, forms: Sequence[ComputeForm]) -> Seconds:
    """Time ``forms`` by `race`.

    If one whole pass of a network of images takes half of the budget, passes are short, so that
    each precision and memory format is timed; other numbers of rows than the first form's are not.
    """
    if task.shape.convolutional and task.learns:
        probe = task._replace(most_rows=PROBE_ROWS)
        time_pass = passes(probe)
        time_pass(forms[0])
        seconds = time_pass(forms[0])
        del time_pass  # frees its network

        if min(forms[0].rows, task.most_rows) * seconds > LONG_PASS * BUDGET_S:
            forms = [form for form in forms if form.rows == forms[0].rows]
            rows = max(PROBE_ROWS, int(SHORT_PASS * BUDGET_S / seconds))
            task = task._replace(most_rows=min(rows, task.most_rows))
    return race(forms, passes(task), task.most_rows, clock_of(task))


def race(
    forms: Sequence[ComputeForm],
    time_pass: Callable[[ComputeForm], float],
    most_rows: int,
    clock: Callable[[], float] = time.thread_time,
    budget_s: float = BUDGET_S,
) -> Seconds:
    """Time as many of ``forms`` as the budget allows, and those that may be the fastest again.

    At first all forms with as many rows as ``forms[0]`` are timed, then the best formats and orders
    with other numbers of rows, then again those that may be the fastest. The first pass of a form
    compiles kernels, and counts only where it shows that the form is slow.

    Args:
        forms: the forms; the first is timed whatever it takes.
        time_pass: makes one pass and returns its seconds per observation, measured by ``clock``.
        most_rows: the most observations in a pass.
        clock: returns seconds, in which the budget is counted.
        budget_s: the budget of all passes, in seconds.

    Returns:
        The least seconds per observation of each form that was timed.
    """
    began_s, ends_s = clock(), time.perf_counter() + LONGEST * budget_s
    time_pass(forms[0])
    found: Seconds = {forms[0]: time_pass(forms[0])}

    def has_time(form: ComputeForm, passes: int) -> bool:
        if time.perf_counter() >= ends_s:
            return False
        each_s = found.get(form, min(found.values()))
        return clock() - began_s + passes * each_s * min(form.rows, most_rows) <= budget_s

    def first_time(form: ComputeForm) -> None:
        if has_time(form, 2):
            seconds = time_pass(form)
            is_slow = seconds > SLOW * min(found.values())
            found[form] = seconds if is_slow else time_pass(form)

    base = [form for form in forms if form.rows == forms[0].rows]
    for form in reversed(base[1:]):  # bf16 before fp32: where it pays, fp32 is seen to be slow
        first_time(form)
    best = {form[:2] for form in sorted(found, key=found.__getitem__)[:FEW]}
    for form in forms[len(base) :]:
        if form[:2] in best:
            first_time(form)
    again = 0
    while again < ROUNDS or (again < MOST_ROUNDS and clock() - began_s < SHORT_S):
        limit = (CLOSE if again else SLOW) * min(found.values())
        for form in [form for form in found if found[form] <= limit or form == forms[0]]:
            if has_time(form, 1):
                found[form] = min(found[form], time_pass(form))
        again += 1
    return found


def clock_of(task: Task) -> Callable[[], float]:
    """Returns the clock, in seconds, by which passes of ``task`` are timed.

    It counts processor time of this thread, so that other processes, which start at the same time,
    count little. Where torch has several threads it counts real time.
    """
    return time.thread_time if task.threads == 1 else time.perf_counter


def passes(task: Task) -> Callable[[ComputeForm], float]:
    """Returns a function that makes one pass of ``task`` in a form.

    The function returns the seconds per observation by `clock_of`. Networks and inputs are made
    once for each form. This sets torch's threads, and draws no random numbers of torch's generator.
    """
    import torch

    from penstock.models.torch_setup import set_up_torch

    set_up_torch(task.threads)
    clock = clock_of(task)
    size, dtype = task.observation
    memory = task.shape.state_size if isinstance(task.shape, GeneralShape) else 0

    @cache
    def network(precision: Precision, memory_format: MemoryFormat) -> Any:
        shape = in_memory_format(task.shape, memory_format)
        return _made(shape, torch.bfloat16 if precision == "bf16" else torch.float32)

    @cache
    def work(form: ComputeForm) -> tuple[Callable[[], object], int]:
        net = network(form.precision, form.memory_format)
        rows = max(1, min(form.rows, task.most_rows))
        lead = (task.unroll, max(1, rows // task.unroll)) if memory and task.learns else (1, rows)
        obs = torch.from_numpy(np.zeros((*lead, *size), dtype))
        state = torch.zeros(lead[1], memory)
        if task.learns:
            call = partial(_learn, net, obs, *([state] if memory else []))
        elif isinstance(task.shape, GeneralShape):
            call = torch.inference_mode()(partial(net.act, obs, state))
        else:
            with torch.inference_mode():
                weights = net.acting_weights()
            call = torch.inference_mode()(partial(net.acting_outputs, obs, weights))
        return call, math.prod(lead)

    def time_pass(form: ComputeForm) -> float:
        call, rows = work(form)
        began_s = clock()
        call()
        return (clock() - began_s) / rows

    return time_pass


def cached_timings() -> dict[str, str]:
    """Returns the cached choices of this machine, the newest first.

    Each value is a line with the network and the choice; its key is the path of the file.
    """
    found = {}
    for path, task, entries in cached_times(FOLDER):
        if times := _times(entries):
            form = fastest(times, next(iter(times)))
            found[str(path)] = f"{task}: {Timing(form, times, cached=True)}"
    return found


def _learn(net: Any, *inputs: Any) -> None:
    """Compute forward and backward pass; an actor-critic returns outputs and values."""
    found = net(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    sum(each.square().mean() for each in outputs).backward()


def _made(shape: AnyShape, dtype: Any) -> Any:
    """The network with constant weights: an orthogonal initialisation takes longer than a pass."""
    import torch

    from penstock.models.torch_nets import build_net

    if isinstance(shape, GeneralShape) and shape.model.entry is not None:
        with torch.random.fork_rng(devices=[]):
            return build_net(shape, dtype)

    # On the device "meta" a network has shapes, but no values that would be initialised.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        net = build_net(shape, dtype)
    net = net.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.01)
        for buffer in net.buffers():
            buffer.fill_(1.0)
    return net


def _about(task: Task, forms: Sequence[ComputeForm]) -> dict[str, Any]:
    """What the times of a file belong to, as plain data; any other value needs new times."""
    network = f"{task.shape!r} {task.shape.layout.entries!r} {task.unroll} {task.most_rows}"
    return {
        "format": FORMAT,
        "task": task.name,
        "network": digest(network),
        "observation": [[*task.observation[0]], task.observation[1]],
        "forms": [[*form] for form in forms],
    }


def _times(entries: Any) -> Seconds:
    """Returns the times in the entries of a cache file; empty where one of them is not sound."""
    found: Seconds = {}
    for entry in entries if type(entries) is list else ():
        form = ComputeForm.read(entry[:-1]) if type(entry) is list else None
        seconds = entry[-1] if form else None
        if form is None or type(seconds) is not float or not 0 < seconds < math.inf:
            return {}
        found[form] = seconds
    return found
