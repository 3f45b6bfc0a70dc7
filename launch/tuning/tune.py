"""`penstock tune`: checks the sweep, runs its trials by Ray Tune or without it, shows the results.

Without Ray it is a grid or a random sample, some runs at a time (`run_group`). With Ray
(`ray_tune`) it is the same by Tune, or one of Tune's schedulers: ASHA stops trials that are worse
than others at the same steps, and PBT lets trials continue from the checkpoints of better ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

from penstock.configs.errors import UserError
from penstock.core.cores import usable_cores
from penstock.core.files import write_atomic
from penstock.launch.run_group import (
    SIGNALLED,
    group_exit_code,
    run_command,
    run_commands,
    say_line,
)
from penstock.launch.signals import SignalsAfterRun
from penstock.launch.tuning import trials
from penstock.launch.tuning.space import overrides_of, with_fixed_cores
from penstock.launch.tuning.sweep import Scheduler, Sweep, make_folder
from penstock.launch.tuning.trials import TrialsEnd, add_start, folder_of

RESULTS = "results.json"
TUNE_PACKAGES = ("ray", "pandas", "pyarrow", "requests", "tensorboardX")
"""The packages that Ray Tune needs."""
INSTALL = "Ray Tune, which is not installed; run: pip install 'penstock[tune]'"


def uses_tune(scheduler: Scheduler, with_ray: bool) -> bool:
    """Returns whether Ray Tune runs the trials.

    Args:
        scheduler: "none", or one of Tune's, which needs Tune.
        with_ray: whether the user allows Tune.

    Raises:
        UserError: the scheduler needs Tune, and the user does not allow it or it is not installed.
    """
    missing = any(find_spec(name) is None for name in TUNE_PACKAGES)
    if scheduler != "none" and (missing or not with_ray):
        requirement = INSTALL if missing else "Ray Tune; leave out --no-ray"
        raise UserError(f"--{scheduler} needs {requirement}")
    return with_ray and not missing


def run_sweep(sweep: Sweep, with_ray: bool, as_json: bool) -> int:
    """Run a sweep, and show and write its results.

    Args:
        sweep: the sweep.
        with_ray: whether Ray Tune may run the trials.
        as_json: whether the results go to standard output as JSON, and all other text to standard
            error.

    Returns: the exit code: 130 or 143 after a signal, otherwise 1 if a trial has failed, otherwise
    0.

    Raises:
        UserError: the folder cannot be made, Ray cannot be started, or the grid is too large.
    """
    stream = sys.stderr if as_json else sys.stdout
    by_tune = uses_tune(sweep.scheduler, with_ray)
    trial_count = sweep.trials or len(sweep.space.grid())
    say_line(
        f"{trial_count} trials, {sweep.at_once} at a time: {usable_cores():g} cores, and a trial "
        f"uses {sweep.cores}",
        stream,
    )
    if with_ray and not by_tune:
        say_line("without Ray Tune, which pip install 'penstock[tune]' installs", stream)

    make_folder(sweep)
    say = partial(say_line, stream=stream)
    after = SignalsAfterRun()
    if by_tune:
        from penstock.launch.tuning import ray_tune

        end = ray_tune.run_trials(sweep, say, after)
    else:
        end = _run_plain(sweep, say, after)

    interrupted = end.exit_code in SIGNALLED
    rows = trials.results(sweep.folder, sweep.metric, interrupted, end.errors)
    code = end.exit_code
    if code == 0 and any(row["error"] is not None for row in rows):
        code = 1

    results = {
        "dir": str(sweep.folder),
        "exit_code": code,
        "metric": sweep.metric,
        "scheduler": sweep.scheduler,
        "trials": rows,
    }
    # A full disk or a closed pipe does not hide the results from `as_json`.
    with suppress(OSError):
        write_atomic(sweep.folder / RESULTS, json.dumps(results, indent=2) + "\n")
        trials.show(rows, sweep.metric, sweep.folder, stream)
    if as_json:
        print(json.dumps(results), flush=True)
    return code


def _run_plain(
    sweep: Sweep, print_line: Callable[[str], None], handler_after: SignalsAfterRun
) -> TrialsEnd:
    """Run all trials without Ray, in processes of their own.

    Args:
        sweep: the sweep, whose folder exists.
        print_line: shows a line to the user.
        handler_after: handles signals once the trials have ended.
    """
    if sweep.trials is None:
        options_of_trials = sweep.space.grid()
    else:
        options_of_trials = sweep.space.samples(sweep.trials, sweep.seed)

    # Every trial is checked before the first one has a folder.
    commands = {}
    for number, options in enumerate(options_of_trials):
        path = folder_of(sweep.folder, number)
        overrides = with_fixed_cores(sweep.target, [*sweep.overrides, *overrides_of(options)])
        commands[number] = run_command(sweep.target, overrides, path, "no")
    for number, options in enumerate(options_of_trials):
        path = folder_of(sweep.folder, number)
        add_start(path, options, trained_steps=0, from_trial=None)

    ends = run_commands(
        commands,
        sweep.at_once,
        print_line,
        name="trial",
        independent=True,
        handler_after=handler_after,
    )
    errors = {number: end.summary["error"] for number, end in ends.items() if end.summary["error"]}
    code = group_exit_code(ends, len(commands))
    if code not in SIGNALLED:
        code = min(code, 1)
    return TrialsEnd(code, errors)
