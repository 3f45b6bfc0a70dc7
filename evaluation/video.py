"""`penstock record` and `penstock play`: watch what the weights of a run do. A run's own videos are
recorded here too (`penstock.evaluation.best_videos`).

The policy sees exactly what it saw in training; what a person sees is drawn beside it
(`penstock.envs.rendering`). An environment that does not draw itself is shown by its observations,
if these are pictures.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.actors.matches import Plan
from penstock.algos.samples import network_shape
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.formatting import number
from penstock.core.observations import views
from penstock.core.place import is_of_environment
from penstock.envs import BatchedEnv, EnvInfo, find_bad_observation, make
from penstock.envs.make import FirstIndex
from penstock.envs.rendering import DISPLAYS, INSTALL, do_without_display, drawing
from penstock.envs.seats import check_opposed, keys_of
from penstock.evaluation.decisions import DecisionTrack, decisions_path
from penstock.evaluation.evaluate import (
    Begin,
    Choose,
    Episode,
    PlayedEnvs,
    TakeRewards,
    of_checkpoint_text,
    were_cut,
)
from penstock.evaluation.opponents import OpponentSource, find_opponent, pairings_of
from penstock.evaluation.policy_source import PolicySource, find_policy
from penstock.evaluation.window import (
    MOST_PICTURES_PER_S,
    ClosedWindowError,
    Person,
    Picture,
    open_window,
)
from penstock.models.acting.critic import make_critic

LEAST_HEIGHT = 320
"""Smaller pictures are enlarged by a whole number."""
LEAST_SIDE = 8
"""An array with a shorter side is not taken for a picture."""
COLOURS = 3
GENTLY = ("-preset", "veryfast", "-threads", "1")
"""Options of the encoder beside a run."""

Show = Callable[[list[Picture]], bool]
"""Shows pictures one after another, and returns whether more are wanted."""


@dataclass(frozen=True)
class Shot:
    """One step as a person sees it: pictures ``[H, W, 3]``, oldest first, and the episode that it
    ended, if it did."""

    pictures: list[Picture]
    episode: Episode | None = None
    reward: float = 0.0
    plays: bool = False
    """Whether the environment took an action: not in a reset."""


class NotShownError(UserError):
    """The environment neither draws itself nor shows pictures as observations."""


@dataclass(kw_only=True)
class FilmedPolicy:
    """One environment, or a game with all of its seats or with an opponent, and who plays it.

    Episodes, rewards and decisions are those of the first seat that is played.
    """

    env_id: str
    env: BatchedEnv
    """One environment or game, which draws itself if it can."""
    rows: PlayedEnvs
    """The rows of ``env`` that are played: all, or those that do not belong to the opponent."""
    choose: Choose
    """Returns the actions of these rows. If there is a ``track``, it is the track's method."""
    begin: Begin
    """Called where episodes begin."""
    checkpoint: str
    """Name of the checkpoint; "file" for an exported file."""
    max_steps: int
    """Agent steps at which an episode is cut."""
    sample: bool
    opponent: str = ""
    """Who plays the other seats; empty if there is nobody."""
    track: DecisionTrack | None = None
    """Keeps the decisions of a video."""
    take_rewards: TakeRewards | None = None
    """Receives what each step paid, raw."""

    def shots(self, episodes: int, seed: int) -> Iterator[Shot]:
        """Play ``episodes``, complete or cut, and yield what a person sees of each step.

        The same ``seed`` plays the same episodes. Raises UserError for an observation that is not
        sound.
        """
        rows = self.rows
        space = rows.info.observation_space
        obs = np.empty((rows.count, *space.shape), space.dtype)
        rows.reset_into(seed, obs)
        yield self._tracked(Shot(self._pictures(obs)))

        begins = np.ones(rows.count, np.bool_)
        idle = np.zeros(rows.count, np.bool_)
        episode_return = 0.0
        length = 0
        while episodes:
            info = rows.info
            if bad := find_bad_observation(obs[None], info.parts, ~idle[None], info.counts):
                raise UserError(f"there is {bad}; correct the environment")
            self.begin(begins)

            # The step after an episode's end only resets.
            begins = idle
            plays = not begins[0]
            seat = int(rows.seat_of[0])
            reward, terminated, truncated = rows.step_into(self.choose(obs), obs)
            if self.take_rewards is not None:
                self.take_rewards(reward)
            over = terminated | truncated
            idle = over if rows.playing is None else ~rows.playing
            episode_return += float(reward[0])
            if plays:
                length += 1

            # The loss of a life ends an episode in training only. After a step that failed
            # (`dropped`) another episode has begun.
            lost_life = rows.life_lost is not None and bool(rows.life_lost[0])
            has_ended = bool(over[0]) and not lost_life
            is_cut = (length == self.max_steps and not has_ended) or rows.dropped is not None
            episode = None
            if is_cut or has_ended:
                outcome = None
                if has_ended and rows.outcome is not None and np.isfinite(rows.outcome[0]):
                    outcome = float(rows.outcome[0])
                episode = Episode(episode_return, length, is_cut, seat=seat, outcome=outcome)
            shot = Shot(self._pictures(obs), episode, reward=float(reward[0]), plays=plays)
            yield self._tracked(shot)

            if episode is not None:
                episodes -= 1
                episode_return = 0.0
                length = 0
            if is_cut and episodes:
                seed += 1
                rows.reset_into(seed, obs)
                begins = np.ones(rows.count, np.bool_)
                idle = np.zeros(rows.count, np.bool_)
                yield self._tracked(Shot(self._pictures(obs)))

    def _tracked(self, shot: Shot) -> Shot:
        """Returns the ``shot``, after its decision was added to the track."""
        if self.track is not None:
            self.track.on_step(len(shot.pictures), shot.reward, plays=shot.plays)
        return shot

    def write_decisions(self, path: Path, played: list[Episode], **fields: Any) -> None:
        """Write the decisions of a video as ``path``.

        Args:
            path: of the JSON file.
            played: the episodes of the video.
            fields: further ones for the file.

        Raises:
            OSError: if it cannot be written.
        """
        assert self.track is not None
        about = {
            "fps": min(self.env.pictures_per_s, MOST_PICTURES_PER_S),
            "sampled": self.sample,
            "counts": list(self.env.info.counts),
            "episodes": [
                {"return": each.episode_return, "length": each.length, "cut": each.cut}
                for each in played
            ],
            **fields,
        }
        self.track.write(path, about, self.env.action_names)

    def _pictures(self, obs: npt.NDArray[Any]) -> list[Picture]:
        """Returns what the environment draws, or else what it shows the policy, enlarged.

        Raises NotShownError if it neither draws nor has pictures among its observations.
        """
        with drawing(self.env_id):
            pictures = self.env.pictures()
        pictures = pictures or drawn(self.env.info, obs[0])
        if not pictures:
            raise NotShownError(
                f"{self.env_id} cannot be shown: it does not draw itself, and its observations are "
                'no pictures; let it take render_mode="rgb_array" and return a picture in render()'
            )
        return enlarged(pictures)


