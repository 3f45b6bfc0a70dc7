"""`penstock check-env`, and what `penstock train` says of the same mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from train_command import SMALL, Penstock

pytestmark = [pytest.mark.system, pytest.mark.timeout(100)]

EXAMPLES = Path(__file__).parents[2] / "examples"

BROKEN = """
import ctypes, time
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

class Game(gymnasium.Env):
    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2)
    age = 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.age += 1
        return np.zeros(2, np.float32), 1.0, self.age == 9, False, {}

class Grows(Game):
    def step(self, action):
        _, *rest = super().step(action)
        return np.zeros(2 + (self.age > 7), np.float32), *rest

class Leaks(Game):
    kept = []
    def step(self, action):
        self.kept.append(np.ones(1 << 15, np.uint8))
        return super().step(action)

class Lies(VectorWrapper):
    def __init__(self, num_envs):
        super().__init__(SyncVectorEnv([Game] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP))
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

class Hangs(Game):
    def step(self, action):
        time.sleep(100)

class KeepsTheLock(Game):
    def step(self, action):
        ctypes.PyDLL(None).sleep(100)

nameless = lambda: Game()
"""


@pytest.fixture
def broken(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)


@pytest.mark.slow
def test_sound_custom_environment_passes_check_env_and_trains(
    penstock: Penstock, tmp_path: Path
) -> None:
    (tmp_path / "own_game.py").write_text((EXAMPLES / "own_game.py").read_text())
    code, report, _ = penstock("check-env", "own_game:Orchard", "--steps", "300", "--json").end()
    assert (code, report["problems"]) == (0, [])
    assert report["figures"]["episodes"] > 5
    assert report["figures"]["steps_per_s"] > 100
    options = (*SMALL, "algo.name=ppo", "stop.learner_steps=5", "run.dir=first")
    code, summary, err = penstock("train", "own_game:Orchard", *options, "--json").end()
    assert code == 0, err
    assert summary["accounting"]["trained"] > 0


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Grows", "observation"),
        ("Leaks", "memory"),
        ("Lies", "autoreset"),
        ("nameless", "pickling"),
    ],
)
def test_check_env_lists_problems_and_exits_with_2(
    penstock: Penstock, name: str, kind: str
) -> None:
    code, report, _ = penstock("check-env", f"broken:{name}", "--json").end()
    assert code == 2
    assert [problem["kind"] for problem in report["problems"]] == [kind], report


@pytest.mark.usefixtures("broken")
def test_hanging_step_is_reported_with_its_line(penstock: Penstock) -> None:
    code, report, _ = penstock("check-env", "broken:Hangs", "--hang-s", "1", "--json").end()
    assert code == 2
    [problem] = report["problems"]
    assert problem["kind"] == "hang"
    assert problem["text"].startswith("Hangs.step() has not come back for 1 s and is at broken.py:")


@pytest.mark.usefixtures("broken")
@pytest.mark.slow
def test_step_that_hangs_with_the_gil_held_is_ended(penstock: Penstock) -> None:
    code, _, err = penstock("check-env", "broken:KeepsTheLock", "--hang-s", "1", "--json").end()
    assert code == 1
    assert re.search(r"broken\.py\", line \d+ in step", err)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("broken:Grows", "returned an observation of shape [3] where its space says [2]"),
        ("broken:Lies", "gave a reward in the step after an episode's end, which only resets"),
        ("phys2d/CartPole-v1", 'run `pip install "gymnasium[jax]"`, then try again'),
    ],
)
def test_training_in_a_broken_environment_ends_with_one_sentence(
    penstock: Penstock, target: str, sentence: str
) -> None:
    code, summary, err = penstock("train", target, *SMALL, "--json").end()
    assert code == 2, err
    assert sentence in summary["error"]
    assert "Traceback" not in err
