"""The code in the tutorials does what they say it does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pages import code
from train_command import Penstock

pytestmark = pytest.mark.system

QUICK = ("run.dir=run", "stop.minutes=0.6")


@pytest.fixture
def corridor(tmp_path: Path) -> Path:
    (tmp_path / "corridor.py").write_text(code("own-game.md", "python", 0))
    (tmp_path / "corridor.yaml").write_text(code("own-game.md", "yaml", 0))
    return tmp_path


@pytest.mark.timeout(110)
def test_custom_environment_tutorial_is_learnt(corridor: Path, penstock: Penstock) -> None:
    run = penstock("train", "corridor.yaml", *QUICK, "--json")
    status, summary, errors = run.end()
    assert status == 0, errors
    # The best play takes 11 to 20 steps: each costs 0.01, but the last, which pays 1.
    assert summary["exit_reason"] == "return"
    assert 0.8 <= summary["closing_evaluation"]["estimate"]["mean"] <= 0.9
    # -P: as for the command `penstock`, what lies in the current folder is not found by itself.
    asked = [sys.executable, "-P", "-m", "penstock", "eval", "run", "--episodes", "4"]
    subprocess.run(asked, cwd=corridor, check=True, timeout=50)
    (corridor / "use.py").write_text(
        code("own-game.md", "python", 1).replace("runs/corridor", "run")
    )
    status, _, errors = penstock(module="use").end()
    assert (status, errors) == (0, "")


@pytest.mark.smoke
@pytest.mark.timeout(110)
def test_the_game_of_the_readme_is_checked_trained_and_played(
    tmp_path: Path, penstock: Penstock
) -> None:
    (tmp_path / "dial.py").write_text(code("../README.md", "python", 0))
    status, _, errors = penstock("check-env", "dial:Dial", "--steps", "500", "--json").end()
    assert status == 0, errors
    last = "import json; print(json.dumps({'reason': summary.reason, 'left': action == 0}))"
    program = [code("../README.md", "python", 1), last]
    (tmp_path / "use.py").write_text("\n".join(program))
    status, answer, errors = penstock(module="use").end()
    assert (status, answer["reason"], answer["left"]) == (0, "return", True), errors


@pytest.mark.timeout(110)
def test_replay_example_trains_resumes_and_is_evaluated(tmp_path: Path, penstock: Penstock) -> None:
    for name in ("own_offpolicy.py", "own_offpolicy.yaml"):
        shutil.copy(Path(__file__).parents[2] / "examples" / name, tmp_path)
    small = ("replay.min_size=256", "stop.return=null")
    begun = ("run.dir=run", *small, "stop.learner_steps=30", "--json")
    status, _, errors = penstock("train", "own_offpolicy.yaml", *begun).end()
    assert status == 0, errors
    again = penstock("train", "run", "--resume", "must", "stop.learner_steps=60", "--json")
    status, summary, errors = again.end()
    assert status == 0, errors
    assert summary["learner_steps"] >= 60
    status, summary, errors = penstock("eval", "run", "--episodes", "2", "--json").end()
    assert status == 0, errors
    assert len(summary["returns"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("name", "number", "options"),
    [
        ("nets", 0, ["model.entry=nets:Net", "model.settings.width=32"]),
        (
            "a2c",
            1,
            ["algo.name=custom", "algo.entry=a2c", "learner.lr=1e-3"],
        ),
    ],
)
def test_custom_network_and_algorithm_tutorials_learn(
    tmp_path: Path, penstock: Penstock, name: str, number: int, options: list[str]
) -> None:
    (tmp_path / f"{name}.py").write_text(code("own-algorithm.md", "python", number))
    run = penstock("train", "CartPole-v1", *options, "stop.return=200", *QUICK, "--json")
    status, summary, errors = run.end()
    assert status == 0, errors
    assert summary["exit_reason"] == "return", "random play returns about 22"
