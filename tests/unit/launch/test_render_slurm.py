"""Batch scripts for SLURM: their resource requests, and that bash parses them as intended."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.launch.render.slurm import Job, render

BASH = shutil.which("bash") or "bash"


def script(
    *overrides: str, engine: Literal["ray", "none"] = "ray", target: str = "cartpole", **job: Any
) -> str:
    return render(target, overrides, Job(**{"nodes": 2, **job}), engine, 60, "/opt/penstock/bin")


@pytest.mark.parametrize("engine", ["ray", "none"])
@pytest.mark.parametrize("nodes", [1, 8])
def test_script_is_valid_bash_with_short_lines(engine: Literal["ray", "none"], nodes: int) -> None:
    text = script("model.hidden=[32]", engine=engine, nodes=nodes)
    subprocess.run([BASH, "-n"], input=text, text=True, check=True)
    assert max(map(len, text.splitlines())) < 160


def test_resource_requests_follow_the_options() -> None:
    job: dict[str, Any] = {
        "cpus": 16,
        "gpus": 2,
        "time": "12:00:00",
        "partition": "gpu",
        "account": "me",
    }
    options = {line[8:] for line in script(**job).splitlines() if line.startswith("#SBATCH")}
    assert options == {
        "--job-name=penstock-cartpole",
        "--output=penstock-cartpole-%j.log",
        "--open-mode=append",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=16",
        "--gpus-per-node=2",
        "--time=12:00:00",
        "--partition=gpu",
        "--account=me",
        "--requeue",
        "--signal=B:USR1@90",
    }


def test_each_gpu_gets_a_learner_unless_the_user_sets_the_count() -> None:
    assert "actors.count=auto learner.device=cuda learner.count=4" in script(gpus=2)
    assert "learner.count=4" not in script("learner.count=2", gpus=2)


@pytest.mark.parametrize(
    ("engine", "gpus", "command", "rest"),
    [
        ("ray", 1, "train", ()),
        ("ray", 0, "train", ()),
        ("none", 1, "learner", ("--world", "8")),
    ],
)
def test_the_options_of_its_command_are_accepted_on_the_nodes(
    engine: Literal["ray", "none"], gpus: int, command: str, rest: tuple[str, ...]
) -> None:
    text = script(target="pong", engine=engine, gpus=gpus, nodes=8)
    [line] = re.findall(rf"penstock {command} pong (.*) run\.dir=", text)
    config = resolve("pong", [*line.split(), *(f"learner.count={n}" for n in rest[1:])])
    assert config.learner.count == (8 if gpus or rest else 1)


def test_grace_time_of_the_run_fits_that_of_slurm() -> None:
    assert "run.grace_s=60" in script()
    assert "run.grace_s=60" not in script("run.grace_s=20")


def test_arguments_reach_the_program_unchanged(tmp_path: Path) -> None:
    """With programs that only print what they were called with."""
    folder = tmp_path / "a b; touch oops"
    text = script("env.kwargs={sutton_barto_reward: true}", f"run.dir={folder}", nodes=1)
    for name, does in {
        "penstock": f'printf "%s\\n" "$@" > {tmp_path}/words',
        "ray": 'if [ "$1" = status ]; then echo " 1 node_0"; fi',
        "scontrol": "echo here",
        "srun": "true",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    text = text.replace("/opt/penstock/bin", str(tmp_path))
    known = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "SLURM_CPUS_ON_NODE": "2"}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), **known}
    environment["SLURM_JOB_NUM_NODES"] = "1"
    subprocess.run([BASH], input=text, text=True, check=True, env=environment, cwd=tmp_path)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:3] == ["train", "cartpole", "env.kwargs={sutton_barto_reward: true}"]
    assert f"run.dir={folder}" in words
    assert words[words.index("--resume") + 1] == "auto"
    assert not (tmp_path / "oops").exists()


@pytest.mark.parametrize(
    ("addresses", "found"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("fe80::1 127.0.1.1 10.0.0.7 10.1.0.7", "10.0.0.7"),
        ("127.0.1.1", "127.0.1.1"),
        ("::1 fd00::7", "::1"),
    ],
)
def test_ray_starts_at_an_address_that_other_nodes_reach_and_nodes_that_do_not_are_counted(
    addresses: str, found: str, tmp_path: Path
) -> None:
    for name, does in {
        "penstock": "true",
        "ray": f'echo "$@" >> {tmp_path}/calls; [ "$1" != status ] || echo " 1 node_0"',
        "scontrol": "echo here",
        "srun": "true",
        "seq": "echo 1",
        "hostname": f"echo {addresses}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    text = script(f"run.dir={tmp_path}/run").replace("/opt/penstock/bin", str(tmp_path))
    known = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "SLURM_CPUS_ON_NODE": "2"}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), **known}
    environment["SLURM_JOB_NUM_NODES"] = "2"
    done = subprocess.run(
        [BASH], input=text, text=True, check=True, env=environment, capture_output=True
    )
    assert f"--node-ip-address={found} " in (tmp_path / "calls").read_text()
    assert f"1 of 2 nodes have joined Ray at {found}:6386" in done.stderr


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("ray", '--engine ray --address "$address:$port" --working-dir {} &'),
        ("none", "cd {}"),
    ],
)
def test_code_of_the_user_is_taken_from_the_working_folder(
    engine: Literal["ray", "none"], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my code").mkdir()
    monkeypatch.chdir(tmp_path)
    text = render("cartpole", [], Job(2), engine, 60, None, "my code")
    assert line.format(shlex.quote(str(tmp_path / "my code"))) in map(str.strip, text.splitlines())
    subprocess.run([BASH, "-n"], input=text, text=True, check=True)
    with pytest.raises(UserError, match="--working-dir nowhere is not a folder; name one that"):
        render("cartpole", [], Job(2), engine, 60, None, "nowhere")


@pytest.mark.parametrize(
    ("overrides", "job", "message"),
    [
        (("learner.lr=fast",), {}, "learner.lr"),
        ((), {"time": "a day; rm"}, "--time is 'a day; rm'; it must be a time"),
        (("transport.kind=inproc",), {}, "transport.kind inproc is one process"),
        (("learner.pace=asp",), {}, "--engine none does not start; set --engine ray"),
        ((), {"gpus": 2}, "starts one learner on each node"),
        (("transport.connectors=auto",), {}, "and 2 learners need the same number; set transport"),
        (("actors.envs=auto",), {}, "learners on 2 hosts need the same number; set actors.envs to"),
    ],
)
def test_unworkable_options_are_refused(
    overrides: tuple[str, ...], job: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        script(*overrides, engine="none", **job)
