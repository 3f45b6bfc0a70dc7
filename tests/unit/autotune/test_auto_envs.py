"""The number of environments of an actor is timed once, cached, and kept by a resumed run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.autotune.envs import cached_choices, code_of, enough, with_envs
from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve, resolve_target
from penstock.configs.schema import Config
from penstock.launch import measuring, run, topology
from penstock.monitor.sinks import FanOut

AUTO = resolve("cartpole", ["actors.envs=auto"])
CHEAPER = [[16, 4e-6], [32, 2e-6], [64, 1.9e-6]]

ENVS = """
import time

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class OneWait(VectorEnv):
    "A step waits once for all environments."

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    open = most_open = 0

    def __init__(self, num_envs):
        OneWait.open += 1
        OneWait.most_open = max(OneWait.open, OneWait.most_open)
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 2), np.float32), {}

    def close_extras(self, **kwargs):
        OneWait.open -= 1

    def step(self, actions):
        time.sleep(0.002)
        nothing = np.zeros(self.num_envs, bool)
        return self.reset()[0], nothing.astype(np.float64), nothing, nothing, {}


class Waits(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.002)
        return self.env.step(action)


def each_waits():
    return Waits(gymnasium.make("CartPole-v1"))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "envs"


class Measured:
    """What was to be timed; `CHEAPER` is found."""

    def __init__(self) -> None:
        self.configs: list[Config] = []

    def __call__(self, config: Config) -> list[list[Any]]:
        self.configs.append(config)
        return CHEAPER


@pytest.fixture
def measured() -> Measured:
    return Measured()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    (path / "checkpoints" / "last").mkdir(parents=True)
    (path / "checkpoints" / "last" / "checkpoint.safetensors").touch()
    return path


def test_smallest_number_with_little_further_gain_is_chosen() -> None:
    assert enough({8: 1.0, 16: 0.95}) == 8
    assert enough({8: 1.0, 16: 0.8, 32: 0.79}) == 16
    assert enough({8: 1.0, 16: 0.8, 32: 0.7}) == 32
    assert enough({8: 1.0, 16: 1.2}) == 8
    assert enough({8: 1.0}) == 8


def test_explicit_number_of_environments_is_kept(tmp_path: Path, measured: Measured) -> None:
    config = resolve("cartpole")
    assert with_envs(config, tmp_path, "no", measured) == (config, "")
    assert not measured.configs


def test_number_of_environments_is_timed_once(
    tmp_path: Path, measured: Measured, cache: Path
) -> None:
    config, note = with_envs(AUTO, tmp_path, "no", measured)
    assert config.actors.envs == 32
    assert note == (
        "actors.envs: 32 environments for each actor, 2 µs a step (others, in µs: 16: 4; 64: 1.9), "
        "timed now; a batch has 1,024 agent steps"
    )
    again, note = with_envs(AUTO, tmp_path, "no", measured)
    assert again == config
    assert "timed by an earlier run" in note
    assert len(measured.configs) == 1
    assert cached_choices() == [
        "environments of CartPole-v1, impala: 32, 2 µs a step (others, in µs: 16: 4; 64: 1.9)"
    ]
    with_envs(
        resolve("cartpole", ["actors.envs=auto", "model.hidden=[8]"]), tmp_path, "no", measured
    )
    assert len(measured.configs) == 2
    more_actors = resolve("cartpole", ["actors.envs=auto", "actors.count=7", "learner.lr=1e-3"])
    with_envs(more_actors, tmp_path, "no", measured)
    assert len(measured.configs) == 2, "a step is the same with them"
    assert len(list(cache.glob("*.json"))) == 2


@pytest.mark.parametrize(
    "entries",
    [None, [], [[16]], [[16, -1.0]], [[16, 1]], [["16", 1e-6]], [[17, 1e-6]], [[32, 1e-6]], {}],
)
def test_damaged_cache_file_is_replaced(
    entries: Any, tmp_path: Path, measured: Measured, cache: Path
) -> None:
    with_envs(AUTO, tmp_path, "no", measured)
    [path] = cache.glob("*.json")
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole) | {"seconds": entries}))
    cached_choices()
    assert with_envs(AUTO, tmp_path, "no", measured)[0].actors.envs == 32
    assert len(measured.configs) == 2
    assert path.read_text() == whole


def test_a_changed_file_of_the_environment_needs_new_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured
) -> None:
    file = tmp_path / "own_games" / "maze.py"
    file.parent.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    config = resolve("cartpole", ["actors.envs=auto", "env.id=own_games.maze:make"])
    for text in ("first", "second one", "second one"):
        file.write_text(text)
        os.utime(file, (1, 1))
        with_envs(config, tmp_path, "no", measured)
    assert len(measured.configs) == 2
    os.utime(file, (2, 2))
    with_envs(config, tmp_path, "no", measured)
    assert len(measured.configs) == 3
    assert code_of("CartPole-v1") == code_of("no_such_module:Maze-v0") == []


