"""`penstock profile`: runs a target, measures a window of it, and reports where the time went."""

from __future__ import annotations

import json
import math
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from penstock.bench.stages import learner_rate
from penstock.configs.errors import UserError
from penstock.configs.load import load_run, resolve_target
from penstock.configs.schema import Config
from penstock.configs.sections import StopConfig
from penstock.configs.transports import TRANSPORTS
from penstock.core.cores import usable_cores
from penstock.core.files import without_nan
from penstock.core.run_dir import default_run_dir
from penstock.launch import run, topology
from penstock.launch.alone import call_in_process
from penstock.launch.measuring import thread_trials
from penstock.launch.profile_watch import ProfileWatch
from penstock.profiling.report import files, kernels, tables
from penstock.profiling.report.profile import Profile, with_thread_trials, with_verdict
from penstock.profiling.report.window import GPU, ProfileWindow, make_profile
from penstock.profiling.verdict import depends_on_threads
from penstock.watch import freeze

# The duration of the measurement of the learner's ceiling.
CEILING_S = 4.0
# A larger share of a learner's time without a core is worth a note.
CORELESS = 0.1
# A larger ratio of the achieved rate to the ceiling is no noise between two measurements.
NOISE = 1.05
# The run writes its metrics at least so many times within the window.
LEAST_INTERVALS = 5


def main(
    target: str,
    overrides: Sequence[str],
    *,
    seconds: float,
    with_torch: bool,
    as_json: bool,
    make_specs: run.MakeSpecs = topology.train_roles,
    place: run.EngineChoice = run.LOCAL_ENGINE,
) -> int:
    """Run a target, measure a window of the run, then print the profile and write its files.

    Args:
        target: a TARGET of the command line.
        overrides: options of the config as ``key=value``.
        seconds: the length of the window.
        with_torch: whether torch's profiler traces some learner steps after the window.
        as_json: whether the profile is printed as JSON.
        make_specs: makes the processes of a config, given a folder for their sockets.
        place: the engine that places them.

    Returns:
        The exit code of the run, as of `penstock train`.

    Raises:
        UserError: an option is wrong, or the config has no processes to profile.
    """
    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds is {seconds:g}; it must be a number above 0, such as 30")
    resolved = resolve_target(target, overrides)
    config = prepared(resolved.config, seconds)
    if TRANSPORTS.one_process(config.transport.kind):
        raise UserError(
            f"transport.kind={config.transport.kind} plays and trains in one thread, so there is "
            "no overlap to profile; set transport.kind=shm or zmq"
        )

    # The run; `watch` measures the window and ends the run after it.
    folder = Path(config.run.dir or default_run_dir(f"{resolved.name}-profile"))
    torch_trace = folder / files.TORCH_TRACE if with_torch else None
    watch = ProfileWatch(seconds, folder / files.KERNELS, torch_trace)
    outcome, summary = run.run_and_show(
        replace(resolved, config=config),
        folder,
        "no",
        as_json,
        make_specs,
        watch,
        place=place,
    )
    if watch.window is None:
        return _report_no_window(folder, outcome.exit_code, summary, as_json)

    # The profile, for which the learner's ceiling is measured now. The saved config has the number
    # of environments that the run has chosen.
    config = load_run(folder)
    if _is_learner_here(watch) and not watch.interrupted:
        _say(["measuring the learner's ceiling, its rate on data in place"], as_json)
    kernel_busy = kernels.kernel_share_in(folder / files.KERNELS)
    profile, notes = _profile(resolved.name, config, watch, watch.window, kernel_busy)

    # The trials of `actors.env_threads`, only where they could change the verdict.
    if depends_on_threads(profile) and watch.cores is None and not watch.interrupted:
        _say(["actors wait in steps: trying actors.env_threads with one of them alone"], as_json)
        profile, trial_notes = _with_trials(profile, config)
        notes += trial_notes
    profile = with_verdict(profile)

    if with_torch and not (folder / files.TORCH_TRACE).exists():
        notes.append(
            "torch's profiler wrote no trace, because the run ended before, or its first learner "
            "is on another host"
        )
    if watch.without_spans:
        notes.append(f"no spans arrived of {', '.join(watch.without_spans)}")

    notes = files.write_profile_files(folder, profile, watch.window, watch.threads, notes)
    _show(profile, _page(folder), notes, as_json)
    return outcome.exit_code


def prepared(config: Config, seconds: float) -> Config:
    """Returns the config of a run without a limit, which reports several times in the window."""
    interval_s = min(config.run.interval_s, max(0.1, seconds / LEAST_INTERVALS))
    timing = config.run.model_copy(update={"interval_s": interval_s})
    return config.model_copy(update={"stop": StopConfig(), "run": timing})


