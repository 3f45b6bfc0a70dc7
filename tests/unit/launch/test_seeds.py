"""Groups of runs with several seeds: processes, signals and their common summary."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.run_dir import Resume
from penstock.launch.run_group import (
    RunEnd,
    cores_of,
    run_command,
    run_commands,
    runs_at_once,
)
from penstock.launch.seeds import group_means, train_seeds
from penstock.launch.signals import SIGNALS, SignalsAfterRun, handling_signals


def summary(reason: str, solved_at_s: float | None, mean: float) -> dict[str, Any]:
    error = "learner-0: was killed" if reason == "fault" else None
    figures = {"solved_at_s": solved_at_s, "episode_return_mean": mean}
    return {"error": error, "exit_reason": reason, **figures}


def test_summary_of_a_group_matches_figures_by_hand() -> None:
    runs = {
        0: summary("return", 2.0, 480.0),
        1: summary("return", 4.0, 500.0),
        2: summary("env_steps", None, 400.0),
        3: summary("fault", 1.0, 1.0),
        4: summary("interrupted", None, 12.0),
        5: summary("terminated", None, 13.0),
    }
    found = group_means(runs, 475.0)
    assert (found["goal"], found["solved"], found["finished"]) == (475.0, 2, 3)
    assert found["return"]["mean"] == 460.0
    # Deviation of 480, 500, 400: sqrt((20² + 40² + 60²) / 2); Student's t for two degrees: 4.303.
    assert found["return"]["half"] == pytest.approx(4.303 * (2800 / 3) ** 0.5)
    assert found["solved_at_s"] == {"mean": 3.0, "half": pytest.approx(12.706)}


@pytest.mark.parametrize(
    ("resume", "taken", "refused"),
    [("no", 2, "seed-2 already holds a run"), ("must", 0, "seed-1 has no checkpoint")],
)
def test_unusable_folder_is_refused_before_the_first_run(
    tmp_path: Path, resume: Resume, taken: int, refused: str
) -> None:
    last = tmp_path / f"seed-{taken}" / "checkpoints" / "last"
    last.mkdir(parents=True)
    (last / "checkpoint.safetensors").touch()
    with pytest.raises(UserError, match=refused):
        train_seeds("cartpole", [f"run.dir={tmp_path}"], 3, resume, as_json=True)
    assert [path.name for path in tmp_path.iterdir()] == [f"seed-{taken}"]


def test_auto_numbers_are_refused_for_several_seeds(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the runs of this command need the same number; set act"):
        train_seeds("cartpole", [f"run.dir={tmp_path}", "actors.envs=auto"], 3, "no", as_json=True)
    options = [f"run.dir={tmp_path}", "transport.connectors=auto"]
    with pytest.raises(UserError, match=r"auto .*, and this command starts several runs; set tran"):
        train_seeds("cartpole", options, 3, "no", as_json=True)
    assert not list(tmp_path.iterdir())


def test_refused_later_seed_does_not_cost_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Outcome:
        exit_code = 0

    def run_and_show(resolved: Any, path: Path, *rest: Any, **more: Any) -> Any:
        if path.name == "seed-1":
            raise UserError(f"{path} is in use")
        return Outcome(), summary("env_steps", None, 400.0)

    monkeypatch.setattr("penstock.launch.run.run_and_show", run_and_show)
    options = [f"run.dir={tmp_path}"]
    assert train_seeds("cartpole", options, 3, "no", as_json=True, parallel=1) == 2
    found = json.loads(capsys.readouterr().out)
    assert [run["seed"] for run in found["runs"]] == [0, 1]
    assert found["return"]["mean"] == 400.0
    assert "seed-1 is in use" in found["runs"][1]["error"]


def test_runs_prevented_by_a_signal_are_not_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came when the first runs had reached their limits, and had not been reaped."""
    ended = {seed: RunEnd(0, summary("env_steps", None, 400.0)) for seed in range(2)}
    monkeypatch.setattr("penstock.launch.seeds.run_commands", lambda *_, **__: ended)
    options = [f"run.dir={tmp_path}"]
    assert train_seeds("cartpole", options, 3, "no", as_json=True, parallel=2) == 130
    assert train_seeds("cartpole", options, 2, "no", as_json=True, parallel=2) == 0


