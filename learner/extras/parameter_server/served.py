"""Learners with a parameter server: each pushes gradients and pulls parameters, at a pace.

The server's side of each pace is in `server_pace`. The policy version is the server's count of all
learners' updates. Gradients are not shared, so each learner normalises its own advantages.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from penstock.core.params import Arrays, Floats
from penstock.learner.extras.parameter_server.client import Reply, ServerClient
from penstock.learner.extras.parameter_server.parameters import ServerState
from penstock.learner.extras.parameter_server.protocol import COUNTS, NOTHING, Tally
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.progress import GROWTH, Progress
from penstock.learner.sync.gradient_sync import ControlMessage, OwnUpdates
from penstock.profiling.ledger import Part, TimeLedger

PULL_S = 0.2  # longest wait for parameters between two heartbeats
FETCH_S = 1.0  # longest wait for the server's state between two heartbeats
STOPPING_S = 30.0  # longest wait for the state of the last checkpoint
LOST_S = 5.0  # a shard counts as dead when it had no connection for so long


class Served(OwnUpdates):
    """One of several learners with a parameter server: a `GradientSync`."""

    def __init__(
        self,
        client: ServerClient,
        optimizer: FlatOptimizer,
        progress: Progress,
        world: int,
        ledger: TimeLedger,
        waiting: Callable[[], bool],
    ) -> None:
        """Join the learners; nothing is sent before the first call.

        Args:
            client: the connections to the server.
            optimizer: holds this learner's parameters and gradients.
            progress: the run's counts.
            world: number of learners.
            ledger: where the time of this thread is counted.
            waiting: is called during waits, and returns whether to continue.
        """
        self.world = world
        self.rounds = 0
        self.unsent: Floats = np.zeros(COUNTS)
        self._client = client
        self._optimizer = optimizer
        self._progress = progress
        self._ledger = ledger
        self._waiting = waiting

        self._unsent_tally: Tally = NOTHING  # this learner's counts for the next push
        self._known_totals: Floats = np.array(progress.totals())  # the run's, as last received
        self._updates_left = 0  # updates left in this batch
        self._is_cut = False  # whether the run stops before the rest of the batch had parameters
        self._stopped = False

    def sync_control(self, mine: ControlMessage) -> ControlMessage:
        """Pull the newest parameters, as soon as the pace allows and if it needs them.

        Once the run has stopped, the whole state is fetched: a checkpoint of it follows.

        Returns:
            The control message of the run. Its ``counts`` are this learner's own. Without a pull,
            the growth of the others remains unknown.
        """
        self._unsent_tally = tuple(mine.growth.tolist())
        if self._stopped:
            self._push_counts(mine)
            state = self._fetch()
            growth = np.zeros_like(mine.growth) if state is None else self._follow(state)
            return ControlMessage(mine.counts, growth, stop=True)

        message = self._exchange(mine)
        self._stopped = message.stop
        return message

    def _exchange(self, mine: ControlMessage) -> ControlMessage:
        """Push what the server must know now, and pull parameters if the batch needs them."""
        # A pull may have begun before the last step. It is finished first.
        if self._client.has_pull_pending and self._pull() is None:
            self._push_counts(mine)  # else its last counts would be missing in the run's
            return _stopping(mine)

        self._ledger.switch(Part.REDUCE)
        self._is_cut = False
        self._updates_left = int(np.count_nonzero(mine.counts))
        if mine.stop or mine.nan or mine.checkpoint or not self._updates_left:
            self._push_counts(mine)
            reply = self._pull()
        else:
            reply = self._pull_if_needed()
        if reply is None:
            return _stopping(mine)

        return ControlMessage(
            mine.counts,
            self._follow(reply),
            stop=reply.stop,
            nan=reply.nan,
            checkpoint=mine.checkpoint,
        )

    def prepare_backward(self, optimizer: FlatOptimizer, total: float) -> None:
        """Ask for the next parameters, by `learner.pull`; gradients are sent when complete."""
        self._client.ask_ahead()

    def step(self, optimizer: FlatOptimizer, total: float, env_steps: int) -> Tensor:
        """Push the gradient of an update, and pull the parameters of the batch's next one.

        Returns the norm of the mean gradient, float32 ``[]``; 0 where no gradient was sent.
        """
        samples = 0 if self._is_cut else int(total)
        norm = self._client.push(samples, self._unsent_tally)
        self._clear_sent()

        self._updates_left -= 1
        if self._updates_left and not self._is_cut:
            self._is_cut = self._pull_if_needed() is None
            self._progress.version = self._client.last.version
        return torch.zeros(()) if norm is None else norm

    def state_dict(self, *, saves: bool) -> Arrays | None:
        """Fetch the server's state into the optimizer, if this learner ``saves`` the run.

        Returns:
            An empty dictionary, as there is no other state; None if the server's did not arrive
            before the run ended.
        """
        if not saves:
            return {}

        state = self._fetch()
        if state is None:
            return None
        self._progress.commit(np.zeros(GROWTH), self._follow(state))
        return {}

    def load_state_dict(self, state: Arrays) -> None:
        """Does nothing: the server has the optimizer of the learner that resumed."""

    def close(self) -> None:
        """Leave the server."""
        self._client.close()

    def _fetch(self) -> ServerState | None:
        """Fetch the server's state into the optimizer.

        Returns the state; None if it did not arrive before the end of the run. While the run goes
        on this waits without a limit. Once it stops, it waits for `STOPPING_S`, or until a shard
        is dead.
        """
        deadline_s = time.monotonic() + STOPPING_S
        while (state := self._client.fetch(FETCH_S)) is None:
            unreached = self._client.unreached()
            if self._waiting():
                deadline_s = time.monotonic() + STOPPING_S
                continue

            is_lost = unreached is not None and unreached.seconds > LOST_S
            if is_lost or time.monotonic() > deadline_s:
                return None
        return state

    def _follow(self, newest: Reply | ServerState) -> Floats:
        """Take the run's version from the server's newest answer.

        Returns the growth of the run's counts since the last call, as `Progress.growth`.
        """
        totals = np.array(newest.tally)
        growth = totals.copy()
        growth[:COUNTS] -= self._known_totals[:COUNTS]
        self._known_totals = totals
        self._progress.follow(newest.version)
        return growth

    def _push_counts(self, mine: ControlMessage) -> None:
        """Push the counts and flags, without a gradient."""
        self._client.push(0, self._unsent_tally, stop=mine.stop, nan=mine.nan)
        self._clear_sent()

    def _clear_sent(self) -> None:
        """Clear counters that were sent; the recent returns stay until replaced."""
        self._unsent_tally = (*NOTHING[:COUNTS], *self._unsent_tally[COUNTS:])

    def _pull_if_needed(self) -> Reply | None:
        """Pull parameters, unless those here are new enough.

        Returns the last answer; None if the run ends before there is one.
        """
        return self._pull() if self._client.needs_pull else self._client.last

    def _pull(self) -> Reply | None:
        """Pull parameters; at least once, also while stopping: the server then answers at once.

        Returns the answer; None if the run ends before there is one.
        """
        self._ledger.switch(Part.PULL)
        while (reply := self._client.pull(PULL_S)) is None and self._waiting():
            pass
        return reply


def _stopping(mine: ControlMessage) -> ControlMessage:
    """Returns the message of a learner whose run stops before the server has answered."""
    return ControlMessage(np.zeros_like(mine.counts), np.zeros_like(mine.growth), stop=True)
