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

from penstock.actors.join import LearnerEndpoint, find_learner, join_learner
from penstock.actors.matches import make_environments
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
from penstock.profiling.ledger import Part, TimeLedger
from penstock.profiling.status import Phase, StatusPage

logger = note_logger(__name__)

# The longest wait for a slot, before the actor looks whether it is to leave.
GRANT_TIMEOUT_S = 0.5
# The pause while there are no weights yet.
NO_WEIGHTS_S = 0.005

# The reasons for which the command of actors by hand ends.
RUN_OVER = "learner"
GAVE_UP = "lost"


def run(ctx: RoleContext) -> None:
    """Play until ``ctx.stopping()``: the main function of an actor.

    An actor started by hand exits with EXIT_REJOIN when its learner ends. It ends its command when
    the run is over, or it has waited for too long.
    """
    try:
        learner = find_learner(ctx)
        config = learner.config
        ctx.status.begin(Phase.ENVIRONMENT)
        number = actor_number(actor_id(ctx))
        env = make_environments(config, number, ctx.ledger, ctx.status.beat)

        ctx.status.begin(Phase.STARTING)
        with _closed_at_the_end(env):
            _play_for_learners(ctx, learner, env)
    except LearnerGoneError as error:
        if not ctx.stopping():
            _on_learner_gone(ctx, error)


def _on_learner_gone(ctx: RoleContext, error: LearnerGoneError) -> None:
    """End the command of an actor by hand, or exit with EXIT_REJOIN, so that it joins again."""
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
def _closed_at_the_end(env: Environments) -> Iterator[None]:
    """Close the environments when the block is left, unless one of them has failed.

    The `close` of a failed environment may hang, and hold up the error that is to be reported.
    """
    try:
        yield
    except LearnerGoneError:
        env.close()
        raise
    env.close()


def _play_for_learners(ctx: RoleContext, learner: LearnerEndpoint, env: Environments) -> None:
    """Play for one learner after the other, in the same environments.

    The supervisor may move an actor to another learner, or to the next process of the only one; an
    actor started by hand has no supervisor that could. Raises LearnerGoneError for the latter.
    """
    actor = actor_id(ctx)
    is_of_run = ctx.config is not None
    config = learner.config
    spec = slot_spec(config, env.info)
    player: Player | None = None

    while not ctx.stopping():
        ctx.follow()
        if is_of_run:
            learner = find_learner(ctx)
        link = None
        try:
            link = join_learner(ctx, learner, spec, actor)
            if link is None:
                continue
            ctx.report("ready")
            if player is None:
                player = _make_player(ctx, config, link, env, actor)
            else:
                player.join(link, ctx.incarnation)
            _play(ctx, player)
        except LearnerGoneError:
            if not is_of_run:
                raise
        finally:
            if link is not None:
                link.close()


def _make_player(
    ctx: RoleContext, config: Config, link: Link, env: Environments, actor: int
) -> Player:
    """Make the player, with the form of the network that is fastest on this host."""
    config, note = with_acting_form(config, env.info)
    if note and actor_number(actor) == 0:  # the note of other actors would be alike
        logger.info("%s", note)

    return Player(
        config,
        link,
        env,
        actor=actor,
        incarnation=ctx.incarnation,
        status=ctx.status,
        ledger=ctx.ledger,
    )


def actor_id(ctx: RoleContext) -> int:
    """Return the actor's index in its run, or an id unique across hosts if it has none.

    An actor started by hand has no index.
    """
    if ctx.config is not None:
        return ctx.index
    random_number = ctx.run_id % (1 << 40)
    return random_number << ACTOR_INDEX_BITS | ctx.index


def actor_number(actor: int) -> int:
    """Return the actor's number on its host, also of one that was started by hand."""
    return actor & (1 << ACTOR_INDEX_BITS) - 1


def _play(ctx: RoleContext, player: Player) -> None:
    """Play unroll after unroll for one learner, and count them on the status page."""
    status = ctx.status
    previous_steps = status.played_steps
    status.begin_stream(ctx.incarnation, player.sequence)
    while not ctx.leaving():
        status.beat()
        status.phase = Phase.WAITING
        if player.play(GRANT_TIMEOUT_S):
            status.sequence = player.sequence
            status.produced_steps = player.produced_steps
            status.played_steps = previous_steps + player.produced_steps


