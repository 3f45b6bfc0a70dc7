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

from penstock.algos.samples import network_shape
from penstock.configs.errors import UserError
from penstock.core.formatting import number
from penstock.core.observations import views
from penstock.core.place import is_of_environment
from penstock.envs import BatchedEnv, EnvInfo, find_bad_observation, make
from penstock.envs.make import FirstIndex
from penstock.envs.rendering import DISPLAYS, INSTALL, do_without_display, drawing
from penstock.evaluation.decisions import DecisionTrack, decisions_path
from penstock.evaluation.evaluate import Choose, Episode, of_checkpoint_text, were_cut
from penstock.evaluation.policy_source import PolicySource, find_policy
from penstock.models.acting.critic import make_critic
from penstock.models.acting.policy import Policy

MOST_PICTURES_PER_S = 120.0
LEAST_HEIGHT = 320
"""Smaller pictures are enlarged by a whole number."""
LEAST_SIDE = 8
"""An array with a shorter side is not taken for a picture."""
COLOURS = 3
GENTLY = ("-preset", "veryfast", "-threads", "1")
"""Options of the encoder beside a run."""

Picture = npt.NDArray[np.uint8]
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
    """One environment, or a game with all of its seats, and the policy that plays it.

    Episodes, rewards and decisions are those of the first seat.
    """

    env_id: str
    env: BatchedEnv
    """One environment or game, which draws itself if it can."""
    policy: Policy
    choose: Choose
    """Returns the policy's actions. If there is a ``track``, it is the track's method."""
    checkpoint: str
    """Name of the checkpoint; "file" for an exported file."""
    max_steps: int
    """Agent steps at which an episode is cut."""
    sample: bool
    track: DecisionTrack | None = None
    """Keeps the decisions of a video."""

    def shots(self, episodes: int, seed: int) -> Iterator[Shot]:
        """Play ``episodes``, complete or cut, and yield what a person sees of each step.

        The same ``seed`` plays the same episodes. Raises UserError for an observation that is not
        sound.
        """
        env = self.env
        space = env.info.observation_space
        obs = np.empty((env.count, *space.shape), space.dtype)
        env.reset_into(seed, obs)
        yield self._tracked(Shot(self._pictures(obs)))

        begins = np.ones(env.count, np.bool_)
        idle = np.zeros(env.count, np.bool_)
        episode_return = 0.0
        length = 0
        while episodes:
            if bad := find_bad_observation(obs[None], env.info.parts, ~idle[None], env.info.counts):
                raise UserError(f"there is {bad}; correct the environment")
            self.policy.reset(begins)

            # The step after an episode's end only resets.
            begins = idle
            plays = not begins[0]
            reward, terminated, truncated = env.step_into(self.choose(obs), obs)
            over = terminated | truncated
            idle = over if env.playing is None else ~env.playing
            episode_return += float(reward[0])
            if plays:
                length += 1

            # The loss of a life ends an episode in training only. After a step that failed
            # (`dropped`) another episode has begun.
            lost_life = env.life_lost is not None and bool(env.life_lost[0])
            has_ended = bool(over[0]) and not lost_life
            is_cut = (length == self.max_steps and not has_ended) or env.dropped is not None
            episode = None
            if is_cut or has_ended:
                episode = Episode(episode_return, length, is_cut)
            shot = Shot(self._pictures(obs), episode, reward=float(reward[0]), plays=plays)
            yield self._tracked(shot)

            if episode is not None:
                episodes -= 1
                episode_return = 0.0
                length = 0
            if is_cut and episodes:
                seed += 1
                env.reset_into(seed, obs)
                begins = np.ones(env.count, np.bool_)
                idle = np.zeros(env.count, np.bool_)
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

    Returns: the raw returns and lengths, how they were played, and the path in "file".

    Raises:
        UserError: if the video cannot be made, for instance without the extra [video].
    """
    if out is not None and Path(out).suffix != ".mp4":
        raise UserError(f"--out {out} is no mp4, and nothing else is made; let it end in .mp4")
    _require("imageio_ffmpeg", "a video")

    source = find_policy(run_dir, which, allow)
    played: list[Episode] = []
    with open_filmed_policy(source, sample, seed, max_steps, tracked=True) as filmed:

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
) -> dict[str, Any]:
    """Show episodes in a window, as fast as a person would play. Closing the window ends it.

    The arguments have the same meaning as in `record`.

    Returns: the raw returns and lengths of the episodes that have ended, and how they were played.

    Raises:
        UserError: if they cannot be shown, for instance without a display.
    """
    if not any(os.environ.get(name) for name in DISPLAYS):
        raise UserError(
            "there is no display to show a game on: neither DISPLAY nor WAYLAND_DISPLAY is set; "
            f"make a video with `penstock record {run_dir}`"
        )
    _require("pygame", "a window")

    source = find_policy(run_dir, which, allow)
    with (
        open_filmed_policy(source, sample, seed, max_steps) as filmed,
        _window(run_dir, filmed.env) as show,
    ):
        played = _show_episodes(filmed, episodes, seed, show)
    return _result(run_dir, filmed, played)


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
) -> Iterator[FilmedPolicy]:
    """Open one environment, which draws itself if it can, with the policy that plays it.

    Args:
        source: where the policy's weights are.
        sample: whether actions are sampled; None takes the default of the ``source``.
        seed: seed of the policy's random actions.
        max_steps: agent steps at which an episode is cut; None takes `eval.max_episode_steps`.
        tracked: whether the policy's decisions are kept, for a file beside a video.

    Raises:
        UserError: if the environment cannot be made, or the policy does not fit it.
    """
    config = source.config
    if sample is None:
        sample = source.sampled
    do_without_display()
    with drawing(config.env.id):
        env = make(config.env, 1, whole_games=True, filmed=True, first=FirstIndex.VIDEO)

    try:
        policy = source.policy(env, seed)
        choose: Choose = policy.act if sample else policy.greedy
        track = None
        if tracked:
            critic = make_critic(network_shape(config, env.info), source.weights(env))
            track = DecisionTrack(policy, critic, sample)
            choose = track.choose
        yield FilmedPolicy(
            env_id=config.env.id,
            env=env,
            policy=policy,
            choose=choose,
            checkpoint=source.name,
            max_steps=max_steps or config.eval.max_episode_steps,
            sample=sample,
            track=track,
        )
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


@contextmanager
def _window(title: str, env: BatchedEnv) -> Iterator[Show]:
    """Open a window that shows pictures at the pace of ``env``, until it is closed.

    Raises UserError if there is no usable display.
    """
    import pygame

    try:
        pygame.display.init()
    except pygame.error as error:
        raise UserError(
            f"the display cannot be used ({error}); make a video with `penstock record {title}`"
        ) from error

    clock = pygame.time.Clock()

    def show(pictures: list[Picture]) -> bool:
        for picture in pictures:
            size = (picture.shape[1], picture.shape[0])
            screen = pygame.display.get_surface()
            if screen is None or screen.get_size() != size:
                screen = pygame.display.set_mode(size)
                pygame.display.set_caption(title)

            # pygame has the horizontal axis first.
            pygame.surfarray.blit_array(screen, picture.swapaxes(0, 1))
            pygame.display.flip()
            clock.tick(min(env.pictures_per_s, MOST_PICTURES_PER_S))

        return not any(event.type == pygame.QUIT for event in pygame.event.get())

    try:
        yield show
    finally:
        pygame.display.quit()


def _result(run_dir: str, filmed: FilmedPolicy, played: list[Episode]) -> dict[str, Any]:
    """Returns what `record` and `play` report on the episodes that were played."""
    return {
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
