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
with other seeds, in the better of the two ways only.

Which checkpoint is the best: that is decided by all episodes of each checkpoint
(`evaluation.estimates.choose`). The result of the best is stored in its own file, so that the two
are replaced together or not at all. A best checkpoint without such a result, because it was found
in training or evaluated with other seeds, is evaluated first.

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
from typing import TYPE_CHECKING, Any

from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.formatting import count, falls_short, number
from penstock.core.notes import note_logger
from penstock.core.role import RoleContext
from penstock.evaluation.best_videos import BestVideos
from penstock.evaluation.estimates import (
    WAYS,
    BestWay,
    Estimate,
    Way,
    choose,
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
    best_meta,
)
from penstock.learner.evaluation_requests import CLOSING, FIRST
from penstock.profiling.ledger import Part
from penstock.profiling.status import Phase

logger = note_logger(__name__)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from penstock.envs import BatchedEnv
    from penstock.evaluation.evaluate import Episode

_FileIdentity = tuple[int, int]

CHECKPOINTS = "checkpoints"
HELD = ".evaluated"
TEMPORARY = f".{FILE}.evaluated.tmp"  # the learner may save `checkpoints/best` at the same time
SEED = 1_100_000  # apart from the games of `penstock eval`, by default
CLOSING_SEED = 2_100_000  # apart from both
VIDEO_SEED = 3_100_000  # apart from all of these
CLOSING_SEEDS = 10_000  # between two closing evaluations, which play different games
POLL_S = 0.05
IDLE_S = 1.0  # between two reports that it is idle
PROBED = 32  # steps by which the cost of a step is estimated
PROBED_ENVS = 4  # where it is high, for a first evaluation with few episodes


class StoppedError(Exception):
    """The run ends in the middle of an evaluation."""


def run(ctx: RoleContext) -> None:
    """Evaluate checkpoints until asked to stop, and report each result as "evaluation"."""
    config = ctx.config
    assert config is not None
    evaluator = Evaluator(ctx, config)
    try:
        _work(ctx, config, evaluator)
        evaluator.close_game()  # not after an error, which a `close` that hangs would hold up
    finally:
        evaluator.videos.close()


def _work(ctx: RoleContext, config: Config, evaluator: Evaluator) -> None:
    """The evaluator's loop: wait for a reason to evaluate a checkpoint, evaluate it, and so on.

    Reasons are a request of the learner, a new checkpoint `eval.every_s` after the last evaluation
    by time, and the end of the run, after which the loop returns.
    """
    if config.confirms_return:  # a closing evaluation may be needed soon
        evaluator.game()
    ctx.report("ready")

    every_s = config.eval.every_s
    due_s = time.monotonic() + (every_s or 0.0)
    idle_s = 0.0
    while not ctx.stopping():
        ctx.status.beat()
        ctx.status.phase = Phase.WAITING
        evaluator.videos.poll()
        finishes = any(message["kind"] == "finish" for message in ctx.messages())
        if finishes and not evaluator.take_last():
            evaluator.finish_video()
            return
        by_time = every_s is not None and time.monotonic() >= due_s and evaluator.has_news()
        if not by_time and not finishes and not evaluator.has_request():
            if time.monotonic() >= idle_s:
                ctx.report("evaluator", **evaluator.state())
                idle_s = time.monotonic() + IDLE_S
            ctx.ledger.switch(Part.WAIT)
            time.sleep(POLL_S)
            continue
        due_s, idle_s = time.monotonic() + (every_s or 0.0), 0.0
        ctx.status.phase = Phase.ENVIRONMENT
        # The time of the policy's decisions counts as that of the environments too.
        ctx.ledger.switch(Part.STEP)
        try:
            evaluator.work(last=finishes)
        except StoppedError:
            return
        except DamagedCheckpointError as error:
            # The learner will save another one.
            logger.info("%s: %s; the next checkpoint is evaluated", ctx.name, error.fault)
        finally:
            evaluator.let_go()
        if finishes:
            evaluator.finish_video()
            return


