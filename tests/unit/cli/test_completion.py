"""Shell completions, requested through environment variables as shells do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from penstock.cli.app import main
sys.argv = ["penstock"]
try:
    main()
finally:
    print([m for m in ("torch", "numpy", "zmq") if m in sys.modules], file=sys.stderr)
"""


def completed(folder: Path, **variables: str) -> list[str]:
    """The lines for the shell."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "[]\n"
    return done.stdout.split("\n")[:-1]


def bash(folder: Path, *words: str) -> list[str]:
    """What bash gets for the last word. bash gives `=` as a word of its own."""
    found = completed(
        folder,
        _PENSTOCK_COMPLETE="complete_bash",
        COMP_WORDS="\n".join(["penstock", *words]),
        COMP_CWORD=str(len(words)),
    )
    return [line for line in found if line]


def test_targets_are_presets_and_yaml_files(tmp_path: Path) -> None:
    (tmp_path / "cartridge.yaml").touch()
    (tmp_path / "cartoon.txt").touch()
    assert bash(tmp_path, "train", "cart") == [
        "cartpole",
        "cartpole_dqn",
        "cartpole_ppo",
        "cartridge.yaml",
    ]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.yml").touch()
    assert bash(tmp_path, "profile", "mine/") == ["mine/run.yml"]
    assert bash(tmp_path, "config", "show", "mine/x") == []  # the shell then completes file names


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("learner.lr_e", "learner.lr_end_fraction= learner.lr_end_fraction=1.0"),
        ("actors.env", "actors.envs= actors.env_threads="),
        ("algo.normalize_r", "algo.normalize_rewards=true algo.normalize_rewards=false"),
        ("learner.lr_scaling = s", "sqrt"),
        ("learner.lr_scaling =", "none sqrt linear"),
        ("learner.reduce.codec = ter", "terngrad"),
        ("run.seed = 3 actors.cou", "actors.count= actors.count=auto"),
        ("transport.frame", "transport.frame_stack= transport.frame_stack=null"),
        ("run.tensorboard = t", "true"),
        ("model.hid", "model.hidden= model.hidden=[64,64]"),
        ("nothing.of", ""),
    ],
)
def test_options_and_their_values_are_completed(words: str, expected: str, tmp_path: Path) -> None:
    assert bash(tmp_path, "train", "cartpole", *words.split()) == expected.split()


def test_options_of_the_algorithm_are_those_of_the_target_or_of_an_override(
    tmp_path: Path,
) -> None:
    assert bash(tmp_path, "train", "pong_apex", "algo.ta") == [
        "algo.target_every=",
        "algo.target_every=1000",
    ]
    assert bash(tmp_path, "train", "pong_apex", "algo.name", "=", "sac", "algo.ta") == [
        "algo.tau=",
        "algo.target_entropy=",
    ]
    assert bash(tmp_path, "train", "nothing-v3:", "algo.rho") == [
        "algo.rho_clip=",
        "algo.rho_clip=1.0",
    ]


def test_fish_and_zsh_get_whole_words_with_help(tmp_path: Path) -> None:
    line = "penstock train pong_apex algo.name=sac algo.name=i"
    fish = {"_PENSTOCK_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert completed(tmp_path, **fish, _TYPER_COMPLETE_ARGS=line) == ["algo.name=impala"]
    line = "penstock train pong_apex algo.name=sac algo.ta"
    assert completed(tmp_path, **fish, _TYPER_COMPLETE_ARGS=line)[0] == (
        "algo.tau=\tStep of the target critics towards the critics after every optimizer ..."
    )
    zsh = {
        "_PENSTOCK_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": "penstock train cartpole_d",
    }
    assert completed(tmp_path, **zsh)[0].startswith(
        '_arguments \'*: :(("cartpole_dqn":"CartPole-v1 from replay\\\\: double'
    )


def test_completion_script_for_a_shell_is_printed(tmp_path: Path) -> None:
    lines = completed(tmp_path, _PENSTOCK_COMPLETE="source_bash")
    assert "complete -o default -F _penstock_completion penstock" in lines
