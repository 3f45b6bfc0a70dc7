"""The environments of the presets, each against the library that it comes from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest

from penstock.configs.load import presets, resolve
from penstock.configs.sections import EnvConfig
from penstock.envs import make, probe
from penstock.envs.checking.checks import Checker

GAMES = {
    "bit_flip": ("numpy", (192,), 15),
    "boxing": ("ale_py", (4, 84, 84), 18),
    "breakout": ("ale_py", (4, 84, 84), 4),
    "car_racing": ("Box2D", (3, 84, 84), None),
    "doom_basic": ("vizdoom", (1, 60, 80), 4),
    "halfcheetah": ("mujoco", (17,), None),
    "minatar_breakout": ("minatar", (4, 10, 10), 3),
    "connect_four": ("numpy", (352,), 7),
    "kuhn": ("numpy", (56,), 2),
    "leduc": ("numpy", (104,), 3),
    "rock_paper_scissors": ("numpy", (1,), 3),
    "simple_spread": ("mpe2", (18,), 5),
    "slime_volley": ("numpy", (12,), None),
}
# Emulator frames in a step; 4 for those that are not here.
FRAMES = {"minatar_breakout": 1, "halfcheetah": 5} | dict.fromkeys(
    (
        "bit_flip",
        "connect_four",
        "kuhn",
        "leduc",
        "rock_paper_scissors",
        "simple_spread",
        "slime_volley",
    ),
    1,
)


def test_each_preset_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "games.md").read_text()
    assert [name for name in presets() if f"`{name}`" not in text] == []


@pytest.mark.parametrize("preset", GAMES)
def test_each_preset_plays(preset: str) -> None:
    module, shape, actions = GAMES[preset]
    pytest.importorskip(module)
    info = probe(resolve(preset).env)
    assert info.observation_space.shape == shape
    assert getattr(info.action_space, "n", None) == actions
    assert info.frames_per_step == FRAMES.get(preset, 4)


@pytest.mark.parametrize(
    ("env_id", "module"),
    [
        pytest.param("penstock/CarRacing-v0", "Box2D", marks=pytest.mark.slow),
        pytest.param("penstock/Doom-v0", "vizdoom", marks=pytest.mark.slow),
        ("penstock/MinAtar-v0", "minatar"),
    ],
)
def test_built_in_environments_pass_the_checks(env_id: str, module: str) -> None:
    pytest.importorskip(module)
    found, env = Checker(), gymnasium.make(env_id)
    assert found.check_spaces(env_id, env)
    list(found.play(env, 120, 0))
    env.close()
    found.determinism(lambda: gymnasium.make(env_id), 60, 9)
    assert found.problems == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "module"),
    [
        ("penstock/CarRacing-v0", "Box2D"),
        ("penstock/Doom-v0", "vizdoom"),
        ("penstock/MinAtar-v0", "minatar"),
    ],
)
def test_filming_does_not_change_the_game(env_id: str, module: str) -> None:
    pytest.importorskip(module)
    plain, filmed = gymnasium.make(env_id), gymnasium.make(env_id, render_mode="rgb_array")
    plain.action_space.seed(0)
    np.testing.assert_array_equal(plain.reset(seed=2)[0], filmed.reset(seed=2)[0])
    for _ in range(40):
        action = plain.action_space.sample()
        shown, reward, over, *_ = plain.step(action)
        other, their_reward, their_over, *_ = filmed.step(action)
        np.testing.assert_array_equal(shown, other)
        assert (reward, over) == (their_reward, their_over)
        if over:
            break
        picture: Any = filmed.render()
        assert picture.dtype == np.uint8
        assert picture.shape[2:] == (3,)
    plain.close()
    filmed.close()


def test_car_racing_equals_gymnasiums() -> None:
    pytest.importorskip("Box2D")
    ours = gymnasium.make("penstock/CarRacing-v0", frame_skip=3, stack=2)
    theirs = gymnasium.make("CarRacing-v3")
    shown, screen = ours.reset(seed=4)[0], theirs.reset(seed=4)[0]
    before = gray(screen)
    np.testing.assert_array_equal(shown, [before, before])
    for pedals in (0.5, 0.8, -0.3, 1.0, 0.2):
        action = np.array([0.1, pedals], np.float32)
        shown, reward, *_ = ours.step(action)
        held = np.array([0.1, max(pedals, 0), max(-pedals, 0)], np.float32)
        frames = [theirs.step(held) for _ in range(3)]
        now = gray(frames[-1][0])
        np.testing.assert_array_equal(shown, [before, now])
        assert reward == pytest.approx(sum(float(frame[1]) for frame in frames))
        before = now
    ours.close()
    theirs.close()


def gray(screen: Any) -> npt.NDArray[Any]:
    weights = np.array([0.299, 0.587, 0.114], np.float32)
    found: npt.NDArray[Any] = screen[:84, 6:90] @ weights
    return found.astype(np.uint8)


def test_car_off_the_field_terminates_and_a_slow_car_is_truncated() -> None:
    pytest.importorskip("Box2D")
    cut = gymnasium.make("penstock/CarRacing-v0", max_frames=10)
    cut.reset(seed=0)
    ends = [cut.step(np.zeros(2, np.float32))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    cut.close()
    away: Any = gymnasium.make("penstock/CarRacing-v0", max_frames=10_000)
    away.reset(seed=0)
    for _ in range(1000):
        _, reward, terminated, *_ = away.step(np.array([0, 0.5], np.float32))
        if terminated:
            break
    assert terminated
    assert reward < -90
    away.close()


def test_minatar_equals_the_authors_environment() -> None:
    minatar = pytest.importorskip("minatar")
    for game in ("breakout", "space_invaders"):
        ours: Any = gymnasium.make("penstock/MinAtar-v0", game=game)
        theirs = minatar.Environment(game)
        theirs.seed(3)
        theirs.reset()
        shown, actions = ours.reset(seed=3)[0], theirs.minimal_action_set()
        rng = np.random.default_rng(0)
        for _ in range(60):
            expected = theirs.state().transpose(2, 0, 1) * 255
            np.testing.assert_array_equal(shown, expected)
            action = rng.integers(len(actions))
            reward, over = theirs.act(actions[action])
            shown, our_reward, terminated, truncated, _ = ours.step(action)
            assert (our_reward, terminated, truncated) == (reward, over, False)
            if over:
                break


def test_minatar_is_truncated_at_its_step_limit() -> None:
    pytest.importorskip("minatar")
    env = gymnasium.make("penstock/MinAtar-v0", game="freeway", max_episode_steps=7)
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(7)]
    assert ends == [(False, False)] * 6 + [(False, True)]


def test_flickering_minatar_hides_as_many_observations_as_asked_and_nothing_else() -> None:
    pytest.importorskip("minatar")
    plain: Any = gymnasium.make("penstock/MinAtar-v0", game="breakout")
    flickering: Any = gymnasium.make("penstock/MinAtar-v0", game="breakout", flicker=0.3)
    hidden = []
    for episode in range(40):
        shown = [env.reset(seed=episode)[0] for env in (plain, flickering)]
        over = False
        while not over:
            hidden.append(not shown[1].any())
            np.testing.assert_array_equal(shown[1], 0 if hidden[-1] else shown[0])
            steps = [env.step(1) for env in (plain, flickering)]
            assert steps[0][1:4] == steps[1][1:4]
            shown = [step[0] for step in steps]
            over = steps[0][2]
    # Five standard deviations of so many draws.
    assert np.mean(hidden) == pytest.approx(0.3, abs=5 * (0.21 / len(hidden)) ** 0.5)
    with pytest.raises(ValueError, match=r"flicker 1.5 is a probability; choose a number from 0"):
        gymnasium.make("penstock/MinAtar-v0", flicker=1.5)


@pytest.mark.slow
def test_doom_rewards_and_ends_are_those_of_the_scenario() -> None:
    pytest.importorskip("vizdoom")
    game = make(EnvConfig(id="penstock/Doom-v0"), 2)
    out = np.zeros((2, 1, 60, 80), np.uint8)
    game.reset_into(1, out)
    rewards = []
    for step in range(1, 76):
        reward, terminated, truncated = game.step_into(np.zeros(2, np.int32), out)
        rewards.append(reward[0])
        assert not terminated.any()
        assert truncated.all() == (step == 75) or 70 <= step <= 75
        if truncated.any():
            break
    assert set(rewards[:-1]) == {-4.0}  # a tic costs 1, and nothing was shot at
    assert truncated.any()
    assert out.std() > 5  # the last screen, not a black one
    game.close()


def test_doom_removes_only_its_own_shared_memory() -> None:
    pytest.importorskip("vizdoom")
    mine = Path(f"/dev/shm/ViZDoomData{os.getpid()}")
    try:
        mapped = np.memmap(mine, np.uint8, "w+", shape=(4096,))
        before = set(os.listdir("/dev/shm"))
        gymnasium.make("penstock/Doom-v0").close()
        assert mine.is_file()
        assert set(os.listdir("/dev/shm")) == before
        del mapped
    finally:
        mine.unlink()


LEFT_ALONE = """
import sys, time
import gymnasium, penstock.envs
games = [gymnasium.make("penstock/Doom-v0") for _ in range(2)]
for game in games:
    game.reset(seed=0)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_killed_owner_leaves_no_doom_process(tmp_path: Path) -> None:
    pytest.importorskip("vizdoom")
    before = set(os.listdir("/dev/shm"))
    owner = subprocess.Popen(
        [sys.executable, "-c", LEFT_ALONE], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    children = dooms(owner.pid)
    assert len(children) == 2
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "ViZDoom" in name}
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    until = time.monotonic() + 10
    while any(running(pid) for pid in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(running(pid) for pid in children)
    assert list(tmp_path.iterdir()) == []


def dooms(parent: int) -> list[int]:
    """The processes of Doom that `parent` has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = status.read_text().rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        if "vizdoom" in name and int(rest.split()[1]) == parent:
            found.append(int(status.parent.name))
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
