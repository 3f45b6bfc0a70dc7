"""Pictures of a filmed environment; those of Atari show the frames that the policy sees."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.observations import laid_out
from penstock.envs import EnvInfo, atari, make
from penstock.envs.lives import LIFE_LOST, LivesAsEpisodes
from penstock.envs.rendering import FilmedAtari, draws, pictures
from penstock.evaluation.video import drawn, enlarged

WHOLE_SCREEN = {"img_height": 210, "img_width": 160, "maxpool": False, "stack_num": 1}


def filmed(game: str, **given: Any) -> FilmedAtari:
    options = {**atari.OPTIONS, "game": game, **given}
    return FilmedAtari(atari.make_vector(options, 1, 1), options)


@pytest.mark.parametrize(
    ("game", "given"),
    [
        pytest.param("pong", {}, marks=pytest.mark.slow),
        pytest.param("breakout", {"repeat_action_probability": 0.0}, marks=pytest.mark.slow),
        pytest.param(
            *("ms_pacman", {"full_action_space": True, "frameskip": 3}), marks=pytest.mark.slow
        ),
        ("boxing", {"max_num_frames_per_episode": 301}),
    ],
)
def test_filmed_screen_equals_the_observed_screen(game: str, given: Any) -> None:
    """In its own size and in colour, ale-py's observation is the screen itself."""
    env = filmed(game, grayscale=False, **WHOLE_SCREEN, **given)
    rng = np.random.default_rng(0)
    obs, _ = env.reset(seed=5)
    assert np.array_equal(obs[0, -1], env.render()[-1])
    ended, actions = 0, len(env._actions)
    for _ in range(500):
        obs, _, terminated, truncated, _ = env.step(rng.integers(actions, size=1))
        over = bool(terminated[0] or truncated[0])
        ended += over
        if not over:  # of a last frame ale-py takes no picture
            assert np.array_equal(obs[0, -1], env.render()[-1])
        assert 1 <= len(env.render()) <= env._options["frameskip"]
    assert ended or game in ("pong", "ms_pacman")  # whose games are longer
    env.close()


@pytest.mark.slow
def test_the_filmed_game_goes_on_after_a_lost_life() -> None:
    options = {**atari.OPTIONS, "game": "breakout", "episodic_life": True}
    env = LivesAsEpisodes(filmed("breakout"), options)
    env.reset(seed=5)
    lost, rng = 0, np.random.default_rng(0)
    for _ in range(300):
        info = env.step(rng.integers(4, size=1))[-1]  # raises if the two emulators differ
        lost += int(info[LIFE_LOST][0])
    assert lost >= 4
    env.close()


def test_diverging_emulators_are_refused() -> None:
    env = filmed("pong")
    env.reset(seed=5)
    env._ale.act(env._noop)
    with pytest.raises(Exception, match="have gone apart"):
        env.step(np.array([0]))


def pictures_of(target: str, *overrides: str) -> tuple[list[Any], float]:
    game = make(resolve(target, overrides).env, 1, filmed=True)
    space = game.info.observation_space
    obs = np.empty((1, *space.shape), space.dtype)
    game.reset_into(0, obs)
    game.step_into(np.zeros(1, np.int64), obs)
    found = game.pictures(), game.pictures_per_s
    game.close()
    return found


@pytest.mark.slow
def test_every_emulator_frame_of_a_step_is_a_picture_at_60_a_second() -> None:
    pictures, rate = pictures_of("pong")
    assert ([picture.shape for picture in pictures], rate) == ([(210, 160, 3)] * 4, 60.0)


def test_wrapped_environment_is_filmed_at_one_picture_per_step() -> None:
    wrapper = "env.wrappers=[gymnasium.wrappers:RecordEpisodeStatistics]"
    pictures, rate = pictures_of("pong", wrapper)
    assert ([picture.shape for picture in pictures], rate) == ([(210, 160, 3)], 15.0)


def test_wrapped_environment_is_filmed_beyond_its_first_episode() -> None:
    wrapper = "env.wrappers=[gymnasium.wrappers:RecordEpisodeStatistics]"
    limit = "env.kwargs.max_num_frames_per_episode=80"
    game = make(resolve("pong", [wrapper, limit]).env, 1, filmed=True)
    space = game.info.observation_space
    obs = np.empty((1, *space.shape), space.dtype)
    game.reset_into(5, obs)
    rng, ended = np.random.default_rng(0), 0
    for _ in range(80):  # raises if the two emulators differ
        _, terminated, truncated = game.step_into(rng.integers(6, size=1), obs)
        ended += int(terminated[0] or truncated[0])
        assert len(game.pictures()) == 1
    assert ended >= 2
    game.close()


def test_a_filmed_game_must_begin_with_a_seed() -> None:
    env = filmed("pong")
    with pytest.raises(ValueError, match="needs a seed"):
        env.reset()
    env.close()


def test_environment_that_renders_is_made_with_render_mode() -> None:
    pictures, rate = pictures_of("cartpole")
    assert ([picture.shape for picture in pictures], rate) == ([(400, 600, 3)], 50.0)


class Painter(gymnasium.Env[Any, Any]):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012
    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, False, False, {}

    def render(self) -> Any:
        return np.full((4, 6, 3), 9, np.uint8)


