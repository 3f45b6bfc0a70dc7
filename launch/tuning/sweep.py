"""A sweep: its trials and the settings that they share, checked before any of them starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.configs.errors import UserError
from penstock.configs.load import presets, resolve_target
from penstock.configs.schema import Config
from penstock.core.cores import usable_cores
from penstock.core.run_dir import default_run_dir
from penstock.launch.run_group import check_shared, cores_of
from penstock.launch.tuning.space import (
    MOST_TRIALS,
    Space,
    check_keeps_weights,
    read_space,
)
from penstock.launch.tuning.trials import Metric

Scheduler = Literal["none", "asha", "pbt"]

DECISIONS = 10
"""A trial has as many decisions of its scheduler, and evaluations, unless the user sets others."""


@dataclass(frozen=True)
class Sweep:
    """A checked sweep."""

    target: str
    overrides: tuple[str, ...]
    space: Space
    trials: int | None
    """Number of trials, drawn at random; None: the grid of the space."""
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
    """Check the options of a sweep, and choose what they leave open.

    Args:
        target: target as of `penstock train`.
        overrides: options of all trials, each ``key=value``.
        space: path of the YAML file of the space.
        number: number of trials, drawn at random; None for the grid of the space.
        scheduler: which trials it stops or continues from others; "none" runs all to their end.
        metric: the figure by which trials are compared.
        interval: agent steps between two decisions of the scheduler; None chooses them.
        parallel: number of trials that run at the same time; None: as many as the cores allow.
        folder: folder for the runs of all trials; None names a new one.

    Raises:
        UserError: an option is wrong, or some of them contradict each other.
    """
    resolved = resolve_target(target, overrides)
    config = resolved.config
    _check_ends(config, scheduler, interval)

    # The interval between decisions divides the steps of a trial.
    steps = config.stop.env_steps
    if interval is None and steps is not None:
        interval = max(1, steps // DECISIONS)
    if steps is not None and interval is not None and interval > steps:
        raise UserError(
            f"--interval {interval} is more than stop.env_steps={steps}, so no decision would be "
            "made; lower it"
        )

    # The configs at all values of the parameters are checked here, before a trial starts.
    all_overrides = [*_evaluations(config, metric, interval, scheduler), *overrides]
    parameter_space = read_space(Path(space), target, all_overrides)
    if scheduler == "pbt":
        check_keeps_weights(parameter_space)
    _check_number(parameter_space, number, scheduler)

    # Trials that run at the same time share the cores, and nothing else.
    cores = max(map(cores_of, parameter_space.configs))
    at_once = parallel or max(1, int(usable_cores() // cores))
    for trial_config in parameter_space.configs:
        check_shared(trial_config, at_once)

    sweep_folder = Path(folder) if folder else default_run_dir(f"tune-{resolved.name}")
    if config.run.dir is not None:
        raise UserError("run.dir is of one run; name the folder of all trials with --dir")
    _check_unused(sweep_folder)

    # Trials may have another current folder, so the path of a file becomes absolute.
    if target not in presets() and Path(target).is_file():
        target = str(Path(target).resolve())
    return Sweep(
        target=target,
        overrides=tuple(all_overrides),
        space=parameter_space,
        trials=number,
        scheduler=scheduler,
        metric=metric,
        interval=interval,
        most_steps=steps,
        cores=cores,
        at_once=at_once,
        seed=config.run.seed,
        folder=sweep_folder,
    )


def _check_unused(folder: Path) -> None:
    """Raise UserError if a folder for a sweep has something in it, or cannot be read."""
    try:
        is_used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise _unusable(folder, error) from error
    if is_used:
        raise UserError(f"--dir {folder} is not empty; name a folder that does not exist yet")


def make_folder(sweep: Sweep) -> None:
    """Make the folder of a sweep; raises UserError if it cannot be made."""
    try:
        sweep.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(sweep.folder, error) from error


def _unusable(path: Path, error: OSError) -> UserError:
    """Returns the error for a folder that cannot be made or read."""
    return UserError(f"--dir {path} cannot be made: {error.strerror}; name a folder elsewhere")


def _check_ends(config: Config, scheduler: Scheduler, interval: int | None) -> None:
    """Raise UserError if a trial has no end, or none in agent steps and the scheduler needs one."""
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


def _evaluations(
    config: Config, metric: Metric, interval: int | None, scheduler: Scheduler
) -> list[str]:
    """Returns overrides by which there is an evaluation for each decision of the scheduler.

    Those of the user come after them, and replace them.

    Raises:
        UserError: the trials would have no evaluations, by which they are to be compared.
    """
    if metric != "eval":
        return []

    overrides = []
    # A limit on the share of evaluations would postpone them, and so decisions.
    if scheduler != "none" and config.eval.share is not None:
        overrides.append("eval.share=null")
    if config.eval.every_s is not None:
        return overrides

    if not config.evaluates_by_steps:
        raise UserError(
            "trials are compared by their evaluations, and eval.every_steps or transport.kind "
            "switches these off; change that, or compare the returns in training with "
            "--metric return"
        )

    every_steps = config.eval.every_steps
    if interval is not None and every_steps is not None and every_steps > interval:
        overrides.append(f"eval.every_steps={interval}")
    return overrides


def _check_number(space: Space, number: int | None, scheduler: Scheduler) -> None:
    """Raise UserError if the number of trials does not go with the space or the scheduler."""
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
