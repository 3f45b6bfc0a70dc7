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
from collections.abc import Callable, Mapping, Sequence
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
from penstock.launch.alone import alone

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
Say = Callable[[str], None]


class StagePlan(NamedTuple):
    """The options of `penstock bench`, checked."""

    target: str
    seconds: float
    stages: tuple[str, ...]
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
    found = benchmark(PEERS, "--peers").find(target, Path(peers)) if peers else None
    return StagePlan(target, seconds, names, load(old, target) if old else None, found)


def load(path: str, target: str) -> Result:
    """Read an earlier result of ``target`` from a file.

    The file contains a result alone, on however many lines, or has it as its last line.

    Raises:
        UserError: if there is no such result, or it is of another target.
    """
    try:
        result: Result = _json(Path(path).read_text())
        measured, stages = result["target"], result["stages"]
        if not all(min(stage["rates"]) > 0 for stage in stages.values()):
            raise ValueError("a rate of 0")
        # A comparison that cannot be made fails now, and not once all has been measured.
        elsewhere(result, result)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"--compare {path}: it must be what `penstock bench --json` printed ({error})"
        ) from None
    if measured != target:
        raise UserError(f"--compare {path}: it is of --target {measured}, and this is of {target}")
    return result


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(text.splitlines()[-1])


def main(plan: StagePlan, as_json: bool) -> None:
    """Measure, and print a line as each figure comes.

    With ``as_json`` these lines go to standard error, and the result as JSON to standard output.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    people = sys.stderr if as_json else sys.stdout
    result = measure(plan, lambda text: print(text, file=people, flush=True))
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
        result |= {"achieved_steps_per_s": whole.median_rate(rates), "achieved_rates": rates}
    _say_whole(result, say)

    if plan.peers is not None:
        result["peers"] = benchmark(PEERS, "--peers").measure(
            plan.target, plan.peers, plan.seconds, say
        )
    if plan.old is not None:
        result |= _compared(plan.old, result, say)
    return result


def _compared(old: Result, new: Result, say: Say) -> Result:
    """Compare two results, with a line for each stage, and a warning if machines differ.

    Returns:
        The warning as ``elsewhere``, and the changes.
    """
    warning, changes = elsewhere(old, new), compare(old, new)
    for text in (*map(_change, changes), *([warning] if warning else [])):
        say(text)
    return {"elsewhere": warning, "changes": [change._asdict() for change in changes]}


def predict(
    stages: Mapping[str, Any], cores: float, sharing: Sequence[str] = SHARING
) -> float | None:
    """Returns the `ideal` rate, in agent steps per second, by the stages of a result.

    None where a stage is missing. The last of ``sharing`` is learning.
    """
    core_s = {name: s["core_ms"] / 1e3 for name, s in stages.items() if "core_ms" in s}
    learner = stages.get(sharing[-1], {"rate": 0.0, "on_gpu": False})
    return ideal(core_s, cores, learner["rate"], on_gpu=learner["on_gpu"], sharing=sharing)


def in_place(config: Config, stages: Sequence[str], seconds: float) -> Result:
    """Measure some of `PARTS`, each for about ``seconds``, in one process.

    Returns:
        The figures of each stage, by name.
    """
    total_s, threads = seconds * len(stages), config.actors.threads
    rounds = _alone("parts", config, seconds, total_s=total_s, threads=threads, stages=stages)
    return {name: _figures(figures) for name, figures in rounds.items()}


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


def _measured(config: Config, plan: StagePlan) -> Any:
    """Measure the stages of a plan; yields the name and the figures of each."""
    parts = [name for name in PARTS if name in plan.stages]
    if parts:
        yield from in_place(config, parts, plan.seconds).items()

    for name in BARE:
        if name in plan.stages and (found := _bare(config, name, plan.seconds)):
            yield name, _figures(found)
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
    found: Result = alone(
        f"penstock.bench.{module}:rounds",
        {"config": config.model_dump(mode="json"), "seconds": seconds, **request},
        seconds=seconds if total_s is None else total_s,
        threads=threads,
        variables=variables,
    )
    return found


def _allocator(config: Config, seconds: float) -> Result:
    """Measure the learner with tcmalloc; without that library, with the allocator that it has."""
    library = next(filter(None, map(ctypes.util.find_library, TCMALLOC)), None)
    found = learner(config, seconds, {"LD_PRELOAD": library} if library else {})
    if not found["tcmalloc"]:
        found["note"] = "no libtcmalloc was found: this is the C library's own allocator"
    return found


def _figures(told: Mapping[str, Any]) -> Result:
    rest = {name: value for name, value in told.items() if name not in ("rates", "core_s")}
    return {"rates": told["rates"], "core_ms": statistics.median(told["core_s"]) * 1e3, **rest}


def _line(name: str, stage: Mapping[str, Any]) -> str:
    rates = stage["rates"]
    text = (
        f"{name:14}{stage['rate']:>16,.0f} {stage['unit']:14} {min(rates):,.0f}..{max(rates):,.0f}"
    )
    if "core_ms" in stage and stage["unit"] == STEPS:
        text += f", {stage['core_ms']:.3g} core-ms a step"
    if "nbytes_per_step" in stage:
        text += f", {stage['rate'] * stage['nbytes_per_step'] / 1e9:.3g} GB/s"
    return text + (f" ({stage['note']})" if stage.get("note") else "")


def _say_whole(result: Result, say: Say) -> None:
    best, achieved = result["ideal_steps_per_s"], result["achieved_steps_per_s"]
    bare = result["bare_steps_per_s"]
    if best:
        say(f"ideal         {best:>16,.0f} {STEPS}: {result['cores']:g} cores, none ever idle")
    if bare:
        say(f"bare parts    {bare:>16,.0f} {STEPS}: environment and network in plain torch alone")

    if achieved:
        shares = [f"{achieved / best:.0%} of the ideal"] if best else []
        shares += [f"{achieved / bare:.0%} of bare parts"] if bare else []
        share = f": {', '.join(shares)}" if shares else ""
        say(f"achieved      {achieved:>16,.0f} {STEPS} trained{share}")
    result["achieved_over_ideal"] = achieved / best if best and achieved else None
    result["achieved_over_bare"] = achieved / bare if bare and achieved else None


def _change(change: RateChange) -> str:
    ratio = change.new / change.old
    return (
        f"{change.stage:14}{ratio:>7.2f} of before: {change.verdict}, beyond a noise of "
        f"{change.noise:.0%}"
        if change.verdict != "same"
        else f"{change.stage:14}{ratio:>7.2f} of before: the same within {change.noise:.0%}"
    )