def record(
    run_dir: str,
    episodes: int,
    which: str,
    out: str | None,
    sample: bool | None,
    seed: int,
    max_steps: int | None = None,
    allow: Sequence[str] = (),
    against: str | None = None,
) -> dict[str, Any]:
    """Write a video of episodes, and the policy's decisions beside it (`evaluation.decisions`).

    Args:
        run_dir: folder of a run, or path of an exported file.
        episodes: how many to show.
        which: the checkpoint of a run, "best" or "last".
        out: the mp4 file; None takes `video_path`.
        sample: True draws actions as in training, False takes the most probable ones, and None
            does what the run's evaluation found to be better.
        seed: the same one shows the same episodes.
        max_steps: agent steps at which an episode is cut; None takes `eval.max_episode_steps`.
        allow: patterns of names that may be imported (`find_policy`).
        against: an opponent in a game of several sides (`evaluation.opponents`); None lets the
            policy play all seats.

    Returns: the raw returns and lengths, how they were played, and the path in "file".

    Raises:
        UserError: if the video cannot be made, for instance without the extra [video].
    """
    if out is not None and Path(out).suffix != ".mp4":
        raise UserError(f"--out {out} is no mp4, and nothing else is made; let it end in .mp4")
    _require("imageio_ffmpeg", "a video")

    source = find_policy(run_dir, which, allow)
    opponent = _opponent(against, source, run_dir, allow)
    played: list[Episode] = []
    with open_filmed_policy(
        source, sample, seed, max_steps, tracked=True, opponent=opponent
    ) as filmed:

        def write_decisions(decisions: Path) -> None:
            filmed.write_decisions(decisions, played)

        path = Path(out) if out else video_path(run_dir, filmed.checkpoint, seed)
        with encoding(path, filmed.env, write_decisions) as show:
            played.extend(_show_episodes(filmed, episodes, seed, show))
    return _result(run_dir, filmed, played) | {"file": str(path)}


