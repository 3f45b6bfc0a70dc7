"""The league of one run: whom its actors play against, and what enters the pool.

It has `Chairs`, with the opponents and the results of games against them, and `PolicySnapshots`, by
which weights of the run become members. Its state is JSON beside the weights in a checkpoint, so a
resumed run continues with the results and opponents that belong to them.

Each of several learners draws and counts for its own actors; the one that saves adds members. Every
run of a game with several sides has a league, if only one that fills its pool. `pool.py` is the
pool on the disk; the rules are in `penstock.league`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.notes import note_logger
from penstock.league.results import GameCounts
from penstock.learner.base_trainer import BaseTrainer
from penstock.learner.chairs import Chairs
from penstock.learner.policy_snapshots import PolicySnapshots
from penstock.learner.pool import PolicyPool, pool_folder
from penstock.transport.shm.weights_board import WeightsBoard

WAIT_S = 0.2
"""Seconds between two looks for the first member of another line."""

logger = note_logger(__name__)


class League:
    """The chairs and snapshots of the learner that trains ``trainer``; not thread-safe.

    league = League(trainer, pool)        # before the trainer is resumed
    league.load_state_dict(state)         # of the resumed checkpoint, if any
    league.open(new_session())            # before actors attach
    league.turn(results, now_s)           # after each batch
    league.snapshot()                     # in each save, before `state_dict`
    """

    def __init__(
        self,
        trainer: BaseTrainer[Any],
        pool: PolicyPool,
        *,
        rank: int = 0,
        shared: bool = True,
        event: Callable[..., object] = lambda kind, text, **fields: logger.info("%s", text),
    ) -> None:
        """Make the boards of the chairs, and keep the initial weights.

        Args:
            trainer: as it is before training and before a resume.
            pool: the pool of the run.
            rank: of the learner.
            shared: whether other processes read the boards.
            event: is called as `RoleContext.event`.

        Raises:
            UserError: if no line plays the seats of the others.
        """
        self._config = trainer.config.league
        self._env = trainer.config.env
        self._progress = trainer.progress
        self._layout = trainer.layout
        self._pool = pool
        self._rank = rank
        self._event = event
        self._snapshots = PolicySnapshots(trainer, pool, event)
        self._chairs = Chairs(
            self._config,
            trainer.info.seating,
            trainer.layout,
            pool,
            self._snapshots.initial,
            seed=trainer.config.run.seed,
            rank=rank,
            ranks=trainer.config.learner.most_count,
            shared=shared,
        )
        self._is_readable = True
        """Whether the pool could be read at the last draw."""

    @property
    def boards(self) -> list[WeightsBoard]:
        """The boards of the chairs, whose policy ids are 1, 2, ..."""
        return self._chairs.boards

    def open(
        self,
        session: int | None = None,
        *,
        beat: Callable[[], None] = lambda: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Add the policy before training to a pool that lacks it, and publish all chairs.

        Waits until each other line that this one plays against has a member, or ``stopping()``
        holds; then nothing is published.

        Args:
            session: as of `Chairs.seat_all`.
            beat: is called again and again during the wait.
            stopping: whether to end the wait.

        Raises:
            UserError: if the pool holds another network or game, cannot be read or written, or has
                no member that can be read; or if another run trains this line.
        """
        if self._rank == 0:
            self._pool.claim(self._config.name)
        self._check_members()
        self._snapshots.open(writes=self._rank == 0)
        if self._wait_for_lines(beat, stopping):
            self._check_members()
            self._chairs.seat_all(session)

    def turn(self, results: Mapping[int, GameCounts], now_s: float) -> None:
        """Count results, and do what is due: draw one chair anew, show the latest weights.

        A pool that cannot be read or written keeps everything as it is, and is an event.

        Args:
            results: games by the number of their draw or scripted player.
            now_s: the present time (CLOCK_MONOTONIC).
        """
        self._chairs.count_results(results)
        try:
            if self._chairs.draw_one():
                self._is_readable = True
        except UserError as error:
            if self._is_readable:
                text = f"opponents stay as they are, and the run continues: {error}"
                self._event("pool", text)
            self._is_readable = False
        if self._rank == 0:
            self._snapshots.show_latest(now_s)

    def snapshot_is_due(self) -> bool:
        """Whether the present weights should become a member, so that a checkpoint is due."""
        return self._snapshots.is_due(beats_all=self._chairs.wins_enough)

    def snapshot(self) -> None:
        """Add the present weights to the pool if that is due.

        A pool that cannot be written is an event, and training continues.
        """
        if self._snapshots.take(beats_all=self._chairs.wins_enough):
            self._chairs.wins_enough = False

    def postpone_snapshot(self) -> None:
        """Leave a snapshot that is due to the next save, as one has failed."""
        self._snapshots.postpone()

    def take_reset(self) -> bool:
        """Returns whether weights and optimizer were reset since the last call."""
        return self._snapshots.take_reset()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run continues with, as JSON."""
        return self._chairs.state_dict() | self._snapshots.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises LookupError, TypeError or ValueError for another value.
        """
        self._chairs.load_state_dict(state)
        self._snapshots.load_state_dict(state)

    def figures(self) -> dict[str, Any]:
        """Returns the figures of the interval for metrics.jsonl.

        In a run without matches only the number of members.
        """
        figures: dict[str, Any] = {"league_members": self._snapshots.members}
        return figures | (self._chairs.figures() if self._config.has_matches else {})

    def close(self) -> None:
        """Close the boards, and leave the line to other runs."""
        self._chairs.close()
        self._pool.close()

    def _wait_for_lines(self, beat: Callable[[], None], stopping: Callable[[], bool]) -> bool:
        """Wait until each line that this one plays against has a member.

        Returns False if the run stops before.
        """
        others = [name for name in self._chairs.lines if name != self._config.name]
        is_noted = False
        while missing := [name for name in others if not self._pool.members(name)]:
            if not is_noted:
                lines = ", ".join(missing)
                logger.info("waits for the first member of %s in %s", lines, self._pool.folder)
                is_noted = True
            if stopping():
                return False
            beat()
            time.sleep(WAIT_S)
        return True

    def _check_members(self) -> None:
        """Raise UserError if a member that this run may play against is of another network or game.

        If this line has nothing but a policy before training, a fresh run replaces that. A run that
        was resumed in another environment keeps its own members.
        """
        for line in sorted({self._config.name, *self._chairs.lines}):
            members = self._pool.members(line)
            is_own = line == self._config.name
            if is_own and all(member.initial for member in members):
                continue
            env = None if is_own and self._progress.trained_steps else self._env
            for member in members:
                self._pool.check_member(member, self._layout, env)


def make_league(
    trainer: BaseTrainer[Any],
    run_dir: Path,
    event: Callable[..., object],
    *,
    rank: int = 0,
    shared: bool = True,
) -> League | None:
    """Returns the league of a run; None where the game has one side. Arguments are as of `League`.

    Raises UserError as `League`.
    """
    if not trainer.info.seating.has_opponents:
        return None
    pool = PolicyPool(pool_folder(trainer.config, run_dir), event)
    return League(trainer, pool, rank=rank, shared=shared, event=event)
