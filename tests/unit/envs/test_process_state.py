"""Environments that change the state of the process do not affect the rest of it."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.cli.check_env import check
from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.envs import make, process_state
from penstock.envs.process_state import sides_differ

GAME = """
import os, signal, sys, warnings
import gymnasium, numpy as np, torch
from gymnasium import spaces

def change():
    {change}

{at_import}

class Game(gymnasium.Env):
    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)
    def __init__(self):
        {in_constructor}
    def reset(self, *, seed=None, options=None):
        {in_reset}
        return np.zeros(1, np.float32), {{}}
    def step(self, action):
        {in_step}
        return np.zeros(1, np.float32), float({seen}), False, False, {{}}
"""
PLACES = ("at_import", "in_constructor", "in_reset", "in_step")
CHANGES: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "dtype": (
        "torch.set_default_dtype(torch.float64)",
        "torch.zeros(1).dtype == torch.float64",
        lambda: torch.zeros(1).dtype,
    ),
    "device": (
        "torch.set_default_device('meta')",
        "torch.zeros(1).device.type == 'meta'",
        lambda: torch.zeros(1).device,
    ),
    "gradients": (
        "torch.set_grad_enabled(False)",
        "not torch.is_grad_enabled()",
        torch.is_grad_enabled,
    ),
    "numpy": ("np.seterr(all='raise')", "np.geterr()['under'] == 'raise'", np.geterr),
    "folder": ("os.chdir('/')", "os.getcwd() == '/'", os.getcwd),
    "warnings": (
        "warnings.simplefilter('error', FutureWarning)",
        "warnings.filters[0][:3] == ('error', None, FutureWarning)",
        lambda: [each for each in warnings.filters if each[0] == "error"],
    ),
}
SIGNALS: dict[str, tuple[str, Callable[[], Any]]] = {
    "terminate": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))",
        lambda: signal.getsignal(signal.SIGTERM),
    ),
    "interrupt": (
        "signal.signal(signal.SIGINT, signal.SIG_DFL)",
        lambda: signal.getsignal(signal.SIGINT),
    ),
    "pipe": (
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
        lambda: signal.getsignal(signal.SIGPIPE),
    ),
    "mask": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    ),
}


def written(folder: Path, change: str, place: str, seen: str) -> str:
    """The id of a game in a new module, whose reward is ``seen``."""
    code = {each: "change()" if each == place else "pass" for each in PLACES}
    name = f"game_{folder.name}".replace("-", "_")
    (folder / f"{name}.py").write_text(GAME.format(change=change, seen=seen, **code))
    return f"{name}:Game"


def play(env_id: str, threads: int = 1) -> Any:
    """The rewards of two games in their first step."""
    game = make(EnvConfig(id=env_id), 2, threads)
    out = np.zeros((2, 1), np.float32)
    game.reset_into(0, out)
    reward, _, _ = game.step_into(np.zeros(2, np.int32), out)
    game.close()
    return reward.tolist()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process_state._sides, "users", None)
    return tmp_path


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CHANGES)
def test_environment_that_changes_process_state_affects_only_itself(
    name: str, place: str, folder: Path
) -> None:
    change, seen, ours = CHANGES[name]
    before = ours()
    assert play(written(folder, change, place, seen)) == [1, 1]
    assert sides_differ()
    assert ours() == before


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SIGNALS)
def test_signals_are_handled_as_before_an_environment_was_made(
    name: str, place: str, folder: Path
) -> None:
    change, ours = SIGNALS[name]
    before = ours()
    play(written(folder, change, place, "1"))
    assert ours() == before


def test_environment_that_changes_nothing_is_stepped_directly(folder: Path) -> None:
    play(written(folder, "pass", "at_import", "1"))
    assert not sides_differ()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_exit_called_by_an_environment_is_a_user_error_with_its_place(
    place: str, threads: int, folder: Path
) -> None:
    env_id = written(folder, "sys.exit('no licence')", place, "1")
    sentence = r"called sys\.exit\('no licence'\) at game_.*\.py:\d+, in change, which"
    with pytest.raises(UserError, match=sentence):
        play(env_id, threads)
    with pytest.raises(UserError, match=sentence):
        check(env_id, [], 20, 2)


def test_environment_is_made_in_a_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    game = make(EnvConfig(id="CartPole-v1"), 1)
    game.reset_into(0, np.empty((1, 4), np.float32))
    game.close()
