"""`penstock record` and `penstock play`: episodes, files, and errors for missing libraries."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.algos.acting import make_policy
from penstock.algos.samples import network_shape
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.params import Float32
from penstock.envs import BatchedEnv, make
from penstock.envs.games.synthetic import SyntheticVectorEnv
from penstock.envs.lives import LIFE_LOST
from penstock.evaluation import video
from penstock.evaluation.policy_source import PolicySource
from penstock.evaluation.window import open_window


def without(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "find_spec", lambda name: None if name == module else object())


def test_a_missing_encoder_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    without("imageio_ffmpeg", monkeypatch)
    with pytest.raises(UserError) as error:
        video.record("run", 1, "best", None, False, 0)
    assert str(error.value) == (
        'a video needs imageio_ffmpeg, which is not installed; run `pip install "penstock[video]"`'
    )


def test_video_file_name_must_end_in_mp4() -> None:
    with pytest.raises(UserError, match=r"let it end in \.mp4"):
        video.record("run", 1, "best", "agent.gif", False, 0)


def test_missing_window_library_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without("pygame", monkeypatch)
    monkeypatch.setenv("DISPLAY", ":0")
    with pytest.raises(UserError, match=r"a window needs pygame, .*penstock\[video\]"):
        video.play("run", 1, "best", False, 0)


def test_unusable_display_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "no_such_driver")
    with (
        pytest.raises(UserError, match=r"the display cannot be used .*; make a video"),
        open_window("run", "a game", 30.0),
    ):
        raise AssertionError("there is no window")


@pytest.mark.parametrize(
    ("max_steps", "shown", "episode"),
    [(9, 1 + 9 + 1 + 9, (9, False)), (4, 1 + 4 + 1 + 4, (4, True))],
)
def test_video_shows_first_observation_and_every_step_even_of_cut_episodes(
    max_steps: int, shown: int, episode: tuple[int, bool]
) -> None:
    options = "env.kwargs={obs_shape: [4, 24, 32], obs_dtype: uint8, episode_steps: 9}"
    config = resolve("synthetic", [options, "model.kind=auto", "actors.envs=1"])
    game = make(config.env, 1, filmed=True)
    policy = make_policy(config, game.info, 0)

    def first(obs: Any) -> Any:
        return np.zeros(1, np.int64)

    filmed = video.FilmedPolicy(
        env_id="synthetic",
        env=game,
        rows=game,
        begin=policy.reset,
        choose=first,
        checkpoint="last",
        max_steps=max_steps,
        sample=False,
    )
    shots = list(filmed.shots(2, 0))
    game.close()
    assert len(shots) == shown
    played = [shot.episode for shot in shots if shot.episode]
    assert [each[1:3] for each in played] == [episode] * 2


def test_a_tracked_player_plays_as_another_and_keeps_its_decisions() -> None:
    options = "env.kwargs={obs_shape: [4, 24, 32], obs_dtype: uint8, episode_steps: 9}"
    config = resolve("synthetic", [options, "model.kind=auto", "actors.envs=1"])

    def weights(env: BatchedEnv) -> Float32:
        size = network_shape(config, env.info).layout.size
        return np.random.default_rng(0).normal(0, 0.3, size).astype(np.float32)

    source = PolicySource(config, "last", True, weights)
    episodes = []
    for tracked in (False, True):
        with video.open_filmed_policy(source, None, 0, None, tracked=tracked) as filmed:
            episodes.append([(shot.episode, shot.reward) for shot in filmed.shots(1, 0)])
            assert (filmed.track is not None) is tracked
    assert episodes[0] == episodes[1]
    assert filmed.track is not None
    assert filmed.track.steps == 9


class LosesALife(SyntheticVectorEnv):
    """Of its first game, in step 4."""

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(actions)
        lost = np.array([self._calls == 4])
        return obs, reward, terminated | lost, truncated, info | {LIFE_LOST: lost}


def test_episode_cut_at_a_lost_life_is_followed_by_a_complete_one() -> None:
    vector = LosesALife(1, obs_shape=(4, 24, 32), obs_dtype="uint8", episode_steps=9)
    game = BatchedEnv("synthetic", vector, 1, "")
    policy = make_policy(resolve("synthetic", ["actors.envs=1"]), game.info, 0)

    def first(obs: Any) -> Any:
        return np.zeros(1, np.int64)

    filmed = video.FilmedPolicy(
        env_id="synthetic",
        env=game,
        rows=game,
        begin=policy.reset,
        choose=first,
        checkpoint="last",
        max_steps=4,
        sample=False,
    )
    shots = list(filmed.shots(2, 0))
    assert [shot.plays for shot in shots] == [False, *[True] * 4] * 2
    assert [shot.episode[1:3] for shot in shots if shot.episode] == [(4, True)] * 2


class Game:
    pictures_per_s = 50.0


def on_a_full_disk(path: Path) -> None:
    path.write_text("{")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_new_decisions_are_never_stored_beside_an_old_video(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    game: Any = Game()
    for name in ("v.mp4", "v.mp4.json"):
        (tmp_path / name).write_text("old")

    def write(to: Path) -> None:
        to.write_text("new")
        assert {path.read_text() for path in tmp_path.glob("v.mp4*")} == {"old"}

    with video.encoding(tmp_path / "v.mp4", game, write) as show:
        show([np.zeros((320, 480, 3), np.uint8)])
    assert (tmp_path / "v.mp4").stat().st_size > 3
    assert (tmp_path / "v.mp4.json").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"v.mp4", "v.mp4.json"}


def test_unfinished_video_leaves_no_file(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    picture = np.zeros((320, 480, 3), np.uint8)
    game: Any = Game()
    recording = video.encoding(tmp_path / "v.mp4", game, Path.touch)
    recording.__enter__()([picture] * 10)
    assert recording.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None) is False
    assert list(tmp_path.iterdir()) == []
    said = r"of 64 x 320 after others of 480 x 320 .*, and a video has one size"
    with (
        pytest.raises(UserError, match=said),
        video.encoding(tmp_path / "v.mp4", game, Path.touch) as show,
    ):
        show([picture, picture[:, :64]])
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(UserError, match=r"cannot be written \(No space left"),
        video.encoding(tmp_path / "v.mp4", game, on_a_full_disk) as show,
    ):
        show([picture])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"cannot be written .*; give another place with --out"),
        video.encoding(tmp_path / "file" / "v.mp4", game, Path.touch),
    ):
        pass