class Evaluator:
    """Evaluates the checkpoints of a run, and saves the best one as `checkpoints/best`."""

    def __init__(self, ctx: RoleContext, config: Config) -> None:
        self._ctx = ctx
        self._config = config

        folder = ctx.run_dir / CHECKPOINTS
        self._last, self._best, self._held = (folder / name for name in ("last", "best", HELD))
        self._how = {
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
        self._noted_cut = False
        self._requested = folder / REQUESTED
        self._seen: _FileIdentity | None = None  # the last that was evaluated by time
        self._resumes = ctx.incarnation > 0  # at what a killed evaluator was evaluating
        if not self._resumes:  # of an earlier run in this folder
            for each in (self._requested, self._held):
                _remove(each)
        self._done = 0  # trained steps of the last checkpoint that was taken
        self._play_by: dict[str, Any] | None = None  # evidence of the last evaluation
        self._schedule = EvaluationSchedule(config.eval)
        self._closings = 0
        self._game: BatchedEnv | None = None
        seed = VIDEO_SEED + config.run.seed
        self.videos = BestVideos(ctx.run_dir, seed, wanted=config.eval.video)
        """Of each new best."""

    def has_news(self) -> bool:
        """Whether `checkpoints/last` has not been evaluated by time yet."""
        found = _identity(self._last)
        return found is not None and found != self._seen

    def has_request(self) -> bool:
        """Whether the learner has written a checkpoint for an evaluation."""
        there = checkpoint_format.exists
        return there(self._requested) or (self._resumes and there(self._held))

    def take_last(self) -> bool:
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
        wanted = self._play_by is not None or steps >= self._schedule.every > 0
        if steps == self._done or not wanted:
            return False
        logger.info("the last weights are evaluated; Ctrl-C ends the run without that")
        return True

    def state(self) -> dict[str, Any]:
        """The fields of the message "evaluator", which an idle evaluator sends."""
        return {"every": self._schedule.every, "done": self._done, "play": self._play_by}

    def work(self, *, last: bool = False) -> None:
        """Evaluate the checkpoint of the learner's request, or else the newest, and report on it.

        Args:
            last: whether it is the run's last evaluation, which has as many episodes as fit.

        Raises:
            UserError: for the reasons for which an actor raises it.
            DamagedCheckpointError: if the checkpoint cannot be read.
            StoppedError: if the run ends meanwhile.
        """
        if checkpoint_format.exists(self._requested):
            self._held.mkdir(mode=0o700, exist_ok=True)
            (self._requested / FILE).replace(self._held / FILE)
            with suppress(OSError):
                self._requested.rmdir()
        elif not (self._resumes and checkpoint_format.exists(self._held)):
            self._hold_newest()
        self._resumes = False
        meta = checkpoint_format.read_meta(self._held)
        request = meta.get(REQUEST)
        self._done = steps = meta["progress"]["trained_steps"]
        progress = meta["progress"]

        def cost() -> PairCost:
            envs = min(PROBED_ENVS, self._config.eval.episodes) if request == FIRST else None
            return self._estimated_cost(self.game(envs), progress["lengths"])

        episodes = self._schedule.episodes(request, progress, cost)
        if last:
            episodes = self._schedule.last_episodes()
        if episodes is None:
            return

        began_s, cpu_s = time.monotonic(), time.process_time()
        result = self._evaluate(progress, request, episodes)
        self._ctx.report("evaluation", **result)
        wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
        if request == CLOSING:
            solved = result["closing"]["solved"]
            self._ctx.report("verdict", trained_steps=steps, solved=solved, seconds=wall_s)
        self._schedule.took(request, progress, PairCost(cpu_s / episodes, wall_s / episodes))

    def _evaluate(
        self, progress: Mapping[str, Any], request: str | None, episodes: int
    ) -> dict[str, Any]:
        """Evaluate the checkpoint in `_held`, and save it as the best if it is better.

        Args:
            progress: that of the checkpoint.
            request: the learner's, None for an evaluation by time.
            episodes: how many to play in each way.

        Returns: the fields of the message "evaluation".
        """
        from penstock.evaluation.evaluate import summary

        began_s, steps = time.monotonic(), progress["trained_steps"]
        if not self._knows_best:
            self._find_best(progress, episodes)

        played = self._play_both(self._held, episodes)
        found = {way: estimate(returns_of(played[way])) for way in WAYS}
        spread = spread_of(progress.get("returns", ()))
        better = choose(found, spread)
        further = self._close(found, better.way, steps) if request == CLOSING else None
        closing_estimate, solved = further or (None, False)

        by_all = dict(found)
        if closing_estimate is not None:
            by_all[better.way] = pooled(found[better.way], closing_estimate)
        choice = choose(by_all, spread)
        self._play_by = evidence(by_all, choice.way, steps, closing_estimate)
        best = self._is_best(choice, solved) and self._keep(self._held, choice, self._play_by)

        returns, lengths, cut = zip(*played[better.way], strict=True)
        ways: dict[str, Any] = {
            way: found[way]._asdict() | {"lower": lower_end(found[way], spread)} for way in WAYS
        }
        result: dict[str, Any] = {
            **{name: progress[name] for name in ("time_s", "trained_steps", "learner_steps")},
            "episodes": len(returns),
            "play": better.way,
            **ways,
            "return": summary(returns),
            "length": summary(lengths),
            "cut": sum(cut),
            "best": best,
            "best_return_mean": self._best_choice and self._best_choice.found.mean,
            "seconds": time.monotonic() - began_s,
            "every_steps": self._schedule.every or None,
            "env": self._how["env"],
        }
        if best:
            self.videos.request()
        if request == CLOSING:
            goal = self._config.stop.return_
            about = None if closing_estimate is None else closing_estimate._asdict()
            result["closing"] = {"goal": goal, "solved": solved, "estimate": about}
        return result

    def _is_best(self, choice: BestWay, solved: bool) -> bool:
        """Whether evaluated weights replace the best ones.

        They do if the lower end of their mean is higher. Weights that are confirmed to reach
        `stop.return` (``solved``) also replace a best that is equal, or that may not reach it.
        """
        best, goal = self._best_choice, self._config.stop.return_
        if best is None or choice.beats(best):
            return True

        is_equal = choice.lower == best.lower
        return solved and goal is not None and (is_equal or not reaches(best.found, goal))

    def _close(
        self, found: Mapping[Way, Estimate], way: Way, steps: int
    ) -> tuple[Estimate | None, bool]:
        """Decide by further episodes whether the weights in `_held` reach `stop.return`.

        They are not played if the goal is out of reach by the first ones.

        Args:
            estimates: those of the first episodes, in each way.
            way: the better of the two, in which the further episodes are played.
            steps: agent steps that the weights were trained on, for the note to the user.
        """
        from penstock.envs import make
        from penstock.envs.make import FirstIndex
        from penstock.evaluation.evaluate import ENVS

        config = self._config
        goal, episodes = config.stop.return_, config.stop.confirm_episodes
        assert goal is not None
        self._closings += 1
        if out_of_reach(found[way], goal):
            shown = ", ".join(f"{each} {describe(found[each])}" for each in WAYS)
            logger.info(
                "stop.return %s was reached in training, but not in evaluation (%s, over %d "
                "episodes each, at %s steps): the upper end of the better interval (95 %%) is "
                "below it; training continues",
                *(number(goal), shown, found[way].episodes, count(steps)),
            )
            return None, False
        seed = CLOSING_SEED + config.run.seed + self._closings * CLOSING_SEEDS
        envs, beat = min(episodes, max(ENVS, config.actor_envs)), self._ctx.status.beat
        first = FirstIndex.EVALUATOR + ENVS  # those of `self._game` are open too
        with closing(make(config.env, envs, first=first, beat=beat)) as game:
            further = estimate(returns_of(self._play(self._held, game, way, episodes, seed)))
        if solved := reaches(further, goal):
            shown = f"{describe(further)} (95 %)"
            text = "stop.return %s is confirmed by evaluation: %s, %s, over %d episodes at %s steps"
        else:
            shown = falls_short(further.mean, further.upper - further.mean, goal)
            text = (
                "stop.return %s was reached in training, but evaluation does not confirm it: %s, "
                "%s, over %d episodes at %s steps; training continues"
            )
        logger.info(text, number(goal), way, shown, further.episodes, count(steps))
        return further, solved

    def _estimated_cost(self, game: BatchedEnv, lengths: Sequence[int]) -> PairCost:
        """Estimate the cost of a pair of episodes, one in each way, by playing `PROBED` steps.

        Args:
            envs: the environments to step, with the decisions of the policy in `_held`.
            lengths: agent steps of the latest episodes in training; the pair is taken to be as
                long as their mean.
        """
        import numpy as np

        from penstock.evaluation.evaluate import of_checkpoint

        space = game.info.observation_space
        obs = np.empty((game.count, *space.shape), space.dtype)
        policy = of_checkpoint(self._config, self._held).policy(game, SEED)
        self._ctx.status.beat()
        game.reset_into(SEED, obs)
        for i in range(PROBED + 1):
            if i == 1:  # the first includes imports
                began_s, cpu_s = time.monotonic(), time.process_time()
            self._ctx.status.beat()
            game.step_into(policy.greedy(obs), obs)
        wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s

        episode_steps = min(sum(lengths) / len(lengths), self._config.eval.max_episode_steps)
        probes = len(WAYS) * episode_steps / (PROBED * game.count)
        return PairCost(probes * cpu_s, probes * wall_s)

    def let_go(self) -> None:
        """Remove the checkpoint that was evaluated from `_held`."""
        _remove(self._held)

    def close_game(self) -> None:
        """Close the environments of the evaluations."""
        if self._game is not None:
            self._game.close()

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
        layout = network_shape(config, self.game().info).layout
        file = _identity(self._best)
        meta = best_meta(self._best, layout, config.env)
        if meta is not None:
            known = meta.get(EVALUATION, {})
            of_best = meta.get("progress", {})
            new = not known and of_best.get("generation") == progress.get("generation")
            if "mean" in known and {**known, **self._how} == known:
                self._best_choice = _known_choice(known, meta.get(PLAY))
            elif not new:
                played = self._play_both(self._best, episodes)
                found = {way: estimate(returns_of(played[way])) for way in WAYS}
                choice = choose(found, spread_of(of_best.get("returns", ())))
                play_by = evidence(found, choice.way, of_best.get("trained_steps", 0))
                kept = self._keep(self._best, choice, play_by, file=file)
                if not kept and _identity(self._best) != file:
                    return self._find_best(progress, episodes)  # the learner has replaced it
                self._best_choice = choice
                mean = number(choice.found.mean)
                logger.info("%s was evaluated first: mean return %s", self._best, mean)
        self._knows_best = True

    def _keep(
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
        found = checkpoint_format.load(folder)
        meta = {**found.meta, PLAY: play}
        mean, se, played = choice.found
        figures = {"mean": mean, "se": se, "played": played}
        figures |= {"lower": choice.lower, "informed": choice.informed}
        meta[EVALUATION] = self._how | figures
        meta.pop(REQUEST, None)

        try:
            with best_locked(self._best, wait=True):
                if file is not None and _identity(folder) != file:
                    return False
                checkpoint_format.save(self._best, replace(found, meta=meta), TEMPORARY)
        except UserError as error:  # a disk that is full now need not be so for ever
            logger.info("%s stays as it was: %s", self._best, error)
            return False
        self._best_choice = choice
        return True

    def _hold_newest(self) -> None:
        """Link `checkpoints/last` into `_held`, again if the learner replaces it meanwhile."""
        found = None
        while found is None or found != self._seen:  # it may be replaced meanwhile
            self._seen = _identity(self._last)
            _hold(self._last, self._held, FILE)
            found = _identity(self._last)

    def game(self, episodes: int | None = None) -> BatchedEnv:
        """Returns the environments of an evaluation of so many ``episodes``.

        They are made at the first call, with the imports that they need. They are made anew for
        another number of episodes, since environments without an episode would be stepped as well.
        None takes those that there are.
        """
        from penstock.envs import make
        from penstock.envs.make import FirstIndex
        from penstock.evaluation.evaluate import ENVS

        envs = min(episodes or self._config.eval.episodes, ENVS)
        if self._game is not None and episodes is not None and self._game.count != envs:
            self._game.close()
            self._game = None
        if self._game is None:
            beat = self._ctx.status.beat
            self._game = make(self._config.env, envs, first=FirstIndex.EVALUATOR, beat=beat)
        return self._game

    def _play_both(self, folder: Path, episodes: int) -> dict[Way, list[Episode]]:
        """Play the checkpoint in ``folder`` for ``episodes`` in each way, with the same seeds."""
        game, seed = self.game(episodes), SEED + self._config.run.seed
        return {way: self._play(folder, game, way, episodes, seed) for way in WAYS}

    def _play(
        self, folder: Path, game: BatchedEnv, way: Way, episodes: int, seed: int
    ) -> list[Episode]:
        """Play the checkpoint in ``folder`` for ``episodes``, in one way.

        Raises StoppedError if the run ends meanwhile.
        """
        from penstock.evaluation.evaluate import of_checkpoint, play, were_cut

        most = self._config.eval.max_episode_steps
        policy = of_checkpoint(self._config, folder).policy(game, seed)
        act = policy.greedy if way == "greedy" else policy.act

        def choose(obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
            self._ctx.status.beat()
            if self._ctx.stopping():
                raise StoppedError
            return act(obs)

        played = play(game, choose, episodes, seed, most, policy.reset)
        # Not barren, should it die later.
        self._ctx.status.produced_steps += sum(episode.length for episode in played)
        cut = sum(episode.cut for episode in played)
        if cut and not self._noted_cut:
            option = "eval.max_episode_steps"
            logger.info("in an evaluation %s", were_cut(cut, episodes, most, option))
            self._noted_cut = True
        return played


def _known_choice(known: Mapping[str, Any], play: object) -> BestWay:
    """Returns what a best checkpoint was chosen by, from the metadata of its file.

    Earlier versions stored the mean, its error and `eval.episodes` only.
    """
    found = Estimate(known["mean"], known["se"], known.get("played", known["episodes"]))
    lower, informed = known.get("lower", found.lower), known.get("informed", True)
    return BestWay(way_of(play), found, lower, informed)


def returns_of(played: list[Episode]) -> list[float]:
    """Returns the raw return of each episode."""
    return [episode.episode_return for episode in played]


def describe(found: Estimate) -> str:
    """Returns the mean with half its 95 % confidence interval, as text."""
    return f"{number(found.mean)} ± {number(found.upper - found.mean)}"


def _identity(folder: Path) -> _FileIdentity | None:
    """Returns the identity of the checkpoint's file in ``folder``; None if there is none."""
    try:
        [found] = [path.stat() for path in folder.glob("*.safetensors")]
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_mtime_ns


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