def test_a_signal_between_two_runs_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def run_and_show(resolved: Any, path: Path, *rest: Any, handler_after: Any, **more: Any) -> Any:
        begun.append(path.name)
        signal.signal(signal.SIGINT, handler_after)  # as a run does at its end
        return SimpleNamespace(exit_code=0), summary("env_steps", None, 400.0)

    def say(text: str, stream: Any) -> None:
        if begun:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("penstock.launch.run.run_and_show", run_and_show)
    monkeypatch.setattr("penstock.launch.seeds.say_line", say)
    # A command that another test has called may have left a handler, as it ends its process.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train_seeds("cartpole", [f"run.dir={tmp_path}"], 2, "no", as_json=True, parallel=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun == ["seed-0"]


def test_summary_of_no_runs_has_no_figures() -> None:
    assert group_means({}, None) == {
        "return": None,
        "goal": None,
        "solved": 0,
        "solved_at_s": None,
        "finished": 0,
    }


@pytest.mark.parametrize(
    ("options", "cores"),
    [
        (["actors.count=3", "learner.threads=2"], 5),
        (["actors.count=2", "actors.threads=2", "actors.env_threads=4"], 9),
        (["actors.count=2", "learner.count=2", "learner.threads=3"], 8),
        (["transport.kind=inproc", "actors.count=1", "learner.threads=2"], 2),
    ],
)
def test_cores_of_a_run_follow_its_options(options: list[str], cores: int) -> None:
    config = resolve("cartpole", options)
    assert cores_of(config) == cores
    assert [runs_at_once(config, n * cores + 0.5) for n in (0, 1, 3)] == [1, 1, 3]


def program(text: str) -> list[str]:
    return [sys.executable, "-c", "import json, os, pathlib, signal, sys, time\n" + text]


def answer(**figures: Any) -> str:
    known = {"error": None, "exit_reason": "env_steps", "solved_at_s": None}
    return f"print({json.dumps(json.dumps({**known, **figures}))})\n"


def test_allowed_number_of_runs_run_at_once(tmp_path: Path) -> None:
    meet = (
        "me = pathlib.Path(sys.argv[1]); (me / sys.argv[2]).touch()\n"
        "most = 0\n"
        "for _ in range(100):\n"
        "    most = max(most, len([*me.iterdir()])); time.sleep(0.01)\n"
        "    if most == 2 and _ > 20: break\n"
        "(me / sys.argv[2]).unlink()\n"
        "print('met', most, file=sys.stderr)\n"
    )
    lines: list[str] = []
    commands = {
        seed: [*program(meet + answer(episode_return_mean=seed)), str(tmp_path), str(seed)]
        for seed in range(4)
    }
    ended = run_commands(commands, 2, lines.append)
    assert [*ended] == [0, 1, 2, 3]
    assert [found.code for found in ended.values()] == [0] * 4
    assert [found.summary["episode_return_mean"] for found in ended.values()] == [0, 1, 2, 3]
    met = [line for line in lines if " | met " in line]
    assert len(met) == 4
    assert {line.split()[-1] for line in met} <= {"1", "2"}
    assert "seed 0 | met 2" in met


def test_failed_run_is_reported_and_the_others_continue() -> None:
    lines: list[str] = []
    commands = {
        0: program("print('cannot', file=sys.stderr); sys.exit(1)"),
        1: program(answer(exit_reason="fault", error="learner-0: broke") + "sys.exit(1)"),
        2: program("print(1.5, flush=True); os.kill(os.getpid(), signal.SIGKILL)"),
        3: program(answer()),
    }
    ended = run_commands(commands, 1, lines.append)
    assert [found.code for found in ended.values()] == [1, 1, 1, 0]
    assert "seed 0 | cannot" in lines
    assert ended[0].summary["error"] == (
        "its process ended without a summary, with exit code 1; see above"
    )
    assert ended[1].summary["error"] == "learner-0: broke"
    assert "exit code -9" in ended[2].summary["error"]
    assert (
        group_means({seed: found.summary for seed, found in ended.items()}, None)["finished"] == 1
    )