def test_the_user_is_shown_that_a_run_times_its_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EndedError(Exception):
        pass

    def alone(*_: Any, **__: Any) -> Any:
        raise EndedError

    monkeypatch.setattr(measuring, "call_in_process", alone)
    shown: list[str] = []
    resolved, path = resolve_target("cartpole", ["actors.envs=auto"]), tmp_path / "run"
    with pytest.raises(EndedError):
        run.run_in_folder(
            resolved,
            path,
            "no",
            topology.train_roles,
            lambda _: FanOut([]),
            early_note=shown.append,
        )
    assert shown == ["timing steps of CartPole-v1 for actors.envs=auto, which takes seconds"]


def test_invalid_callbacks_are_refused_before_any_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured
) -> None:
    monkeypatch.setattr(measuring, "step_seconds", measured)
    resolved = resolve_target("cartpole", ["actors.envs=auto", "run.callbacks=[no_module:Hook]"])
    with pytest.raises(UserError, match=r"callback no_module:Hook: there is no module no_module"):
        run.run_in_folder(
            resolved, tmp_path / "run", "no", topology.train_roles, lambda _: FanOut([])
        )
    assert not measured.configs


def test_lockstep_and_a_single_candidate_need_no_timing(tmp_path: Path, measured: Measured) -> None:
    lockstep = resolve("cartpole", ["actors.envs=auto", "transport.kind=inproc"])
    config, note = with_envs(lockstep, tmp_path, "no", measured)
    assert config.actors.envs == 16
    assert note == (
        "actors.envs: 16 environments for each actor, the smallest allowed number; a batch has 512 "
        "agent steps"
    )
    long = resolve("cartpole", ["actors.envs=auto", "actors.unroll=4096"])
    assert with_envs(long, tmp_path, "no", measured)[0].actors.envs == 1
    assert not measured.configs


def test_a_resumed_run_keeps_its_number(run_dir: Path, measured: Measured) -> None:
    (run_dir / "config.yaml").write_text(dump(resolve("cartpole", ["actors.envs=24"])))
    config, note = with_envs(AUTO, run_dir, "auto", measured)
    assert config.actors.envs == 24
    assert "24 environments for each actor, as the run began" in note
    assert not measured.configs
    changed = resolve("cartpole", ["actors.envs=auto", "learner.updates_per_batch=16"])
    with pytest.raises(UserError, match=r"actors\.envs 24 is not divisible by"):
        with_envs(changed, run_dir, "must", measured)


def test_resume_without_a_known_number_is_refused(run_dir: Path, measured: Measured) -> None:
    with pytest.raises(UserError, match=r"its run began with is not known; set actors\.envs to"):
        with_envs(AUTO, run_dir, "auto", measured)
    assert not measured.configs


def test_an_environment_that_cannot_be_timed_leaves_the_smallest_number(
    tmp_path: Path, cache: Path
) -> None:
    config, note = with_envs(
        resolve("x:nothing", ["actors.envs=auto"]), tmp_path, "no", measuring.step_seconds
    )
    assert config.actors.envs == config.envs_choices[0]
    assert "the smallest allowed number, as a step could not be timed (environment x:n" in note
    assert not list(cache.glob("*.json"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["actors.envs=8"], [1, 2, 4, 8]),
        (["actors.envs=12"], [1, 2, 3, 6, 12]),
        (["actors.envs=12", "actors.env_threads=4"], [4, 6, 12]),
        (["actors.envs=1", "actors.env_threads=2"], [2]),
        (["actors.envs=2048", "actors.env_threads=512"], [512, 1024]),
    ],
)
def test_thread_candidates_go_up_to_one_per_environment(
    options: list[str], expected: list[int]
) -> None:
    assert measuring.thread_choices(resolve("cartpole", options)) == expected


def test_threads_are_timed_only_for_environments_that_they_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waiting_envs.py").write_text(ENVS)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("BUDGET_S", "THREADS_PASS_S"):
        monkeypatch.setattr(measuring, name, 0.05)
    found = {}
    try:
        for env in ("each_waits", "OneWait"):
            config = resolve(f"waiting_envs:{env}", ["actors.envs=4"])
            found[env] = measuring.time_threads(config.model_dump(mode="json"))
    finally:
        sys.modules.pop("waiting_envs", None)
    assert found["OneWait"] == []
    (one, rate, cpu), *_, (four, rate_of_four, _) = found["each_waits"]
    assert (one, four) == (1, 4)
    assert rate <= 500.0 < rate_of_four
    assert 0.0 < cpu < 0.5


@pytest.mark.parametrize(("env", "expected"), [("OneWait", [16, 32, 64]), ("each_waits", [16, 32])])
def test_real_steps_are_timed_until_twice_as_many_gain_little(
    env: str, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waiting_envs.py").write_text(ENVS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(measuring, "BUDGET_S", 0.05)
    config = resolve(f"waiting_envs:{env}", ["actors.envs=auto", "actors.unroll=32"])
    try:
        found = measuring.time_steps(config.model_dump(mode="json"))
    finally:
        envs = sys.modules.pop("waiting_envs", None)
    assert [number for number, _ in found] == expected
    assert envs is not None
    assert (envs.OneWait.open, envs.OneWait.most_open) == ((0, 2) if env == "OneWait" else (0, 0))
    first_s, last_s = found[0][1], found[-1][1]
    assert first_s >= (2e-3 / 16 if env == "OneWait" else 2e-3)
    assert last_s < 0.5 * first_s if env == "OneWait" else last_s > first_s / 1.1