def as_trained(config: Config, threads: int | None) -> Config:
    """Returns the config with which to measure the ceiling of a run.

    `learner.threads` auto is replaced by ``threads``, the number that each learner had at the end
    of the run. None: the run did not change it.
    """
    if threads is None or config.learner.threads != "auto":
        return config
    learner = config.learner.model_copy(update={"threads": threads})
    return config.model_copy(update={"learner": learner})


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns properties of a config; it is called in a separate process, as it imports torch.

    They are arguments of `window.make_profile`: the bytes of a slot and of the parameters, the
    learner's device, and whether the network has convolutions.
    """
    from penstock.algos.samples import network_shape, slot_spec
    from penstock.device.choice import pick_device
    from penstock.envs import probe

    settings = Config.model_validate(config)
    spaces = probe(settings.env)
    shape = network_shape(settings, spaces)
    return {
        "slot_nbytes": slot_spec(settings, spaces).payload_nbytes,
        "device": pick_device(settings.learner.device).type,
        "weights_nbytes": 4 * shape.layout.size,  # float32
        "convolutional": shape.convolutional,
    }


def _profile(
    name: str, config: Config, watch: ProfileWatch, window: ProfileWindow, kernel_busy: float | None
) -> tuple[Profile, list[str]]:
    """Returns the profile without its verdict, and notes about missing or distorted data.

    ``kernel_busy`` is the share of the window in which the GPU computed, None if it is not known.
    """
    is_learner_here = _is_learner_here(watch)

    # What the window does not contain.
    no_ceiling_reason = None
    if watch.interrupted:
        no_ceiling_reason = "the window was cut short, so the learner's ceiling was not measured"
    elif not is_learner_here:
        no_ceiling_reason = "the first learner is on another host, so its ceiling was not measured"
    trained_config = as_trained(config, watch.learner_threads)
    properties, notes = _measure_outside_window(trained_config, no_ceiling_reason)

    # The device of another host is known by the spans of the window alone.
    if not is_learner_here:
        has_gpu = any(GPU in reading.lanes for reading in window.end.values())
        properties["device"] = "cuda" if has_gpu else "cpu"
    if properties["device"] == "cuda" and kernel_busy is None and is_learner_here:
        notes.append("torch's profiler (CUPTI) reported no kernel, so gpu_kernel_busy is unknown")

    profile: Profile = without_nan(
        make_profile(
            name,
            config,
            window,
            cores=usable_cores() if watch.cores is None else watch.cores,
            idle_cores=watch.idle_cores,
            kernel_busy=kernel_busy,
            **properties,
        )
    )
    return profile, [*notes, *_remarks(profile)]


def _is_learner_here(watch: ProfileWatch) -> bool:
    """Returns whether the first learner is, or was until it ended, on this host."""
    has_ended = watch.learner_host is None
    return has_ended or watch.learner_host == socket.gethostname()


def _with_trials(profile: Profile, config: Config) -> tuple[Profile, list[str]]:
    """Returns ``profile`` with trials of `actors.env_threads`.

    If they fail or are interrupted, it is returned without them, and a note says why.
    """
    try:
        return with_thread_trials(profile, thread_trials(config)), []
    except KeyboardInterrupt:
        return profile, ["interrupted before actors.env_threads was tried"]
    except (UserError, RuntimeError, TimeoutExpired) as error:
        return profile, [f"actors.env_threads could not be tried: {error}"]


def _measure_outside_window(
    config: Config, no_ceiling_reason: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Measure what the window does not contain: the learner's ceiling, and `facts`.

    Args:
        config: the config of the run.
        no_ceiling_reason: why the ceiling is not to be measured; None: it is.

    Returns:
        The measurements as arguments of `window.make_profile`, with a "device" in any case; and a
        note if some are missing.
    """
    is_on_gpu = config.learner.device.startswith("cuda")
    properties: dict[str, Any] = {"device": "cuda" if is_on_gpu else "cpu"}
    try:
        properties |= call_in_process(
            f"{__name__}:facts", {"config": config.model_dump(mode="json")}
        )
        if no_ceiling_reason is not None:
            return properties, [no_ceiling_reason]
        properties["ceiling"] = learner_rate(config, CEILING_S)
    except KeyboardInterrupt:
        return properties, ["interrupted before the learner's ceiling was measured"]
    except (UserError, RuntimeError, TimeoutExpired) as error:
        return properties, [f"the learner's ceiling could not be measured: {error}"]
    return properties, []


def _remarks(profile: Profile) -> list[str]:
    """Returns notes about conditions that distort the figures."""
    learners = profile["learner"]
    notes = [
        f"{learner['name']} waited for a core during {learner['coreless']:.0%} of the window; that "
        "time is included in the other parts: check which other programs run on this machine"
        for learner in learners
        if (learner["coreless"] or 0.0) > CORELESS
    ]
    if any((learner["achieved_over_ceiling"] or 0.0) > NOISE for learner in learners):
        notes.append(
            "the run was faster than the ceiling measured after it: the machine was busier during "
            "that measurement"
        )
    return notes


def _page(folder: Path) -> str:
    """Write the page on the run; returns where it is, or why there is none."""
    try:
        return f"report: {freeze.write_report(str(folder))}"
    except UserError as error:
        return f"no report.html: {error}; then run: penstock report {folder}"


def _show(profile: Profile, page: str, notes: Sequence[str], as_json: bool) -> None:
    """Print the profile as text, and with ``as_json`` as one JSON object too."""
    _say(["", *tables.report_lines(profile), "", *notes, page], as_json)
    if as_json:
        print(json.dumps(profile))


def _say(lines: Sequence[str], as_json: bool) -> None:
    """Print lines for the user; to standard error if standard output is for JSON."""
    with suppress(OSError):  # a terminal that is gone
        print(*lines, sep="\n", file=sys.stderr if as_json else sys.stdout, flush=True)


def _report_no_window(
    folder: Path, exit_code: int, summary: Mapping[str, Any], as_json: bool
) -> int:
    """Report that the run ended before its window began; returns the exit code.

    A run that failed has printed its error already.
    """
    if summary["error"] is None:
        print("penstock: the run ended before the profiled window began", file=sys.stderr)
    if as_json:
        print(json.dumps({"run_dir": str(folder), "exit_code": exit_code, **summary}))
    return exit_code
