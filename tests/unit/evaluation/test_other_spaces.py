"""A policy meets an environment whose spaces have changed since its training."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces

import penstock
from penstock import UserError
from penstock.configs.load import dump, resolve
from penstock.core import used_names
from penstock.core.params import ParamLayout
from penstock.envs import EnvInfo, make, probe
from penstock.envs.space_difference import difference
from penstock.evaluation.policy_source import find_policy
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.checkpoints.checkpoint_spaces import SPACES, check_spaces, spaces_as_json
from penstock.learner.factory import make_trainer

Space = spaces.Space[Any]
Become = Callable[[Space, Space], None]

SPEED, PLACE = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(4)
SEEN, CHOICE = spaces.Dict(speed=SPEED, place=PLACE), spaces.Discrete(3)
TORQUE = spaces.Box(-2, 2, (1,), np.float32)
LARGEST = float(np.finfo(np.float32).max)


class Changing(gymnasium.Env[Any, Any]):
    """An environment whose spaces a test changes."""

    spaces: tuple[Space, Space] = SEEN, CHOICE

    def __init__(self) -> None:
        self.observation_space, self.action_space = self.spaces

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return {"speed": np.array([0.5, -0.25], np.float32), "place": 3}, {}


def boxed(low: Any, high: Any, dtype: Any = np.float32, size: int = 2) -> spaces.Box:
    least, most = (np.broadcast_to(np.asarray(bound, dtype), (size,)) for bound in (low, high))
    return spaces.Box(least, most, dtype=dtype)


def trained(folder: Path) -> CheckpointManager:
    """A learner of the run in ``folder``, on the present spaces."""
    options = ("algo.name=ppo", "model.hidden=[8]", "learner.device=cpu")
    config = resolve(f"{__name__}:Changing", options)
    (folder / "config.yaml").write_text(dump(config))
    used_names.note(config)
    return CheckpointManager(folder, make_trainer(config, probe(config.env)))


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Become:
    return lambda *own: monkeypatch.setattr(Changing, "spaces", own)


CHANGES: dict[str, tuple[tuple[Space, Space], tuple[Space, Space], str | None]] = {
    "a renamed key": ((SEEN, CHOICE), (spaces.Dict(v=SPEED, place=PLACE), CHOICE), "speed"),
    "another shape": ((boxed(-1, 1), CHOICE), (boxed(-1, 1, size=3), CHOICE), "observations"),
    "another dtype": ((boxed(-1, 1), CHOICE), (boxed(-1, 1, np.float64), CHOICE), "observations"),
    "other bounds": ((boxed(-1, 1), CHOICE), (boxed([-1, -1], [1, 9]), CHOICE), "observations"),
    "bounds of a part": (
        (SEEN, CHOICE),
        (spaces.Dict(speed=boxed(0, 1), place=PLACE), CHOICE),
        "observations.speed",
    ),
    "a bound where there was none": (
        (boxed(-np.inf, np.inf), CHOICE),
        (boxed(-1e6, np.inf), CHOICE),
        "observations",
    ),
    "bounds of actions": ((SPEED, TORQUE), (SPEED, spaces.Box(-3, 2, (1,), np.float32)), "actions"),
    "fewer choices": ((SPEED, CHOICE), (SPEED, spaces.Discrete(2)), "actions"),
    "choices from 1": ((SPEED, CHOICE), (SPEED, spaces.Discrete(3, start=1)), "actions"),
    "the same": ((SEEN, TORQUE), (spaces.Dict(speed=SPEED, place=PLACE), TORQUE), None),
    "rounded bounds": ((boxed(0, 0.3), CHOICE), (boxed(0, 0.3000001), CHOICE), None),
    "rounded bounds of a part": (
        (spaces.Dict(speed=boxed(0, 0.6), place=PLACE), CHOICE),
        (spaces.Dict(speed=boxed(0, 0.6000002), place=PLACE), CHOICE),
        None,
    ),
    "the largest float": (
        (boxed(-np.inf, np.inf), CHOICE),
        (boxed(-LARGEST, LARGEST), CHOICE),
        None,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_spaces_are_refused_wherever_weights_are_loaded(
    tmp_path: Path, become: Become, change: str
) -> None:
    before, after, column = CHANGES[change]
    become(*before)
    trained(tmp_path).save()
    file = tmp_path / "policy.safetensors"
    penstock.load_policy(tmp_path).save(file)
    of_file = penstock.load_policy(file)
    become(*after)
    game = make(resolve(f"{__name__}:Changing").env, 2)
    ways: dict[str, Callable[[], object]] = {
        "resume": lambda: trained(tmp_path).resume("must"),
        "eval, record, play, evaluator": lambda: find_policy(tmp_path, "last").policy(game, 0),
        "load_policy": lambda: penstock.load_policy(tmp_path, "last"),
        "check": lambda: of_file.check(Changing()),
    }
    for way, load in ways.items():
        if column is None:
            load()
            continue
        with pytest.raises(UserError) as error:
            load()
        differs = difference(before, after)
        assert differs is not None
        assert differs.column.endswith(column)
        assert all(text in str(error.value) for text in differs), way


def test_policy_file_is_compared_with_its_registered_environment(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "docs" / "agents" / "halfcheetah.safetensors"
    source = find_policy(path, "best")
    game = make(source.config.env, 1)
    source.policy(game, 0)
    own, actions = game.info.spaces
    game.info = replace(game.info, own_spaces=(own, spaces.Box(-2, 2, actions.shape, np.float32)))
    with pytest.raises(UserError, match=r"actions Box.*-1.0.* in training, Box.*-2.0.* here"):
        source.policy(game, 0)


def test_dict_keys_in_another_order_are_accepted(tmp_path: Path, become: Become) -> None:
    """The network finds each part where it was in training."""
    obs = {"speed": np.array([0.5, -0.25], np.float32), "place": 3}

    def outputs() -> npt.NDArray[Any]:
        game = make(resolve(f"{__name__}:Changing").env, 1)
        policy = find_policy(tmp_path, "last").policy(game, 0)
        space = game.info.observation_space
        out = np.empty((1, *space.shape), space.dtype)
        game.reset_into(0, out)
        return policy.outputs(out).copy()

    orders = [OrderedDict(speed=SPEED, place=PLACE), OrderedDict(place=PLACE, speed=SPEED)]
    become(spaces.Dict(orders[0]), CHOICE)
    trained(tmp_path).save()
    expected, decided = outputs(), penstock.load_policy(tmp_path, sample=True)
    become(spaces.Dict(orders[1]), CHOICE)
    np.testing.assert_array_equal(outputs(), expected)
    again = penstock.load_policy(tmp_path, sample=True)
    assert [again(obs)[0] for _ in range(20)] == [decided(obs)[0] for _ in range(20)]
    with pytest.raises(UserError, match=r"\['speed', 'place'\].*\['place', 'speed'\]"):
        trained(tmp_path).resume("must")


def test_large_spaces_equal_to_the_environments_are_accepted(
    tmp_path: Path,
) -> None:
    space = boxed(0, 1, size=3_000_000)
    info = EnvInfo(space, CHOICE, 1, "")
    stored = Checkpoint(
        ParamLayout(()), np.empty(0, np.float32), {}, {SPACES: spaces_as_json(info)}
    )
    assert check_spaces(tmp_path, stored, info, "Large-v0") == space


def test_checkpoint_without_stored_spaces_is_compared_by_its_dtypes(
    tmp_path: Path, become: Become
) -> None:
    become(boxed(0, 1), CHOICE)
    trained(tmp_path).save()
    last = tmp_path / "checkpoints" / "last"
    stored = checkpoint_format.load(last)
    meta = {name: value for name, value in stored.meta.items() if name != SPACES}
    checkpoint_format.save(last, replace(stored, meta=meta))
    become(boxed(0, 9), CHOICE)
    trained(tmp_path).resume("must")
    become(boxed(0, 1, np.uint8), CHOICE)
    with pytest.raises(UserError, match=r"observations of dtype <f4.*of dtype \|u1"):
        trained(tmp_path).resume("must")
