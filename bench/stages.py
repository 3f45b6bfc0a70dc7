"""`penstock bench`: how fast each stage of a target is alone, and what they make together.

Stages are measured in processes of their own, in rounds whose spread says what is noise. A run of
the target stands beside them, and the ideal that they predict: all cores busy all the time with
what an agent step needs.
"""

from __future__ import annotations

import ctypes.util
import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.bench import whole
from penstock.bench.checkout import benchmark
from penstock.bench.compare import (
    BARE_SHARING,
    SHARING,
    RateChange,
    compare,
    elsewhere,
    ideal,
)
from penstock.bench.rates import ROUNDS
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.cores import usable_cores
from penstock.core.machine import machine
from penstock.launch.alone import call_in_process

STEPS = "agent steps/s"
# The stages that `penstock.bench.parts` measures, with the unit of each rate.
PARTS = {
    "memory": "bytes/s",
    "environment": STEPS,
    "bare_environment": STEPS,
    "inference": STEPS,
    "write": STEPS,
    "encode": STEPS,
    "wire": STEPS,
    "decompress": STEPS,
    "gather": STEPS,
    "replay_add": "transitions/s",
    "replay_sample": "transitions/s",
    "publish": "versions/s",
    "relay": "versions/s",
}
BARE = ("bare_inference", "bare_learner")  # the stages that `penstock.bench.bare` measures
UNITS = {
    **PARTS,
    **dict.fromkeys(BARE, STEPS),
    "reduction": "gradients/s",
    "learner": STEPS,
    "allocator": STEPS,
}
WHOLE = "whole"
PEERS = "peers.systems"  # module of benchmarks/ that measures other systems
NAMES = (*UNITS, WHOLE)
TCMALLOC = ("tcmalloc_minimal", "tcmalloc")  # names of the library
WHOLE_SHARE = 10  # how many times longer the whole runs than a stage
MOST_SECONDS = 600.0

Result = dict[str, Any]
"""Figures as `penstock bench --json` prints them."""
Say = Callable[[str], None]
"""Shows a line to the user."""


class StagePlan(NamedTuple):
    """The options of `penstock bench`, checked."""

    target: str
    seconds: float
    """Duration of the measurement of each stage."""
    stages: tuple[str, ...]
    """Names of the stages to measure, some of `NAMES`."""
    old: Result | None
    """An earlier result to compare with."""
    peers: dict[str, tuple[Path, Path]] | None
    """Python and program of each other system to measure."""


def make_plan(
    target: str, seconds: float, only: str | None, old: str | None, peers: str | None
) -> StagePlan:
    """Check the options of the command.

    Args:
        target: preset, file or environment.
        seconds: duration of the measurement of each stage.
        only: names of stages, separated by commas; None: all.
        old: path of an earlier result to compare with.
        peers: folder with other systems to measure.

    Raises:
        UserError: if one of them is not valid.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise UserError(f"--seconds {seconds:g}: it must be above 0 and at most {MOST_SECONDS:g}")

    names = NAMES if only is None else tuple(dict.fromkeys(only.split(",")))
    for name in names:
        if name not in NAMES:
            raise UserError(f"--only {only}: {name!r} is not one of {', '.join(NAMES)}")

    systems = benchmark(PEERS, "--peers").find(target, Path(peers)) if peers else None
    return StagePlan(
        target=target,
        seconds=seconds,
        stages=names,
        old=load(old, target) if old else None,
        peers=systems,
    )


def load(path: str, target: str) -> Result:
    """Read an earlier result of ``target`` from a file.

    The file contains a result alone, on however many lines, or has it as its last line.

    Raises:
        UserError: if there is no such result, or it is of another target.
    """
    try:
        result: Result = _parse(Path(path).read_text())
        old_target = result["target"]
        stages = result["stages"]
        if not all(min(stage["rates"]) > 0 for stage in stages.values()):
            raise ValueError("a rate of 0")
        # A comparison that cannot be made fails now, and not once all has been measured.
        elsewhere(result, result)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"--compare {path}: it must be what `penstock bench --json` printed ({error})"
        ) from None

    if old_target != target:
        raise UserError(
            f"--compare {path}: it is of --target {old_target}, and this is of {target}"
        )
    return result


def _parse(text: str) -> Any:
    """Returns the JSON of a text, or of its last line where that is below other output."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(text.splitlines()[-1])


