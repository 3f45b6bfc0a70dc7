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
from penstock.launch.signals import SignalHandler, handling_signals
from penstock.launch.tuning.space import (
    ChoiceList,
    NumberRange,
    Options,
    Parameter,
    overrides_of,
)
from penstock.launch.tuning.sweep import Sweep
from penstock.launch.tuning.trial_run import GPUS, TrialRun, TrialSettings, last_output
from penstock.launch.tuning.trials import TrialProgress, TrialsEnd, folder_of

SCORE = "score"
"""Name of the score in a report for Tune."""
TIME = "scored_steps"
"""Name of the time of schedulers, in agent steps, in a report for Tune."""
DRAWS = 100
"""Most draws until options agree with each other."""
KEPT_CHECKPOINTS = 4
"""Number of Tune's checkpoints that a trial keeps, of which PBT may still need earlier ones."""
LOGGERS = ("ray", "ray.tune", "ray.train")
"""Names of the loggers whose warnings are not shown."""


class RunTrainable(tune.Trainable):
    """A trial as Tune drives it."""

    def setup(self, config: Options, settings: TrialSettings | None = None) -> None:
        """Take the options of the trial and the settings of all trials."""
        assert settings is not None
        self._trial_run = TrialRun(settings, number_of(self.trial_id), config)

    def step(self) -> dict[str, Any]:
        """Returns the next report; raises RuntimeError if the run has failed."""
        progress, has_ended = self._trial_run.step()
        return {**tune_report(progress), "done": has_ended}

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

    def __init__(self, print_line: Callable[[str], None], signals: Sequence[int]) -> None:
        """Begin with no trial.

        Args:
            say: shows a line to the user.
            signals: the signals that have arrived so far; more may be appended.
        """
        self._print_line = print_line
        self._signals = signals
        self._scored_steps: dict[str, int] = {}
        """Agent steps of the last score that was shown, by the id of the trial."""
        self.failed: list[int] = []
        """The numbers of the trials that have failed."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns what Tune pickles of its callbacks: a stream cannot be pickled."""
        return {"failed": self.failed}

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        # Tune ends its trials on SIGUSR1.
        if self._signals:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        options = ", ".join(overrides_of(trial.config))
        self._print_line(f"trial {number_of(trial.trial_id)} starts: {options}")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        # Reports between two evaluations repeat the last score.
        steps = result.get(TIME, 0)
        if steps and steps != self._scored_steps.get(trial.trial_id):
            self._scored_steps[trial.trial_id] = steps
            self._print_line(
                f"trial {number_of(trial.trial_id)}: return {result[SCORE]:.4g} after {steps:,} "
                "agent steps"
            )

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._print_line(f"trial {number_of(trial.trial_id)} has ended")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        number = number_of(trial.trial_id)
        self.failed.append(number)
        self._print_line(f"trial {number} has failed")


def run_trials(
    sweep: Sweep, print_line: Callable[[str], None], handler_after: SignalHandler | None = None
) -> TrialsEnd:
    """Run the trials of a sweep on a Ray cluster of this host.

    Args:
        sweep: the sweep, whose folder exists.
        print_line: shows a line to the user.
        handler_after: handles signals once the trials have ended, as for `handling_signals`.

    Raises:
        UserError: Ray cannot be started.
    """
    random.seed(sweep.seed)  # PBT draws from it
    signals: list[int] = []
    narrator = Narrator(print_line, signals)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            connect(None, cores=sweep.cores * sweep.at_once)
            # Signals are handled only now, as Ray has set a handler of SIGTERM that exits at once.
            with handling_signals(lambda signum, _: signals.append(signum), handler_after):
                with _quiet_tune():
                    _tuner(sweep, narrator).fit()
                ray.shutdown()
        except SystemExit:  # Ray's handler of SIGTERM
            signals.append(signal.SIGTERM)
        finally:
            ray.shutdown()  # also where it was not started completely

    errors = {number: last_output(folder_of(sweep.folder, number)) for number in narrator.failed}
    if signals:
        return TrialsEnd(128 + signals[0], errors)
    return TrialsEnd(1 if errors else 0, errors)


