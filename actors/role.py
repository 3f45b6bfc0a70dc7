"""The actor's process: join a learner, play, and publish unrolls until asked to stop.

An actor started by hand has no config; it gets the learner's in the handshake.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from penstock.actors.join import Found, find, join
from penstock.actors.rollout import Rollout
from penstock.algos.acting import make_inference
from penstock.algos.recorded import make_recorders
from penstock.algos.registry import algorithm
from penstock.algos.samples import slot_spec
from penstock.autotune.forms import with_acting_form
from penstock.configs.schema import Config
from penstock.core.interfaces import Environments, LearnerGoneError, Link, RunOverError
from penstock.core.notes import note_logger
from penstock.core.role import ACTOR_INDEX_BITS, EXIT_REJOIN, RoleContext
from penstock.envs import BatchedEnv, make
from penstock.envs.make import first_index
from penstock.profiling.ledger import Part, TimeLedger
from penstock.profiling.status import Phase, StatusPage

logger = note_logger(__name__)

# The longest wait for a slot, before the actor looks whether it is to leave.
GRANT_TIMEOUT_S = 0.5
RUN_OVER, GAVE_UP = "learner", "lost"  # reasons for which the command of actors by hand ends


def run(ctx: RoleContext) -> None:
    """Play until ``ctx.stopping()``. An actor started by hand exits with EXIT_REJOIN when its
    learner ends, and ends its command when the run is over or it has waited for too long."""
    try:
        found = find(ctx)
        ctx.status.begin(Phase.ENVIRONMENT)
        config, envs = found.config, found.config.actor_envs
        first = first_index(actor_number(actor_id(ctx)), envs)
        threads, beat = config.actors.env_threads, ctx.status.beat
        game = make(config.env, envs, threads, first=first, stagger=True, beat=beat)
        ctx.status.begin(Phase.STARTING)
        with _closed_at_the_end(game):
            _live(ctx, found, game)
    except LearnerGoneError as error:
        if ctx.stopping():
            return
        if isinstance(error, RunOverError):
            logger.info("the run of the learner at %s is over, and its actors end", ctx.address)
            ctx.report("stop", reason=RUN_OVER)
        elif ctx.gave_up:
            text = f"no learner answered at {ctx.address} for {ctx.wait_s:g} s; start it, or raise"
            ctx.report("stop", reason=GAVE_UP, error=f"{text} --wait")
        else:
            logger.info("%s joins again: %s", ctx.name, error)
            raise SystemExit(EXIT_REJOIN) from error


@contextmanager
def _closed_at_the_end(game: BatchedEnv) -> Iterator[None]:
    """Close the environments, unless one has failed: its `close` may hang, and hold up the error
    that is to be reported."""
    try:
        yield
    except LearnerGoneError:
        game.close()
        raise
    game.close()


def _live(ctx: RoleContext, found: Found, game: BatchedEnv) -> None:
    """Play for one learner after the other, in the same environments.

    The supervisor may move an actor to another learner, or to the next process of the only one; an
    actor started by hand has no supervisor that could.
    """
    config, actor = found.config, actor_id(ctx)
    moves = ctx.config is not None
    spec = slot_spec(config, game.info)
    player: Player | None = None
    while not ctx.stopping():
        ctx.follow()
        found = find(ctx) if moves else found
        link = None
        try:
            link = join(ctx, found, spec, actor)
            if link is None:
                continue
            ctx.report("ready")
            if player is None:
                config, note = with_acting_form(config, game.info)
                if note and actor_number(actor) == 0:  # that of the others is alike
                    logger.info("%s", note)
                player = Player(config, link, game, actor, ctx.incarnation, ctx.status, ctx.ledger)
            else:
                player.join(link, ctx.incarnation)
            _play(ctx, player)
        except LearnerGoneError:
            if not moves:
                raise
        finally:
            if link is not None:
                link.close()


def actor_id(ctx: RoleContext) -> int:
    """The actor's index in its run; for an actor started by hand, an id unique across hosts."""
    if ctx.config is not None:
        return ctx.index
    return (ctx.run_id % (1 << 40)) << ACTOR_INDEX_BITS | ctx.index


def actor_number(actor: int) -> int:
    """Return the actor's number on its host, also of one that was started by hand."""
    return actor & (1 << ACTOR_INDEX_BITS) - 1


