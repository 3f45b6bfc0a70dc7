"""Snapshots: the weights of a run that become members of the pool.

The first member of a line is its policy before training. Later ones are added every
`league.snapshot_steps`, or earlier if the policy beats all its opponents, as by-products of a
checkpoint: the member's file is written first, then the checkpoint that knows it. With
`league.reset` training then begins anew, as in PSRO.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.params import Arrays, Float32
from penstock.learner.base_trainer import BaseTrainer
from penstock.learner.chairs import InitialPolicy
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_history import ENV
from penstock.learner.checkpoints.checkpoint_spaces import SPACES, spaces_as_json
from penstock.learner.pool import PolicyPool, PoolMember, member_id
from penstock.learner.state import WEIGHTS, follow_lr_factor, set_weights, weights_of

EARLY_SHARE = 10
"""A policy that beats all opponents is added after this fraction of the steps."""
LATEST_S = 30.0
"""Seconds after which the latest weights are shown to other lines again."""
SHOWN_TO = ("newest", "main_exploiter")
"""The rules of lines that play against the latest weights of others."""


class PolicySnapshots:
    """Adds the weights of ``trainer`` to the pool. A failure is an event, and the run continues."""

    def __init__(
        self, trainer: BaseTrainer[Any], pool: PolicyPool, event: Callable[..., object]
    ) -> None:
        """Keep the initial weights.

        Args:
            trainer: as it is before training and before a resume.
            pool: the pool.
            event: is called as `RoleContext.event`.
        """
        self._config = trainer.config.league
        self._trainer = trainer
        self._progress = trainer.progress
        self._pool = pool
        self._event = event

        self._initial: Arrays = {WEIGHTS: weights_of(trainer)}
        """The state before training; without `league.reset` only its weights."""
        if self._config.reset:
            self._initial |= {name: array.copy() for name, array in trainer.state_dict().items()}

        self.members = 0
        """Members of this line."""
        self._resumed_members: int | None = None
        """The same in the resumed checkpoint; None without one."""
        self._earlier_members = 0
        """Of these, the members that other runs have added before this one began."""
        self._last_steps = 0
        """Trained steps of the last member that this run has added."""
        self._is_postponed = False
        """Whether the last save has failed to add a member; the next one tries it again."""
        self._was_reset = False

        others = self._config.lines.values()
        self._shows_latest = any(line.draw in SHOWN_TO for line in others)
        self._next_latest_s = 0.0

    @property
    def initial(self) -> InitialPolicy:
        """The policy before training."""
        weights: Float32 = self._initial[WEIGHTS]
        member = PoolMember(member_id(weights), self._config.name, 0, 0.0, initial=True)
        return InitialPolicy(member, weights)

    def open(self, *, writes: bool) -> None:
        """Read this line's list, and complete what a former process of the run has left undone.

        Args:
            writes: whether this learner adds the initial policy, if that is missing.

        Raises:
            UserError: if the list is damaged.
        """
        self._read_list()
        if writes and not (self._progress.generation and self.members):
            try:
                self._add_initial()
            except UserError as error:
                self._on_failed(error)

        # Steps of a run that has trained this line before say nothing of this one.
        if not self._progress.trained_steps:
            self._earlier_members = self.members
            self._last_steps = 0

        # The run may have ended between a snapshot and the checkpoint that follows the reset.
        resumed_members = self._resumed_members
        if self._config.reset and resumed_members is not None and self.members > resumed_members:
            self._reset()

    def is_due(self, *, beats_all: bool) -> bool:
        """Whether the present weights should become a member, so that a checkpoint is due.

        ``beats_all`` is whether the policy wins often enough against all opponents.
        """
        return not self._is_postponed and self._has_enough_steps(beats_all)

    def postpone(self) -> None:
        """Leave what is due to the next save, as one has failed."""
        self._is_postponed = True

    def take(self, *, beats_all: bool) -> bool:
        """Add the present weights to the pool if that is due; returns whether they were added."""
        self._is_postponed = False
        try:
            self._read_list()  # another learner may have saved since
            if not self.members:
                self._add_initial()
            if not self._has_enough_steps(beats_all):
                return False
            self._add_present()
        except UserError as error:
            self._on_failed(error)
            return False

        if self._config.reset:
            self._reset()
        return True

    def show_latest(self, now_s: float) -> None:
        """Show the present weights to other lines, if one plays against them and that is due.

        ``now_s`` is a time of CLOCK_MONOTONIC in seconds. Raises GroupLostError if the other
        learners are lost.
        """
        if not self._shows_latest or now_s < self._next_latest_s:
            return

        self._next_latest_s = now_s + LATEST_S
        self._trainer.queue.drain()  # a copy from a GPU would wait for ever if the group is lost
        try:
            self._pool.set_latest(
                self._config.name,
                self._checkpoint_of(weights_of(self._trainer)),
                steps=self._progress.trained_steps,
                time_s=self._progress.time_s,
            )
        except UserError as error:
            self._on_failed(error)

    def take_reset(self) -> bool:
        """Returns whether weights and optimizer were reset since the last call."""
        was_reset, self._was_reset = self._was_reset, False
        return was_reset

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run continues with, as JSON."""
        return {"members": self.members, "earlier_members": self._earlier_members}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, before `open`. Raises LookupError for another value."""
        self._resumed_members = state["members"]
        self._earlier_members = state.get("earlier_members", 0)  # newer than `members`

    def _reset(self) -> None:
        """Return weights and optimizer to their initial state; the progress goes on.

        Unrolls that wait to be trained on are too old from then on.
        """
        state = dict(self._initial)
        set_weights(self._trainer, state.pop(WEIGHTS))
        self._trainer.load_state_dict(state)
        follow_lr_factor(self._trainer)
        self._progress.version += self._trainer.config.transport.max_policy_lag + 1
        self._was_reset = True

    def _has_enough_steps(self, beats_all: bool) -> bool:
        """Whether there were enough steps since the last snapshot."""
        every = self._config.snapshot_steps
        if every is None:
            return False
        steps = self._progress.trained_steps - self._last_steps
        return steps >= (every // EARLY_SHARE if beats_all else every)

    def _read_list(self) -> None:
        """Read this line's list. Raises UserError if it is damaged."""
        members = self._pool.members(self._config.name)
        self.members = len(members)
        own_members = members[self._earlier_members :]
        self._last_steps = max(self._last_steps, *(member.steps for member in own_members), 0)

    def _add_initial(self) -> None:
        """Add the policy before training. Raises UserError if it cannot be written."""
        checkpoint = self._checkpoint_of(self._initial[WEIGHTS])
        self._pool.add(self._config.name, checkpoint, steps=0, time_s=0.0, initial=True)
        self._read_list()

    def _add_present(self) -> None:
        """Add the present weights. Raises UserError if they cannot be written."""
        steps = self._progress.trained_steps
        member = self._pool.add(
            self._config.name,
            self._checkpoint_of(weights_of(self._trainer)),
            steps=steps,
            time_s=self._progress.time_s,
        )
        self._read_list()
        self._last_steps = steps  # also if such a member was there
        self._event(
            "member",
            f"the policy after {steps:,} steps is member {self._config.name}:{self.members - 1} of "
            "the pool",
            member=member.id,
            line=member.line,
            steps=steps,
        )

    def _checkpoint_of(self, weights: Float32) -> Checkpoint:
        """Returns weights of this run as a checkpoint of the pool."""
        meta = {
            ENV: self._trainer.config.env.identity(),
            SPACES: spaces_as_json(self._trainer.info),
        }
        return Checkpoint(self._trainer.layout, weights, meta=meta)

    def _on_failed(self, error: UserError) -> None:
        """Report that nothing could be added to the pool; a save tries it again."""
        self._is_postponed = True
        self._event("pool", f"the pool stays as it was, and the run continues: {error}")