def play(
    run_dir: str,
    episodes: int,
    which: str,
    sample: bool | None,
    seed: int,
    max_steps: int | None = None,
    allow: Sequence[str] = (),
    against: str | None = None,
    seat: int | None = None,
) -> dict[str, Any]:
    """Show episodes in a window, as fast as a person would play. Closing the window ends it.

    The arguments have the same meaning as in `record`, and one more:

    Args:
        seat: that a person plays, by keys; the policy plays the other seats, or else the opponent
            ``against``. None lets the policy play.

    Returns: the raw returns and lengths of the episodes that have ended, and how they were played;
        with a ``seat`` those of the person.

    Raises:
        UserError: if they cannot be shown, for instance without a display, or if the game does not
            say by which keys a person plays.
    """
    if not any(os.environ.get(name) for name in DISPLAYS):
        raise UserError(
            "there is no display to show a game on: neither DISPLAY nor WAYLAND_DISPLAY is set; "
            f"make a video with `penstock record {run_dir}`"
        )
    _require("pygame", "a window")

    source = find_policy(run_dir, which, allow)
    opponent = _opponent(against, source, run_dir, allow)
    if seat is not None:
        if sample is None:
            sample = source.sampled
        agent = opponent or OpponentSource(run_dir, source)
        return _play_as_person(
            run_dir,
            source,
            agent,
            seat,
            episodes,
            sample=sample,
            seed=seed,
            max_steps=max_steps or source.config.eval.max_episode_steps,
        )

    with (
        open_filmed_policy(source, sample, seed, max_steps, opponent=opponent) as filmed,
        open_window(run_dir, run_dir, filmed.env.pictures_per_s) as window,
    ):
        played = _show_episodes(filmed, episodes, seed, window.show)
    return _result(run_dir, filmed, played)


def _opponent(
    name: str | None, source: PolicySource, run_dir: str, allow: Sequence[str]
) -> OpponentSource | None:
    """Returns the opponent of this name; None without a name. Errors as of `find_opponent`."""
    if name is None:
        return None
    folder = None if source.name == "file" else Path(run_dir)
    return find_opponent(name, source.config, folder, allow)