def _tuner(sweep: Sweep, narrator: Narrator) -> tune.Tuner:
    """Returns the tuner of a sweep, which reports to ``narrator``."""
    folder = sweep.folder.resolve()
    settings = TrialSettings(
        target=sweep.target,
        overrides=sweep.overrides,
        folder=folder,
        cwd=Path.cwd(),
        metric=sweep.metric,
        most_steps=sweep.most_steps,
        grace_s=2 * max(config.run.grace_s for config in sweep.space.configs),
        gpus=os.environ.get(GPUS),
    )
    trainable = tune.with_parameters(RunTrainable, settings=settings)

    parameters = sweep.space.parameters
    if sweep.trials is None:
        param_space = {
            name: tune.grid_search([*parameter.checked_values])
            for name, parameter in parameters.items()
        }
    else:
        param_space = {name: _domain(parameter) for name, parameter in parameters.items()}

    return tune.Tuner(
        tune.with_resources(trainable, {"CPU": sweep.cores}),
        param_space=param_space,
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
            checkpoint_config=tune.CheckpointConfig(num_to_keep=KEPT_CHECKPOINTS),
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

    # PBT takes a list for choices, and a domain for a range.
    mutations = {
        name: [*parameter.values] if isinstance(parameter, ChoiceList) else _domain(parameter)
        for name, parameter in sweep.space.parameters.items()
    }
    return PopulationBasedTraining(
        time_attr=TIME,
        perturbation_interval=sweep.interval,
        hyperparam_mutations=mutations,
        custom_explore_fn=partial(correct_options, sweep, random.Random(sweep.seed)),
    )


def correct_options(sweep: Sweep, rng: random.Random, options: Options) -> Options:
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
    corrected: Options = {}
    for name, parameter in parameters.items():
        value = options[name]
        corrected[name] = parameter.clipped(value) if isinstance(parameter, NumberRange) else value

    for _ in range(DRAWS):
        if _can_start(sweep, corrected):
            break
        corrected = {name: parameter.sample(rng) for name, parameter in parameters.items()}
    return corrected


def _can_start(sweep: Sweep, options: Options) -> bool:
    """Returns whether a trial with these options starts."""
    try:
        resolve(sweep.target, [*sweep.overrides, *overrides_of(options)])
    except UserError:
        return False
    return True


def _domain(parameter: Parameter) -> Any:
    """Returns a parameter as a domain of Tune."""
    if isinstance(parameter, ChoiceList):
        return tune.choice([*parameter.values])

    # Tune's upper end of whole numbers is excluded.
    if parameter.whole:
        integers = tune.lograndint if parameter.log else tune.randint
        return integers(int(parameter.low), int(parameter.high) + 1)
    numbers = tune.loguniform if parameter.log else tune.uniform
    return numbers(parameter.low, parameter.high)


def number_of(trial_id: str) -> int:
    """Returns the number of a trial, with which Tune's id ends: ``3f2a1_00007`` is trial 7."""
    return int(trial_id.rpartition("_")[2])


def tune_report(progress: TrialProgress) -> dict[str, Any]:
    """Returns the report for Tune on the progress of a trial.

    A score that is not known yet is NaN at 0 steps: Tune requires a number, and no scheduler
    decides at 0 steps. Other figures are left out while they are not known.
    """
    score = math.nan if progress.score is None else progress.score
    report = {
        SCORE: score,
        TIME: progress.scored_steps,
        "trained_steps": progress.trained_steps,
        "env_steps": progress.env_steps,
        "seconds": progress.time_s,
    }
    optional = {
        "return": progress.return_mean,
        "eval_return": progress.eval_return_mean,
        "learning_rate": progress.learning_rate,
    }
    return report | {name: value for name, value in optional.items() if value is not None}


@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Keep Tune's texts from standard output, and its handler of SIGINT away.

    With that handler, a second Ctrl-C would end this process before its trials. `Narrator` informs
    Tune of signals instead.
    """
    variable = "TUNE_DISABLE_SIGINT_HANDLER"
    os.environ[variable] = "1"
    # Tune replaces this handler.
    usr1_handler = signal.getsignal(signal.SIGUSR1)
    try:
        with open(os.devnull, "w") as null_device, redirect_stdout(null_device):
            yield
    finally:
        os.environ.pop(variable, None)
        signal.signal(signal.SIGUSR1, usr1_handler)
