"""A sweep by Ray Tune: its trials are Penstock runs, its search and schedulers are Ray's.

    Tune's controller ══ Ray ══ `RunTrainable` ── `TrialRun` ── the process of a run (`run_group`)

A checkpoint of Tune is one of the run's, with the number of the trial that wrote it. PBT gives a
trial the checkpoint and the perturbed options of another one. Where more trials than ``--parallel``
take turns, PBT also pauses a trial, which then continues from its own checkpoint.

Schedulers measure time in ``scored_steps``, the agent steps behind the weights of the last score.
Reports between two evaluations repeat the score and its steps, and so lead to no decision.
"""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.launch.engines.ray_connection import connect
from penstock.launch.signals import SignalHandler, handled
from penstock.launch.tuning.space import (
    ChoiceList,
    NumberRange,
    Options,
    Parameter,
    overrides_of,
)
from penstock.launch.tuning.sweep import Sweep
from penstock.launch.tuning.trial_run import GPUS, TrialRun, TrialSettings, last_output
from penstock.launch.tuning.trials import TrialProgress, folder_of

# Names of the score and of the time, in agent steps, in a report for Tune.
SCORE, TIME = "score", "scored_steps"
# Most draws until options agree with each other.
DRAWS = 100
# Number of Tune's checkpoints that a trial keeps, of which PBT may still need earlier ones.
KEPT = 4
# Names of the loggers whose warnings are not shown.
LIBRARIES = ("ray", "ray.tune", "ray.train")


class RunTrainable(tune.Trainable):
    """A trial as Tune drives it."""

    def setup(self, config: Options, settings: TrialSettings | None = None) -> None:
        """Take the options of the trial and the settings of all trials."""
        assert settings is not None
        self._trial_run = TrialRun(settings, number_of(self.trial_id), config)

    def step(self) -> dict[str, Any]:
        """Returns the next report; raises RuntimeError if the run has failed."""
        progress, ended = self._trial_run.step()
        return {**figures(progress), "done": ended}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Have the run save, and copy its newest checkpoint."""
        self._trial_run.save(Path(checkpoint_dir))

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Begin from the checkpoint of this trial or of another one."""
        self._trial_run.load(Path(checkpoint_dir))

    def cleanup(self) -> None:
        """End the run, which saves."""
        self._trial_run.end()


class Narrator(tune.Callback):
    """Shows the starts, scores and ends of the trials, and ends them all after a signal."""

    def __init__(self, say: Callable[[str], None], signals: Sequence[int]) -> None:
        """Begin with no trial.

        Args:
            say: shows a line to the user.
            signals: the signals that have arrived so far; more may be appended.
        """
        self._say, self._signals = say, signals
        self._scored: dict[str, int] = {}
        self.failed: list[int] = []
        """The numbers of the trials that have failed."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns what Tune pickles of its callbacks: a stream cannot be pickled."""
        return {"failed": self.failed}

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if self._signals:
            os.kill(os.getpid(), signal.SIGUSR1)  # on which Tune ends its trials

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        shown = ", ".join(overrides_of(trial.config))
        self._say(f"trial {number_of(trial.trial_id)} starts: {shown}")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        steps = result.get(TIME, 0)
        if steps and steps != self._scored.get(trial.trial_id):
            self._scored[trial.trial_id] = steps
            self._say(
                f"trial {number_of(trial.trial_id)}: return {result[SCORE]:.4g} after {steps:,} "
                "agent steps"
            )

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say(f"trial {number_of(trial.trial_id)} has ended")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.failed.append(number_of(trial.trial_id))
        self._say(f"trial {self.failed[-1]} has failed")


def run(
    sweep: Sweep, say: Callable[[str], None], after: SignalHandler | None = None
) -> tuple[int, dict[int, str]]:
    """Run the trials of a sweep on a Ray cluster of this host.

    Args:
        sweep: the sweep, whose folder exists.
        say: shows a line to the user.
        after: handles signals once the trials have ended, as for `handled`.

    Returns: the exit code, and the errors of the trials that have failed, by their numbers.

    Raises:
        UserError: Ray cannot be started.
    """
    random.seed(sweep.seed)  # PBT draws from it
    signals: list[int] = []
    narrator = Narrator(say, signals)
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            connect(None, cores=sweep.cores * sweep.at_once)
            # Signals are handled only now, as Ray has set a handler of SIGTERM that exits at once.
            with handled(lambda signum, _: signals.append(signum), after):
                with _quiet_tune():
                    _tuner(sweep, narrator).fit()
                ray.shutdown()
        except SystemExit:  # Ray's handler of SIGTERM
            signals.append(signal.SIGTERM)
        finally:
            ray.shutdown()  # also where it was not started completely

    errors = {n: last_output(folder_of(sweep.folder, n)) for n in narrator.failed}
    return (128 + signals[0] if signals else 1 if errors else 0), errors


