"""What `penstock` offers in Python, without starting a process."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import UserError
from penstock.configs.load import resolve
from penstock.launch.api import _override, _raise_failure
from penstock.launch.supervisor_messages import Failure, Outcome
from penstock.monitor.view import ProgressLine


def test_importing_penstock_imports_no_library() -> None:
    program = (
        "import sys; before = set(sys.modules); import penstock; "
        "print([m for m in ('numpy', 'torch', 'pydantic', 'zmq', 'gymnasium') if m in sys.modules]"
        ", sorted(m for m in sys.modules if m.startswith('penstock')))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert said.stdout.decode().strip() == "[] ['penstock']"


def test_every_exported_name_exists() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert set(penstock.__all__) <= set(dir(penstock))
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = penstock.trian


KEYWORDS = {"text": "no", "x": [1, None]}


@pytest.mark.parametrize(
    ("name", "value", "path", "found"),
    [
        ("learner.lr", 1e-05, ("learner", "lr"), 1e-5),
        ("learner.lr", np.float32(0.5), ("learner", "lr"), 0.5),
        ("learner", {"lr": 0.25}, ("learner", "lr"), 0.25),
        ("model.hidden", (32, 16), ("model", "hidden"), [32, 16]),
        ("stop.return", None, ("stop", "return_"), None),
        ("run.tensorboard", True, ("run", "tensorboard"), True),
        ("run.dir", Path("a b/#c: é"), ("run", "dir"), "a b/#c: é"),
        ("env.kwargs", KEYWORDS, ("env", "kwargs"), KEYWORDS),
    ],
)
def test_python_values_of_overrides_reach_the_config_unchanged(
    name: str, value: Any, path: tuple[str, str], found: Any
) -> None:
    section = getattr(resolve("cartpole", [_override(name, value)]), path[0])
    assert getattr(section, path[1]) == found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), print, {"a": b"x"}])
def test_a_value_that_no_config_can_hold_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"override learner\.lr: .* is not a value of a config"):
        penstock.train("cartpole", {"learner.lr": value})


def test_unknown_option_is_refused_with_its_equivalent() -> None:
    with pytest.raises(UserError, match=r"there is no option .*; the equivalent is learner\.lr$"):
        penstock.train("cartpole", {"learner.learning_rate": 1e-3})


@pytest.mark.parametrize("resume", [False, True, None, "yes"])
def test_unknown_resume_value_is_refused(tmp_path: Path, resume: Any) -> None:
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    with pytest.raises(UserError, match='is unknown; give "no", "auto" or "must"'):
        penstock.train("cartpole", run_dir=tmp_path, resume=resume)


class Hook:
    """One of a user's."""


@pytest.mark.parametrize(
    ("callbacks", "sentence"),
    [
        (Hook(), r"callbacks=.* is not a list; give a list of objects, callbacks="),
        ("module:Hook", r"callbacks='module:Hook' is not a list"),
    ],
)
def test_callbacks_are_objects_in_a_list(callbacks: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        penstock.train("cartpole", {"learner.lr": "none"}, callbacks=callbacks)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"episodes": 0}, "episodes is 0; it must be a whole number of at least 1"),
        ({"episodes": -1}, "episodes is -1; it must be a whole number of at least 1"),
        ({"episodes": 2.5}, "episodes is 2.5; it must be a whole number of at least 1"),
        ({"seed": -1}, "seed is -1; it must be a whole number of at least 0"),
        ({"episodes": np.int64(3)}, "is not a run"),
    ],
)
def test_an_evaluation_is_of_a_number_of_episodes(
    tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        penstock.evaluate(tmp_path, **options)


@pytest.mark.parametrize("target", [resolve, object(), None])
def test_environment_object_instead_of_a_name_is_refused(target: Any) -> None:
    with pytest.raises(
        UserError, match="the environment must be given by name, such as 'grid:make_env', in"
    ):
        penstock.train(target)


def test_failure_of_a_run_raises_the_matching_exception(tmp_path: Path) -> None:
    def end(code: int, reason: str, message: str, *, user: bool = False) -> Outcome:
        return Outcome(code, reason, Failure("actor-0", message, "Traceback ...", user))

    _raise_failure(Outcome(0, "return"), tmp_path)
    _raise_failure(Outcome(130, "interrupted"), tmp_path)
    with pytest.raises(UserError, match=r"^no such game\nTraceback"):
        _raise_failure(end(2, "user_error", "no such game", user=True), tmp_path)
    with pytest.raises(RuntimeError, match=r"^actor-0: KeyError: 3; the logs are in ") as raised:
        _raise_failure(end(1, "fault", "KeyError: 3"), tmp_path)
    assert raised.value.__notes__ == ["Traceback ..."]
    asked = Failure.killed_by_user("actor-0", has_checkpoint=True)
    with pytest.raises(KeyboardInterrupt):
        _raise_failure(Outcome(130, "interrupted", asked), tmp_path)


def test_history_reads_whole_lines_of_a_run_that_goes_on(tmp_path: Path) -> None:
    lines = [json.dumps({"time_s": float(i)}) for i in range(2)]
    lines.insert(1, '{"time_s": 0.5, "env_st')  # a machine died in the midst of it
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"time_s": 2')
    assert penstock.history(tmp_path) == [{"time_s": 0.0}, {"time_s": 1.0}]
    with pytest.raises(UserError, match="give the folder of a run"):
        penstock.history(tmp_path / "nowhere")


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


METRICS = {"time_s": 2.0, "env_steps": 20, "steps_per_s": 10.0, "episodes": 4}
METRICS["episode_return_mean"] = 3.0
LINE = "time 0:02, steps 20, 10/s, return 3 in training, 4 episodes"


def test_progress_line_is_overwritten_on_a_terminal() -> None:
    terminal = Terminal()
    view = ProgressLine(terminal, "a title that is longer than what comes after it by a lot", None)
    view.metrics(METRICS)
    view.note("actor-0 is started again")
    view.close()
    screen: dict[int, str] = {}
    row = 0
    for text in terminal.getvalue().splitlines(keepends=True):
        for part in text.rstrip("\n").split("\r"):
            screen[row] = part + screen.get(row, "")[len(part) :]
        row += text.endswith("\n")
    assert [line.rstrip() for line in screen.values()] == ["actor-0 is started again", LINE]


def test_progress_is_printed_once_without_a_terminal() -> None:
    stream = StringIO()
    view = ProgressLine(stream, "a title", None)
    view.metrics({**METRICS, "time_s": 1.0})
    view.metrics(METRICS)
    view.close()
    assert stream.getvalue() == f"{LINE}\n"
