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
from penstock.core.interfaces import TransitionSequences, Unrolls
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

# All forms are timed within this budget, in seconds; the form by rule whatever it takes.
BUDGET_S = 1.2
# On a machine with other work, timing may take this many times the budget in real time.
LONGEST = 4.0
# A form above this multiple of the fastest time is slow, and is not timed again.
SLOW = 2.0
# A form within this multiple of the fastest time is timed again in every further round.
CLOSE = 1.25
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
"""Seconds of one observation, by form."""


class Task(NamedTuple):
    """What is timed: a network, in training or in inference."""

    shape: AnyShape
    observation: tuple[tuple[int, ...], str]
    """Shape and numpy dtype of one observation."""
    model: ModelConfig
    learns: bool
    """Whether training is timed; otherwise an actor's inference."""
    threads: int
    """Threads of torch."""
    unroll: int = 1
    """Rows of an unroll that a recurrent network goes through one after the other."""
    most_rows: int = 1 << 30
    """No pass has more observations."""

    @property
    def name(self) -> str:
        """The network and what it does: `nature_cnn of [4, 84, 84], training, 1 thread`."""
        layers = layers_in_words(self.shape, self.model)
        size = [*self.observation[0]]
        action = "training" if self.learns else "inference"
        plural = "s" if self.threads > 1 else ""
        return f"{layers} of {size}, {action}, {self.threads} thread{plural}"


class Timing(NamedTuple):
    """A choice, and the times that it is based on."""

    form: ComputeForm
    """The form that was chosen."""
    seconds: Seconds
    """Times by form; the form by rule comes first."""
    cached: bool
    """Whether the times are those of an earlier run."""

    def __str__(self) -> str:
        """The form with its time, and the times of a few others, that by rule first."""
        by_rule = next(iter(self.seconds))
        fastest_first = sorted(self.seconds, key=self.seconds.__getitem__)
        shown = [form for form in fastest_first if form not in (self.form, by_rule)][:SHOWN]
        if by_rule != self.form:
            shown = [by_rule, *shown]

        when = "timed by an earlier run" if self.cached else "timed now"
        text = f"{self.form}: {1e6 * self.seconds[self.form]:,.0f} µs an observation, {when}"
        if shown:
            times = "; ".join(f"{form.short}: {1e6 * self.seconds[form]:,.0f}" for form in shown)
            text += f" (others, in µs: {times})"
        return text


def with_acting_form(config: Config, spaces: Spaces) -> tuple[Config, str]:
    """Choose number format and order of images in which this processor infers fastest.

    They are chosen where `actors.precision` and `actors.memory_format` leave them open.

    Returns:
        The config with the choice, and a sentence about it. The config is unchanged and the
        sentence empty where nothing is open.
    """
    actors = config.actors
    envs = config.actor_envs
    shape = network_shape(config, spaces)
    if actors.inference == "numpy":
        return config, ""

    options = Options(actors.precision, actors.memory_format, envs)
    forms = acting_forms(shape, options, envs, has_bf16=processor().has_bf16)
    if len(forms) == 1:
        return config, ""

    task = Task(
        shape=shape,
        observation=_observation(config, spaces),
        model=config.model,
        learns=False,
        threads=actors.threads,
    )
    timing = time_forms(task, forms)
    form = timing.form
    values = {"precision": form.precision, "memory_format": form.memory_format}
    changed = config.model_copy(update={"actors": actors.model_copy(update=values)})
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

    shape = network_shape(config, spaces)
    update = update_size(config, spaces)
    is_one_pass = _updates_in_one_pass(config)
    rows = min(update.rows, MOST_TIMED_ROWS) if is_one_pass else learner.micro_batch
    options = Options(learner.precision, learner.memory_format, rows)
    forms = training_forms(shape, options, update, has_bf16=processor().has_bf16)
    if len(forms) == 1:
        return config, ""

    if kept in forms:
        form = kept
        text = f"{kept}: as the checkpoint's learner computed"
    else:
        is_recurrent = isinstance(shape, GeneralShape) and shape.state_size > 0
        task = Task(
            shape=shape,
            observation=_observation(config, spaces),
            model=config.model,
            learns=True,
            threads=learner.first_threads,
            unroll=update.unit if is_recurrent else 1,
            most_rows=update.rows,
        )
        timing = time_forms(task, forms)
        form = timing.form
        text = str(timing)

    values = {
        "precision": form.precision,
        "memory_format": form.memory_format,
        "micro_batch": form.rows,
    }
    changed = config.model_copy(update={"learner": learner.model_copy(update=values)})
    return changed, f"the learner computes in {text}{WHOLE if is_one_pass else ''}"