class Blind(Painter):
    """Takes `render_mode`, and has no picture."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012


class Strict(Painter):
    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(None)


@pytest.mark.parametrize(
    ("entry_point", "pictures"),
    [
        (lambda render_mode=None: Painter(render_mode), 1),
        (lambda **given: Painter(**given), 1),
        (lambda **given: Blind(**given), 0),
        (lambda **given: Strict(**given), 0),
        (lambda: Painter(), 0),
    ],
)
def test_environment_from_a_function_is_made_with_render_mode(
    entry_point: Any, pictures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Painted-v0", entry_point=entry_point)
    monkeypatch.setitem(gymnasium.registry, "Painted-v0", spec)
    shown, rate = pictures_of("Painted-v0")
    assert len(shown) == pictures
    if pictures:
        assert (shown[0].shape, rate) == ((4, 6, 3), 12.0)


class Refuses(Blind):
    def __init__(self, render_mode: str | None = None) -> None:
        assert render_mode in (None, "ansi")
        super().__init__(render_mode)


class Unwritten(Painter):
    metadata = {"render_modes": []}  # noqa: RUF012

    def render(self) -> Any:
        raise NotImplementedError


def text_only(render_mode: str | None = None) -> Blind:
    return Blind(render_mode)


def refuses(render_mode: str | None = None) -> Blind:
    return Refuses(render_mode)


def unwritten(render_mode: str | None = None) -> Painter:
    return Unwritten(render_mode)


def paints(render_mode: str | None = None) -> Painter:
    return Painter(render_mode)


@pytest.mark.parametrize(
    ("function", "pictures"), [("text_only", 0), ("refuses", 0), ("unwritten", 0), ("paints", 1)]
)
def test_environment_from_a_function_that_renders_only_text_is_unchanged(
    function: str, pictures: int
) -> None:
    assert len(pictures_of(f"{__name__}:{function}")[0]) == pictures


def test_environment_that_does_not_render_is_unchanged() -> None:
    assert pictures_of("synthetic")[0] == []


class Drawn(gymnasium.vector.VectorEnv):
    render_mode = "rgb_array"

    def __init__(self, shown: Any) -> None:
        self.shown = shown

    def render(self) -> Any:
        return (self.shown,)


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (np.zeros((10, 12), np.uint8), r"uint8 of shape \[10, 12\]"),
        (np.zeros((10, 12, 4), np.uint8), r"uint8 of shape \[10, 12, 4\]"),
        (np.zeros((10, 12, 3)), r"float64 of shape \[10, 12, 3\]"),
    ],
)
def test_render_result_that_is_no_picture_is_refused(shown: Any, said: str) -> None:
    """One of other bytes would make a video of stripes."""
    with pytest.raises(UserError, match=rf"returned {said}, and a picture is uint8"):
        pictures(Drawn(shown))


def test_pictures_of_a_vector_may_be_one_array() -> None:
    class Together(Drawn):
        def render(self) -> Any:
            return self.shown

    assert len(pictures(Together(np.zeros((1, 10, 12, 3), np.uint8)))) == 1


def test_integer_pictures_are_converted_to_uint8() -> None:
    [picture] = pictures(Drawn(np.full((10, 12, 3), 255)))
    assert (str(picture.dtype), picture.min()) == ("uint8", 255)


def test_draws_follows_the_declared_render_modes() -> None:
    class Draws:
        metadata = {"render_modes": ["human", "rgb_array"]}  # noqa: RUF012

    assert draws(Draws)
    assert not draws(lambda: None)


def info(*shape: int, dtype: Any = np.uint8) -> EnvInfo:
    from gymnasium.spaces import Box, Discrete

    return EnvInfo(Box(0, 255, shape, dtype), Discrete(2), 1, "")


@pytest.mark.parametrize("shape", [(10, 12), (10, 12, 1), (10, 12, 3), (4, 10, 12), (4, 10, 12, 3)])
def test_an_observation_that_is_a_picture_is_shown(shape: tuple[int, ...]) -> None:
    observation = np.zeros(shape, np.uint8)
    newest = observation[-1] if len(shape) == 4 or shape[0] == 4 else observation
    newest[2, 3] = 200
    [picture] = drawn(info(*shape), observation)
    assert picture.shape == (10, 12, 3)
    assert np.argwhere(picture.any(2)).tolist() == [[2, 3]]


@pytest.mark.parametrize("shape", [(128,), (4, 4), (2, 10, 12, 7)])
def test_observation_that_is_no_picture_is_not_shown(shape: tuple[int, ...]) -> None:
    assert drawn(info(*shape), np.zeros(shape, np.uint8)) == []
    floats = np.zeros((10, 12), np.float32)
    assert drawn(info(10, 12, dtype=np.float32), floats) == []


def test_first_picture_among_observation_parts_is_shown() -> None:
    parts = laid_out([("speed", (2,), "<f4"), ("screen", (9, 8), "|u1")])
    row = np.full(80, 7, np.uint8)
    packed = EnvInfo(info(80).observation_space, info(80).action_space, 1, "", parts)
    [picture] = drawn(packed, row)
    assert (picture.shape, picture.min(), picture.max()) == ((9, 8, 3), 7, 7)


def test_small_pictures_are_scaled_by_integers_to_even_sides() -> None:
    small = np.arange(3 * 5 * 3, dtype=np.uint8).reshape(3, 5, 3)
    [grown] = enlarged([small])
    assert grown.shape == (322, 536, 3)  # 107 times 3, 107 times 5, and one more each
    assert np.array_equal(grown[:321:107, :535:107], small)
    large = np.zeros((480, 641, 3), np.uint8)
    assert enlarged([large])[0].shape == (480, 642, 3)