def test_after_a_mistake_of_the_user_no_further_run_starts() -> None:
    commands = {seed: program("sys.exit(2)") for seed in range(5)}
    ended = run_commands(commands, 2, lambda _: None)
    assert {found.summary["exit_reason"] for found in ended.values()} == {"user_error"}
    assert 1 <= len(ended) <= 2


def test_independent_runs_continue_after_a_user_error_in_one() -> None:
    commands = {0: program("sys.exit(2)"), 1: program(answer())}
    ended = run_commands(commands, 1, lambda _: None, independent=True)
    assert [found.code for found in ended.values()] == [2, 0]


def test_the_failure_of_one_of_several_runs_together_asks_the_others_to_end() -> None:
    wait = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "print('waits', file=sys.stderr, flush=True); time.sleep(60)\n"
    )
    fail = "time.sleep(1)\n" + answer(exit_reason="fault", error="learner-0: broke") + "sys.exit(1)"
    lines: list[str] = []
    commands = {"main": program(wait), "exploiter": program(fail), "done": program(answer())}
    ended = run_commands(commands, 3, lines.append, name="line", together=True)
    assert {name: end.code for name, end in ended.items()} == {
        "main": 143,
        "exploiter": 1,
        "done": 0,
    }
    assert "line main | waits" in lines
    assert "the other runs save and end, as line exploiter has failed" in lines


def test_refused_config_is_reported_in_the_summary(tmp_path: Path) -> None:
    refused = run_command("cartpole", ["learner.lr=-1"], tmp_path / "run", "no")
    [found] = run_commands({0: refused}, 1, lambda _: None).values()
    assert found.code == 2
    assert "learner.lr is -1; it must be" in found.summary["error"]


def test_ctrl_c_ends_all_runs_once_and_starts_no_other(tmp_path: Path) -> None:
    wait = (
        "count = 0\n"
        "def end(*_):\n"
        "    global count; count += 1\n"
        "signal.signal(signal.SIGINT, end)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "until = time.monotonic() + 20\n"
        "while not count and time.monotonic() < until: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "print(json.dumps({'error': None, 'exit_reason': 'interrupted', 'solved_at_s': None,"
        " 'signals': count}))\n"
        "sys.exit(130)\n"
    )
    commands = {seed: [*program(wait), str(tmp_path / str(seed))] for seed in range(3)}

    def interrupt() -> None:
        while len([*tmp_path.iterdir()]) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    ended = run_commands(commands, 2, lambda _: None)
    thread.join()
    assert [*ended] == [0, 1]
    assert [(found.code, found.summary["signals"]) for found in ended.values()] == [(130, 1)] * 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_a_signal_ends_before_it_began_was_interrupted() -> None:
    commands = {
        0: program("signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), 2)"),
        1: program("os.kill(os.getpid(), signal.SIGTERM)"),
    }
    ended = run_commands(commands, 2, lambda _: None)
    assert [found.code for found in ended.values()] == [130, 143]
    reasons = [found.summary["exit_reason"] for found in ended.values()]
    assert reasons == ["interrupted", "terminated"]
    assert group_means({s: found.summary for s, found in ended.items()}, None)["finished"] == 0


def test_ignored_signal_stays_ignored_and_the_first_signal_after_the_runs_has_no_effect() -> None:
    """As nohup ignores SIGHUP."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals: list[int] = []
    try:
        after = SignalsAfterRun()
        with handling_signals(lambda signum, _: signals.append(signum), after):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals == [signal.SIGTERM]
        assert not after.signalled
        os.kill(os.getpid(), signal.SIGTERM)
        assert after.signalled
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
