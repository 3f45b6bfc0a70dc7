"""Saves a learner, and resumes it.

`checkpoints/last` is the newest state. `checkpoints/best` is the best of the evaluated checkpoints,
written by the evaluator; before the first evaluation it is the one with the highest mean return in
training at the time of a save, once there are enough episodes. Both are complete: weights,
optimizer, random generators, counters, versions.

`checkpoint_schedule` decides when a save is due, `best_checkpoint` whether it is the best, and
`checkpoint_history` which older ones are kept, and what a resume does where the newest is damaged.
`checkpoint_store` copies each one to `checkpoint.store`.

`best` is written before `last`, and contains the mean to be beaten: so a crash or a full disk
between the two writes neither loses the best nor replaces it by a worse one.

A run may continue in another environment (`env`): its weights do, and no earlier return counts
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.configs.errors import UserError
from penstock.core.control import Message
from penstock.core.machine import processor
from penstock.core.notes import note_logger
from penstock.core.params import POLICY_ID, Arrays
from penstock.core.run_dir import RunFolderGuard
from penstock.device.choice import device_of
from penstock.device.interface import Device
from penstock.envs.packing import Packer
from penstock.learner.base_trainer import under
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints import checkpoint_history as history
from penstock.learner.checkpoints.best_checkpoint import BestCheckpoint
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_history import ENV, PLAY, REQUEST, REQUESTED
from penstock.learner.checkpoints.checkpoint_schedule import CheckpointSchedule
from penstock.learner.checkpoints.checkpoint_spaces import SPACES, check_spaces, spaces_as_json
from penstock.learner.checkpoints.checkpoint_store import (
    CheckpointStore,
    CheckpointWriter,
    ReplacedError,
    Uploader,
    take_newer,
)
from penstock.learner.evaluation_requests import EvaluationRequests
from penstock.learner.league import League
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.state import follow_lr_factor, set_weights, weights_of
from penstock.learner.trainer import Trainer
from penstock.models.compute_form import ComputeForm

# Prefixes of arrays in a checkpoint: states of random generators, and what each learner of a group
# keeps for itself. The latter has its name from version 0.1.0.
RANDOM = "random/"
GROUP = "team/"

# Keys of a checkpoint's meta.
EPOCH = "epoch"  # epoch of the group of learners that wrote the checkpoint
LR = "lr"  # value of `learner.lr`
SCALES = "scales"  # value of `algos.samples.scales`, absent if that is empty
LEAGUE = "league"  # state of the league, absent in a game of one side
FORM = "form"  # form in which a learner on a CPU computed, and the model of its processor

logger = note_logger(__name__)


class FormOnProcessor(NamedTuple):
    """How the learner of a checkpoint computed."""

    form: ComputeForm
    processor: str
    """Model of the processor."""


class CheckpointManager:
    """Saves ``trainer`` under ``run_dir`` and restores it.

    Call `resume` first, then `save` whenever a checkpoint is `is_due`. After a save that failed
    call `postpone`.
    """

    def __init__(
        self,
        run_dir: Path,
        trainer: Trainer | OffPolicyTrainer,
        report: Callable[..., object] = lambda kind, **fields: None,
        event: Callable[..., object] = lambda kind, text, **fields: logger.info("%s", text),
        league: League | None = None,
    ) -> None:
        """Make a manager of a run that has neither been resumed nor saved yet.

        Args:
            run_dir: the run's folder.
            trainer: what is saved and restored.
            report: is called at every save, as `RoleContext.report`.
            event: is called, as `RoleContext.event`, where an older checkpoint replaces a damaged
                one, and where a copy to `checkpoint.store` fails.
            league: the run's, whose state is saved and restored; None in a game of one side.
        """
        config = trainer.config
        folder = run_dir / "checkpoints"
        self._trainer = trainer
        self._league = league
        self._config = config.checkpoint
        self._report = report
        self._event = event
        self._run_folder = RunFolderGuard(run_dir)
        self._last = folder / "last"
        self._requested = folder / REQUESTED
        self._best = BestCheckpoint(
            folder / "best",
            trainer.layout,
            config.env,
            has_evaluator=config.has_evaluator,
            has_opponents=trainer.info.seating.has_opponents,
        )
        self._schedule = CheckpointSchedule(config, now_s=time.monotonic())
        self._requests: EvaluationRequests | None = None  # None where the learner makes none
        self._spaces = spaces_as_json(trainer.info)
        # After a resume in another environment: the trained steps of the checkpoint.
        self._resumed_elsewhere: int | None = None
        self._epoch = 0  # epoch of the group of learners, at the last save

        # Both are None without `checkpoint.store`.
        url = self._config.store
        self._store = None if url is None else CheckpointStore(url)
        self._uploader = (
            None if self._store is None else Uploader(self._store, self._config.keep, event)
        )

        self._stored_play: Mapping[str, Any] | None = None
        self.resumed_group_state: Arrays = {}
        """What each of several learners kept for itself, in the resumed checkpoint."""

    @property
    def play(self) -> Mapping[str, Any] | None:
        """How to play the policy, by the last evaluation of the run; None before the first."""
        if self._requests is not None and self._requests.play is not None:
            return self._requests.play
        return self._stored_play

    def resume(self, how: str, *, repair: bool = True) -> bool:
        """Resume from the newest undamaged checkpoint.

        Args:
            how: "no": start fresh; "auto": resume if there is one; "must": fail if there is none.
            repair: whether damaged ones that are newer are set aside, and replaced by the one that
                is resumed; only one process of a run may do so.

        Returns:
            Whether the run was resumed.

        Raises:
            UserError: if there is no checkpoint and there must be one, if there are some and all
                are damaged, or if the newest does not fit this run.
        """
        if self._store is not None and how != "no" and repair:
            take_newer(self._store, self._last)  # this host may not be that of the newest
        if how == "no" or (how == "auto" and not history.any_exists(self._last)):
            return False

        folder, checkpoint = self._load_newest(repair=repair)
        self._restore_trainer(folder, checkpoint)
        same_env = self._restore_run(folder, checkpoint)

        progress = self._trainer.progress
        self._schedule.resume(progress.learner_steps)
        if not same_env:
            self._resumed_elsewhere = progress.trained_steps
            logger.info(
                "the environment (env.*) differs from the checkpoint's: the weights are kept; mean "
                "return, stop.return, replay and the best checkpoint start anew"
            )
        return True

    def _load_newest(self, *, repair: bool) -> tuple[Path, Checkpoint]:
        """Read the newest undamaged checkpoint and check that it fits the run.

        With ``repair`` damaged ones that are newer are replaced by it.

        Returns its folder and its content.
        """
        folder, checkpoint, damaged = history.newest_undamaged(self._last)
        self._check_fits(folder, checkpoint)
        if checkpoint.policy_id != POLICY_ID:
            raise UserError(
                f"{folder} holds policy {checkpoint.policy_id}, and a run trains policy "
                f"{POLICY_ID}; resume from a checkpoint that a run has written"
            )

        if damaged and repair:
            self._fall_back(folder, damaged)
        if not checkpoint.verified:
            logger.info(
                "%s has no checksums, as an older version wrote it: damage in it is not noticed; "
                "the next checkpoint has them",
                folder,
            )
        return folder, checkpoint

    def _restore_trainer(self, folder: Path, checkpoint: Checkpoint) -> None:
        """Give the trainer its weights and the state of its optimizer."""
        set_weights(self._trainer, checkpoint.weights)
        trainer_state = {
            name: array
            for name, array in checkpoint.arrays.items()
            if not name.startswith((RANDOM, GROUP))
        }

        try:
            self._trainer.load_state_dict(trainer_state)
        except ValueError as error:
            raise UserError(
                f"{folder} was saved by another optimizer ({error}); set learner.optimizer as "
                "it was, or another run.dir"
            ) from error

    def _restore_run(self, folder: Path, checkpoint: Checkpoint) -> bool:
        """Restore all but the trainer: random generators, counters, and what depends on them.

        Returns:
            Whether the checkpoint was trained in the environment of this run.
        """
        trainer = self._trainer
        meta = checkpoint.meta
        try:
            _set_random_states(under(RANDOM, checkpoint.arrays), device_of(trainer.device))
            self.resumed_group_state = under(GROUP, checkpoint.arrays)

            same_env = trainer.config.env.is_same(meta.get(ENV, {}))
            scales = meta.get(SCALES, [])
            if same_env and scales != trainer.scales:
                raise UserError(
                    f"{folder} was trained with observations scaled by {scales or 'bytes'}, and "
                    f"now it is {trainer.scales or 'bytes'}; set model.scale and the bounds of the "
                    "environment's observations as they were, or another run.dir"
                )

            trainer.progress.load_state_dict(meta["progress"], same_env=same_env)
            self._resume_lr_factor(meta.get(LR))
            self._compare_form(meta)
            self._stored_play = meta.get(PLAY) if same_env else None
            if self._league is not None and same_env and LEAGUE in meta:
                self._league.load_state_dict(meta[LEAGUE])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"{folder} holds weights, but not the state of a run ({error!r}); resume from a "
                "checkpoint that a run has written"
            ) from error
        return same_env

    def _check_fits(self, folder: Path, checkpoint: Checkpoint) -> None:
        """Raise UserError where a checkpoint is of another network, or of other spaces."""
        trainer = self._trainer
        env_id = trainer.config.env.id
        trained_space = check_spaces(folder, checkpoint, trainer.info, env_id)

        # Actors pack the keys of an observation in the order of its space.
        packer = Packer(env_id, trained_space, trainer.info.embed_above)
        trained_keys = [part.name for part in packer.parts]
        present_keys = [part.name for part in trainer.info.parts]
        if trained_keys != present_keys:
            raise UserError(
                f"{folder} was trained on the keys {trained_keys} of observations in that order, "
                f"and {env_id} has the order {present_keys}; give its observation space the former "
                "order, or set another run.dir"
            )

        checkpoint_format.check_layout(
            folder / checkpoint_format.FILE, checkpoint.layout, trainer.layout
        )

    def _resume_lr_factor(self, stored_lr: Any) -> None:
        """Keep the learning rate that rollbacks have lowered, unless `learner.lr` has changed.

        ``stored_lr`` is the value of `learner.lr` in the checkpoint.
        """
        progress = self._trainer.progress
        present_lr = self._trainer.config.learner.model_dump()[LR]
        if progress.lr_factor != 1.0:
            if stored_lr != present_lr:
                progress.lr_factor = 1.0
            else:
                logger.info(
                    "the learning rate stays at %g times learner.lr, as rollbacks have lowered it "
                    "(learner.nonfinite); set another learner.lr to begin anew",
                    progress.lr_factor,
                )

        follow_lr_factor(self._trainer)

    def _compare_form(self, meta: Mapping[str, Any]) -> None:
        """Log that passes are computed in another form than before, which changes their rounding.

        A learner on a GPU has none.
        """
        stored = _form_in(meta)
        present_form = self._trainer.form

        if stored is not None and present_form is not None and stored.form != present_form:
            logger.info(
                "the learner computes in %s; the checkpoint's computed in %s on %s: results differ "
                "from those without a resume by rounding",
                present_form,
                stored.form,
                stored.processor,
            )

    def begin_evaluation_requests(self) -> EvaluationRequests:
        """Returns the learner's requests to the run's evaluator, whose checkpoints this manager
        writes from now on. Call it after `resume`."""
        trainer = self._trainer
        self._requests = EvaluationRequests(
            trainer.config,
            trainer.progress,
            self.play,
            has_opponents=trainer.info.seating.has_opponents,
        )
        return self._requests

    def resumes_same_env(self) -> bool:
        """Whether the resumed run was in the same environment, so that its replay can be used.

        True also if no checkpoint is here, as another machine may have it.
        """
        meta = history.newest_meta(self._last)
        return meta is None or self._trainer.config.env.is_same(meta.get(ENV, {}))

    def replay_folder(self, learner: int = 0) -> Path:
        """Returns the folder in which ``learner`` keeps its replay."""
        return self._last / "replay" / str(learner)

    def handle_messages(self, messages: Iterable[Message]) -> None:
        """Take the order to save, if the supervisor's messages contain one."""
        if any(message["kind"] == "save" for message in messages):
            self._schedule.is_ordered = True

    def on_order_done(self) -> None:
        """Note that some learner has carried out the order to save, if there was one."""
        self._schedule.is_ordered = False

    def is_due(self, *, by_time: bool = True) -> bool:
        """Whether to save, by `checkpoint.every_s`, `eval.every_s`, `checkpoint.every_steps`, or by
        order, or as a snapshot for the pool is due. ``by_time=False`` leaves out the first two."""
        if self._league is not None and self._league.snapshot_is_due():
            return True
        return self._schedule.is_due(
            now_s=time.monotonic(),
            learner_steps=self._trainer.progress.learner_steps,
            by_time=by_time,
        )

    def postpone(self, error: str) -> None:
        """Note that a save has failed, and report that if it was ordered.

        The next one is due when it would be after a success.
        """
        if self._schedule.is_ordered:
            self._report("save_failed", error=error)
        self._schedule.is_ordered = False
        self._begin_interval()
        if self._requests is not None:
            self._requests.postpone()
        if self._league is not None:
            self._league.postpone_snapshot()

    def reread_best(self) -> None:
        """Read the best mean return from the disk again, since another learner may save now."""
        self._best.forget_return()

    def save(
        self, group_state: Arrays | None = None, *, epoch: int = 0, is_named: bool = False
    ) -> None:
        """Write `last`, and `best` where the mean return has never been higher and no checkpoint
        was evaluated yet.

        Args:
            group_state: what each of several learners keeps for itself.
            epoch: of the group of learners; a checkpoint of a later one is never replaced.
            is_named: whether the supervisor has named this learner to save the run at its end. It
                then also replaces the checkpoint of a learner with a later generation, which has
                ended.

        Raises:
            UserError: if the checkpoint cannot be written, or the run's folder is another run's
                now. The previous checkpoint is whole.
            ReplacedError: if `last` is of a later generation or epoch.
        """
        progress = self._trainer.progress
        self._epoch = epoch
        if progress.trained_steps == self._resumed_elsewhere:
            # `last` stays that of the other environment.
            self.postpone(
                "nothing was trained on yet in the environment (env.*) of the resumed run"
            )
            return

        is_best = self._best.is_beaten_by(progress)
        return_to_beat = progress.return_mean if is_best else self._best.return_to_beat()
        writer = self._claim_last(is_named=is_named)
        if self._league is not None:
            self._league.snapshot()  # the checkpoint knows the member whose file exists already
        checkpoint = self._make_checkpoint(group_state or {}, return_to_beat)

        # The order matters for a crash in between, see the beginning of this file.
        replaces_best = is_best and self._best.replace(checkpoint, progress.return_mean)
        self._keep_older()
        checkpoint_format.save(self._last, checkpoint)
        history.prune(self._last, self._config.keep)
        if self._uploader is not None:
            file = self._last / checkpoint_format.FILE
            self._uploader.offer(file, writer, progress.learner_steps)

        self._report(
            "checkpoint",
            folder=str(self._last),
            best=replaces_best,
            time_s=progress.time_s,
            trained_steps=progress.trained_steps,
            learner_steps=progress.learner_steps,
            return_mean=progress.return_mean,
        )
        self._begin_interval()

    def save_for_evaluation(self, group_state: Arrays | None = None) -> None:
        """Write the checkpoint that is due for the evaluator, which takes it away.

        ``group_state`` is as for `save`. Raises UserError where the checkpoint cannot be written.
        """
        assert self._requests is not None
        request = self._requests.due()
        if request is None:
            return

        self._run_folder.check()
        checkpoint = self._make_checkpoint(group_state or {}, self._best.return_to_beat())
        meta = {**checkpoint.meta, REQUEST: request}
        checkpoint_format.save(self._requested, replace(checkpoint, meta=meta))
        self._requests.on_requested(request)

    def close(self, wait_s: float) -> None:
        """Wait until the last checkpoint is in `checkpoint.store` too, for at most ``wait_s``
        seconds."""
        if self._uploader is not None and not self._uploader.close(wait_s):
            logger.info(
                "the last checkpoint is not in checkpoint.store %s; it is in %s",
                self._config.store,
                self._last,
            )

    def _begin_interval(self) -> None:
        """Count time and steps to the next save from now on."""
        self._schedule.begin_interval(
            now_s=time.monotonic(), learner_steps=self._trainer.progress.learner_steps
        )

    def _claim_last(self, *, is_named: bool) -> CheckpointWriter:
        """Check that this learner may replace `last`, and return it as a writer.

        On a disk of several hosts, learners that were presumed dead may still run. A learner that
        is named takes over generation and epoch of a later writer.

        Raises:
            UserError: if the run's folder is another run's.
            ReplacedError: if `last` is of a later writer, and this learner is not named.
        """
        self._run_folder.check()
        progress = self._trainer.progress
        writer = CheckpointWriter(progress.generation, self._epoch)

        last_writer = writer
        with suppress(UserError, LookupError):  # there is no checkpoint, or a damaged one
            meta = checkpoint_format.read_meta(self._last, self._trainer.layout)
            last_writer = CheckpointWriter(meta["progress"]["generation"], meta.get(EPOCH, 0))

        if last_writer <= writer:
            return writer
        if not is_named:
            raise ReplacedError(self._last, writer, last_writer)
        progress.generation = last_writer.generation
        self._epoch = last_writer.epoch
        return last_writer

    def _keep_older(self) -> None:
        """Keep the previous checkpoint.

        The newest is worth more: it is written even if this fails.
        """
        try:
            aside = history.keep_previous(self._last, self._trainer.progress.learner_steps)
            if aside is not None:
                logger.info("%s was damaged meanwhile; it is kept as %s", self._last, aside)
        except OSError as error:
            logger.info("%s of before could not be kept: %s", self._last, error.strerror)

    def _fall_back(self, whole: Path, damaged: list[str]) -> None:
        """Make the checkpoint in ``whole`` the newest one, and report that.

        ``damaged`` has a sentence on each newer checkpoint, the newest first.
        """
        try:
            aside = history.restore(self._last, whole)
        except OSError as error:
            raise UserError(
                f"{damaged[0]}; {whole} is whole, and cannot be put in its place: {error.strerror}"
            ) from error

        kept_as = f"; kept as {', '.join(map(str, aside))}" if aside else ""
        text = f"{damaged[0]}{kept_as}; the run resumes from {whole}, the newest that is whole"
        self._event("rollback", text, folder=str(whole), damaged=damaged)

    def _make_checkpoint(self, group_state: Arrays, return_to_beat: float | None) -> Checkpoint:
        """Returns the present state of the run as a checkpoint.

        Args:
            group_state: what each of several learners keeps for itself.
            return_to_beat: the mean return that a later checkpoint must exceed to be the best.
        """
        trainer = self._trainer
        trainer_state = trainer.state_dict()
        random_states = _random_states(device_of(trainer.device))
        arrays = {
            **trainer_state,
            **{RANDOM + name: state for name, state in random_states.items()},
            **{GROUP + name: state for name, state in group_state.items()},
        }

        meta: dict[str, Any] = {
            "progress": trainer.progress.state_dict(),
            "best_return": return_to_beat,
            LR: trainer.config.learner.model_dump()[LR],
            ENV: trainer.config.env.identity(),
            SPACES: self._spaces,
            "spec": trainer.spec.to_dict(),
            EPOCH: self._epoch,
        }
        if self.play is not None:
            meta[PLAY] = self.play
        if trainer.scales:
            meta[SCALES] = trainer.scales
        if self._league is not None:
            meta[LEAGUE] = self._league.state_dict()
        if trainer.form is not None:
            meta[FORM] = [[*trainer.form], processor().model]
        return Checkpoint(trainer.layout, weights_of(trainer), arrays, meta)


