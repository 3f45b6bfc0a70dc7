"""The role that evaluates a run as it goes: it plays checkpoints and saves the best one.

It reads weights from checkpoints and not from the learner's memory. So it works alike for every
transport, pace and number of learners, and an evaluated checkpoint can become `checkpoints/best`
as it is.

Which checkpoints are evaluated: the learner decides, and writes a checkpoint for each evaluation
(`learner.evaluation_requests`). With `eval.every_s` it is `checkpoints/last`, which stays on disk
under a name of its own (a hard link) while the learner saves further ones. An evaluation by steps
is skipped if it would take more than `eval.share` of a core; it has fewer episodes if there would
otherwise be no evaluation for minutes (`evaluation.schedule`). When a run reaches one of its
limits, such as `stop.env_steps`, its last weights are evaluated as well.

Which episodes are played: every evaluation takes the same seeds, or the first of them, with greedy
and with sampled actions, so that two evaluations differ in their weights and in nothing else. A
closing evaluation, which decides whether `stop.return` is reached, plays these and then episodes
with other seeds, in the better of the two ways only. In a game of several sides the episodes are
matches against the opponents of `eval.against`, equally many against each.

Which checkpoint is the best: that is decided by all episodes of each checkpoint
(`evaluation.estimates.better_way`). The result of the best is stored in its own file, so that the
two are replaced together or not at all. A best checkpoint without such a result, because it was
found in training or evaluated with other seeds, is evaluated first.

torch, where the network needs it, is imported at the first evaluation: it must not delay the start
of a run.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.formatting import count, falls_short, number
from penstock.core.notes import note_logger
from penstock.core.role import RoleContext
from penstock.envs.seats import INITIAL
from penstock.evaluation.best_videos import BestVideos
from penstock.evaluation.estimates import (
    WAYS,
    BestWay,
    Estimate,
    Way,
    better_way,
    estimate,
    evidence,
    lower_end,
    out_of_reach,
    pooled,
    reaches,
    spread_of,
    way_of,
)
from penstock.evaluation.schedule import EvaluationSchedule, PairCost
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import FILE, DamagedCheckpointError
from penstock.learner.checkpoints.checkpoint_history import (
    EVALUATION,
    PLAY,
    REQUEST,
    REQUESTED,
    best_locked,
    usable_best_meta,
)
from penstock.learner.evaluation_requests import CLOSING, FIRST
from penstock.learner.pool import PolicyPool, pool_folder
from penstock.profiling.ledger import Part
from penstock.profiling.status import Phase

logger = note_logger(__name__)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from penstock.envs import BatchedEnv
    from penstock.evaluation.evaluate import Choose, Episode
    from penstock.evaluation.opponents import MissingInitialError, OpponentSource
    from penstock.evaluation.tournament import Tournament
    from penstock.models.acting.policy import Policy

CHECKPOINTS = "checkpoints"
HELD = ".evaluated"
"""Folder of the checkpoint that is being evaluated, beside the others."""
TEMPORARY = f".{FILE}.evaluated.tmp"
"""A name of its own, since the learner may save `checkpoints/best` at the same time."""

# The seeds of evaluations, of closing evaluations and of videos lie apart from each other, and from
# the default seeds of `penstock eval`.
SEED = 1_100_000
CLOSING_SEED = 2_100_000
VIDEO_SEED = 3_100_000
CLOSING_SEEDS = 10_000
"""Distance between the seeds of two closing evaluations, which play different episodes."""

POLL_S = 0.05
IDLE_S = 1.0
"""Time between two reports of an idle evaluator."""
MEMBER_GAMES = 5_000
"""Games that each two members of the pool play, at most; their payoff then has a standard error of
a seventieth of the deviation of a game."""
NASH_SHARE = 0.5
"""The share of a core that they may take at least where `league.draw: nash` trains against their
equilibrium; with less, new members would enter it late."""
PAIRS_S = 2.0
"""Time after which a pair is looked for again where there was none."""
FAULT_S = 600.0
"""The same after a fault of the pool."""
PROBED = 32
"""Steps by which the cost of a step is estimated."""
PROBED_ENVS = 4
"""Environments of that estimate before a first evaluation, which has few episodes if they are
expensive."""


class StoppedError(Exception):
    """The run ends in the middle of an evaluation."""


class _FileIdentity(NamedTuple):
    """What tells a checkpoint's file from the one that replaces it."""

    inode: int
    mtime_ns: int


