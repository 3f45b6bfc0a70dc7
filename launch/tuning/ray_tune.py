"""A sweep by Ray Tune: its trials are Penstock runs, its search and schedulers are Ray's.

    Tune's controller ══ Ray ══ `RunTrainable` ── the process of a run (`run_group`)

The trainable starts the run, reports its figures, and ends it by SIGTERM. A checkpoint of Tune is
one of the run's, with the number of the trial that wrote it. PBT gives a trial the checkpoint and
the perturbed options of another one: the trial's run is then started again by
``--resume-from`` that checkpoint, in the same folder. The same happens where more trials than
``--parallel`` take turns, and there a trial continues from its own checkpoint.

Schedulers measure time in ``scored_steps``, the agent steps behind the weights of the last score.
Reports between two evaluations repeat the score and its steps, and so lead to no decision.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from penstock.configs.errors import UserError
from penstock.core.files import open_private
from penstock.core.run_dir import has_checkpoint, in_use
from penstock.launch.engines.ray_engine import LEFT_OUT, connect
from penstock.launch.run_group import command
from penstock.launch.supervisor import SIGNALS
from penstock.launch.tuning.space import (
    Choices,
    NumberRange,
    Options,
    Parameter,
    Space,
    overrides_of,
)
from penstock.launch.tuning.sweep import Sweep
from penstock.launch.tuning.trials import Progress, ProgressReader, add_start, folder_of
from penstock.learner.checkpoints.checkpoint_format import FILE
from penstock.monitor.order_client import save
from penstock.monitor.record import EVALUATIONS

SCORE, TIME = "score", "scored_steps"
REPORT_S = 2.0  # longest time between two reports, which is the delay of an order to stop
POLL_S = 0.1
SAVE_S = 60.0
RECEIVED = "received"  # in the folder of checkpoints: one that came from another trial
ORIGIN = "trial.json"  # in a checkpoint of Tune
OUTPUT = "output.log"  # of the trial's process
KEPT = 4  # checkpoints of Tune per trial; PBT may still need earlier ones
LINE_NBYTES = 1 << 12
LIBRARIES = ("ray", "ray.tune", "ray.train")


class RunTrainable(tune.Trainable):
    """A trial: starts a run, reports its figures, and saves it when Tune asks for that."""

    def setup(
        self, config: Options, target: str = "", overrides: tuple[str, ...] = (),
        folder: str = "", cwd: str = "", metric: Any = "eval", grace_s: float = 30.0,
    ) -> None:  # fmt: skip
        """Take the options of the trial; the run is started by the first `step`.

        Args:
            config: the trial's options of the space.
            target: as of `penstock train`.
            overrides: options that all trials share.
            folder: the folder of the sweep, absolute.
            cwd: the current folder of the command.
            metric: what the score is.
            grace_s: seconds that the run may take to end.
        """
        self._options, self._target, self._overrides = config, target, overrides
        self._number = number_of(self.trial_id)
        self._path = folder_of(Path(folder), self._number)
        self._cwd, self._metric, self._grace_s = cwd, metric, grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._source: Path | None = None  # a checkpoint of another trial, to begin from
        self._origin: Mapping[str, Any] = {}

    def step(self) -> dict[str, Any]:
        """Wait for the next evaluation or interval; returns the figures. Raises RuntimeError where
        the run has failed."""
        if self._process is None:
            self._process = self._start()
        before_nbytes, ends_s = self._evaluated_nbytes(), time.monotonic() + REPORT_S
        while (code := self._process.poll()) is None and time.monotonic() < ends_s:
            if self._evaluated_nbytes() != before_nbytes:
                break
            time.sleep(POLL_S)
        if code:
            raise RuntimeError(f"trial {self._number}: {self._last_line()}")
        return {**figures(self._reader.read()), "done": code is not None}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Have the run save, and copy its newest checkpoint."""
        saved: dict[str, Any] = {}
        if self._process is not None and self._process.poll() is None:
            with suppress(UserError):  # it has just ended, and has saved
                saved = save(str(self._path), SAVE_S)
        steps = saved.get("trained_steps") or self._reader.read().trained_steps
        shutil.copyfile(self._path / "checkpoints" / "last" / FILE, Path(checkpoint_dir, FILE))
        origin = {"trial": self._number, "trained_steps": steps}
        Path(checkpoint_dir, ORIGIN).write_text(json.dumps(origin))

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Begin from the checkpoint of this trial or of another one."""
        self._origin = json.loads(Path(checkpoint_dir, ORIGIN).read_text())
        if self._origin["trial"] == self._number and has_checkpoint(self._path):
            return  # what the run saved when it ended is newer
        self._source = self._path / "checkpoints" / RECEIVED
        self._source.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(Path(checkpoint_dir, FILE), self._source / FILE)

    def cleanup(self) -> None:
        """End the run, which saves."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            process.kill()  # its roles end with it
            process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        ends_s = time.monotonic() + self._grace_s
        while in_use(self._path) and time.monotonic() < ends_s:
            time.sleep(POLL_S)  # the trial's run before this one ends
        resume = "must" if has_checkpoint(self._path) else "no"
        source = ""
        if self._source is not None:
            source, resume = str(self._source), "no"
            self._drop_own_checkpoints()
        other = self._origin.get("trial") if self._source is not None else None
        add_start(self._path, self._options, self._origin.get("trained_steps", 0), other)
        given = [*self._overrides, *overrides_of(self._options)]
        self._reader = ProgressReader(self._path, self._metric)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT)}
        with open(self._path / OUTPUT, "ab", opener=open_private) as output:
            return subprocess.Popen(
                command(self._target, given, self._path, resume, source),  # type: ignore[arg-type]
                cwd=self._cwd,
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal reaches only the command
            )

    def _drop_own_checkpoints(self) -> None:
        """Remove the checkpoints whose training is given up; the best one stays."""
        own = self._path / "checkpoints"
        for folder in [own / "last", *own.glob("step-*")]:
            shutil.rmtree(folder, ignore_errors=True)

    def _evaluated_nbytes(self) -> int:
        with suppress(OSError):
            return (self._path / EVALUATIONS).stat().st_size
        return 0

    def _last_line(self) -> str:
        """The last line of the process's output, which is its error."""
        text = (self._path / OUTPUT).read_bytes()[-LINE_NBYTES:].decode(errors="replace")
        lines = [line for line in text.splitlines() if line and not line.startswith("{")]
        return lines[-1] if lines else "its process has failed"


