"""`penstock tune`: checks the sweep, runs its trials by Ray Tune or without it, shows the results.

Without Ray it is a grid or a random sample, some runs at a time (`run_group`). With Ray
(`ray_tune`) it is the same by Tune, or one of Tune's schedulers: ASHA stops trials that are worse
than others at the same steps, and PBT lets trials continue from the checkpoints of better ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from penstock.configs.errors import UserError
from penstock.configs.load import presets, resolve_target
from penstock.configs.schema import Config
from penstock.core.cores import usable_cores
from penstock.core.files import write_atomic
from penstock.core.run_dir import default_run_dir
from penstock.launch.run_group import SIGNALLED, command, cores_of, run_commands, say_line
from penstock.launch.tuning import trials
from penstock.launch.tuning.space import (
    MOST_TRIALS,
    Space,
    check_keeps_weights,
    overrides_of,
    read_space,
    with_fixed_cores,
)
from penstock.launch.tuning.trials import Metric, add_start, folder_of

Scheduler = Literal["none", "asha", "pbt"]

RESULTS = "results.json"
DECISIONS = 10  # of a scheduler in the steps of a trial, and evaluations, unless others are set
NEEDED = ("ray", "pandas", "pyarrow", "requests", "tensorboardX")  # of Ray Tune
INSTALL = "Ray Tune, which is not installed; run: pip install 'penstock[tune]'"


@dataclass(frozen=True)
class Sweep:
    """A checked sweep."""

    target: str
    overrides: tuple[str, ...]
    space: Space
    trials: int | None
    """None: the grid of the space."""
    scheduler: Scheduler
    metric: Metric
    interval: int | None
    """Agent steps between two decisions of the scheduler; None without a limit on agent steps."""
    most_steps: int | None
    """Agent steps of a trial that is not stopped (`stop.env_steps`)."""
    cores: int
    """Of each trial."""
    at_once: int
    """Trials that run at the same time."""
    seed: int
    folder: Path


def tune(
    target: str,
    overrides: Sequence[str],
    space: str,
    number: int | None,
    scheduler: Scheduler,
    metric: Metric,
    interval: int | None,
    parallel: int | None,
    folder: str | None,
    with_ray: bool,
    as_json: bool,
) -> int:
    """Run a sweep; returns the exit code: 130 or 143 after a signal, otherwise 1 if a trial failed,
    otherwise 0. The arguments are the options of `penstock tune`. Raises UserError."""
    stream = sys.stderr if as_json else sys.stdout
    missing = [name for name in NEEDED if find_spec(name) is None]
    if scheduler != "none" and (missing or not with_ray):
        why = INSTALL if missing else "Ray Tune; leave out --no-ray"
        raise UserError(f"--{scheduler} needs {why}")
    sweep = make_sweep(
        target, overrides, space, number, scheduler, metric, interval, parallel, folder
    )
    name = f"{sweep.trials or len(sweep.space.grid())} trials"
    say_line(
        f"{name}, {sweep.at_once} at a time: {usable_cores():g} cores, and a trial uses "
        f"{sweep.cores}",
        stream,
    )
    if missing and with_ray:
        say_line("without Ray Tune, which pip install 'penstock[tune]' installs", stream)
    sweep.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    say = partial(say_line, stream=stream)
    if with_ray and not missing:
        from penstock.launch.tuning import ray_tune

        code, errors = ray_tune.run(sweep, say)
    else:
        code, errors = _run_plain(sweep, say)
    found = trials.results(sweep.folder, metric, code in SIGNALLED, errors)
    if code == 0 and any(row["error"] is not None for row in found):
        code = 1
    answer = {
        "dir": str(sweep.folder),
        "exit_code": code,
        "metric": metric,
        "scheduler": scheduler,
        "trials": found,
    }
    with suppress(OSError):
        write_atomic(sweep.folder / RESULTS, json.dumps(answer, indent=2) + "\n")
        trials.show(found, metric, sweep.folder, stream)
    if as_json:
        print(json.dumps(answer))
    return code


def make_sweep(
    target: str,
    overrides: Sequence[str],
    space: str,
    number: int | None,
    scheduler: Scheduler,
    metric: Metric,
    interval: int | None,
    parallel: int | None,
    folder: str | None,
) -> Sweep:
    """Check a sweep and add what its options leave open. Raises UserError."""
    resolved = resolve_target(target, overrides)
    config = resolved.config
    _check_ends(config, scheduler, interval)
    steps = config.stop.env_steps
    if interval is None and steps is not None:
        interval = max(1, steps // DECISIONS)
    if steps is not None and interval is not None and interval > steps:
        raise UserError(
            f"--interval {interval} is more than stop.env_steps={steps}, so no decision would be "
            "made; lower it"
        )
    given = [*overrides, *_evaluations(config, metric, interval)]
    found = read_space(Path(space), target, given)
    if scheduler == "pbt":
        check_keeps_weights(found)
    _check_number(found, number, scheduler)
    cores = max(map(cores_of, found.configs))
    path = Path(folder) if folder else default_run_dir(f"tune-{resolved.name}")
    if config.run.dir is not None:
        raise UserError("run.dir is of one run; name the folder of all trials with --dir")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"--dir {path} is not empty; name a folder that does not exist yet")
    is_file = target not in presets() and Path(target).is_file()
    return Sweep(
        str(Path(target).resolve()) if is_file else target,
        tuple(given),
        found,
        number,
        scheduler,
        metric,
        interval,
        steps,
        cores,
        parallel or max(1, int(usable_cores() // cores)),
        config.run.seed,
        path,
    )


def _check_ends(config: Config, scheduler: Scheduler, interval: int | None) -> None:
    stop = config.stop
    if stop.env_steps is None and (scheduler != "none" or interval is not None):
        option = f"--{scheduler}" if scheduler != "none" else "--interval"
        raise UserError(
            f"{option} needs the number of agent steps of a trial; add stop.env_steps=1e6"
        )
    if stop.env_steps is None and stop.learner_steps is None and stop.minutes is None:
        raise UserError(
            "a trial would run without an end; add stop.env_steps=1e6, or stop.minutes=10"
        )


def _evaluations(config: Config, metric: Metric, interval: int | None) -> list[str]:
    """Overrides by which there is an evaluation for each decision. Raises UserError where trials
    would have none."""
    if metric != "eval" or config.eval.every_s is not None:
        return []
    if not config.evaluates_by_steps:
        raise UserError(
            "trials are compared by their evaluations, and eval.every_steps or transport.kind "
            "switches these off; change that, or compare the returns in training with "
            "--metric return"
        )
    every = config.eval.every_steps
    if interval is not None and every is not None and every > interval:
        return [f"eval.every_steps={interval}"]
    return []


def _check_number(space: Space, number: int | None, scheduler: Scheduler) -> None:
    if number is None and scheduler == "pbt":
        raise UserError("--pbt needs the size of the population; add --trials 8")
    if number is not None and number < 2 and scheduler != "none":
        raise UserError(f"--trials is {number}; --{scheduler} needs at least 2 to compare")
    if number is not None and number > MOST_TRIALS:
        raise UserError(f"--trials is {number}; a sweep has at most {MOST_TRIALS}")
    if number is None and not space.is_grid:
        raise UserError(
            "the space has ranges, so it has no grid; add the number of random trials, --trials 16"
        )
    if number is None:
        space.grid()  # raises UserError if it is too large


def _run_plain(sweep: Sweep, say: Callable[[str], None]) -> tuple[int, dict[int, str]]:
    """All trials in processes of their own; returns the exit code, and the errors of the trials
    that have failed, by their numbers."""
    space, number = sweep.space, sweep.trials
    drawn = space.grid() if number is None else space.samples(number, sweep.seed)
    commands = {}
    for n, options in enumerate(drawn):
        path = folder_of(sweep.folder, n)
        given = with_fixed_cores(sweep.target, [*sweep.overrides, *overrides_of(options)])
        commands[n] = command(sweep.target, given, path, "no")
    for n, options in enumerate(drawn):
        add_start(folder_of(sweep.folder, n), options, 0, None)
    ended = run_commands(commands, sweep.at_once, say, name="trial")
    errors = {n: found.summary["error"] for n, found in ended.items() if found.summary["error"]}
    return max((found.code for found in ended.values()), default=SIGNALLED[0]), errors
