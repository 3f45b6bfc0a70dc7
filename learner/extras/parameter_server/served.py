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
from penstock.learner.extras.parameter_server.protocol import NOTHING, Tally
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.progress import BOOKED, GROWTH, Progress
from penstock.learner.sync.gradient_sync import ControlMessage, OwnUpdates
from penstock.profiling.ledger import Part, TimeLedger

PULL_S = 0.2
FETCH_S = 1.0
STOPPING_S = 30.0  # for the state of the last checkpoint
LOST_S = 5.0  # without a connection, after which a shard counts as dead


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
        self.unsent: Floats = np.zeros(len(BOOKED))
        self._client = client
        self._optimizer = optimizer
        self._progress = progress
        self._ledger = ledger
        self._waiting = waiting
        self._tally: Tally = NOTHING  # for the next push
        self._known: Floats = np.array(progress.totals())
        self._left = 0  # updates left of this batch
        self._is_cut = False  # the run stops before the rest of this batch had parameters
        self._stopped = False

    def sync_control(self, mine: ControlMessage) -> ControlMessage:
        """Pull the newest parameters, as soon as the pace allows and if it needs them.

        Once the run has stopped, the whole state is fetched: a checkpoint of it follows.

        Returns:
            The control message of the run. Its ``counts`` are this learner's own. Without a pull,
            the growth of the others remains unknown.
        """
        self._tally = tuple(mine.growth.tolist())
        if self._stopped:
            self._push_counts(mine)
            state = self._fetch()
            growth = np.zeros_like(mine.growth) if state is None else self._follow(state)
            return ControlMessage(mine.counts, growth, stop=True)
        said = self._exchange(mine)
        self._stopped = said.stop
        return said

    def _exchange(self, mine: ControlMessage) -> ControlMessage:
        """Push what the server must know now, and pull parameters if the batch needs them."""
        if self._client.has_asked and self._pull() is None:
            self._push_counts(mine)  # else its last counts would be missing in the run's
            return _stopping(mine)
        self._ledger.switch(Part.REDUCE)
        self._is_cut = False
        self._left = int(np.count_nonzero(mine.counts))
        if mine.stop or mine.nan or mine.checkpoint or not self._left:
            self._push_counts(mine)
            reply = self._pull()
        else:
            reply = self._renew()
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
        norm = self._client.push(0 if self._is_cut else int(total), self._tally)
        self._clear_sent()
        self._left -= 1
        if self._left and not self._is_cut:
            self._is_cut = self._renew() is None
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
        ends_s = time.monotonic() + STOPPING_S
        while (state := self._client.fetch(FETCH_S)) is None:
            away = self._client.unreached()
            if self._waiting():
                ends_s = time.monotonic() + STOPPING_S
            elif time.monotonic() > ends_s or (away and away.seconds > LOST_S):
                return None
        return state

    def _follow(self, found: Reply | ServerState) -> Floats:
        """Take the run's version; returns the growth of its counts since the last call."""
        totals = np.array(found.tally)
        growth = totals.copy()
        growth[: len(BOOKED)] -= self._known[: len(BOOKED)]
        self._known = totals
        self._progress.follow(found.version)
        return growth

    def _push_counts(self, mine: ControlMessage) -> None:
        """Push the counts and flags, without a gradient."""
        self._client.push(0, self._tally, stop=mine.stop, nan=mine.nan)
        self._clear_sent()

    def _clear_sent(self) -> None:
        """Clear counters that were sent; the recent returns stay until replaced."""
        self._tally = (*NOTHING[: len(BOOKED)], *self._tally[len(BOOKED) :])

    def _renew(self) -> Reply | None:
        """Pull parameters, unless those here are new enough."""
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
