"""Evaluating, recording, plotting and listing a run, with callbacks, signals and metric sinks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.learner.checkpoints import checkpoint_format
from train_command import SMALL, Penstock, assert_balanced, json_lines, metrics, trained

pytestmark = pytest.mark.system

HOOKS = """
from pathlib import Path
from penstock.launch.callbacks import Callbacks

class Hooks(Callbacks):
    evaluations = 0

    def on_evaluation(self, run, evaluated):
        self.evaluations += 1
        return self.evaluations == 3

    def on_checkpoint(self, run, saved):
        if not (saved.folder / "checkpoint.safetensors").is_file():
            Path("missing").touch()
        raise OSError("cannot be reached")

    def on_end(self, run, summary):
        Path("end").write_text(f"{summary.reason} {run.folder}")
"""
# Signals that arrive when a run has ended, and its command has not yet printed the result.
LATE = """
import os
import time
from penstock.launch.callbacks import Callbacks

class Late(Callbacks):
    def on_end(self, run, summary):
        for signum in (SIGNUMS):
            os.kill(os.getpid(), signum)
            time.sleep(0.01)
"""
# An environment that breaks in the evaluator alone.
BROKEN = """
import sys
import gymnasium

def make():
    if "evaluator-0" in sys.argv:
        raise RuntimeError("not in here")
    return gymnasium.make("CartPole-v1")
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of CartPole that has ended, soon after it began."""
    folder = tmp_path_factory.mktemp("around")
    options = ("run.dir=run", "stop.learner_steps=60", *SMALL)
    command = [sys.executable, "-m", "penstock", "train", "cartpole", *options]
    subprocess.run(command, cwd=folder, check=True, timeout=100, stdout=subprocess.DEVNULL)
    return folder / "run"


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return json_lines(run_dir / "evaluations.jsonl")


def test_run_is_evaluated_while_training_and_its_callbacks_end_it(
    penstock: Penstock, tmp_path: Path
) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS)
    options = (
        "run.dir=run", "eval.every_s=0.3", "eval.episodes=4", "checkpoint.every_s=0.2",
        "run.callbacks=[hooks:Hooks]", "run.tensorboard=true",
    )  # fmt: skip
    code, answer, err = penstock("train", "cartpole", "--json", *SMALL, *options).end()
    assert (code, answer["exit_reason"]) == (0, "callback"), err
    assert_balanced(answer)
    found = evaluations(tmp_path / "run")
    assert len(found) >= 3  # it goes on until it is stopped
    assert {e["episodes"] for e in found} == {4}
    steps = [e["learner_steps"] for e in found]
    assert steps == sorted(steps)
    assert len(set(steps)) >= 2
    best = max(found, key=lambda e: e[e["play"]]["lower"])
    assert best["best"], (found, err)
    assert answer["eval_return_best"] == best["return"]["mean"]
    assert answer["eval_return_mean"] == found[-1]["return"]["mean"]
    stored = checkpoint_format.load(tmp_path / "run" / "checkpoints" / "best").meta["progress"]
    assert stored["learner_steps"] == best["learner_steps"]
    assert err.count("callback hooks:Hooks.on_checkpoint failed with OSError") == 1
    assert (tmp_path / "end").read_text() == "callback run"
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_after_the_end_of_a_run_keeps_its_result(
    penstock: Penstock, tmp_path: Path, signum: int
) -> None:
    (tmp_path / "late.py").write_text(LATE.replace("SIGNUMS", f"{int(signum)},"))
    options = (*SMALL, "run.dir=run", "stop.learner_steps=20", "run.callbacks=[late:Late]")
    code, answer, err = penstock("train", "cartpole", "--json", *options).end()
    assert (code, answer.get("exit_reason")) == (0, "learner_steps"), err
    assert answer["exit_code"] == 0
    assert "ended by" in err  # the summary


@pytest.mark.slow
def test_a_second_signal_after_the_end_of_a_run_ends_its_command(
    penstock: Penstock, tmp_path: Path
) -> None:
    (tmp_path / "late.py").write_text(LATE.replace("SIGNUMS", "2, 2"))
    options = (*SMALL, "run.dir=run", "stop.learner_steps=20", "run.callbacks=[late:Late]")
    assert penstock("train", "cartpole", "--json", *options).end()[:2] == (130, {})


@pytest.mark.slow
def test_a_signal_after_a_run_of_a_group_ends_the_group_with_its_table(
    penstock: Penstock, tmp_path: Path
) -> None:
    (tmp_path / "late.py").write_text(LATE.replace("SIGNUMS", "15,"))
    options = (*SMALL, "run.dir=group", "stop.learner_steps=20", "run.callbacks=[late:Late]")
    group = ("--seeds", "2", "--parallel", "1")
    found, answer, err = penstock("train", "cartpole", "--json", *group, *options).end()
    assert (found, len(answer["runs"]), answer["finished"]) == (130, 1, 1), err


@pytest.mark.slow  # on a busy machine the run may end before its evaluator has started
def test_a_run_of_a_number_of_steps_ends_with_an_evaluation_of_its_last_weights(
    penstock: Penstock, tmp_path: Path
) -> None:
    options = (
        "run.dir=run", "eval.every_steps=4000", "eval.share=null", "eval.episodes=2",
        "stop.env_steps=10000",
    )  # fmt: skip
    code, answer, err = penstock("train", "cartpole", "--json", *SMALL, *options).end()
    assert (code, answer["exit_reason"]) == (0, "env_steps"), err
    assert_balanced(answer)
    last = checkpoint_format.load(tmp_path / "run" / "checkpoints" / "last").meta["progress"]
    found = evaluations(tmp_path / "run")
    assert found[-1]["trained_steps"] == last["trained_steps"] == answer["trained_steps"]
    assert answer["eval_return_mean"] == found[-1]["return"]["mean"]
    assert err.count("the last weights are evaluated") == 1


@pytest.mark.slow
def test_killed_evaluator_is_restarted(penstock: Penstock, tmp_path: Path) -> None:
    options = ("run.dir=run", "eval.every_s=0.3", "eval.episodes=2")  # which saves as often
    run = penstock("train", "cartpole", "--json", *SMALL, *options)
    run.wait_until(lambda: evaluations(tmp_path / "run"))
    os.kill(run.pid_of("evaluator-0"), signal.SIGKILL)
    before = len(evaluations(tmp_path / "run"))
    run.wait_until(lambda: len(evaluations(tmp_path / "run")) > before)
    run.process.send_signal(signal.SIGINT)
    code, summary, err = run.end()
    assert (code, summary["actors_restarted"]) == (130, 0)
    assert "evaluator-0: was killed by SIGKILL" in err
    assert_balanced(summary)


@pytest.mark.slow
def test_failing_evaluator_does_not_end_the_run(penstock: Penstock, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    options = ("run.dir=run", "eval.every_s=0.1", "checkpoint.every_s=0.1")
    run = penstock("train", "broken:make", "--json", *SMALL, *options, "stop.minutes=0.1")
    code, summary, err = run.end()
    assert (code, summary["exit_reason"]) == (0, "minutes")
    assert "not in here" in err
    assert err.count("the run continues without it") == 1


def count_pictures(path: Path) -> tuple[int, float]:
    import imageio_ffmpeg

    found: tuple[int, float] = imageio_ffmpeg.count_frames_and_secs(str(path))
    return found


def test_a_video_shows_every_step(
    penstock: Penstock, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.delenv("DISPLAY", raising=False)
    code, answer, err = penstock("record", str(run_dir), "--episodes", "2", "--json").end()
    assert (code, err) == (0, "")
    path = Path(answer["file"])
    # So short a run may end before its first evaluation, and then has no best checkpoint.
    checkpoint = "best" if (run_dir / "checkpoints" / "best").is_dir() else "last"
    assert path == run_dir / "videos" / f"{checkpoint}-0.mp4"
    assert answer["returns"] == answer["lengths"]  # CartPole pays 1 a step
    pictures, seconds = count_pictures(path)
    # The first observation and the reset between the episodes are shown too, at 50 a second.
    assert pictures == sum(answer["lengths"]) + 2
    assert seconds == pytest.approx(pictures / 50, abs=0.05)
    evaluated = penstock("eval", str(run_dir), "--episodes", "1", "--json").end()[1]
    assert evaluated["returns"][0] == answer["returns"][0]  # the same game, played the same way


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("env.kwargs={obs_shape: [4, 24, 32], obs_dtype: uint8, episode_steps: 9}",), 0),
        pytest.param(("env.kwargs={obs_shape: [8], episode_steps: 9}",), 2, marks=pytest.mark.slow),
    ],
)
def test_a_game_that_does_not_draw_itself_is_shown_by_its_observations(
    penstock: Penstock, tmp_path: Path, options: Sequence[str], code: int
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    small = ("run.dir=run", "stop.learner_steps=1", "actors.envs=8", "actors.unroll=8")
    run = penstock("train", "synthetic", *small, "model.kind=auto", *options, "--json")
    assert run.end()[0] == 0
    found, answer, err = penstock("record", "run", "--out", "seen.mp4", "--json").end()
    assert found == code
    if code:
        assert "cannot be shown: it does not draw itself" in err
        assert not list(tmp_path.glob("*.mp4"))
    else:
        assert answer["lengths"] == [9]
        assert count_pictures(tmp_path / "seen.mp4")[0] == 10


def test_playing_needs_a_display(
    penstock: Penstock, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    code, _, err = penstock("play", str(run_dir)).end()
    assert code == 2
    assert err == (
        "penstock: there is no display to show a game on: neither DISPLAY nor WAYLAND_DISPLAY is "
        f"set; make a video with `penstock record {run_dir}`\n"
    )
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # a window that nobody sees
    code, answer, err = penstock("play", str(run_dir), "--episodes", "1", "--json").end()
    assert (code, len(answer["returns"])) == (0, 1), err


def test_weights_of_another_game_are_refused(
    penstock: Penstock, run_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    (other / "checkpoints" / "last").mkdir(parents=True)
    name = "checkpoints/last/checkpoint.safetensors"
    (other / name).write_bytes((run_dir / name).read_bytes())
    text = (run_dir / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("id: CartPole-v1", "id: Acrobot-v1"))
    for command in ("eval", "record"):
        code, _, err = penstock(command, "other").end()
        assert (code, err.count("\n")) == (2, 1)
        assert "is of another network" in err
        assert "set env.id and model.* as they were" in err


def test_runs_are_listed_during_and_after_their_life(penstock: Penstock, tmp_path: Path) -> None:
    run = penstock("train", "cartpole", "--json", *SMALL, "run.dir=runs/a")
    run.wait_until(lambda: trained(tmp_path / "runs" / "a"))
    (found,) = penstock("runs", "--json").end()[1]["runs"]
    assert (found["run_dir"], found["state"]) == ("runs/a", "running")
    assert (found["env"], found["algorithm"]) == ("CartPole-v1", "impala")
    assert penstock("plot", "runs/a", "--json").end()[1] == {"file": "runs/a/plot.png"}
    run.process.send_signal(signal.SIGINT)
    code, summary, _ = run.end()
    assert code == 130
    (found,) = penstock("runs", "--json").end()[1]["runs"]
    assert found["state"] == "stopped"
    assert found["env_steps"] == summary["env_steps"]  # with what arrived after the last metrics


def test_group_of_seeds_trains_a_run_for_each_seed(penstock: Penstock, tmp_path: Path) -> None:
    options = ("run.dir=group", "run.seed=7", *SMALL)
    group = penstock("train", "cartpole", "--seeds", "2", "--json", *options, "stop.env_steps=3e4")
    code, answer, err = group.end()
    assert code == 0, err
    assert [run["seed"] for run in answer["runs"]] == [7, 8]
    assert (answer["finished"], answer["solved"]) == (2, 0)
    means = [run["episode_return_mean"] for run in answer["runs"]]
    assert answer["return"]["mean"] == pytest.approx(sum(means) / 2)
    assert answer["return"]["half"] > 0
    assert (tmp_path / answer["plot"]).read_bytes()[1:4] == b"PNG"
    for seed in (7, 8):
        text = (tmp_path / "group" / f"seed-{seed}" / "config.yaml").read_text()
        assert f"  seed: {seed}\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
def test_ctrl_c_ends_a_group_of_seeds(penstock: Penstock, tmp_path: Path, parallel: int) -> None:
    options = ("--seeds", "3", "--parallel", str(parallel), "--json", "run.dir=other")
    other = penstock("train", "cartpole", *options, *SMALL)
    for seed in range(parallel):
        other.wait_until(lambda seed=seed: trained(tmp_path / "other" / f"seed-{seed}"))  # type: ignore[misc]
    other.process.send_signal(signal.SIGINT)
    code, answer, _ = other.end()
    assert (code, answer["exit_code"], answer["asked"]) == (130, 130, 3)
    assert [run["exit_reason"] for run in answer["runs"]] == ["interrupted"] * parallel
    assert not (tmp_path / "other" / f"seed-{parallel}").exists()


WANDB = {
    "hangs": "import time\ndef init(**options): time.sleep(1000)\n",
    "fails": "def init(**options): raise RuntimeError('no network')\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_failing_metrics_library_does_not_end_the_run(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "wandb.py").write_text(WANDB[how])
    paths = [str(tmp_path / "libraries"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    options = ("run.dir=run", "run.wandb=games", "run.grace_s=3", "stop.learner_steps=400")
    code, summary, err = penstock("train", "cartpole", "--json", *SMALL, *options).end()
    assert (code, summary["exit_reason"]) == (0, "learner_steps"), err
    if how == "hangs":
        assert "W&B did not finish within 3 s: no data was stored" in err
    else:
        assert "RuntimeError: no network" in (tmp_path / "run" / "logs" / "wandb.log").read_text()


def test_metrics_reach_wandb_without_a_network(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    options = ("run.dir=run", "run.wandb=games", "stop.learner_steps=50", "run.grace_s=60")
    code, _, err = penstock("train", "cartpole", "--json", *SMALL, *options).end()
    assert code == 0, err
    log = (tmp_path / "run" / "logs" / "wandb.log").read_text()
    steps = metrics(tmp_path / "run")[-1]["env_steps"]
    assert f"wandb: flow/env_steps {steps} " in " ".join(log.split())  # of what its summary shows
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
