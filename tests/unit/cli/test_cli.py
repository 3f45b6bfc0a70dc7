"""The command line: its output streams and exit codes."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli.options import PANELS
from penstock.configs.errors import UserError
from penstock.configs.json_schema import json_schema
from penstock.configs.load import resolve
from penstock.monitor import sinks
from penstock.replay.remote.peers import ServiceLimits

COMMANDS = (
    ["train"], ["profile"], ["learner"], ["actor"], ["eval"], ["record"], ["play"], ["export"],
    ["plot"], ["compare"], ["report"],
    ["runs"], ["status"], ["stacks"], ["bench"], ["check-env"], ["doctor"], ["config", "show"],
    ["config", "list"], ["config", "schema"], ["keys", "new"], ["replay", "serve"],
    ["bench", "reduce"], ["tune"], ["league"],
)  # fmt: skip


def command(*arguments: str, cwd: Path | None = None) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``penstock`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *arguments], cwd=cwd, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def last_line(out: str) -> dict[str, Any]:
    answer = json.loads(out.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def in_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """The same without a process: quicker, for what imports little."""
    from penstock.cli.app import main

    monkeypatch.setattr("sys.argv", ["penstock", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    captured = capsys.readouterr()
    code = exit_.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def test_command_options_set_the_limits_of_a_replay_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.cli import app, replay_server

    limits: list[Any] = []
    monkeypatch.setattr(
        replay_server, "serve", lambda *args, **options: limits.append(options["limits"])
    )
    options = ("--max-clients", "3", "--client-mb", "1", "--batches-mb", "2", "--slots-mb", "5")
    for arguments in ((), options):
        app.app(["replay", "serve", "--spec", "x", *arguments], standalone_mode=False)
    assert limits == [ServiceLimits(), ServiceLimits(3, 1 << 20, 2 << 20, 5 << 20)]


def test_the_schema_of_a_file_is_printed_as_json() -> None:
    for arguments in ((), ("--json",)):
        code, out, err = command("config", "schema", *arguments)
        assert (code, err, json.loads(out)) == (0, "", json_schema())
    assert out.count("\n") == 1


def test_penstock_without_arguments_prints_its_help() -> None:
    code, out, err = command()
    assert (code, err) == (0, "")
    for names in COMMANDS:
        assert f"\n  {names[0]} " in out


def test_help_groups_the_commands_by_purpose() -> None:
    code, out, _ = command("--help")
    groups = {text.split(":")[0]: text for text in out.split("\n\n") if "\n  " in text}
    assert code == 0
    assert set(PANELS) <= set(groups)
    assert "\n  record " in groups["Evaluate and inspect runs"]
    assert "\n  train " in groups["Train"]


def test_help_imports_no_slow_library() -> None:
    slow = {"torch", "gymnasium", "numpy", "pydantic", "rich", "zmq", "matplotlib"}
    code = (
        "import sys; sys.argv = ['penstock', '--help']\n"
        "from penstock.cli.app import main\n"
        "try: main()\n"
        f"finally: print('slow:', sorted({slow!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "slow: []", done.stderr


def test_supervisor_and_profile_command_import_no_torch() -> None:
    code = (
        "import sys, penstock.launch.run, penstock.cli.profile; "
        "print({'torch', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_command_imports_no_module_of_the_current_folder(tmp_path: Path) -> None:
    """Libraries try to import modules that are not installed: ruamel.yaml one of this name."""
    (tmp_path / "_ruamel_yaml.py").write_text("open('imported', 'w')")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("env: {id: CartPole-v1}")

    program = Path(sys.executable).with_name("penstock")
    subprocess.run([program, "runs", "."], cwd=tmp_path, capture_output=True, check=True)

    assert not (tmp_path / "imported").exists()


def test_version_option_prints_the_version() -> None:
    assert command("--version") == (0, f"{penstock.__version__}\n", "")


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], names: list[str]
) -> None:
    code, out, _ = in_process(monkeypatch, capsys, *names, "--help")
    assert code == 0
    assert "--json" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["train", "cartpole", "--resume", "maybe"],
        ["fly"],
        ["actor", "--count", "2"],
        ["actor", "--connect", "tcp://127.0.0.1:1", "--count", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, err = in_process(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert "Usage: " in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "cartpoal"], "the nearest preset is cartpole"),
        (["train", "cartpole", "learner.lrr=1"], "learner.lr"),
        (["learner", "cartpole", f"run.dir={'x' * 120}"], "longer than the 102 bytes"),
        (
            ["learner", "cartpole", "--bind", "tcp://0.0.0.0:7700"],
            "set transport.curve to a folder of keys",
        ),
        (["train", "cartpole", f"run.dir=/{'x' * 300}"], "cannot be accessed: File name too long"),
        (["status", "x" * 300], "cannot be accessed: File name too long; name another path"),
        (["actor", "--connect", "here:7700"], "--connect here:7700 is neither an address nor a"),
        (["actor", "--connect", "tcp://10.0.0.1:7700"], "is on another host, and its learner"),
        (
            ["learner", "cartpole", "--rank=0", "--world=2", "--store=10.0.0.1:29500"],
            "give --trusted-network",
        ),
        (["train", "cartpole", "--resume", "auto"], "name the folder with run.dir="),
        (["train", "cartpole", "--resume", "must", "run.dir=x"], "x has no checkpoint to resume"),
        (["train", "grid.py"], "grid.py is a Python file; name the function in it that"),
        (["eval", "nowhere"], "nowhere does not exist, so it is not a run"),
        (["record", "nowhere"], "nowhere does not exist, so it is not a run"),
        (["plot", "nowhere"], "nowhere has no metrics.jsonl, so there is nothing to show"),
        (["compare", "nowhere"], "nowhere has no metrics.jsonl, so there is nothing to show"),
        (
            ["report", "nowhere"],
            "there is no folder nowhere; give a run, or a folder that contains runs",
        ),
        (["train", "cartpole", "--parallel", "2"], "--parallel is of several runs; add --seeds N"),
        (["runs", "nowhere"], "there is no folder nowhere"),
        (["runs"], "there is no folder runs; give a folder that contains runs, or train one first"),
        (["keys", "new", "/proc/no"], "no keys can be made in /proc/no: No such file"),
        (["config", "show", "cartpole", "actors.count=many"], "actors.count"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_user_error_is_one_sentence_on_standard_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = in_process(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("penstock: ")
    assert sentence in err
    code, out, _ = in_process(monkeypatch, capsys, *arguments, "--json")
    assert code == 2
    assert sentence in last_line(out)["error"]


def test_error_text_contains_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = in_process(monkeypatch, capsys, "runs", "no\x1b[2J\udcffwhere")
    assert err.startswith(r"penstock: there is no folder no\x1b[2J\udcffwhere")


@pytest.mark.parametrize("arguments", [["runs"], ["eval"], ["train", "--resume-from"]])
def test_too_long_path_is_a_user_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    target = ["cartpole"] if "--resume-from" in arguments else []
    code, out, err = in_process(monkeypatch, capsys, *arguments, "x" * 300, *target, "--json")
    assert (code, err.count("\n")) == (2, 1)
    said = "cannot be accessed: File name too long; name another path"
    assert err.startswith(f"penstock: {'x' * 200}... {said}")
    assert last_line(out)["exit_code"] == 2


def test_unreadable_folder_is_a_user_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(folder: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", folder)

    monkeypatch.setattr("penstock.monitor.runs.find", find)
    code, _, err = in_process(monkeypatch, capsys, "runs", "of-another-user")
    said = "of-another-user cannot be accessed: Permission denied; name another path"
    assert code == 2
    assert err.startswith(f"penstock: {said}")


def test_too_low_limit_of_open_files_is_a_user_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "train", "cartpole", "run.dir=run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10)),
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the limit of 10 open files" in done.stderr


def test_user_error_leaves_no_run_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sinks, "find_spec", lambda _: None)
    mistakes = (
        (["train", "cartpoal"], "cartpoal"),
        (["learner", "cartpole", "--bind", "tcp://0.0.0.0:7700"], "transport.curve"),
        (["train", "cartpole", "run.callbacks=[nowhere_at_all:Hooks]"], "there is no module"),
        (["train", "cartpole", "run.wandb=games"], "needs wandb, which is not installed"),
    )
    for arguments, sentence in mistakes:
        code, _, err = in_process(monkeypatch, capsys, *arguments)
        assert code == 2
        assert sentence in err
    assert list(tmp_path.iterdir()) == []


def test_folder_named_wandb_is_not_taken_for_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wandb").mkdir()  # as offline runs leave one
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="needs wandb, which is not installed"):
        sinks.check_libraries(resolve("cartpole", ["run.wandb=games"]))


def test_training_is_refused_on_other_systems_than_linux(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    code, _, err = in_process(monkeypatch, capsys, "train", "cartpole")
    assert code == 2
    assert err.startswith("penstock: training needs Linux, and this is darwin;")


def test_config_show_prints_the_resolved_config() -> None:
    code, out, err = command("config", "show", "pong", "actors.count=8")
    assert (code, err) == (0, "")
    assert "count: 8\n" in out
    code, out, _ = command("config", "show", "pong", "actors.count=8", "--json")
    assert last_line(out)["actors"]["count"] == 8


def test_config_list_names_the_presets() -> None:
    code, out, _ = command("config", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(
        last_line(command("config", "list", "--json")[1])
    )
    assert "cartpole " in out


@pytest.mark.parametrize(
    ("given", "example"),
    [
        ("--lr", "learner.lr=VALUE"),
        ("--total-timesteps=1000", "stop.env_steps=VALUE"),
        ("--n-envs", "learner.lr=1e-3"),
        ("--jsn", None),
    ],
)
def test_an_option_of_the_config_is_no_option_of_a_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: str,
    example: str | None,
) -> None:
    code, _, err = in_process(monkeypatch, capsys, "train", "cartpole", given, "1e-3")
    assert code == 2
    assert f"No such option: {given.partition('=')[0]}" in err
    written = f"; options of the config are written key=value: {example}"
    assert (written in err) if example else ("key=value: " not in err and "--json" in err)
    assert "of the config" not in in_process(monkeypatch, capsys, "runs", given)[2]


def test_keys_new_makes_keys_once(tmp_path: Path) -> None:
    code, out, _ = command("keys", "new", "--json", cwd=tmp_path)
    assert code == 0
    files = last_line(out)["files"]
    assert all((tmp_path / file).is_file() for file in files)
    code, _, err = command("keys", "new", cwd=tmp_path)
    assert code == 2
    assert err.startswith("penstock: keys holds keys already")


def test_the_supervisor_starts_without_the_slow_libraries() -> None:
    program = (
        "import sys\n"
        "from penstock.cli import app\n"
        "from penstock.launch import run\n"
        "from penstock.configs.load import resolve\n"
        "resolve('pong')\n"
        "print([m for m in ('torch', 'numpy', 'gymnasium', 'zmq', 'rich') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("name", ["eval", "record", "play"])
def test_sample_and_greedy_together_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = in_process(monkeypatch, capsys, name, "run", "--sample", "--greedy")
    assert code == 2
    assert err == "penstock: --sample and --greedy are two ways to play; give one of them\n"


@pytest.mark.parametrize("option", ["--by", "--x"])
def test_plot_accepts_the_current_and_the_former_axis_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    from penstock.monitor import plot

    calls: list[dict[str, Any]] = []

    def draw(folders: Sequence[str], **options: Any) -> str:
        calls.append({"folders": folders, **options})
        return "p.png"

    monkeypatch.setattr(plot, "plot", draw)
    code, out, _ = in_process(
        monkeypatch, capsys, "plot", "runs/a", option, "time", "--metric", "kl", "--smooth", "3"
    )
    assert (code, out) == (0, "p.png\n")
    assert calls == [
        {
            "folders": ["runs/a"],
            "out": None,
            "by": "time",
            "metrics": ["kl"],
            "smooth": 3,
            "statistic": None,
            "ranges": (),
        }
    ]


INTERRUPTED = """
import sys
import penstock.__main__ as command, penstock.cli.app as app
def interrupt():
    raise KeyboardInterrupt
app.main = lambda: eval("interrupt()")  # typer evaluates the annotations of all commands
sys.argv = ["penstock", "--version"]
command.main()
"""


def test_ctrl_c_gives_exit_code_130_wherever_it_interrupts(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    words = [sys.executable, "-m", "interrupted"]
    assert subprocess.run(words, cwd=tmp_path, check=False).returncode == 130