def _play_as_person(
    run_dir: str,
    source: PolicySource,
    agent: OpponentSource,
    seat: int,
    episodes: int,
    *,
    sample: bool,
    seed: int,
    max_steps: int,
) -> dict[str, Any]:
    """Let a person play a seat by keys, and an agent the others; arguments as of `play`.

    ``source`` is of the policy whose environment is played, which usually is the agent.
    """
    config = source.config
    with _filmed_env(config) as env:
        keys = keys_of(config.env.id, env.vector, seat)
        check_opposed(config.env.id, [agent.name], env.info.seating)
        source.weights(env)  # packs observations
        plan = Plan.against(env.info.seating, 1, [seat])
        rows = agent.matches(env, plan, seed, sample=sample)

        title = f"{agent.name}: seat {seat} by the keys {', '.join(keys)}"
        with open_window(run_dir, title, env.pictures_per_s) as window:
            person = Person(window, keys, rows)
            filmed = FilmedPolicy(
                env_id=config.env.id,
                env=env,
                rows=rows,
                choose=person.choose,
                begin=person.begin,
                checkpoint=source.name,
                max_steps=max_steps,
                sample=sample,
                opponent=agent.name,
            )
            played: list[Episode] = []
            with suppress(ClosedWindowError):
                for shot in filmed.shots(episodes, seed):
                    if shot.episode is not None:
                        played.append(shot.episode)
                    if not window.show(shot.pictures):
                        break
                    if shot.episode is not None and len(played) < episodes:
                        person.on_end(_outcome_text(shot.episode.outcome) or "the end")
    return _result(run_dir, filmed, played)


def _outcome_text(outcome: float | None) -> str:
    """Returns "won", "drawn" or "lost"; empty if the outcome is not known."""
    if outcome is None:
        return ""
    if outcome == 0:
        return "drawn"
    return "won" if outcome > 0 else "lost"


def video_path(source: str, name: str, seed: int) -> Path:
    """Returns the default path of a policy's video: in the folder of its run, or beside its file.

    ``name`` is the name of the checkpoint.
    """
    if Path(source).is_file():
        return Path(source).with_name(f"{Path(source).stem}-{seed}.mp4")
    return Path(source) / "videos" / f"{name}-{seed}.mp4"


def describe(result: dict[str, Any]) -> str:
    """Returns the result of `record` or `play` as text, with a line for each episode."""
    episodes = zip(result["returns"], result["lengths"], strict=True)
    lines = [
        f"episode {number_of_episode}: return {number(episode_return)} in {length:,} steps"
        for number_of_episode, (episode_return, length) in enumerate(episodes, 1)
    ]
    if "against" in result:
        matches = zip(result["seats"], result["outcomes"], strict=True)
        for i, (seat, outcome) in enumerate(matches):
            lines[i] += f" as seat {seat} against {result['against']}"
            if outcome is not None:
                lines[i] += f", {_outcome_text(outcome)}"

    if result["cut"]:
        lines.append(
            were_cut(
                result["cut"],
                len(result["lengths"]),
                result["max_episode_steps"],
                option="--max-episode-steps",
            )
        )
    if "file" in result:
        way = "sampled" if result["sample"] else "greedy"
        policy = f"{result['run_dir']}{of_checkpoint_text(result)}"
        lines.append(f"{result['file']} shows {policy}, {way} actions")
    return "\n".join(lines)


def drawn(info: EnvInfo, observation: npt.NDArray[Any]) -> list[Picture]:
    """Returns what a policy sees as a picture ``[H, W, 3]``, or an empty list if it sees none.

    It is the newest frame of the first part of the ``observation`` that consists of pictures.
    """
    arrays = views(info.parts, observation) if info.parts else {"": observation}
    for array in arrays.values():
        picture = _picture(array)
        if picture is not None:
            return [picture]
    return []


def enlarged(pictures: list[Picture]) -> list[Picture]:
    """Returns the pictures large enough to look at, with even sides, which a video must have."""
    return [_even(_grown(picture)) for picture in pictures]