class _ClosingResult(NamedTuple):
    """The result of the further episodes of a closing evaluation."""

    estimate: Estimate | None
    """None if the goal was out of reach, so that no further episodes were played."""
    solved: bool
    """Whether `stop.return` is reached, with 95 % confidence."""


def run(ctx: RoleContext) -> None:
    """Evaluate checkpoints until asked to stop, and report each result as "evaluation"."""
    config = ctx.config
    assert config is not None
    evaluator = Evaluator(ctx, config)
    try:
        _evaluate_until_stopped(ctx, config, evaluator)
        # Not after an error: a `close` that hangs would delay its report.
        evaluator.close_envs()
    finally:
        evaluator.videos.close()


def _evaluate_until_stopped(ctx: RoleContext, config: Config, evaluator: Evaluator) -> None:
    """The evaluator's loop: wait for a reason to evaluate a checkpoint, evaluate it, and so on.

    Reasons are a request of the learner, a new checkpoint `eval.every_s` after the last evaluation
    by time, and the end of the run, after which the loop returns.
    """
    if config.confirms_return:
        # A closing evaluation may be needed soon.
        evaluator.envs()
    evaluator.check_opponents()
    ctx.report("ready")

    every_s = config.eval.every_s
    next_evaluation_s = time.monotonic() + (every_s or 0.0)
    next_report_s = 0.0
    while not ctx.stopping():
        ctx.status.beat()
        ctx.status.phase = Phase.WAITING
        evaluator.videos.poll()

        run_ends = any(message["kind"] == "finish" for message in ctx.messages())
        if run_ends and not evaluator.prepare_last_evaluation():
            evaluator.finish_video()
            return

        is_due = (
            every_s is not None
            and time.monotonic() >= next_evaluation_s
            and evaluator.has_new_checkpoint()
        )
        if not is_due and not run_ends and not evaluator.has_request():
            if time.monotonic() >= next_report_s:
                ctx.report("evaluator", **evaluator.state())
                next_report_s = time.monotonic() + IDLE_S
            evaluator.play_members()
            ctx.ledger.switch(Part.WAIT)
            time.sleep(POLL_S)
            continue

        next_evaluation_s = time.monotonic() + (every_s or 0.0)
        next_report_s = 0.0
        ctx.status.phase = Phase.ENVIRONMENT
        # The time of the policy's decisions counts as that of the environments too.
        ctx.ledger.switch(Part.STEP)
        try:
            evaluator.evaluate_next(last=run_ends)
        except StoppedError:
            return
        except DamagedCheckpointError as error:
            # The learner will save another one.
            logger.info("%s: %s; the next checkpoint is evaluated", ctx.name, error.fault)
        finally:
            evaluator.release_checkpoint()

        if run_ends:
            evaluator.finish_video()
            return


