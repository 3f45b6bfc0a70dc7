"""Environments stepped by several threads, against the same environments in one thread."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces

from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.envs import BatchedEnv, make, probe
from penstock.envs.threads import ThreadedVectorEnv
from user_shop import config

Array = npt.NDArray[Any]
WAIT_S = 30  # at most, for games that wait for each other


class Told(gymnasium.Env[Any, Any]):
    """Shows its number and its age; does in step 3 what `faults` says of its number."""

    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = spaces.Discrete(3)
    made: list[Told] = []  # noqa: RUF012

    def __init__(self, faults: dict[int, str] | None = None) -> None:
        self.number = len(Told.made)
        self.fault = (faults or {}).get(self.number, "")
        self.threads = [threading.current_thread()]
        Told.made.append(self)
        self.age = 0
        if self.fault == "construct":
            raise OSError("no licence")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.threads.append(threading.current_thread())
        self.age = 0
        return self.show(), {}

    def step(self, action: Any) -> Any:
        self.threads.append(threading.current_thread())
        self.age += 1
        if self.age == 3:
            match self.fault:
                case "raise":
                    raise KeyError(f"game {self.number}")
                case "reward":
                    return self.show(), [1.0, 2.0], False, False, {}
                case "info":
                    return self.show(), 0.0, False, False, None
                case "shape":
                    return np.zeros(3, np.float32), 0.0, False, False, {}
        return self.show(), float(action), self.age == 5 + self.number, False, {}

    def show(self) -> Any:
        return np.array([self.number, self.age], np.float32)

    def close(self) -> None:
        self.threads.append(threading.current_thread())
        if self.fault == "close":
            raise OSError("the window is busy")


class Meets(Told):
    """Goes on only when all games are in their step at the same time."""

    barrier = threading.Barrier(4)

    def step(self, action: Any) -> Any:
        self.barrier.wait(WAIT_S)
        return super().step(action)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    Told.made.clear()
    before = set(threading.enumerate())
    yield
    Told.made.clear()
    assert set(threading.enumerate()) <= before


def told(count: int, threads: int, faults: dict[int, str] | None = None) -> BatchedEnv:
    Told.made.clear()
    pairs = [[*pair] for pair in (faults or {}).items()]
    return make(config(f"{__name__}:from_config", faults=pairs), count, threads)


def from_config(faults: list[tuple[int, str]]) -> Told:
    return Told(dict(faults))


def played(game: BatchedEnv, steps: int, seed: int) -> list[Array]:
    """All that a game returns, under actions by chance."""
    rng = np.random.default_rng(seed)
    space, moves = game.info.observation_space, game.info.action_space
    out = np.zeros((game.count, *space.shape), space.dtype)
    game.reset_into(seed, out)
    found: list[Array] = [out.copy()]
    for step in range(steps):
        if step == steps // 2:  # a learner may have gone, and its lockstep form begins anew
            game.reset_into(seed + 100, out)
        actions: Array = rng.uniform(-1, 1, (game.count, *(moves.shape or ()))).astype(np.float32)
        if isinstance(moves, spaces.Discrete):
            actions = rng.integers(moves.n, size=game.count)
        found += [*game.step_into(actions, out), out.copy()]
    return found


def alike(env: EnvConfig, count: int, threads: int, steps: int) -> list[Array]:
    """Plays serially and with threads, compares bit for bit; returns what was played."""
    results = []
    for number in (1, threads):
        game = make(env, count, number)
        results.append(played(game, steps, seed=5))
        game.close()
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    return results[0]


@pytest.mark.parametrize("threads", [2, 3, 9])
@pytest.mark.parametrize(
    "env",
    [
        EnvConfig(id="CartPole-v1", wrappers=["gymnasium.wrappers:FlattenObservation"]),
        EnvConfig(id="Pendulum-v1", kwargs={"max_episode_steps": 30}),
        EnvConfig(id="Blackjack-v1"),
    ],
    ids=lambda env: str(env.id),
)
def test_results_equal_those_of_one_thread(env: EnvConfig, threads: int) -> None:
    found = alike(env, 5, threads, 150)
    assert any(flags.any() for flags in found if flags.dtype == np.bool_)  # episodes did end


@pytest.mark.slow
def test_doom_results_equal_those_of_one_thread() -> None:
    pytest.importorskip("vizdoom")
    found = alike(EnvConfig(id="penstock/Doom-v0"), 4, 3, 100)
    assert any(flags.any() for flags in found if flags.dtype == np.bool_)


def test_environment_stays_in_one_thread_from_construction_to_close() -> None:
    game = told(5, 3)
    played(game, 30, seed=0)
    game.close()
    owners = [set(single.threads) for single in Told.made]
    assert [len(owner) for owner in owners] == [1] * 5
    shares = [[i for i in range(5) if owners[i] == owner] for owner in owners]
    assert shares == [[0], [1, 2], [1, 2], [3, 4], [3, 4]]
    assert owners[0] == {threading.current_thread()}
    assert all(len(single.threads) > 30 for single in Told.made)


def test_environments_step_concurrently() -> None:
    game = BatchedEnv("meets", ThreadedVectorEnv([Meets] * 4, 4), 1, "")
    played(game, 6, seed=0)  # would stand still in the first
    game.close()


@pytest.mark.parametrize(
    ("faults", "kind", "sentence"),
    [
        ({3: "raise"}, KeyError, "game 3"),
        ({0: "raise"}, KeyError, "game 0"),
        ({4: "raise", 2: "raise", 3: "reward"}, KeyError, "game 2"),
        ({3: "raise", 2: "reward"}, UserError, "with a sequence"),
        ({4: "info"}, AttributeError, "NoneType"),
        ({1: "shape"}, UserError, r"of shape \[3\] where its space says \[2\]"),
    ],
)
def test_error_is_the_same_with_any_number_of_threads(
    faults: dict[int, str], kind: type[Exception], sentence: str
) -> None:
    texts = []
    for threads in (1, 2, 5):
        game = told(5, threads, faults)
        with pytest.raises(kind, match=sentence) as error:
            played(game, 8, seed=0)
        texts.append(str(error.value))
        game.close()
    assert texts == texts[:1] * 3


def test_place_of_an_error_is_in_the_environment() -> None:
    game = told(4, 4, {2: "raise"})
    with pytest.raises(KeyError) as error:
        played(game, 8, seed=0)
    assert error.traceback[-1].frame.code.name == "step"
    assert str(error.traceback[-1].path) == __file__
    game.close()


def test_failed_construction_leaves_no_thread() -> None:
    texts = []
    for threads in (1, 4):
        with pytest.raises(UserError, match="failed with OSError: no licence") as error:
            told(4, threads, {2: "construct"})
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def test_failing_close_leaves_no_thread() -> None:
    game = told(4, 4, {1: "close"})
    game.close()  # the error is noted
    Told.made[1].fault = ""
    game.close()


def test_garbage_collected_environments_leave_no_thread() -> None:
    game = told(4, 2)
    played(game, 3, seed=0)
    singles = list(Told.made)
    del game
    gc.collect()
    assert [len(set(single.threads)) for single in singles] == [1] * 4  # closed, each by its own


LEFT_OPEN = """
import sys
import gymnasium
from penstock.configs.sections import EnvConfig
from penstock.envs import make
import numpy as np
game = make(EnvConfig(id="Pendulum-v1"), 4, 4)
game.reset_into(0, np.zeros((4, 3), np.float32))
sys.argv[1] == "raise" and 1 / 0
"""


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("raise", 1)])
def test_program_without_close_still_exits(how: str, code: int) -> None:
    command = [sys.executable, "-c", LEFT_OPEN, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert "ignored" not in done.stderr  # no complaint of a destructor
    assert ("ZeroDivisionError" in done.stderr) == (how == "raise")


@pytest.mark.parametrize(
    ("env", "threads", "how"),
    [
        (EnvConfig(id="Acrobot-v1"), 4, "Acrobot-v1 is stepped side by side, by up to 4 threads"),
        (
            EnvConfig(id="CartPole-v1"),
            4,
            "CartPole-v1 is stepped by its own vector form, and actors.env_threads=4 does nothing "
            "for it",
        ),
        (
            EnvConfig(id="CartPole-v1", wrappers=["gymnasium.wrappers:FlattenObservation"]),
            2,
            "CartPole-v1 is stepped side by side, by up to 2 threads: env.wrappers turn its own "
            "vector form off, which is faster",
        ),
    ],
)
def test_use_of_threads_is_described_in_the_info(env: EnvConfig, threads: int, how: str) -> None:
    game = make(env, 3, threads)
    game.close()
    assert game.info.how == how
    assert probe(env, threads).how == how


def test_atari_uses_its_own_threads() -> None:
    pytest.importorskip("ale_py")
    game = make(EnvConfig(id="ALE/Pong-v5"), 2, 2)
    game.close()
    assert game.info.how == "ALE/Pong-v5 is stepped by ale_py.AtariVectorEnv"