def _observation(config: Config, spaces: Spaces) -> tuple[tuple[int, ...], str]:
    """Returns shape and numpy dtype of one observation, as `Task` has them."""
    dtype = slot_spec(config, spaces).columns[0].dtype
    return tuple(spaces.observation_space.shape), dtype


def _updates_in_one_pass(config: Config) -> bool:
    """Whether each update is one pass, whatever `learner.micro_batch` is."""
    algo = algorithm(config.algo)
    if not isinstance(algo, UnrollAlgorithm):
        return False
    scheduled = over_run(config.algo, config.stop.env_steps)
    return algo.whole(algo.resolve_options(with_values(scheduled, 0)))


def update_size(config: Config, spaces: Spaces) -> UpdateSize:
    """Returns the number of observations in one update of a learner."""
    data = algorithm(config.algo).data(config.algo)
    if isinstance(data, TransitionSequences):
        rows = data.length + 1
        return UpdateSize(config.replay.batch_size * rows, rows)
    if not isinstance(data, Unrolls):
        return UpdateSize(config.replay.batch_size)

    spec = slot_spec(config, spaces)
    updates = config.learner.updates_per_batch
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

    seconds, cached = timed_once(FOLDER, _cache_key(task, forms), read, measure)
    return Timing(fastest(seconds, forms[0]), seconds, cached)


def _times_of(task: Task, forms: Sequence[ComputeForm]) -> Seconds:
    """Time ``forms`` by `race`.

    If one whole pass of a network of images takes half of the budget, passes are short, so that
    each precision and memory format is timed; other numbers of rows than the first form's are not.
    """
    if task.shape.convolutional and task.learns:
        # The first pass compiles kernels; the second shows how long an observation takes.
        time_pass = passes(task._replace(most_rows=PROBE_ROWS))
        time_pass(forms[0])
        seconds = time_pass(forms[0])
        del time_pass  # frees its network

        if min(forms[0].rows, task.most_rows) * seconds > LONG_PASS * BUDGET_S:
            forms = [form for form in forms if form.rows == forms[0].rows]
            rows = max(PROBE_ROWS, int(SHORT_PASS * BUDGET_S / seconds))
            task = task._replace(most_rows=min(rows, task.most_rows))

    return race(forms, passes(task), task.most_rows, clock=clock_of(task))


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
    began_s = clock()
    deadline_s = time.perf_counter() + LONGEST * budget_s
    time_pass(forms[0])
    least_s: Seconds = {forms[0]: time_pass(forms[0])}

    def has_time(form: ComputeForm, passes: int) -> bool:
        if time.perf_counter() >= deadline_s:
            return False
        row_s = least_s.get(form, min(least_s.values()))
        return clock() - began_s + passes * row_s * min(form.rows, most_rows) <= budget_s

    def time_first(form: ComputeForm) -> None:
        if has_time(form, 2):
            seconds = time_pass(form)
            is_slow = seconds > SLOW * min(least_s.values())
            least_s[form] = seconds if is_slow else time_pass(form)

    # bf16 comes before fp32: where it pays, the first pass shows that fp32 is slow.
    same_rows = [form for form in forms if form.rows == forms[0].rows]
    for form in reversed(same_rows[1:]):
        time_first(form)

    # The other numbers of rows are tried with the best precisions and memory formats.
    best = {form[:2] for form in sorted(least_s, key=least_s.__getitem__)[:FEW]}
    for form in forms[len(same_rows) :]:
        if form[:2] in best:
            time_first(form)

    # Forms that may be the fastest, and that by rule, are timed again; the fastest pass counts.
    number = 0
    while number < ROUNDS or (number < MOST_ROUNDS and clock() - began_s < SHORT_S):
        factor = CLOSE if number > 0 else SLOW
        limit_s = factor * min(least_s.values())
        contenders = [form for form in least_s if least_s[form] <= limit_s or form == forms[0]]
        for form in contenders:
            if has_time(form, 1):
                least_s[form] = min(least_s[form], time_pass(form))
        number += 1
    return least_s


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

    @cache
    def network(precision: Precision, memory_format: MemoryFormat) -> Any:
        shape = in_memory_format(task.shape, memory_format)
        return _constant_network(shape, torch.bfloat16 if precision == "bf16" else torch.float32)

    @cache
    def work(form: ComputeForm) -> tuple[Callable[[], object], int]:
        return _pass(task, network(form.precision, form.memory_format), form.rows)

    def time_pass(form: ComputeForm) -> float:
        call, rows = work(form)
        began_s = clock()
        call()
        return (clock() - began_s) / rows

    return time_pass