def _tuner(sweep: Sweep, narrator: Narrator) -> tune.Tuner:
    """Returns the tuner of a sweep, which reports to ``narrator``."""
    folder = sweep.folder.resolve()
    grace_s = 2 * max(config.run.grace_s for config in sweep.space.configs)
    settings = TrialSettings(
        sweep.target,
        sweep.overrides,
        folder,
        Path.cwd(),
        sweep.metric,
        sweep.most_steps,
        grace_s,
        os.environ.get(GPUS),
    )

    trainable = tune.with_parameters(RunTrainable, settings=settings)
    is_grid = sweep.trials is None

    return tune.Tuner(
        tune.with_resources(trainable, {"CPU": sweep.cores}),
        param_space={
            name: tune.grid_search([*found.checked]) if is_grid else _domain(found)
            for name, found in sweep.space.parameters.items()
        },
        tune_config=tune.TuneConfig(
            metric=SCORE,
            mode="max",
            num_samples=sweep.trials or 1,
            scheduler=make_scheduler(sweep),
            search_alg=BasicVariantGenerator(random_state=sweep.seed),
            reuse_actors=False,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(folder),
            callbacks=[narrator],
            checkpoint_config=tune.CheckpointConfig(num_to_keep=KEPT),
            verbose=0,
        ),
    )


def make_scheduler(sweep: Sweep) -> TrialScheduler | None:
    """Returns the scheduler of a sweep; None for one that runs all trials to their end."""
    if sweep.scheduler == "none":
        return None

    assert sweep.interval is not None
    assert sweep.most_steps is not None
    if sweep.scheduler == "asha":
        return ASHAScheduler(
            time_attr=TIME,
            max_t=sweep.most_steps,
            grace_period=sweep.interval,
            stop_last_trials=False,  # `stop.env_steps` ends them
        )

    return PopulationBasedTraining(
        time_attr=TIME,
        perturbation_interval=sweep.interval,
        hyperparam_mutations={
            name: [*found.values] if isinstance(found, ChoiceList) else _domain(found)
            for name, found in sweep.space.parameters.items()
        },
        custom_explore_fn=partial(within, sweep, random.Random(sweep.seed)),
    )


def within(sweep: Sweep, rng: random.Random, options: Options) -> Options:
    """Correct options that PBT has perturbed.

    PBT multiplies numbers by 0.8 or 1.2 whatever their range is; they are moved into it. Options
    that contradict each other, or others of the run, are drawn anew. If `DRAWS` draws do not agree,
    the last is returned, and the trial's process refuses it.

    Args:
        sweep: has the parameters and the other options of the run.
        rng: the source of new draws.
        options: values by the names of the parameters.

    Returns: the corrected options.
    """
    parameters = sweep.space.parameters
    found = {
        name: each.clipped(options[name]) if isinstance(each, NumberRange) else options[name]
        for name, each in parameters.items()
    }

    for _ in range(DRAWS):
        if _agree(sweep, found):
            break
        found = {name: each.sample(rng) for name, each in parameters.items()}
    return found


def _agree(sweep: Sweep, options: Options) -> bool:
    """Returns whether a trial with these options starts."""
    try:
        resolve(sweep.target, [*sweep.overrides, *overrides_of(options)])
    except UserError:
        return False
    return True


def _domain(found: Parameter) -> Any:
    """Returns a parameter as a domain of Tune."""
    if isinstance(found, ChoiceList):
        return tune.choice([*found.values])

    # Tune's upper end of whole numbers is excluded.
    if found.whole:
        draw = tune.lograndint if found.log else tune.randint
        return draw(int(found.low), int(found.high) + 1)
    draw_number = tune.loguniform if found.log else tune.uniform
    return draw_number(found.low, found.high)


def number_of(trial_id: str) -> int:
    """Returns the number of a trial, with which Tune's id ends: ``3f2a1_00007`` is trial 7."""
    return int(trial_id.rpartition("_")[2])


def figures(progress: TrialProgress) -> dict[str, Any]:
    """Returns the report for Tune on the progress of a trial.

    A score that is not known yet is NaN at 0 steps: Tune requires a number, and no scheduler
    decides at 0 steps. Other figures are left out while they are not known.
    """
    score = math.nan if progress.score is None else progress.score
    report = {SCORE: score, TIME: progress.scored_steps}
    report |= {
        "trained_steps": progress.trained_steps,
        "env_steps": progress.env_steps,
        "seconds": progress.time_s,
    }
    known = {
        "return": progress.return_mean,
        "eval_return": progress.eval_return_mean,
        "learning_rate": progress.learning_rate,
    }
    return report | {name: value for name, value in known.items() if value is not None}


@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Keep Tune's texts from standard output, and its handler of SIGINT away.

    With that handler, a second Ctrl-C would end this process before its trials. `Narrator` informs
    Tune of signals instead.
    """
    variable, on_stop = "TUNE_DISABLE_SIGINT_HANDLER", signal.getsignal(signal.SIGUSR1)
    os.environ[variable] = "1"
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        os.environ.pop(variable, None)
        signal.signal(signal.SIGUSR1, on_stop)  # which Tune has replaced