class Player:
    """One actor without its process: plays an unroll into a slot whenever one is granted."""

    def __init__(
        self,
        config: Config,
        link: Link,
        env: Environments,
        actor: int,
        incarnation: int,
        status: StatusPage,
        ledger: TimeLedger,
    ) -> None:
        """Make the player.

        Args:
            config: of the run.
            link: joined to the learner; it stays the caller's.
            env: the environments, which `close` closes.
            actor: unique among all actors of the run.
            incarnation: how often this actor was started before.
            status: the status page of the role.
            ledger: the time ledger of the calling thread.
        """
        # A restarted actor, and one of a resumed run, must not repeat the same episodes.
        entropy = [config.run.seed, actor, incarnation, link.welcome.generation]
        inference_seed, env_seed = np.random.SeedSequence(entropy).generate_state(2)

        self.sequence = 0
        """The sequence of the next slot in its stream."""
        self.produced_steps = 0
        """Agent steps in the stream so far."""
        self._link = link
        self._env = env
        self._actor = actor
        self._incarnation = incarnation
        self._status = status
        self._ledger = ledger
        self._started = False  # whether an unroll was begun, even if it reached no learner
        self._process = partial(algorithm(config.algo).process, config.algo)
        self._inference = make_inference(config, env.info, int(inference_seed), actor_number(actor))
        if actor_number(actor) == 0:  # the other actors' environments are alike
            env.watch_precision()
        recorders = make_recorders(config, env)
        self._rollout = Rollout(env, self._inference, int(env_seed), ledger, recorders)

    def join(self, link: Link, incarnation: int) -> None:
        """Continue with the same environments for another learner, as a new stream."""
        self._link = link
        self._incarnation = incarnation
        self._inference.forget()
        self._env.forget()
        self._rollout.forget_slots()
        # A stream that does not begin with sequence 0 begins in the middle of episodes.
        self.sequence = 1 if self._started else 0
        self.produced_steps = 0

    def play(self, timeout_s: float) -> bool:
        """Play one unroll with the newest weights, and publish it.

        Returns:
            False when there were no weights, or no slot was granted within ``timeout_s`` seconds.

        Raises:
            LearnerGoneError: the learner has ended. The next unroll continues from there.
        """
        self._ledger.switch(Part.WAIT)
        if not self._refresh_weights():
            self._link.beat()
            time.sleep(min(timeout_s, NO_WEIGHTS_S))
            return False

        with self._link.slot(timeout_s) as slot:
            if slot is None:
                return False
            self._ledger.switch(Part.OTHER)
            # Newer weights may have arrived while it waited.
            self._refresh_weights()
            self._status.phase = Phase.ENVIRONMENT
            self._status.beat()

            started_s = time.monotonic()
            self._started = True
            steps = self._rollout.fill(slot.columns, slot.index, beat=self._link.beat)
            produced_steps = steps + self._rollout.dropped_steps
            if self._link.fills_store:
                self._ledger.switch(Part.PROCESS)
                self._process(slot.columns)

            self._ledger.switch(Part.WRITE)
            oldest = self._rollout.oldest
            assert oldest is not None
            header = slot.header
            header["actor"] = self._actor
            header["incarnation"] = self._incarnation
            header["generation"] = oldest.generation
            header["version"] = oldest.version
            header["sequence"] = self.sequence
            header["steps"] = steps
            header["produced_steps"] = self.produced_steps + produced_steps
            header["started_s"] = started_s
            header["published_s"] = time.monotonic()

        # Leaving the block has published the slot.
        self.sequence += 1
        self.produced_steps += produced_steps
        return True

    def _refresh_weights(self) -> bool:
        """Take the newest weights, also of opponents; return whether there are some of all."""
        read = self._link.read_weights
        opponents_ready = self._env.refresh(read)
        return self._inference.refresh(read) is not None and opponents_ready

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two unrolls, as plain data.

        Raises NotSavableError where the environments cannot be saved.
        """
        return {
            "env": self._env.state_dict(),
            "rollout": self._rollout.state_dict(),
            "inference": self._inference.state_dict(),
            "stream": [self._incarnation, self.sequence, self.produced_steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises NotSavableError, or ValueError, LookupError or TypeError, where it does not fit; this
        player must not be used then.
        """
        self._env.load_state_dict(state["env"])
        self._rollout.load_state_dict(state["rollout"])
        self._inference.load_state_dict(state["inference"])
        self._incarnation, self.sequence, self.produced_steps = map(int, state["stream"])
        self._started = self.sequence > 0

    def close(self) -> None:
        """Close inference and environments; the caller closes the link."""
        self._inference.close()
        self._env.close()