def _play(ctx: RoleContext, player: Player) -> None:
    """Play unroll after unroll for one learner, and count them on the status page."""
    status = ctx.status
    before = status.played_steps
    status.begin_stream(ctx.incarnation, player.sequence)
    while not ctx.leaving():
        status.beat()
        status.phase = Phase.WAITING
        if player.play(GRANT_TIMEOUT_S):
            status.sequence = player.sequence
            status.produced_steps = player.produced_steps
            status.played_steps = before + player.produced_steps


class Player:
    """One actor without its process: plays an unroll into a slot whenever one is granted."""

    def __init__(
        self,
        config: Config,
        link: Link,
        game: Environments,
        actor: int,
        incarnation: int,
        status: StatusPage,
        ledger: TimeLedger,
    ) -> None:
        # A restarted actor, and one of a resumed run, must not repeat the same episodes.
        life = [config.run.seed, actor, incarnation, link.welcome.generation]
        seeds = np.random.SeedSequence(life).generate_state(2)
        self._process = partial(algorithm(config.algo).process, config.algo)
        self._link = link
        self._game = game
        self._actor = actor
        self._incarnation = incarnation
        self._status, self._ledger = status, ledger
        self._inference = make_inference(config, game.info, int(seeds[0]), actor_number(actor))
        if actor_number(actor) == 0:  # the others' environments are alike
            game.watch_precision()
        recorders = make_recorders(config, game)
        self._rollout = Rollout(game, self._inference, int(seeds[1]), ledger, recorders, link.beat)
        self._began = False  # also where the first unroll reached no learner
        self.sequence = 0
        self.produced_steps = 0

    def join(self, link: Link, incarnation: int) -> None:
        """Continue with the same environments for another learner, as a new stream."""
        self._link = link
        self._rollout.beat = link.beat
        self._incarnation = incarnation
        self._inference.forget()
        self._rollout.forget_slots()
        # A stream that does not begin with sequence 0 begins in the middle of episodes.
        self.sequence = int(self._began)
        self.produced_steps = 0

    def play(self, timeout_s: float) -> bool:
        """Play one unroll with the newest weights; False when no slot was granted in time."""
        self._ledger.switch(Part.WAIT)
        if self._inference.refresh(self._link.read_weights) is None:
            self._link.beat()
            time.sleep(min(timeout_s, 0.005))  # the relay has none yet
            return False
        with self._link.slot(timeout_s) as slot:
            if slot is None:
                return False
            self._ledger.switch(Part.OTHER)
            # Newer weights may have arrived while it waited.
            self._inference.refresh(self._link.read_weights)
            self._status.phase = Phase.ENVIRONMENT
            self._status.beat()
            began_s = time.monotonic()
            self._began = True
            steps = self._rollout.fill(slot.columns, slot.index)
            played = steps + self._rollout.dropped_steps
            if self._link.fills_store:
                self._ledger.switch(Part.PROCESS)
                self._process(slot.columns)
            self._ledger.switch(Part.WRITE)
            header = slot.header
            header["actor"] = self._actor
            header["incarnation"] = self._incarnation
            assert self._rollout.oldest is not None
            header["generation"], header["version"] = self._rollout.oldest
            header["sequence"] = self.sequence
            header["steps"] = steps
            header["produced_steps"] = self.produced_steps + played
            header["started_s"], header["published_s"] = began_s, time.monotonic()
        self.sequence += 1
        self.produced_steps += played
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two unrolls, as plain data.

        Raises NotSavableError where the environments cannot be saved.
        """
        return {
            "env": self._game.state_dict(),
            "rollout": self._rollout.state_dict(),
            "inference": self._inference.state_dict(),
            "stream": [self._incarnation, self.sequence, self.produced_steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises NotSavableError, or ValueError, LookupError or TypeError, where it does not fit; this
        player must not be used then.
        """
        self._game.load_state_dict(state["env"])
        self._rollout.load_state_dict(state["rollout"])
        self._inference.load_state_dict(state["inference"])
        self._incarnation, self.sequence, self.produced_steps = map(int, state["stream"])
        self._began = self.sequence > 0

    def close(self) -> None:
        """Close inference and environments; the caller closes the link."""
        self._inference.close()
        self._game.close()
