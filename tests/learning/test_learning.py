"""Agents reach a known return, through the real processes and both transports."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train_command import run_command, train

pytestmark = [pytest.mark.learning, pytest.mark.system, pytest.mark.timeout(240)]


def solve(folder: Path, target: str, *options: str, least: float) -> dict[str, Any]:
    """Train until the return that the target wants, and expect at least this mean."""
    summary = train(folder, target, *options)
    assert summary["exit_reason"] == "return"
    assert confirmed(summary) >= least
    return summary


def confirmed(summary: dict[str, Any]) -> float:
    """The mean return that ended the run: that of its closing evaluation, or in lockstep that in
    training."""
    closing = summary.get("closing_evaluation")
    found: float = closing["estimate"]["mean"] if closing else summary["episode_return_mean"]
    return found


@pytest.mark.smoke
@pytest.mark.parametrize(
    "kind", ["zmq", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("shm", "inproc"))]
)
def test_cartpole_is_solved(tmp_path: Path, kind: str) -> None:
    solve(tmp_path, "cartpole", f"transport.kind={kind}", "stop.minutes=2", least=475)


@pytest.mark.smoke
def test_ppo_solves_cartpole(tmp_path: Path) -> None:
    summary = solve(tmp_path, "CartPole-v1", "algo.name=ppo", "stop.minutes=2", least=475)
    assert summary["closing_evaluation"]["trained_steps"] < 400_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_algorithm", "own_offpolicy"])
def test_custom_algorithm_example_solves_cartpole(tmp_path: Path, name: str) -> None:
    for file in (f"{name}.py", f"{name}.yaml"):
        shutil.copy(Path(__file__).parents[2] / "examples" / file, tmp_path)
    solve(tmp_path, f"{name}.yaml", least=475)


@pytest.mark.slow
def test_ppo_solves_lunar_lander(tmp_path: Path) -> None:
    solve(tmp_path, "lunarlander", "stop.minutes=3.5", least=200)


@pytest.mark.slow
def test_one_policy_of_three_agents_covers_the_landmarks_of_simple_spread(tmp_path: Path) -> None:
    """Random play returns -26.3 to an agent, and published play about -10."""
    pytest.importorskip("mpe2")
    solve(tmp_path, "simple_spread", "stop.return=-17", "stop.minutes=3.5", least=-17)


@pytest.mark.slow
def test_evaluation_confirms_the_trained_return(tmp_path: Path) -> None:
    """In lockstep, which gives the same run each time: elsewhere the last update varies."""
    train(tmp_path, "cartpole", "transport.kind=inproc", "stop.minutes=2")
    result = run_command(tmp_path, "eval", "run", "--episodes", "20")
    assert len(result["returns"]) == 20
    assert result["return"]["mean"] >= 475


@pytest.mark.slow
def test_synthetic_game_is_played_optimally(tmp_path: Path) -> None:
    assert confirmed(solve(tmp_path, "synthetic", "stop.minutes=2", least=95)) <= 100


@pytest.mark.parametrize("core", ["lstm", pytest.param("gru", marks=pytest.mark.slow)])
def test_recurrent_policy_solves_the_memory_corridor(tmp_path: Path, core: str) -> None:
    """0.95 of the optimum: 39 of 40 turns at the end of the corridor are right."""
    solve(tmp_path, "memory", f"model.core={core}", "stop.minutes=1", least=0.95)


def test_r2d2_solves_the_memory_corridor_from_replay(tmp_path: Path) -> None:
    """0.95 of the optimum, in half of the steps that a policy without memory is given below."""
    summary = solve(tmp_path, "memory_r2d2", "stop.env_steps=150_000", "stop.minutes=3", least=0.95)
    assert summary["replay_size"] >= 5000


@pytest.mark.slow
def test_policy_without_memory_solves_half_of_the_memory_corridors(tmp_path: Path) -> None:
    """The mean of 100 returns of -1 or 1 deviates by 0.1 from 0: this allows for four of it."""
    steps = 300_000  # several times what the LSTM needs
    options = ("model.core=none", "stop.return=null", f"stop.env_steps={steps}", "stop.minutes=1")
    summary = train(tmp_path, "memory", *options)
    assert summary["exit_reason"] == "env_steps"
    assert abs(summary["episode_return_mean"]) <= 0.4


@pytest.mark.parametrize("kind", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_dqn_learns_from_replay(tmp_path: Path, kind: str) -> None:
    options = ("stop.return=150", "stop.minutes=3", f"transport.kind={kind}")
    summary = train(tmp_path, "cartpole_dqn", *options)
    assert summary["exit_reason"] == "return"
    assert summary["samples_per_insert"] == pytest.approx(16, rel=0.4)
    assert summary["replay_size"] >= 2000


@pytest.mark.slow
@pytest.mark.parametrize(("target", "least"), [("cartpole_dqn", 475), ("pendulum_sac", -200)])
def test_presets_on_replay_reach_their_return(tmp_path: Path, target: str, least: float) -> None:
    solve(tmp_path, target, "stop.minutes=3.5", least=least)


@pytest.mark.slow
@pytest.mark.parametrize(("example", "least"), [("dqn", 475), ("sac", -200)])
def test_examples_reach_their_return(example: str, least: float) -> None:
    program = Path(__file__).parents[2] / f"examples/{example}.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) >= least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "warmup", "updates", "options"),
    [
        ("onebit", 10, 50, ("sgd", "learner.lr=0.03", "learner.lr_scaling=sqrt")),
        ("onebit_lamb", 50, 100, ("lamb", "learner.lr=0.02")),
    ],
)
def test_two_learners_solve_cartpole_with_one_bit_optimizers(
    tmp_path: Path, codec: str, warmup: int, updates: int, options: tuple[str, ...]
) -> None:
    """``learner.lr`` was chosen with this scale of rewards."""
    summary = solve(
        tmp_path,
        "cartpole",
        "learner.count=2",
        f"learner.optimizer={options[0]}",
        *options[1:],
        "algo.reward_scale=0.1",
        f"learner.reduce.codec={codec}",
        "learner.reduce.onebit_block=64",  # a layer of 64 units has a size of its own
        f"learner.reduce.warmup_updates={warmup}",
        "stop.minutes=3",
        least=475,
    )
    assert summary["learner_steps"] > updates


@pytest.mark.slow
def test_custom_network_example_learns(tmp_path: Path) -> None:
    for name in ("catch.py", "own_network.py", "own_network.yaml"):
        shutil.copy(Path(__file__).parents[2] / "examples" / name, tmp_path)
    solve(tmp_path, "own_network.yaml", "stop.minutes=1", least=0.98)


@pytest.mark.slow
def test_custom_pixel_game_is_learnt(tmp_path: Path) -> None:
    for name in ("catch.py", "catch.yaml"):
        shutil.copy(Path(__file__).parents[2] / "examples" / name, tmp_path)
    solve(tmp_path, "catch.yaml", "stop.minutes=3.5", least=0.98)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_doom_is_solved_from_pixels(tmp_path: Path) -> None:
    pytest.importorskip("vizdoom")
    solve(tmp_path, "doom_basic", least=80)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["minatar_breakout", "minatar_breakout_pqn"])
def test_minatar_is_learnt(tmp_path: Path, target: str) -> None:
    """Ten times what chance scores; well below what the presets reach."""
    pytest.importorskip("minatar")
    summary = train(tmp_path, target, "stop.return=4", "stop.minutes=3")
    assert summary["exit_reason"] == "return"


@pytest.mark.slow
def test_pqn_balances_the_pole(tmp_path: Path) -> None:
    """As it is played, without random actions."""
    summary = train(tmp_path, "CartPole-v1", "algo.name=pqn", "stop.env_steps=200_000")
    assert summary["eval_return_greedy"] >= 475


def test_hindsight_finds_goals_that_are_never_reached_without_it(tmp_path: Path) -> None:
    """12 bits have 4,096 states, and an episode sees 12 of them."""
    options = ("env.kwargs.bits=12", "stop.return=null", "stop.env_steps=8000", "stop.minutes=2")
    success = {}
    for fraction in (0.8, 0.0):
        folder = tmp_path / str(fraction)
        folder.mkdir()
        summary = train(folder, "bit_flip", f"algo.hindsight={fraction}", *options)
        success[fraction] = summary["env_is_success_final_mean"]
    assert success[0.8] >= 0.95
    assert success[0.0] <= 0.3


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_a_point_is_moved_to_goals_that_hindsight_has_shown(tmp_path: Path, algo: str) -> None:
    """Random actions reach the goal in about 3 % of episodes."""
    shutil.copy(Path(__file__).parents[1] / "goal_games.py", tmp_path)
    summary = train(
        tmp_path,
        "goal_games:PointReach",
        *(f"algo.name={algo}", "env.kind=continuous", "algo.hindsight=0.8", "algo.discount=0.95"),
        *("replay.min_size=500", "model.hidden=[64,64]", "learner.lr=1e-3"),
        *("env.record=[is_success]", "stop.env_steps=6000", "stop.minutes=3.5"),
    )
    assert summary["env_is_success_final_mean"] >= 0.9
