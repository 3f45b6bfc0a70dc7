"""The decisions stored beside a video, and the checks of such a file."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algos.acting import make_policy
from penstock.algos.samples import network_shape
from penstock.configs.load import resolve
from penstock.envs import make
from penstock.evaluation import decisions
from penstock.evaluation.decisions import DecisionTrack, parse_decisions
from penstock.models.acting.critic import make_critic


def tracked(
    *options: str, target: str = "synthetic", sample: bool = False
) -> tuple[DecisionTrack, Any, Any, list[Any]]:
    """A track, a policy as it is and its critic, after three steps with these actions."""
    config = resolve(target, ["actors.envs=1", *options])
    game = make(config.env, 1)
    layout = network_shape(config, game.info).layout
    weights = np.random.default_rng(0).normal(0, 0.3, layout.size).astype(np.float32)
    if any(name.startswith("normalizer.var") for name, _ in layout.entries):
        layout.views(weights)["normalizer.var"][:] = 2.0
    policies = [make_policy(config, game.info, 5) for _ in range(2)]
    for policy in policies:
        policy.load(weights)
    critic = make_critic(network_shape(config, game.info), weights)
    track = DecisionTrack(policies[0], critic, sample)
    obs = np.empty((1, *game.info.observation_space.shape), game.info.observation_space.dtype)
    game.reset_into(1, obs)
    track.on_step(1, 0.0, plays=False)
    plain, actions = policies[1], []
    for _ in range(3):
        expected = (plain.act(obs) if sample else plain.greedy(obs)).copy()
        chosen = track.choose(obs)
        assert np.array_equal(chosen, expected)  # the video shows what would be played without it
        actions.append(chosen.tolist()[0])
        reward, _, _ = game.step_into(chosen, obs)
        track.on_step(4, float(reward[0]), plays=True)
    game.close()
    return track, plain, critic, actions


def written(track: DecisionTrack, folder: Path, names: tuple[str, ...] = ()) -> dict[str, Any]:
    track.write(folder / "decisions.json", {"fps": 50.0, "sampled": False}, names)
    found = parse_decisions((folder / "decisions.json").read_text())
    assert found is not None
    return found


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize(
    ("target", "options", "kind", "has_value"),
    [
        ("synthetic", (), "probabilities", True),
        ("synthetic", ("model.core=lstm",), "probabilities", True),
        ("synthetic", ("model.normalize_observations=true",), "probabilities", True),
        ("synthetic", ("algo.name=dqn",), "q", True),
        ("Pendulum-v1", ("algo.name=ppo",), "mean", True),
        ("Pendulum-v1", ("algo.name=sac",), "mean", False),
    ],
)
def test_recorded_decisions_equal_those_of_the_policy(
    tmp_path: Path,
    target: str,
    options: tuple[str, ...],
    kind: str,
    has_value: bool,
    sample: bool,
) -> None:
    track, _, critic, actions = tracked(*options, target=target, sample=sample)
    found = written(track, tmp_path)
    assert (found["kind"], found["steps"]) == (kind, 3)
    assert found["picture"] == [0, 4, 8]  # the last of those that show the state
    assert np.allclose(found["action"], np.reshape(actions, (3, -1)), rtol=1e-3)
    assert all(isinstance(value, float) is has_value for value in found["value"])
    assert (critic is None) is (kind == "q" or not has_value)
    rows = np.array(found["rows"], float)
    if kind == "probabilities":
        assert np.allclose(rows.sum(1), 1, atol=1e-3)
        if not sample:
            assert rows.argmax(1).tolist() == actions
    if kind == "q":
        assert np.allclose(rows.max(1), found["value"], rtol=1e-3)
    if kind == "mean":
        assert (np.array(found["std"]) > 0).all()


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("CartPole-v1", ("model.normalize_observations=true",)),
        ("CartPole-v1", ("model.core=lstm", "model.core_size=8")),
        ("synthetic", ("env.kwargs={obs_shape: [4, 84, 84], obs_dtype: uint8}", "model.kind=auto")),
    ],
)
def test_numpy_critic_equals_the_learners_network(target: str, options: tuple[str, ...]) -> None:
    torch = pytest.importorskip("torch")
    from penstock.models.torch_nets import build_net

    config = resolve(target, ["actors.envs=1", *options])
    game = make(config.env, 1)
    shape: Any = network_shape(config, game.info)
    space = game.info.observation_space
    game.close()
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.05, shape.layout.size).astype(np.float32)
    views = shape.layout.views(weights)
    if "normalizer.var" in views:
        views["normalizer.var"][:] = rng.uniform(0.5, 2, 4)
    net = build_net(shape).requires_grad_(False).eval()
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        np.copyto(tensor.numpy(), views[name])
    obs = rng.uniform(0, 200 if space.dtype == np.uint8 else 1, (3, *space.shape))
    obs = obs.astype(space.dtype)
    state = rng.normal(size=(3, getattr(shape, "state_size", 0))).astype(np.float32)
    critic = make_critic(shape, weights)
    assert critic is not None
    rows = torch.from_numpy(obs)
    if state.size:
        expected = net(rows[None], torch.from_numpy(state))[1]
        assert not np.allclose(critic(obs, state), critic(obs, np.zeros_like(state)), atol=1e-5)
    else:
        expected = net(rows)[1]
    assert np.allclose(critic(obs, state), expected.numpy(), atol=1e-4)
    assert np.std(critic(obs, state)) > 0


def test_decisions_file_is_bounded_in_steps_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "MOST_STEPS", 2)
    monkeypatch.setattr(decisions, "MOST_VALUES", 3)
    track, *_ = tracked("env.kwargs={n_actions: 4}")
    found = written(track, tmp_path, ("a", "b", "c", "d"))
    assert (len(found["picture"]), found["steps"]) == (2, 3)
    assert ([len(row) for row in found["rows"]], found["values"]) == ([3, 3], 4)
    assert found["names"] == ["a", "b", "c"]


def test_largest_allowed_decisions_file_is_read() -> None:
    row = [-0.0001234] * decisions.MOST_VALUES
    columns = {"action": row, "rows": row, "std": row, "reward": 1.5, "value": 1.5}
    steps = {name: [value] * decisions.MOST_STEPS for name, value in columns.items()}
    assert len(json.dumps(steps, separators=(",", ":"))) < 0.9 * decisions.NBYTES


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"format": "another"}',
        '{"format": "penstock decisions 1", "picture": [0, "a"]}',
        '{"format": "penstock decisions 1", "picture": [NaN]}',
        '{"format": "penstock decisions 1", "picture": [-1]}',
    ],
)
def test_invalid_decisions_file_is_ignored(text: str | None) -> None:
    assert parse_decisions(text) is None


def test_hostile_decisions_file_is_reduced_to_numbers_and_short_texts() -> None:
    found = parse_decisions(
        json.dumps(
            {
                "format": "penstock decisions 1",
                "picture": [*range(9000)],
                "value": ["<b>", True, 1e400, 2.0],
                "rows": [[1, "x", None, {}] * 100, "text", 7],
                "names": ["n" * 1000, {"a": 1}],
                "kind": "<script>",
                "fps": "50",
                "episodes": [{"return": "high", "cut": 1}, 3, {"length": 9, "cut": True}],
                "more": "x" * 1000,
            }
        )
    )
    assert found is not None
    assert len(found["picture"]) == len(found["value"]) == len(found["rows"]) == 3000
    assert found["value"][:5] == [None, None, None, 2.0, None]
    assert found["rows"][:3] == [[1, None, None, None] * 6, [], []]
    assert found["names"] == ["n" * 40, "{'a': 1}"]
    assert (found["kind"], found["fps"]) == (None, None)
    assert found["episodes"] == [
        {"return": None, "length": None, "cut": False},
        {"return": None, "length": 9, "cut": True},
    ]
    assert "more" not in found


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
FIELDS = ("picture", "action", "reward", "value", "rows", "std", "names", "counts", "episodes")


@given(st.dictionaries(st.sampled_from((*FIELDS, "kind", "fps", "steps", "values")), ANY_JSON))
def test_columns_of_any_decisions_file_are_finite_and_equally_long(fields: Any) -> None:
    found = parse_decisions(json.dumps({**fields, "format": decisions.FORMAT}))
    if found is None:
        return
    steps = len(found["picture"])
    assert {len(found[name]) for name in ("action", "reward", "value", "rows", "std")} == {steps}
    numbers = [*found["picture"], *found["reward"], *found["value"], *chain(*found["rows"])]
    assert all(x is None or np.isfinite(x) for x in numbers)
    json.dumps(found, allow_nan=False)
