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
from typing import Any

import numpy as np
import torch

from penstock.configs.errors import UserError
from penstock.core.control import Message
from penstock.core.machine import processor
from penstock.core.notes import note_logger
from penstock.core.params import POLICY_ID, Arrays
from penstock.core.run_dir import HeldFolder
from penstock.device.choice import device_of
from penstock.device.interface import Device
from penstock.envs.packing import Packer
from penstock.learner.base_trainer import under
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints import checkpoint_history as history
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_history import (
    ENV,
    EVALUATION,
    PLAY,
    REQUEST,
    REQUESTED,
    best_locked,
    best_meta,
)
from penstock.learner.checkpoints.checkpoint_spaces import SPACES, check_spaces, described
from penstock.learner.checkpoints.checkpoint_store import (
    CheckpointStore,
    CheckpointWriter,
    ReplacedError,
    Uploader,
    take_newer,
)
from penstock.learner.evaluation_requests import EvaluationRequests
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.progress import EPISODES
from penstock.learner.state import follow_lr_factor, set_weights, weights_of
from penstock.learner.trainer import Trainer
from penstock.models.compute_form import ComputeForm

RANDOM = "random/"
GROUP = "team/"  # as in checkpoints of 0.1.0
EPOCH = "epoch"  # in the meta: of the group of learners that wrote it
LR = "lr"  # in the meta: `learner.lr`
SCALES = "scales"  # in the meta: `algos.samples.scales`, unless empty
FORM = "form"  # in the meta: how a learner on a CPU computed, and the model of its processor

logger = note_logger(__name__)