class Narrator(tune.Callback):
    """Shows the starts and scores of the trials, and which checkpoints PBT hands on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._scored: dict[str, int] = {}

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
        self._say(f"trial {number_of(trial.trial_id)} has failed")


def run(sweep: Sweep, say: Callable[[str], None]) -> int:
    """Run the trials of a sweep on a Ray cluster of this host; returns the exit code. Raises
    UserError where Ray cannot be started."""
    random.seed(sweep.seed)  # PBT draws from it
    signals: list[int] = []
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    with _as_interrupts(signals), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        connect(None, cores=sweep.cores * sweep.at_once)
        try:
            found = _tuner(sweep, say).fit()
        finally:
            ray.shutdown()
    if signals:
        return 128 + signals[0]
    return 1 if found.errors else 0


def _tuner(sweep: Sweep, say: Callable[[str], None]) -> tune.Tuner:
    folder = sweep.folder.resolve()
    trainable = tune.with_parameters(
        RunTrainable,
        target=sweep.target,
        overrides=sweep.overrides,
        folder=str(folder),
        cwd=os.getcwd(),
        metric=sweep.metric,
        grace_s=2 * max(config.run.grace_s for config in sweep.space.configs),
    )
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
            scheduler=_scheduler(sweep),
            search_alg=BasicVariantGenerator(random_state=sweep.seed),
            reuse_actors=False,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(folder),
            callbacks=[Narrator(say)],
            checkpoint_config=tune.CheckpointConfig(num_to_keep=KEPT),
            verbose=0,
        ),
    )


def _scheduler(sweep: Sweep) -> TrialScheduler | None:
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
            name: [*found.values] if isinstance(found, Choices) else _domain(found)
            for name, found in sweep.space.parameters.items()
        },
        custom_explore_fn=partial(within, sweep.space),
    )


def within(space: Space, options: Options) -> Options:
    """Perturbed options, with numbers moved into their ranges: PBT multiplies them by 0.8 or 1.2
    whatever the range is."""
    return {
        name: found.clipped(options[name]) if isinstance(found, NumberRange) else options[name]
        for name, found in space.parameters.items()
    }


def _domain(found: Parameter) -> Any:
    """The parameter as a domain of Tune."""
    if isinstance(found, Choices):
        return tune.choice([*found.values])
    if found.whole:
        draw = tune.lograndint if found.log else tune.randint
        return draw(int(found.low), int(found.high) + 1)
    draw_number = tune.loguniform if found.log else tune.uniform
    return draw_number(found.low, found.high)


def number_of(trial_id: str) -> int:
    """The number of a trial, with which Tune's id ends: ``3f2a1_00007`` is trial 7."""
    return int(trial_id.rpartition("_")[2])


def figures(progress: Progress) -> dict[str, Any]:
    """The report for Tune. A score that is not known yet is NaN at 0 steps: Tune requires a number,
    and no scheduler decides at 0 steps."""
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
def _as_interrupts(signals: list[int]) -> Iterator[None]:
    """Collect the signals that end a sweep. Tune ends its trials at SIGUSR1, once; its own handler
    of SIGINT would let a second Ctrl-C end this process before its trials."""

    def pass_on(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        if len(signals) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def ignore(signum: int, frame: FrameType | None) -> None:
        """Before Tune has its handler."""

    before = {signum: signal.signal(signum, pass_on) for signum in SIGNALS}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, ignore)
    variable = "TUNE_DISABLE_SIGINT_HANDLER"
    os.environ[variable] = "1"
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        for signum, old in before.items():
            signal.signal(signum, old)