@contextmanager
def open_filmed_policy(
    source: PolicySource,
    sample: bool | None,
    seed: int,
    max_steps: int | None,
    *,
    tracked: bool = False,
    opponent: OpponentSource | None = None,
) -> Iterator[FilmedPolicy]:
    """Open one environment, which draws itself if it can, with the policy that plays it.

    Args:
        source: where the policy's weights are.
        sample: whether actions are sampled; None takes the default of the ``source``.
        seed: seed of the policy's random actions.
        max_steps: agent steps at which an episode is cut; None takes `eval.max_episode_steps`.
        tracked: whether the policy's decisions are kept, for a file beside a video.
        opponent: who plays the other seats; None lets the policy play all of them.

    Raises:
        UserError: if the environment cannot be made, or the policy or its opponent does not fit it.
    """
    config = source.config
    if sample is None:
        sample = source.sampled
    with _filmed_env(config) as env:
        rows: PlayedEnvs = env
        if opponent is not None:
            check_opposed(config.env.id, [opponent.name], env.info.seating)
            source.weights(env)  # packs observations
            # Of sides of unlike size the first is shown.
            rows = pairings_of(env, [opponent], seats=config.league.seats, seed=seed)[0].envs
        policy = source.policy(env, seed, rows.count)
        choose: Choose = policy.act if sample else policy.greedy
        track = None
        if tracked:
            critic = make_critic(network_shape(config, env.info), source.weights(env))
            track = DecisionTrack(policy, critic, sample)
            choose = track.choose
        yield FilmedPolicy(
            env_id=config.env.id,
            env=env,
            rows=rows,
            choose=choose,
            begin=policy.reset,
            take_rewards=policy.take_rewards,
            checkpoint=source.name,
            max_steps=max_steps or config.eval.max_episode_steps,
            sample=sample,
            opponent="" if opponent is None else opponent.name,
            track=track,
        )


@contextmanager
def _filmed_env(config: Config) -> Iterator[BatchedEnv]:
    """Open one environment or game, which draws itself if it can.

    Raises UserError if it cannot be made.
    """
    do_without_display()
    with drawing(config.env.id):
        env = make(config.env, 1, whole_games=True, filmed=True, first=FirstIndex.VIDEO)
    try:
        yield env
    finally:
        env.close()


def _show_episodes(filmed: FilmedPolicy, episodes: int, seed: int, show: Show) -> list[Episode]:
    """Show episodes until all have ended or ``show`` returns False.

    Returns: the episodes that have ended.
    """
    played: list[Episode] = []
    for shot in filmed.shots(episodes, seed):
        if shot.episode is not None:
            played.append(shot.episode)
        if not show(shot.pictures):
            break
    return played