class CheckpointManager:
    """Saves ``trainer`` under ``run_dir`` and restores it.

    Call `resume` first, then `save` whenever a checkpoint is `due`. After a save that failed call
    `put_off`.
    """

    def __init__(
        self,
        run_dir: Path,
        trainer: Trainer | OffPolicyTrainer,
        tell: Callable[..., object] = lambda kind, **fields: None,
        event: Callable[..., object] = lambda kind, text, **fields: logger.info("%s", text),
    ) -> None:
        """``tell`` is called at every save, as `RoleContext.report`.

        ``event`` is called, as `RoleContext.event`, where an older checkpoint replaces a damaged
        one, and where a copy to `checkpoint.store` fails.
        """
        self._tell = tell
        self._event = event
        every_s, evaluated_s = trainer.config.checkpoint.every_s, trainer.config.eval.every_s
        self._has_evaluator = trainer.config.has_evaluator
        self._requests: EvaluationRequests | None = None  # None where the learner makes none
        self._every_s = min(every_s, evaluated_s or every_s)  # each evaluation needs a new one
        self._folder = HeldFolder(run_dir)
        self._last = run_dir / "checkpoints" / "last"
        self._best = run_dir / "checkpoints" / "best"
        self._requested = run_dir / "checkpoints" / REQUESTED
        self._trainer = trainer
        self._spaces = described(trainer.info)
        self._config = trainer.config.checkpoint
        self._best_return: float | None = None
        self._resumed_elsewhere: int | None = None  # in another game, after so many trained steps
        self._saved_s = time.monotonic()
        self._saved_steps = 0
        self._ordered = False  # by `penstock save`
        self._epoch = 0  # of the group of learners, at the last save
        url = self._config.store
        self._store = None if url is None else CheckpointStore(url)
        self._uploader: Uploader | None = None
        self.play: Mapping[str, Any] | None = None
        """How to play the policy, by the last evaluation of the run."""
        self.stored: Arrays = {}  # what each of several learners kept, in the resumed checkpoint

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

        folder, stored, damaged = history.newest_whole(self._last)
        self._check_fits(folder, stored)
        if stored.policy_id != POLICY_ID:
            raise UserError(
                f"{folder} holds policy {stored.policy_id}, and a run trains policy {POLICY_ID}; "
                "resume from a checkpoint that a run has written"
            )
        if damaged and repair:
            self._fall_back(folder, damaged)
        if not stored.verified:
            logger.info(
                "%s has no checksums, as an older version wrote it: damage in it is not noticed; "
                "the next checkpoint has them",
                folder,
            )

        trainer = self._trainer
        set_weights(trainer, stored.weights)
        own = {k: v for k, v in stored.arrays.items() if not k.startswith((RANDOM, GROUP))}
        try:
            trainer.load_state_dict(own)
        except ValueError as error:
            raise UserError(
                f"{folder} was saved by another optimizer ({error}); set learner.optimizer as "
                "it was, or another run.dir"
            ) from error
        try:
            _set_random_states(under(RANDOM, stored.arrays), device_of(trainer.device))
            self.stored = under(GROUP, stored.arrays)
            same = trainer.config.env.is_same(stored.meta.get(ENV, {}))
            scales = stored.meta.get(SCALES, [])
            if same and scales != trainer.scales:
                raise UserError(
                    f"{folder} was trained with observations scaled by {scales or 'bytes'}, and "
                    f"now it is {trainer.scales or 'bytes'}; set model.scale and the bounds of the "
                    "environment's observations as they were, or another run.dir"
                )
            trainer.progress.load_state_dict(stored.meta["progress"], same_game=same)
            self._resume_lr_factor(stored.meta.get(LR))
            self._compare_form(stored.meta)
            self.play = stored.meta.get(PLAY) if same else None
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"{folder} holds weights, but not the state of a run ({error!r}); resume from a "
                "checkpoint that a run has written"
            ) from error
        self._saved_steps = trainer.progress.learner_steps
        if not same:
            self._resumed_elsewhere = trainer.progress.trained_steps
            logger.info(
                "the environment (env.*) differs from the checkpoint's: the weights are kept; mean "
                "return, stop.return, replay and the best checkpoint start anew"
            )
        return True

    def _check_fits(self, folder: Path, stored: Checkpoint) -> None:
        """Raise UserError where a checkpoint is of another network, or of other spaces."""
        trainer = self._trainer
        env_id = trainer.config.env.id
        space = check_spaces(folder, stored, trainer.info, env_id)
        trained = [part.name for part in Packer(env_id, space).parts]
        present = [part.name for part in trainer.info.parts]
        if trained != present:  # the same in another order, in which the actors would pack them
            raise UserError(
                f"{folder} was trained on the keys {trained} of observations in that order, and "
                f"{env_id} has the order {present}; give its observation space the former order, "
                "or set another run.dir"
            )
        checkpoint_format.check_layout(
            folder / checkpoint_format.FILE, stored.layout, trainer.layout
        )

    def _resume_lr_factor(self, lr: Any) -> None:
        """Keep the learning rate that rollbacks have lowered, unless `learner.lr` has changed.

        ``lr`` is its value in the checkpoint.
        """
        progress, now = self._trainer.progress, self._trainer.config.learner.model_dump()[LR]
        if progress.lr_factor != 1.0 and lr != now:
            progress.lr_factor = 1.0
        elif progress.lr_factor != 1.0:
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
        before, own = _form_in(meta), self._trainer.form
        if before is not None and own is not None and before[0] != own:
            logger.info(
                "the learner computes in %s; the checkpoint's computed in %s on %s: results differ "
                "from those without a resume by rounding",
                own,
                *before,
            )

    def begin_evaluation_requests(self) -> EvaluationRequests:
        """Returns the learner's requests to the run's evaluator, whose checkpoints this manager
        writes from now on. Call it after `resume`."""
        config, progress = self._trainer.config, self._trainer.progress
        self._requests = EvaluationRequests(config, progress, self.play)
        return self._requests

    def goes_on_in_its_game(self) -> bool:
        """Whether the resumed run was in the same environment, so that its replay can be used.

        True also if no checkpoint is here, as another machine may have it.
        """
        meta = history.newest_meta(self._last)
        return meta is None or self._trainer.config.env.is_same(meta.get(ENV, {}))

    def shard(self, learner: int = 0) -> Path:
        """Returns the folder in which ``learner`` keeps its replay."""
        return self._last / "replay" / str(learner)

    def hear(self, messages: Iterable[Message]) -> None:
        """Take the order to save, if the supervisor's messages contain one."""
        self._ordered |= any(message["kind"] == "save" for message in messages)

    def answer(self) -> None:
        """Note that some learner has carried out the order to save, if there was one."""
        self._ordered = False

    def due(self, *, by_time: bool = True) -> bool:
        """Whether to save, by `checkpoint.every_s`, `eval.every_s`, `checkpoint.every_steps`, or by
        order. ``by_time=False`` leaves out the first two."""
        if self._ordered:
            return True
        steps = self._trainer.progress.learner_steps
        every = self._config.every_steps
        due = by_time and time.monotonic() - self._saved_s >= self._every_s
        return due or (every is not None and steps // every > self._saved_steps // every)

    def put_off(self, error: str) -> None:
        """Note that a save has failed, and report that if it was ordered.

        The next one is due when it would be after a success.
        """
        if self._ordered:
            self._tell("save_failed", error=error)
        self._ordered = False
        self._saved_s = time.monotonic()
        self._saved_steps = self._trainer.progress.learner_steps
        if self._requests is not None:
            self._requests.put_off()

    def forget_best(self) -> None:
        """Read the best mean return from the disk again, since another learner may save now."""
        self._best_return = None

    def save(self, group: Arrays | None = None, *, epoch: int = 0, is_named: bool = False) -> None:
        """Write `last`, and `best` where the mean return has never been higher and no checkpoint
        was evaluated yet.

        Args:
            group: what each of several learners keeps for itself.
            epoch: of the group of learners; a checkpoint of a later one is never replaced.
            is_named: whether the supervisor has named this learner to save the run at its end. It
                then also replaces the checkpoint of a learner with a later generation, which has
                ended.
        """
        self._epoch = epoch
        progress = self._trainer.progress
        mean = progress.return_mean
        if progress.trained_steps == self._resumed_elsewhere:
            # `last` stays that of the other game.
            self.put_off("nothing was trained on yet in the environment (env.*) of the resumed run")
            return
        best_return = self._find_best()
        is_best = (
            mean is not None
            and progress.recent_episodes >= EPISODES  # fewer may be luck
            and (best_return is None or mean > best_return)
        )
        writer = self._check_not_replaced(is_named=is_named)
        state = self._state(group or {}, mean if is_best else best_return)
        writes_best = is_best and self._write_best(state)
        if is_best:
            self._best_return = mean
        self._keep_older()
        checkpoint_format.save(self._last, state)
        history.prune(self._last, self._config.keep)
        self._upload(writer)
        self._tell(
            "checkpoint",
            folder=str(self._last),
            best=writes_best,
            time_s=progress.time_s,
            trained_steps=progress.trained_steps,
            learner_steps=progress.learner_steps,
            return_mean=mean,
        )
        self._saved_s = time.monotonic()
        self._saved_steps = progress.learner_steps

    def close(self, wait_s: float) -> None:
        """Wait until the last checkpoint is in `checkpoint.store` too, for at most ``wait_s``
        seconds."""
        if self._uploader is not None and not self._uploader.close(wait_s):
            logger.info(
                "the last checkpoint is not in checkpoint.store %s; it is in %s",
                self._config.store,
                self._last,
            )

    def _check_not_replaced(self, *, is_named: bool) -> CheckpointWriter:
        """This learner as a writer. Raises UserError where the folder is another run's, and
        ReplacedError where `last` is of a later writer: on a disk of several hosts, learners that
        were presumed dead may still run."""
        self._folder.check()
        own = CheckpointWriter(self._trainer.progress.generation, self._epoch)
        other = own
        with suppress(UserError, LookupError):  # there is none, or a damaged one
            meta = checkpoint_format.read_meta(self._last, self._trainer.layout)
            other = CheckpointWriter(meta["progress"]["generation"], meta.get(EPOCH, 0))
        if other > own and is_named:
            progress, self._epoch = self._trainer.progress, other.epoch
            progress.generation = other.generation
            return other
        if other > own:
            raise ReplacedError(self._last, own, other)
        return own

    def _upload(self, writer: CheckpointWriter) -> None:
        if self._store is None:
            return
        if self._uploader is None:
            self._uploader = Uploader(self._store, self._config.keep, self._event)
        steps = self._trainer.progress.learner_steps
        self._uploader.offer(self._last / checkpoint_format.FILE, writer, steps)

    def save_for_evaluation(self, group: Arrays | None = None) -> None:
        """Write the checkpoint that is due for the evaluator, which takes it away.

        ``group`` is as for `save`.
        """
        assert self._requests is not None
        request = self._requests.due()
        if request is not None:
            self._folder.check()
            state = self._state(group or {}, self._find_best())
            meta = {**state.meta, REQUEST: request}
            checkpoint_format.save(self._requested, replace(state, meta=meta))
            self._requests.requested(request)

    def _write_best(self, state: Checkpoint) -> bool:
        """Replace `best`, unless the evaluator has written it or is writing it; returns whether it
        was replaced."""
        with best_locked(self._best, wait=False) as locked:
            writes = locked and not self._best_is_evaluated()
            if writes:
                checkpoint_format.save(self._best, state)
            return writes

    def _best_is_evaluated(self) -> bool:
        """Whether the evaluator has written `best`, in this game."""
        if not self._has_evaluator:
            return False
        meta = best_meta(self._best, self._trainer.layout, self._trainer.config.env)
        return meta is not None and EVALUATION in meta

    def _keep_older(self) -> None:
        """Keep the previous checkpoint.

        The newest is worth more: it is written even if this fails.
        """
        try:
            steps = self._trainer.progress.learner_steps
            if aside := history.keep_older(self._last, steps):
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
        kept = f"; kept as {', '.join(map(str, aside))}" if aside else ""
        text = f"{damaged[0]}{kept}; the run resumes from {whole}, the newest that is whole"
        self._event("rollback", text, folder=str(whole), damaged=damaged)

    def _find_best(self) -> float | None:
        """The mean return to be beaten, from the disk where it is not known here."""
        if self._best_return is None:
            layout, env = self._trainer.layout, self._trainer.config.env
            meta = best_meta(self._best, layout, env)
            if meta is not None and env.is_same(meta.get(ENV, {})):  # else only evaluated in it
                self._best_return = meta.get("best_return")
        return self._best_return

    def _state(self, group: Arrays, best_return: float | None) -> Checkpoint:
        trainer = self._trainer
        arrays = trainer.state_dict() | {
            RANDOM + k: v for k, v in _random_states(device_of(trainer.device)).items()
        }
        arrays |= {GROUP + k: v for k, v in group.items()}
        meta: dict[str, Any] = {
            "progress": trainer.progress.state_dict(),
            "best_return": best_return,
            LR: trainer.config.learner.model_dump()[LR],
            ENV: trainer.config.env.identity(),
            SPACES: self._spaces,
            "spec": trainer.spec.to_dict(),
            EPOCH: self._epoch,
        }
        if self._requests is not None and self._requests.play is not None:
            self.play = self._requests.play
        if self.play is not None:
            meta[PLAY] = self.play
        if trainer.scales:
            meta[SCALES] = trainer.scales
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
    form, model = _form_in(meta) or (None, "")
    return form if model == processor().model else None


def _form_in(meta: Mapping[str, Any]) -> tuple[ComputeForm, str] | None:
    """Returns how the learner of a checkpoint computed; None in those of earlier releases."""
    value = meta.get(FORM)
    if type(value) is not list or len(value) != 2 or type(value[1]) is not str:
        return None
    form = ComputeForm.read(value[0])
    return None if form is None else (form, value[1])


def _random_states(device: Device) -> dict[str, Any]:
    """Returns the states of the random generators of the CPU and of ``device``."""
    states = {"cpu": torch.get_rng_state().numpy()}
    if (state := device.random_state()) is not None:
        states["cuda"] = state.numpy()
    return states


def _set_random_states(states: dict[str, Any], device: Device) -> None:
    torch.set_rng_state(torch.from_numpy(np.array(states["cpu"])))
    if "cuda" in states and device.runs_behind:
        device.set_random_state(torch.from_numpy(np.array(states["cuda"])))