def form_of_checkpoint(run_dir: Path) -> ComputeForm | None:
    """Returns the form in which a learner on this processor computed when it wrote the run's last
    checkpoint; None where that is not known."""
    try:
        meta = checkpoint_format.read_meta(run_dir / "checkpoints" / "last")
    except UserError:  # none, or damaged: `CheckpointManager.resume` reports it
        return None
    stored = _form_in(meta)
    if stored is None or stored.processor != processor().model:
        return None
    return stored.form


def _form_in(meta: Mapping[str, Any]) -> FormOnProcessor | None:
    """Returns how the learner of a checkpoint computed; None in those of earlier releases."""
    value = meta.get(FORM)
    if type(value) is not list or len(value) != 2 or type(value[1]) is not str:
        return None
    form = ComputeForm.read(value[0])
    return None if form is None else FormOnProcessor(form, value[1])


def _random_states(device: Device) -> dict[str, Any]:
    """Returns the states of the random generators of the CPU and of ``device``."""
    states = {"cpu": torch.get_rng_state().numpy()}
    device_state = device.random_state()
    if device_state is not None:
        states["cuda"] = device_state.numpy()
    return states


def _set_random_states(states: dict[str, Any], device: Device) -> None:
    torch.set_rng_state(torch.from_numpy(np.array(states["cpu"])))
    if "cuda" in states and device.runs_behind:
        device.set_random_state(torch.from_numpy(np.array(states["cuda"])))