def _pass(task: Task, net: Any, rows: int) -> tuple[Callable[[], object], int]:
    """Returns a pass of a network over zeros, and its number of observations.

    A pass in training is forward and backward; an actor's is the inference alone. A recurrent
    network trains on ``[unroll, environments]``, any other pass has ``[1, rows]`` observations.
    """
    import torch

    from penstock.models.torch_heads import HeadNet

    size, dtype = task.observation
    rows = max(1, min(rows, task.most_rows))
    memory = task.shape.state_size if isinstance(task.shape, GeneralShape) else 0
    lead = (1, rows)
    if memory and task.learns:
        lead = (task.unroll, max(1, rows // task.unroll))
    obs = torch.from_numpy(np.zeros((*lead, *size), dtype))
    state = torch.zeros(lead[1], memory)

    call: Callable[[], object]
    if task.learns:
        inputs = (obs, state) if memory else (obs,)
        forward = net.unroll if memory and isinstance(net, HeadNet) else net
        call = partial(_learn, forward, *inputs)
    elif isinstance(task.shape, GeneralShape):
        call = torch.inference_mode()(partial(net.act, obs, state))
    else:
        with torch.inference_mode():
            weights = net.acting_weights()
        call = torch.inference_mode()(partial(net.acting_outputs, obs, weights))
    return call, math.prod(lead)


def cached_timings() -> dict[str, str]:
    """Returns the cached choices of this machine, the newest first.

    Each value is a line with the network and the choice; its key is the path of the file.
    """
    lines = {}
    for path, task, entries in cached_times(FOLDER):
        if times := _times(entries):
            form = fastest(times, next(iter(times)))
            lines[str(path)] = f"{task}: {Timing(form, times, cached=True)}"
    return lines


def _learn(net: Any, *inputs: Any) -> None:
    """Compute forward and backward pass; a network returns outputs, or these and others."""
    result = net(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    sum(output.square().mean() for output in outputs).backward()


def _constant_network(shape: AnyShape, dtype: Any) -> Any:
    """Returns the network with constant weights.

    An orthogonal initialisation takes longer than a pass. A network of the user's own is
    initialised as it is.
    """
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


def _cache_key(task: Task, forms: Sequence[ComputeForm]) -> dict[str, Any]:
    """Returns what the times belong to, as plain data; any other value needs new times."""
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
    times: Seconds = {}
    for entry in entries if type(entries) is list else ():
        form = ComputeForm.read(entry[:-1]) if type(entry) is list else None
        seconds = entry[-1] if form else None
        if form is None or type(seconds) is not float or not 0 < seconds < math.inf:
            return {}
        times[form] = seconds
    return times