@contextmanager
def encoding(
    path: Path,
    env: BatchedEnv,
    write_decisions: Callable[[Path], None],
    part: Path | None = None,
    *,
    gently: bool = False,
) -> Iterator[Show]:
    """Encode what is shown as an mp4, which appears as ``path`` when it is complete.

    gymnasium's `RecordVideo` would not do: it wraps a single environment that draws itself, keeps
    all pictures of an episode in memory (gigabytes of Atari), writes a file for each episode, and
    needs moviepy.

    Args:
        path: of the video.
        env: the environment that draws, for the rate of its pictures.
        write_decisions: writes the decisions of the video as the file that it is given. They
            appear right after the video, so that no new ones are beside an old video.
        part: the file that is written meanwhile, beside ``path``; by default one with a new name.
        gently: the encoder takes one thread and little time, for a larger file.

    Raises:
        UserError: if a file cannot be written, or if a picture has another size than the first.
    """
    part = part or path.with_name(f".{path.stem}.{secrets.token_hex(8)}.part")
    decisions_part = decisions_path(part)
    writer: Any = None
    first: Picture | None = None

    def show(pictures: list[Picture]) -> bool:
        nonlocal writer, first
        if first is None:
            first = pictures[0]
            writer = _writer(part, first, env.pictures_per_s, gently)
        for picture in pictures:
            _check_size(picture, first)
            writer.send(np.ascontiguousarray(picture))
        return True

    try:
        with _write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield show

            write_decisions(decisions_part)
            writer.close()
            part.replace(path)
            decisions_part.replace(decisions_path(path))
    finally:
        # After an error this ends the encoder; after success there is nothing left to do.
        if writer is not None:
            with suppress(OSError):
                writer.close()
        for temporary in (part, decisions_part):
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Raise UserError in place of an OSError, which says that ``path`` cannot be written."""
    try:
        yield
    except OSError as error:
        # The environment draws meanwhile, and its own errors are none of the file.
        if is_of_environment(error):
            raise
        reason = " ".join((error.strerror or str(error)).split())
        raise UserError(
            f"{path} cannot be written ({reason}); give another place with --out"
        ) from error


def _check_size(picture: Picture, first: Picture) -> None:
    """Raise UserError if a picture has another size than the first one of the video."""
    if picture.shape != first.shape:
        height, width, _ = picture.shape
        first_height, first_width, _ = first.shape
        raise UserError(
            f"the game drew a picture of {width} x {height} after others of {first_width} x "
            f"{first_height} (small ones enlarged), and a video has one size; let render() keep "
            "to one"
        )


def _writer(path: Path, picture: Picture, pictures_per_s: float, gently: bool) -> Any:
    """Start the encoder of a video with pictures of the size of ``picture``.

    Returns: imageio_ffmpeg's generator, to which pictures are sent.
    """
    import imageio_ffmpeg

    height, width = picture.shape[:2]
    fps = min(pictures_per_s, MOST_PICTURES_PER_S)
    writer = imageio_ffmpeg.write_frames(
        str(path),
        (width, height),
        fps=fps,
        quality=7,
        macro_block_size=2,
        ffmpeg_log_level="error",
        output_params=[*(GENTLY if gently else ()), "-f", "mp4"],
    )
    writer.send(None)  # to its first `yield`
    return writer


def _result(run_dir: str, filmed: FilmedPolicy, played: list[Episode]) -> dict[str, Any]:
    """Returns what `record` and `play` report on the episodes that were played."""
    matches: dict[str, Any] = {}
    if filmed.opponent:
        matches = {
            "against": filmed.opponent,
            "seats": [episode.seat for episode in played],
            "outcomes": [episode.outcome for episode in played],
        }
    return matches | {
        "run_dir": run_dir,
        "checkpoint": filmed.checkpoint,
        "sample": filmed.sample,
        "cut": sum(episode.cut for episode in played),
        "max_episode_steps": filmed.max_steps,
        "returns": [episode.episode_return for episode in played],
        "lengths": [episode.length for episode in played],
    }


def _require(module: str, what: str) -> None:
    """Raise UserError if ``what`` cannot be made because ``module`` is not installed."""
    if find_spec(module) is None:
        raise UserError(f"{what} needs {module}, which is not installed; run `{INSTALL}`")


def _picture(array: npt.NDArray[Any]) -> Picture | None:
    """Returns the ``array`` as a picture ``[H, W, 3]``, or None if it does not look like one.

    Pictures are uint8 ``[H, W]`` or ``[H, W, 1 or 3]``. Of a stack, ``[frames, H, W]`` or
    ``[frames, H, W, 3]``, the newest frame is taken.
    """
    if array.dtype != np.uint8 or array.ndim not in (2, 3, 4):
        return None

    has_colours = array.shape[-1] in (1, COLOURS)
    is_stack = array.ndim == 4 or (array.ndim == 3 and not has_colours)
    if is_stack:
        array = array[-1]

    if min(array.shape[:2]) < LEAST_SIDE:
        return None
    if array.ndim == 2:
        array = array[..., None]
    if array.shape[-1] not in (1, COLOURS):
        return None
    return np.broadcast_to(array, (*array.shape[:2], COLOURS))


def _grown(picture: Picture) -> Picture:
    """Returns the ``picture`` enlarged to at least `LEAST_HEIGHT`, by a whole number."""
    factor = math.ceil(LEAST_HEIGHT / picture.shape[0])
    return picture.repeat(factor, 0).repeat(factor, 1) if factor > 1 else picture


def _even(picture: Picture) -> Picture:
    """Returns the ``picture`` with a black row or column more where a side is odd."""
    height, width = picture.shape[:2]
    if not height % 2 and not width % 2:
        return picture
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)))