class Evaluator:
    """Evaluates the checkpoints of a run, and saves the best one as `checkpoints/best`."""

    def __init__(self, ctx: RoleContext, config: Config) -> None:
        self._ctx = ctx
        self._config = config

        folder = ctx.run_dir / CHECKPOINTS
        self._last = folder / "last"
        self._best = folder / "best"
        self._held = folder / HELD
        self._requested = folder / REQUESTED

        # The conditions of an evaluation: results under others are not compared.
        self._conditions = {
            "env": config.env.identity(),
            "episodes": config.eval.episodes,
            "seed": SEED + config.run.seed,
            "max_episode_steps": config.eval.max_episode_steps,
            "ways": list(WAYS),
        }

        # The way to play `checkpoints/best`, with its estimate under these conditions. It is None
        # if there is none to beat, and unknown until `_find_best` has looked.
        self._best_choice: BestWay | None = None
        self._knows_best = False

        # Whether to continue with the checkpoint that a killed evaluator was evaluating.
        self._resumes = ctx.incarnation > 0
        if not self._resumes:
            for leftover in (self._requested, self._held):
                _remove(leftover)

        # The last checkpoint that was taken by time, and the trained steps of the last one of all.
        self._seen: _FileIdentity | None = None
        self._evaluated_steps = 0
        # How to play the weights of the last evaluation (`estimates.evidence`).
        self._play_by: dict[str, Any] | None = None

        self._schedule = EvaluationSchedule(config.eval)
        self._closings = 0  # closing evaluations so far
        self._opponents: list[OpponentSource] | None = None  # None: not looked for yet
        self._noted_missing = False
        self._envs: BatchedEnv | None = None
        self._env_count = 0  # the least number of these, which were made in whole games
        self._noted_cut = False
        self._tournament: Tournament | None = None
        self._next_games_s = 0.0  # when members play again (CLOCK_MONOTONIC)
        self.videos = BestVideos(
            ctx.run_dir, VIDEO_SEED + config.run.seed, enabled=config.eval.video
        )
        """Records a video of each new best."""

    def check_opponents(self) -> None:
        """Raise UserError if one of `eval.against` does not fit the environment.

        The policy before training fits, and may not be in the pool yet.
        """
        names = [name for name in self._config.eval.against or () if name != INITIAL]
        if not names:
            return

        from penstock.evaluation.opponents import find_opponent

        for name in names:
            find_opponent(name, self._config, self._ctx.run_dir).identity(self.envs())

    def has_new_checkpoint(self) -> bool:
        """Whether `checkpoints/last` has not been evaluated by time yet."""
        identity = _identity(self._last)
        return identity is not None and identity != self._seen

    def has_request(self) -> bool:
        """Whether the learner has written a checkpoint for an evaluation."""
        if checkpoint_format.exists(self._requested):
            return True
        return self._resumes and checkpoint_format.exists(self._held)

    def prepare_last_evaluation(self) -> bool:
        """Drop the learner's request, and decide whether to evaluate the run's last weights.

        They are not evaluated again if they were, nor if the run is shorter than the distance
        between two evaluations.

        Returns: whether `evaluate_next` should be called for them.
        """
        _remove(self._requested)
        self._resumes = False
        if not checkpoint_format.exists(self._last):
            return False

        try:
            steps = checkpoint_format.read_meta(self._last)["progress"]["trained_steps"]
        except DamagedCheckpointError as error:
            logger.info("the last weights are not evaluated: %s", error.fault)
            return False

        was_evaluated = self._play_by is not None
        is_long_enough = steps >= self._schedule.every > 0
        if steps == self._evaluated_steps or not (was_evaluated or is_long_enough):
            return False
        logger.info("the last weights are evaluated; Ctrl-C ends the run without that")
        return True

    def state(self) -> dict[str, Any]:
        """Returns the fields of the message "evaluator", which an idle evaluator sends.

        They are the distance between evaluations in steps, the trained steps of the last evaluated
        checkpoint, and how to play that.
        """
        return {"every": self._schedule.every, "done": self._evaluated_steps, "play": self._play_by}

    def evaluate_next(self, *, last: bool = False) -> None:
        """Evaluate the checkpoint of the learner's request, or else the newest, and report on it.

        It is skipped while the opponent `initial` is missing, since a disk is full for instance.

        Args:
            last: whether it is the run's last evaluation, which has as many episodes as fit.

        Raises:
            UserError: for the reasons for which an actor raises it.
            DamagedCheckpointError: if the checkpoint cannot be read.
            StoppedError: if the run ends meanwhile.
        """
        from penstock.evaluation.opponents import MissingInitialError

        self._take_checkpoint()
        meta = checkpoint_format.read_meta(self._held)
        self._evaluated_steps = meta["progress"]["trained_steps"]
        try:
            self._evaluate_held(meta["progress"], meta.get(REQUEST), last=last)
        except MissingInitialError as error:
            self._skip(meta.get(REQUEST), error)

    def _skip(self, request: str | None, error: MissingInitialError) -> None:
        """Note, once, that there are no evaluations without an opponent."""
        if not self._noted_missing:
            self._noted_missing = True
            logger.info("checkpoints are not evaluated: %s", error)
        if request == CLOSING:
            steps = self._evaluated_steps
            self._ctx.report("verdict", trained_steps=steps, solved=False, seconds=0.0)

    def _evaluate_held(
        self, progress: Mapping[str, Any], request: str | None, *, last: bool
    ) -> None:
        """Evaluate the checkpoint in `_held` if it is due, and report on it.

        Arguments and errors are those of `_evaluate` and `evaluate_next`.
        """
        steps = progress["trained_steps"]

        def probed_cost() -> PairCost:
            envs = min(PROBED_ENVS, self._config.eval.episodes) if request == FIRST else None
            return self._estimated_cost(self.envs(envs), progress["lengths"])

        episodes = self._schedule.episodes(request, progress, probed_cost)
        if last:
            episodes = self._schedule.last_episodes()
        if episodes is None:
            return

        started_s = time.monotonic()
        started_cpu_s = time.process_time()
        result = self._evaluate(progress, request, episodes)
        self._ctx.report("evaluation", **result)
        wall_s = time.monotonic() - started_s
        cpu_s = time.process_time() - started_cpu_s

        if request == CLOSING:
            solved = result["closing"]["solved"]
            self._ctx.report("verdict", trained_steps=steps, solved=solved, seconds=wall_s)
        cost = PairCost(cpu_s=cpu_s / episodes, wall_s=wall_s / episodes)
        self._schedule.on_evaluated(request, progress, cost)

    def _take_checkpoint(self) -> None:
        """Put the checkpoint that is next into the folder `_held`, where nobody replaces it."""
        if checkpoint_format.exists(self._requested):
            self._held.mkdir(mode=0o700, exist_ok=True)
            (self._requested / FILE).replace(self._held / FILE)
            with suppress(OSError):
                self._requested.rmdir()
        elif not (self._resumes and checkpoint_format.exists(self._held)):
            self._hold_newest()
        self._resumes = False

    def _evaluate(
        self, progress: Mapping[str, Any], request: str | None, episodes: int
    ) -> dict[str, Any]:
        """Evaluate the checkpoint in `_held`, and save it as the best if it is better.

        Args:
            progress: the metadata "progress" of the checkpoint, such as its trained steps.
            request: the kind of the learner's request, None for an evaluation by time.
            episodes: how many to play in each way.

        Returns: the fields of the message "evaluation".
        """
        from penstock.evaluation.evaluate import by_opponent, summary

        started_s = time.monotonic()
        steps = progress["trained_steps"]
        self._find_opponents(self.envs(episodes))
        if not self._knows_best:
            self._find_best(progress, episodes)

        # Play both ways, and the better one further if the return has to be confirmed.
        played = self._play_both(self._held, episodes)
        estimates = {way: estimate(returns_of(played[way])) for way in WAYS}
        spread = spread_of(progress.get("returns", ()))
        better = better_way(estimates, spread)
        closing_result = _ClosingResult(None, solved=False)
        if request == CLOSING:
            closing_result = self._confirm_return(estimates, better.way, steps)

        # Decide by all episodes, with those of the closing evaluation, whether it is a new best.
        all_estimates = dict(estimates)
        if closing_result.estimate is not None:
            all_estimates[better.way] = pooled(estimates[better.way], closing_result.estimate)
        choice = better_way(all_estimates, spread)
        self._play_by = evidence(all_estimates, choice.way, steps, closing_result.estimate)
        is_best = False
        if self._is_best(choice, closing_result.solved):
            is_best = self._save_best(self._held, choice, self._play_by)

        # Report the figures of the better way, and the estimates of both.
        better_episodes = played[better.way]
        returns = tuple(episode.episode_return for episode in better_episodes)
        lengths = tuple(episode.length for episode in better_episodes)
        way_figures: dict[str, Any] = {
            way: estimates[way]._asdict() | {"lower": lower_end(estimates[way], spread)}
            for way in WAYS
        }
        best_choice = self._best_choice
        result: dict[str, Any] = {
            **{name: progress[name] for name in ("time_s", "trained_steps", "learner_steps")},
            "episodes": len(returns),
            "play": better.way,
            **way_figures,
            "return": summary(returns),
            "length": summary(lengths),
            "cut": sum(episode.cut for episode in better_episodes),
            "best": is_best,
            "best_return_mean": None if best_choice is None else best_choice.estimate.mean,
            "seconds": time.monotonic() - started_s,
            "every_steps": self._schedule.every or None,
            "env": self._conditions["env"],
        }
        if self._opponents:
            against = by_opponent(better_episodes)
            win_rates = [each["win_rate"]["mean"] for each in against if each["win_rate"]]
            result["against"] = against
            result["win_rate"] = fmean(win_rates) if win_rates else None

        if is_best:
            self.videos.request()
        if request == CLOSING:
            figures = None if closing_result.estimate is None else closing_result.estimate._asdict()
            result["closing"] = {
                "goal": self._config.stop.return_,
                "solved": closing_result.solved,
                "estimate": figures,
            }
        return result

    def _is_best(self, choice: BestWay, solved: bool) -> bool:
        """Whether evaluated weights replace the best ones.

        They do if the lower end of their mean is higher. Weights that are confirmed to reach
        `stop.return` (``solved``) also replace a best that is equal, or that may not reach it.
        Opponents that always lose do not tell weights apart: there the newer ones replace a best
        with the same mean, as they are trained further.
        """
        best = self._best_choice
        goal = self._config.stop.return_
        if best is None or choice.beats(best):
            return True
        as_many_episodes = choice.estimate.episodes >= best.estimate.episodes
        as_good = choice.estimate.mean >= best.estimate.mean
        if self._opponents and as_many_episodes and as_good:
            return True

        is_equal = choice.lower == best.lower
        return solved and goal is not None and (is_equal or not reaches(best.estimate, goal))

    def _confirm_return(
        self, estimates: Mapping[Way, Estimate], way: Way, steps: int
    ) -> _ClosingResult:
        """Decide by further episodes whether the weights in `_held` reach `stop.return`.

        They are not played if the goal is out of reach by the first ones.

        Args:
            estimates: the estimate of each way, by the first episodes.
            way: the better of the two, in which the further episodes are played.
            steps: agent steps that the weights were trained on, for the note to the user.
        """
        from penstock.envs import make
        from penstock.envs.make import FirstIndex
        from penstock.evaluation.evaluate import ENVS

        config = self._config
        goal = config.stop.return_
        episodes = config.stop.confirm_episodes
        assert goal is not None
        self._closings += 1
        if out_of_reach(estimates[way], goal):
            intervals = ", ".join(f"{each} {with_interval(estimates[each])}" for each in WAYS)
            logger.info(
                "stop.return %s was reached in %s, but not in evaluation (%s, over %d episodes "
                "each, at %s steps): the upper end of the better interval (95 %%) is below it; "
                "training continues",
                *(number(goal), self._reached_in(), intervals),
                *(estimates[way].episodes, count(steps)),
            )
            return _ClosingResult(None, solved=False)

        # The environments of `_envs` are open too, so these have indices of their own.
        envs = make(
            config.env,
            min(self._share_of(episodes), max(ENVS, config.actor_envs)),
            whole_games=True,
            first=FirstIndex.EVALUATOR + ENVS,
            beat=self._ctx.status.beat,
        )
        seed = CLOSING_SEED + config.run.seed + self._closings * CLOSING_SEEDS
        with closing(envs):
            further = estimate(returns_of(self._play(self._held, envs, way, episodes, seed)))

        solved = reaches(further, goal)
        _log_confirmation(
            further, way, goal=goal, solved=solved, steps=steps, reached_in=self._reached_in()
        )
        return _ClosingResult(further, solved)

    def _estimated_cost(self, envs: BatchedEnv, lengths: Sequence[int]) -> PairCost:
        """Estimate the cost of a pair of episodes, one in each way, by playing `PROBED` steps.

        Args:
            envs: the environments to step, with the decisions of the policy in `_held`.
            lengths: agent steps of the latest episodes in training; the pair is taken to be as
                long as their mean.
        """
        import numpy as np

        from penstock.evaluation.opponents import pairings_of
        from penstock.evaluation.policy_source import of_checkpoint

        source = of_checkpoint(self._config, self._held).read_once()
        source.weights(envs)
        opponents = self._find_opponents(envs)
        seats = self._config.league.seats
        pairings = pairings_of(envs, opponents, seats=seats, seed=SEED)

        # Seconds for each step of a row, of all pairings together.
        wall_s = 0.0
        cpu_s = 0.0
        for _, rows in pairings:
            policy = source.policy(envs, SEED, rows.count)
            space = rows.info.observation_space
            obs = np.empty((rows.count, *space.shape), space.dtype)
            self._ctx.status.beat()
            rows.reset_into(SEED, obs)

            # The first step is not measured, since it includes imports.
            rows.step_into(policy.greedy(obs), obs)
            started_s = time.monotonic()
            started_cpu_s = time.process_time()
            for _ in range(PROBED):
                self._ctx.status.beat()
                rows.step_into(policy.greedy(obs), obs)
            wall_s += (time.monotonic() - started_s) / (PROBED * rows.count)
            cpu_s += (time.process_time() - started_cpu_s) / (PROBED * rows.count)

        episode_steps = min(sum(lengths) / len(lengths), self._config.eval.max_episode_steps)
        steps = len(WAYS) * episode_steps / len(pairings)
        return PairCost(cpu_s=steps * cpu_s, wall_s=steps * wall_s)

    def release_checkpoint(self) -> None:
        """Remove the checkpoint that was evaluated from `_held`."""
        _remove(self._held)

    def play_members(self) -> None:
        """Play some games between two members of the pool, if that is due.

        It is if a pair has too few, and `eval.share` leaves time for them. It returns early if the
        run ends meanwhile. A fault of the pool, such as a full disk, is noted, and ends nothing.
        """
        if time.monotonic() < self._next_games_s:
            return
        started_cpu_s = time.process_time()
        pause_s = PAIRS_S
        try:
            if self._play_pair():
                pause_s = 0.0
        except StoppedError:
            return
        except (UserError, OSError) as error:
            logger.info("members of the pool do not play for %.0f s: %s", FAULT_S, error)
            pause_s = FAULT_S

        # The pause is as long as the share of a core demands, also if the search has found no pair.
        share = _share_of_members(self._config)
        if share is not None:
            pause_s = max(pause_s, (time.process_time() - started_cpu_s) / share)
        self._next_games_s = time.monotonic() + pause_s

    def _play_pair(self) -> bool:
        """Play games of the pair that has the fewest; returns whether there are results.

        Raises:
            StoppedError: if the run ends meanwhile.
            UserError: if the pool or the environment cannot be used.
            OSError: if the results cannot be written.
        """
        if self._tournament is None:
            pool = PolicyPool(pool_folder(self._config, self._ctx.run_dir))
            if len(pool.members()) < 2:
                return False

            from penstock.envs.make import FirstIndex
            from penstock.evaluation.tournament import Tournament

            self._tournament = Tournament(
                pool,
                {self._config.league.name: self._config},
                first=FirstIndex.TOURNAMENT,
                beat=self._ctx.status.beat,
            )

        from penstock.evaluation.tournament import GAMES_TOGETHER

        self._ctx.status.phase = Phase.ENVIRONMENT
        self._ctx.ledger.switch(Part.STEP)
        pair = self._tournament.next_pair(MEMBER_GAMES)
        if pair is None:
            return False
        return self._tournament.play(pair, GAMES_TOGETHER, self._choose("sampled"))

    def close_envs(self) -> None:
        """Close the environments of the evaluations."""
        if self._envs is not None:
            self._envs.close()
        if self._tournament is not None:
            self._tournament.close()

    def finish_video(self) -> None:
        """Give the video of the last best some seconds to be recorded, after the run has ended."""

        def beat() -> bool:
            self._ctx.status.beat()
            return self._ctx.stopping()

        self.videos.finish(beat)

    def _find_best(self, progress: Mapping[str, Any], episodes: int) -> None:
        """Find out how good `checkpoints/best` is under the present conditions, if there is one.

        Its stored result is taken if it was evaluated under the same conditions; else it is
        evaluated. A best that the learner has found since the run began or was resumed (it has the
        generation of ``progress``) need not be beaten.
        """
        from penstock.algos.samples import network_shape

        config = self._config
        layout = network_shape(config, self.envs().info).layout
        file = _identity(self._best)
        meta = usable_best_meta(self._best, layout, config.env)
        if meta is None:
            self._knows_best = True
            return

        evaluation = meta.get(EVALUATION, {})
        best_progress = meta.get("progress", {})
        is_of_this_run = best_progress.get("generation") == progress.get("generation")
        has_same_conditions = {**evaluation, **self._conditions} == evaluation
        if "mean" in evaluation and has_same_conditions:
            self._best_choice = _stored_choice(evaluation, meta.get(PLAY))
        elif evaluation or not is_of_this_run:
            is_present = self._evaluate_best(best_progress, episodes, file)
            if not is_present:
                # The learner has replaced it, so the new one is looked at.
                return self._find_best(progress, episodes)
        self._knows_best = True

    def _evaluate_best(
        self, progress: Mapping[str, Any], episodes: int, file: _FileIdentity | None
    ) -> bool:
        """Evaluate `checkpoints/best`, which has this ``progress``, and store the result with it.

        Returns: False if the learner has replaced the ``file`` meanwhile; the result then does not
        count.
        """
        played = self._play_both(self._best, episodes)
        estimates = {way: estimate(returns_of(played[way])) for way in WAYS}
        choice = better_way(estimates, spread_of(progress.get("returns", ())))
        play_by = evidence(estimates, choice.way, progress.get("trained_steps", 0))

        is_saved = self._save_best(self._best, choice, play_by, file=file)
        if not is_saved and _identity(self._best) != file:
            return False
        self._best_choice = choice
        mean = number(choice.estimate.mean)
        logger.info("%s was evaluated first: mean return %s", self._best, mean)
        return True

    def _save_best(
        self,
        folder: Path,
        choice: BestWay,
        play: Mapping[str, Any],
        *,
        file: _FileIdentity | None = None,
    ) -> bool:
        """Save the checkpoint in ``folder`` as the best, with its result.

        Args:
            folder: of the checkpoint.
            choice: the estimate by which it was chosen.
            play: how to play it (`estimates.evidence`).
            file: if given, nothing is saved unless ``folder`` still has this file.

        Returns: whether it was saved. It is not if the disk is full.
        """
        checkpoint = checkpoint_format.load(folder)
        mean, se, episodes = choice.estimate
        result = {
            "mean": mean,
            "se": se,
            "played": episodes,
            "lower": choice.lower,
            "informed": choice.informed,
        }
        meta = {**checkpoint.meta, PLAY: play, EVALUATION: self._conditions | result}
        meta.pop(REQUEST, None)

        try:
            with best_locked(self._best, wait=True):
                if file is not None and _identity(folder) != file:
                    return False
                checkpoint_format.save(self._best, replace(checkpoint, meta=meta), TEMPORARY)
        except UserError as error:
            # A disk that is full now need not be so for ever.
            logger.info("%s stays as it was: %s", self._best, error)
            return False
        self._best_choice = choice
        return True

    def _hold_newest(self) -> None:
        """Link `checkpoints/last` into `_held`, again if the learner replaces it meanwhile."""
        identity = None
        while identity is None or identity != self._seen:
            self._seen = _identity(self._last)
            _hold(self._last, self._held, FILE)
            identity = _identity(self._last)

    def envs(self, episodes: int | None = None) -> BatchedEnv:
        """Returns the environments of an evaluation of so many ``episodes``.

        They are made at the first call, with the imports that they need. They are made anew for
        another number of episodes, since environments without an episode would be stepped as well.
        None takes those that there are.
        """
        from penstock.envs import make
        from penstock.envs.make import FirstIndex
        from penstock.evaluation.evaluate import ENVS

        env_count = min(self._share_of(episodes or self._config.eval.episodes), ENVS)
        if self._envs is not None and episodes is not None and self._env_count != env_count:
            self._envs.close()
            self._envs = None
        if self._envs is None:
            self._env_count = env_count
            self._envs = make(
                self._config.env,
                env_count,
                whole_games=True,
                first=FirstIndex.EVALUATOR,
                beat=self._ctx.status.beat,
            )
        return self._envs

    def _share_of(self, episodes: int) -> int:
        """Returns the episodes against each opponent."""
        from penstock.evaluation.evaluate import share_of

        return share_of(episodes, max(1, len(self._config.eval.against or ())))

    def _find_opponents(self, envs: BatchedEnv) -> list[OpponentSource]:
        """Returns the opponents of evaluations in ``envs``; none in a game of one side.

        They stay the same until the process ends, and are part of the conditions.

        Raises:
            MissingInitialError: if the pool has no policy of before training.
            UserError: if one does not fit the environment.
        """
        if self._opponents is not None:
            return self._opponents

        opponents = []
        if envs.info.seating.has_opponents:
            from penstock.evaluation.opponents import find_opponent

            for name in self._config.eval.against or (INITIAL,):
                opponents.append(find_opponent(name, self._config, self._ctx.run_dir))
            self._conditions["against"] = [opponent.identity(envs) for opponent in opponents]
        self._opponents = opponents
        return opponents

    def _reached_in(self) -> str:
        """Returns where a return was found that is to be confirmed, in words."""
        return "an evaluation" if self._opponents else "training"

    def _play_both(self, folder: Path, episodes: int) -> dict[Way, list[Episode]]:
        """Play the checkpoint in ``folder`` for ``episodes`` in each way, with the same seeds."""
        envs = self.envs(episodes)
        seed = SEED + self._config.run.seed
        return {way: self._play(folder, envs, way, episodes, seed) for way in WAYS}

    def _play(
        self, folder: Path, envs: BatchedEnv, way: Way, episodes: int, seed: int
    ) -> list[Episode]:
        """Play the checkpoint in ``folder`` for ``episodes``, in one way.

        Raises StoppedError if the run ends meanwhile.
        """
        from penstock.evaluation.evaluate import play_policy, were_cut
        from penstock.evaluation.policy_source import of_checkpoint

        max_steps = self._config.eval.max_episode_steps

        played = play_policy(
            envs,
            of_checkpoint(self._config, folder),
            self._find_opponents(envs),
            episodes,
            choose=self._choose(way),
            seed=seed,
            max_steps=max_steps,
        )

        # With produced steps, a later crash of this process does not count as one without progress.
        self._ctx.status.produced_steps += sum(episode.length for episode in played)
        cut = sum(episode.cut for episode in played)
        if cut and not self._noted_cut:
            text = were_cut(cut, len(played), max_steps, option="eval.max_episode_steps")
            logger.info("in an evaluation %s", text)
            self._noted_cut = True
        return played

    def _choose(self, way: Way) -> Callable[[Policy], Choose]:
        """Returns what plays a policy in one ``way``, and raises StoppedError if the run ends."""

        def choose(policy: Policy) -> Choose:
            act = policy.greedy if way == "greedy" else policy.act

            def choose_action(obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
                self._ctx.status.beat()
                if self._ctx.stopping():
                    raise StoppedError
                return act(obs)

            return choose_action

        return choose


def _share_of_members(config: Config) -> float | None:
    """Returns the share of a core for games between members of the pool; None: no limit."""
    share = config.eval.share
    if share is None or config.league.draw != "nash":
        return share
    return max(share, NASH_SHARE)


def _log_confirmation(
    further: Estimate, way: Way, *, goal: float, solved: bool, steps: int, reached_in: str
) -> None:
    """Give the user the result of the ``further`` episodes of a closing evaluation.

    ``reached_in`` says where the return was found, in words.
    """
    if solved:
        finding = f"{with_interval(further)} (95 %)"
        text = "stop.return %s is confirmed by evaluation: %s, %s, over %d episodes at %s steps"
    else:
        finding = falls_short(further.mean, further.upper - further.mean, goal)
        text = (
            f"stop.return %s was reached in {reached_in}, but evaluation does not confirm it: %s, "
            "%s, over %d episodes at %s steps; training continues"
        )
    logger.info(text, number(goal), way, finding, further.episodes, count(steps))


def _stored_choice(evaluation: Mapping[str, Any], play: object) -> BestWay:
    """Returns what a best checkpoint was chosen by, from the metadata of its file.

    Earlier versions stored the mean, its error and `eval.episodes` only.
    """
    stored = Estimate(
        mean=evaluation["mean"],
        se=evaluation["se"],
        episodes=evaluation.get("played", evaluation["episodes"]),
    )
    return BestWay(
        way=way_of(play),
        estimate=stored,
        lower=evaluation.get("lower", stored.lower),
        informed=evaluation.get("informed", True),
    )


def returns_of(played: list[Episode]) -> list[float]:
    """Returns the raw return of each episode; of a game of several seats the mean of its seats.

    The returns of seats that play together are alike, so an interval must not count them as
    independent.
    """
    from penstock.evaluation.evaluate import games_of

    return [fmean(each.episode_return for each in game) for game in games_of(played)]


def with_interval(value: Estimate) -> str:
    """Returns the mean with half its 95 % confidence interval, as text."""
    return f"{number(value.mean)} ± {number(value.upper - value.mean)}"


def _identity(folder: Path) -> _FileIdentity | None:
    """Returns the identity of the checkpoint's file in ``folder``; None if there is none."""
    try:
        [status] = [path.stat() for path in folder.glob("*.safetensors")]
    except (OSError, ValueError):
        return None
    return _FileIdentity(status.st_ino, status.st_mtime_ns)


def _remove(folder: Path) -> None:
    """Remove a checkpoint that was moved or linked into ``folder``."""
    with suppress(OSError):
        (folder / FILE).unlink(missing_ok=True)
        folder.rmdir()


def _hold(source: Path, held: Path, name: str) -> None:
    """Link the file ``name`` of ``source`` into ``held``, where it outlives its replacement."""
    held.mkdir(mode=0o700, exist_ok=True)
    path = held / name
    path.unlink(missing_ok=True)
    try:
        os.link(source / name, path)
    except OSError:
        # A file system without hard links.
        shutil.copyfile(source / name, path)