def main(plan: StagePlan, as_json: bool) -> None:
    """Measure, and print a line as each figure comes.

    With ``as_json`` these lines go to standard error, and the result as JSON to standard output.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    stream = sys.stderr if as_json else sys.stdout
    result = measure(plan, lambda text: print(text, file=stream, flush=True))
    if as_json:
        print(json.dumps(result))


def measure(plan: StagePlan, say: Say) -> Result:
    """Measure a plan, with a line for each figure as it comes.

    Returns:
        The result as it is printed.

    Raises:
        UserError: as `train` would for the target.
    """
    config = resolve(plan.target, [])
    stages: Result = {}
    for name, figures in _measured(config, plan):
        stages[name] = {"rate": statistics.median(figures["rates"]), "unit": UNITS[name], **figures}
        say(_line(name, stages[name]))

    cores = usable_cores()
    result: Result = {
        "machine": machine(),
        "target": plan.target,
        "seconds": plan.seconds,
        "cores": cores,
        "stages": stages,
        "ideal_steps_per_s": predict(stages, cores),
        "bare_steps_per_s": predict(stages, cores, BARE_SHARING),
        "achieved_steps_per_s": None,
    }
    if WHOLE in plan.stages:
        # The run has as many environments as the stages, also where the option is auto.
        envs = f"actors.envs={config.actor_envs}"
        rates = whole.rates(plan.target, plan.seconds * WHOLE_SHARE, ROUNDS, envs)
        result["achieved_steps_per_s"] = whole.median_rate(rates)
        result["achieved_rates"] = rates
    result |= _shares(result)
    _say_whole(result, say)

    if plan.peers is not None:
        systems = benchmark(PEERS, "--peers")
        result["peers"] = systems.measure(plan.target, plan.peers, plan.seconds, say)
    if plan.old is not None:
        result |= _compared(plan.old, result, say)
    return result


def _compared(old: Result, new: Result, say: Say) -> Result:
    """Compare two results, with a line for each stage, and a warning if machines differ.

    Returns:
        The warning as ``elsewhere``, and the changes.
    """
    warning = elsewhere(old, new)
    changes = compare(old, new)
    for change in changes:
        say(_change(change))
    if warning:
        say(warning)
    return {"elsewhere": warning, "changes": [change._asdict() for change in changes]}


def predict(
    stages: Mapping[str, Any], cores: float, sharing: Sequence[str] = SHARING
) -> float | None:
    """Returns the `ideal` rate, in agent steps per second, by the stages of a result.

    None where a stage is missing. The last of ``sharing`` is learning.
    """
    core_s = {
        name: figures["core_ms"] / 1e3 for name, figures in stages.items() if "core_ms" in figures
    }
    learner = stages.get(sharing[-1], {"rate": 0.0, "on_gpu": False})
    return ideal(core_s, cores, learner["rate"], on_gpu=learner["on_gpu"], sharing=sharing)


def in_place(config: Config, stages: Sequence[str], seconds: float) -> Result:
    """Measure some of `PARTS`, each for about ``seconds``, in one process.

    Returns:
        The figures of each stage, by name.
    """
    rounds = _alone(
        "parts",
        config,
        seconds,
        total_s=seconds * len(stages),
        threads=config.actors.threads,
        stages=stages,
    )
    return {name: _figures(stage_rounds) for name, stage_rounds in rounds.items()}


def learner(config: Config, seconds: float, variables: Mapping[str, str] | None = None) -> Result:
    """Measure the learner on data in place, for about ``seconds``, in a process of its own.

    Args:
        config: the config of the target.
        seconds: duration of the measurement.
        variables: environment variables with which the process starts.

    Returns:
        The figures, with ``on_gpu``, whether a GPU trained, and ``tcmalloc``, whether that gave the
        memory.
    """
    threads = config.learner.first_threads
    return _figures(_alone("ceiling", config, seconds, threads=threads, variables=variables))


def learner_rate(config: Config, seconds: float) -> float:
    """Measure one learner of ``config`` alone, for about ``seconds``.

    Returns:
        The agent steps per second that it trains on. With replay: the agent steps per second that
        it keeps up with, each sampled `replay.samples_per_insert` times (once where that is null).

    Raises:
        UserError: if there is no such environment, network or device.
    """
    return float(statistics.median(learner(config, seconds)["rates"]))


def _measured(config: Config, plan: StagePlan) -> Iterator[tuple[str, Result]]:
    """Measure the stages of a plan; yields the name and the figures of each."""
    parts = [name for name in PARTS if name in plan.stages]
    if parts:
        yield from in_place(config, parts, plan.seconds).items()

    for name in BARE:
        if name in plan.stages:
            rounds = _bare(config, name, plan.seconds)
            if rounds:
                yield name, _figures(rounds)

    if "reduction" in plan.stages:
        yield "reduction", _alone("reduction", config, plan.seconds)
    if "learner" in plan.stages:
        yield "learner", learner(config, plan.seconds)
    if "allocator" in plan.stages:
        yield "allocator", _allocator(config, plan.seconds)


def _bare(config: Config, stage: str, seconds: float) -> Result:
    """Returns the rounds of the target's network in plain torch; empty where it has no such form.

    Choosing the form takes about as long as the measurement.
    """
    is_learner = stage == "bare_learner"
    threads = config.learner.first_threads if is_learner else config.actors.threads
    return _alone("bare", config, seconds, total_s=2 * seconds, threads=threads, stage=stage)


def _alone(
    module: str,
    config: Config,
    seconds: float,
    *,
    total_s: float | None = None,
    threads: int = 1,
    variables: Mapping[str, str] | None = None,
    **request: Any,
) -> Result:
    """Call ``rounds`` of a module of `penstock.bench` in a process of its own.

    Args:
        module: name of the module.
        config: the config of the target.
        seconds: duration of the measurement of one stage.
        total_s: duration of all measurements; by default ``seconds``.
        threads: threads of the process.
        variables: environment variables with which it starts.
        request: further arguments of ``rounds``.

    Returns:
        The result of ``rounds``.
    """
    result: Result = call_in_process(
        f"penstock.bench.{module}:rounds",
        {"config": config.model_dump(mode="json"), "seconds": seconds, **request},
        seconds=seconds if total_s is None else total_s,
        threads=threads,
        variables=variables,
    )
    return result


def _allocator(config: Config, seconds: float) -> Result:
    """Measure the learner with tcmalloc; without that library, with the allocator that it has."""
    library = next(filter(None, map(ctypes.util.find_library, TCMALLOC)), None)
    figures = learner(config, seconds, {"LD_PRELOAD": library} if library else {})
    if not figures["tcmalloc"]:
        figures["note"] = "no libtcmalloc was found: this is the C library's own allocator"
    return figures


def _figures(rounds: Mapping[str, Any]) -> Result:
    """Returns the result of a ``rounds`` function, with the median core-milliseconds of a unit."""
    notes = {name: value for name, value in rounds.items() if name not in ("rates", "core_s")}
    core_ms = statistics.median(rounds["core_s"]) * 1e3
    return {"rates": rounds["rates"], "core_ms": core_ms, **notes}


def _line(name: str, stage: Mapping[str, Any]) -> str:
    """Returns the figures of a stage as a line: rate, unit, range of the rounds, and notes."""
    rates = stage["rates"]
    text = (
        f"{name:14}{stage['rate']:>16,.0f} {stage['unit']:14} {min(rates):,.0f}..{max(rates):,.0f}"
    )
    if "core_ms" in stage and stage["unit"] == STEPS:
        text += f", {stage['core_ms']:.3g} core-ms a step"
    if "nbytes_per_step" in stage:
        text += f", {stage['rate'] * stage['nbytes_per_step'] / 1e9:.3g} GB/s"
    if stage.get("note"):
        text += f" ({stage['note']})"
    return text


def _shares(result: Result) -> Result:
    """Returns the achieved rate as a fraction of the ideal and of the bare parts.

    None where one of the two rates is missing.
    """
    achieved = result["achieved_steps_per_s"]
    best = result["ideal_steps_per_s"]
    bare = result["bare_steps_per_s"]
    return {
        "achieved_over_ideal": achieved / best if best and achieved else None,
        "achieved_over_bare": achieved / bare if bare and achieved else None,
    }


def _say_whole(result: Result, say: Say) -> None:
    """Show the rates of the whole that are known: ideal, bare parts, and achieved."""
    best = result["ideal_steps_per_s"]
    bare = result["bare_steps_per_s"]
    achieved = result["achieved_steps_per_s"]
    if best:
        say(f"ideal         {best:>16,.0f} {STEPS}: {result['cores']:g} cores, none ever idle")
    if bare:
        say(f"bare parts    {bare:>16,.0f} {STEPS}: environment and network in plain torch alone")

    if achieved:
        shares = []
        if best:
            shares.append(f"{achieved / best:.0%} of the ideal")
        if bare:
            shares.append(f"{achieved / bare:.0%} of bare parts")
        suffix = f": {', '.join(shares)}" if shares else ""
        say(f"achieved      {achieved:>16,.0f} {STEPS} trained{suffix}")


def _change(change: RateChange) -> str:
    """Returns the change of a stage as a line."""
    text = f"{change.stage:14}{change.new / change.old:>7.2f} of before: "
    if change.verdict == "same":
        return f"{text}the same within {change.noise:.0%}"
    return f"{text}{change.verdict}, beyond a noise of {change.noise:.0%}"
