"""Students reach their teachers in a part of the steps, through the whole command."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.learner.checkpoints import checkpoint_format
from train_command import run_command

pytestmark = [pytest.mark.learning, pytest.mark.system, pytest.mark.timeout(240)]

TEACHER = "teacher.safetensors"
LOCKSTEP = "transport.kind=inproc"  # gives the same run each time
SWAPPED = '''
import gymnasium
from gymnasium import spaces


class Swapped(gymnasium.ActionWrapper):
    """A hero whose left is right."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))

    def action(self, action):
        return 1 - action


class AnyHero(gymnasium.Env):
    """Another hero in each episode, whose number is a part of the observation."""

    def __init__(self):
        self.games = [gymnasium.make("CartPole-v1"), Swapped()]
        pole = self.games[0].observation_space
        self.observation_space = spaces.Dict({"hero": spaces.Discrete(2), "pole": pole})
        self.action_space = self.games[0].action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.hero = int(self.np_random.integers(2))
        pole, info = self.games[self.hero].reset(seed=seed)
        return {"hero": self.hero, "pole": pole}, info

    def step(self, action):
        pole, *rest = self.games[self.hero].step(action)
        return {"hero": self.hero, "pole": pole}, *rest
'''


def mean_return(folder: Path, run: str) -> float:
    result = run_command(folder, "eval", run, "--checkpoint", "last", "--episodes", "20")
    mean: float = result["return"]["mean"]
    return mean


def parameters(folder: Path, run: str) -> int:
    return checkpoint_format.load(folder / run / "checkpoints" / "last").layout.size


@pytest.fixture(scope="module")
def steps_of_teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder with a run that has solved CartPole by PPO and its exported policy; its steps."""
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "heroes.py").write_text(SWAPPED)
    trained = run_command(folder, "train", "cartpole_ppo", "run.dir=teacher", LOCKSTEP)
    assert trained["exit_reason"] == "return"
    run_command(folder, "export", "teacher", TEACHER)
    return folder, trained["trained_steps"]


def test_a_student_of_a_quarter_of_the_parameters_needs_a_fifth_of_the_steps(
    steps_of_teacher: tuple[Path, int],
) -> None:
    folder, steps = steps_of_teacher
    options = ("algo.name=distill", f"algo.teachers=[{TEACHER}]", "model.hidden=[28,28]")
    run_command(
        *(folder, "train", "CartPole-v1", *options, "run.dir=student", LOCKSTEP),
        f"stop.env_steps={steps // 5}",
    )
    assert parameters(folder, "student") <= parameters(folder, "teacher") / 4
    assert mean_return(folder, "student") >= 0.9 * 500


def test_kick_started_ppo_reaches_its_teacher_in_half_of_the_steps(
    steps_of_teacher: tuple[Path, int],
) -> None:
    folder, steps = steps_of_teacher
    options = (f"algo.teacher={TEACHER}", f"algo.teacher_cost={{from: 1, to: 0, steps: {steps}}}")
    run_command(
        *(folder, "train", "cartpole_ppo", *options, "run.dir=kick", LOCKSTEP, "run.seed=5"),
        *("stop.return=null", f"stop.env_steps={steps // 2}"),
    )
    assert mean_return(folder, "kick") >= 0.9 * 500


@pytest.mark.slow
def test_one_policy_is_made_of_the_policies_of_two_heroes(
    steps_of_teacher: tuple[Path, int],
) -> None:
    """Each teacher was trained in an environment without the part that tells heroes apart."""
    folder, _ = steps_of_teacher
    run_command(
        *(folder, "train", "heroes:Swapped", "run.dir=other", LOCKSTEP, "algo.name=ppo"),
        *("algo.reward_scale=0.1", "learner.lr=3e-3", "stop.return=475"),
    )
    teachers = f"algo.teachers=[{TEACHER},other]"
    run_command(
        *(folder, "train", "heroes:AnyHero", "algo.name=distill", teachers, "algo.part=hero"),
        *("run.dir=both", LOCKSTEP, "stop.env_steps=60000"),
    )
    assert mean_return(folder, "both") >= 0.9 * 500
