"""Defaults of an environment kind: found by its id, overridden by presets and overrides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.algorithms import ALGORITHMS
from penstock.configs.errors import UserError
from penstock.configs.keys import options
from penstock.configs.kinds import KINDS, defaults, known_kind
from penstock.configs.load import dump, resolve, resolve_target
from penstock.configs.schedules import LinearSchedule
from penstock.configs.schema import Config

ROOT = Path(__file__).parents[3]
WITH_KINDS = ("ppo", "impala", "dqn", "r2d2", "pqn", "sac", "td3")
PPO = "algo.name=ppo"
ABSENT = "\N{EN DASH}"


def listed(algo: str, kind: str) -> dict[str, Any]:
    """The options of an algorithm's file for a kind, by their dotted names."""
    path = ALGORITHMS.specs[algo].defaults
    assert path is not None
    sections = defaults(path, kind).values
    return {f"{name}.{key}": v for name, options in sections.items() for key, v in options.items()}


def value(config: Config, name: str) -> Any:
    section, _, key = name.partition(".")
    return config.model_dump()[section][key]


@pytest.mark.parametrize(
    ("env_id", "kind"),
    [
        ("CartPole-v1", "vector"),
        ("penstock/MinAtar-v0", "vector"),
        ("envpool/LunarLander-v3", "vector"),
        ("Walker2d-v5", "continuous"),
        ("Walker2d-v4", "continuous"),
        ("HumanoidStandup-v5", "continuous"),
        ("Pendulum-v1", "continuous"),
        ("BipedalWalkerHardcore-v3", "continuous"),
        ("dm_control/cheetah-run-v0", "continuous"),
        ("my_module:Hopper-v5", "continuous"),
        ("CarRacing-v3", "pixels"),
        ("penstock/Doom-v0", "pixels"),
        ("VizdoomCorridor-v0", "pixels"),
        ("ALE/Seaquest-v5", "atari"),
        ("games:make_maze", None),
        ("Antics-v0", None),
    ],
)
def test_environment_id_determines_the_kind(env_id: str, kind: str | None) -> None:
    assert known_kind(env_id) == kind


@pytest.mark.parametrize("algo", WITH_KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_default_is_an_option_and_applies(algo: str, kind: str) -> None:
    found = resolve("x:f", [f"algo.name={algo}", f"env.kind={kind}"])
    values = listed(algo, kind)
    assert values.keys() <= options(algo).keys()
    for name, expected in values.items():
        if isinstance(expected, dict):
            expected = {"steps": None, **expected}
        assert value(found, name) == expected, name
    core = {"core": found.model.core}  # R2D2 needs one
    plain = Config.model_validate({"env": {"id": "x:f"}, "algo": {"name": algo}, "model": core})
    for name in options(algo).keys() - values.keys() - {"env.id", "env.kind", "env.kwargs"}:
        if name.count(".") == 1:
            assert value(found, name) == value(plain, name), name


def test_ppo_of_a_mujoco_environment_is_the_published_algorithm() -> None:
    config = resolve("Walker2d-v5", [PPO])
    learner = config.learner
    batch = config.actor_envs * config.actors.unroll * learner.batch_slots
    assert (batch, batch // learner.updates_per_batch) == (2048, 64)
    assert learner.lr == LinearSchedule.model_validate({"from": 3e-4, "to": 0})
    algo = config.algo.model_dump()
    assert (algo["epochs"], algo["clip"], algo["entropy_cost"]) == (10, 0.2, 0.0)
    assert algo["normalize_rewards"]
    assert config.model.normalize_observations
    assert config.algo.by_steps(has_core=False)
    assert not config.algo.by_steps(has_core=True)
    assert learner.publish_every == learner.updates_per_batch * algo["epochs"]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_published_after_every_batch(kind: str) -> None:
    config = resolve("x:f", [PPO, f"env.kind={kind}"])
    assert config.learner.publish_every == config.learner.updates_per_batch * config.algo.passes


def test_the_base_of_a_run_names_the_kind_and_the_source() -> None:
    found = resolve_target("Walker2d-v5", [PPO])
    assert (found.name, found.origin) == ("Walker2d-v5", "no preset")
    assert found.config.env.kind == "continuous"
    assert found.defaults.startswith(
        "defaults of algo.name ppo for env.kind continuous: CleanRL, ppo_continuous_action.py"
    )
    for target in ("cartpole", "CartPole-v1"):
        assert resolve_target(target).defaults == ""
        assert resolve_target(target).config.env.kind == "auto"


def test_override_takes_precedence_over_kind_defaults() -> None:
    given = ["algo.epochs=2", "actors.envs=3", "learner.lr.from=1e-3", "model={}"]
    config = resolve("Walker2d-v5", [PPO, *given])
    assert (config.algo.passes, config.actors.envs) == (2, 3)
    assert config.learner.lr == LinearSchedule.model_validate({"from": 1e-3, "to": 0})
    assert config.model == Config.model_validate({"env": {"id": "x"}}).model, "it was cleared"
    assert resolve("Walker2d-v5", [PPO, "learner.lr=1e-4"]).learner.lr == 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_batch_of_ppo_is_shared_by_two_actors_or_played_by_one(kind: str) -> None:
    several = resolve("x:f", [PPO, f"env.kind={kind}"])
    assert several.actors.count == "auto"
    assert several.first_actors == several.least_actors == several.learner.batch_slots == 2
    for count in (["actors.count=1"], ["actors.count=1..4"], ["actors.count=4", "learner.count=4"]):
        one = resolve("x:f", [PPO, f"env.kind={kind}", *count])
        assert one.learner.batch_slots == 1
        assert one.actor_envs == 2 * several.actor_envs
    lockstep = resolve("x:f", [PPO, f"env.kind={kind}", "transport.kind=inproc"])
    assert lockstep.first_actors == 2


def test_an_option_that_does_the_same_in_another_way_replaces_a_default() -> None:
    for given in ("algo.reward_clip=1", "algo.reward_scale=0.1"):
        assert not resolve("Walker2d-v5", [PPO, given]).algo.normalizes_rewards
    decay = ["learner.lr_end_fraction=0.1", "learner.lr_decay_steps=1e6"]
    assert resolve("Walker2d-v5", [PPO, *decay]).learner.lr == 3e-4
    for given in ("algo.epochs=1", "learner.updates_per_batch=2"):
        assert resolve("Walker2d-v5", [PPO, given]).learner.publish_every == 1, "not every 320"
    # A preset of the environment for another algorithm has scaled its rewards.
    kept = resolve("Pendulum-v1", [PPO])
    assert (kept.algo.reward_scale, kept.algo.normalizes_rewards) == (0.1, False)


def test_preset_takes_precedence_unless_a_kind_is_requested() -> None:
    preset = resolve("halfcheetah")
    assert resolve("HalfCheetah-v5", [PPO]) == resolve("HalfCheetah-v5") == preset
    asked = resolve("HalfCheetah-v5", [PPO, "env.kind=continuous"])
    walker = resolve("Walker2d-v5", [PPO])
    assert asked.model_dump(exclude={"env"}) == walker.model_dump(exclude={"env"})
    atari = resolve("ALE/Breakout-v5", [PPO, "env.kind=atari"])
    assert atari.env.kwargs == resolve("breakout").env.kwargs
    assert (atari.algo.passes, atari.actors.unroll, atari.algo.reward_clip) == (4, 128, 1.0)


REPLAY = ("capacity", "min_size", "batch_size", "samples_per_insert", "prioritized")


@pytest.mark.parametrize(
    ("target", "algo", "replay", "network", "lr"),
    [
        # One update a step, by uniform replay: Haarnoja et al. 2018, table 1.
        ("HalfCheetah-v5", "td3", (10**6, 25_000, 256, 256, False), ([256, 256], "relu"), 3e-4),
        ("HalfCheetah-v5", "sac", (10**6, 10**4, 256, 256, False), ([256, 256], "relu"), 3e-4),
        ("Walker2d-v5", "sac", (10**6, 10**4, 256, 256, False), ([256, 256], "relu"), 3e-4),
        ("games:make", "sac", (10**6, 10**4, 256, 256, False), ([256, 256], "relu"), 3e-4),
        ("CarRacing-v3", "sac", (10**5, 10**3, 128, 128, False), ([256, 256], "relu"), 3e-4),
        # An update every 10 steps: CleanRL, dqn.py.
        ("Acrobot-v1", "dqn", (20_000, 10_000, 128, 12.8, False), ([120, 84], "relu"), 2.5e-4),
        ("LunarLander-v3", "dqn", (20_000, 10_000, 128, 12.8, False), ([120, 84], "relu"), 2.5e-4),
        # An update every 4 steps: Hessel et al. 2018, table 1.
        ("ALE/Seaquest-v5", "dqn", (500_000, 20_000, 32, 8, True), ([64, 64], "tanh"), 6.25e-5),
        ("penstock/Doom-v0", "dqn", (10**5, 20_000, 32, 8, True), ([64, 64], "tanh"), 6.25e-5),
        # Presets of the algorithm stay as they were measured.
        ("CartPole-v1", "dqn", (100_000, 2_000, 128, 16, True), ([64, 64], "tanh"), 2e-3),
        ("ALE/Pong-v5", "dqn", (200_000, 5_000, 32, 8, True), ([64, 64], "tanh"), 2.5e-4),
        ("Pendulum-v1", "sac", (200_000, 1_000, 256, 128, False), ([128, 128], "relu"), 1e-3),
    ],
)
def test_replay_network_and_learning_rate_follow_the_kind(
    target: str, algo: str, replay: tuple[Any, ...], network: tuple[Any, ...], lr: float
) -> None:
    config = resolve(target, [f"algo.name={algo}"])
    assert tuple(getattr(config.replay, name) for name in REPLAY) == replay
    assert (config.model.hidden, config.model.activation) == network
    assert (config.learner.lr, config.algo.discount) == (lr, 0.99)
    # The stacks of Atari would need four times the memory.
    assert config.transport.frame_stack == (4 if target.startswith("ALE/") else None)


def test_file_without_base_gets_kind_defaults_and_a_complete_config_does_not(
    tmp_path: Path,
) -> None:
    short, whole = tmp_path / "short.yaml", tmp_path / "whole.yaml"
    short.write_text("env: {id: Walker2d-v5}\nalgo: {name: ppo, epochs: 5}\n")
    config = resolve(str(short))
    assert config == resolve("Walker2d-v5", [PPO, "algo.epochs=5"])
    assert "ppo_continuous_action.py" in resolve_target(str(short)).defaults
    whole.write_text(dump(config))
    assert resolve(str(whole)) == config
    assert resolve_target(str(whole)).defaults == ""
    # An earlier version wrote a config without options that exist now.
    old = tmp_path / "config.yaml"
    old.write_text("env: {id: Walker2d-v5}\nalgo: {name: ppo}\n")
    assert resolve(str(old)) == Config.model_validate(
        {"env": {"id": "Walker2d-v5"}, "algo": {"name": "ppo"}}
    )


def test_an_error_names_the_line_of_a_default() -> None:
    with pytest.raises(UserError, match=r"algos/ppo/defaults\.yaml:\d+ and override actors.envs=1"):
        resolve("Walker2d-v5", [PPO, "actors.envs=1", "actors.unroll=8"])


def test_a_network_with_memory_trains_on_whole_unrolls() -> None:
    config = resolve("CartPole-v1", [PPO, "env.kind=vector", "model.core=lstm"])
    assert not config.algo.by_steps(config.model.core != "none")
    with pytest.raises(UserError, match=r"actors.envs 4 is not divisible by .* 32"):
        resolve("Walker2d-v5", [PPO, "model.core=lstm"])


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['from']:g} → {value['to']:g}"
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value).lower()


@pytest.mark.parametrize("algo", WITH_KINDS)
def test_documentation_has_every_kind_default_and_its_source(algo: str) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    part = page.partition(f"<!-- defaults of {algo} -->\n")[2].partition("<!-- end -->")[0]
    head, _, *rows = [line.strip("| \n").split(" | ") for line in part.strip().splitlines()]
    assert head == ["option", *KINDS]
    found = {re.sub("`", "", row[0]): [cell.strip() for cell in row[1:]] for row in rows}
    per_kind = {kind: listed(algo, kind) for kind in KINDS}
    assert found.keys() == {name for values in per_kind.values() for name in values}
    for name, cells in found.items():
        for kind, cell in zip(KINDS, cells, strict=True):
            own = per_kind[kind]
            assert cell == (_shown(own[name]) if name in own else ABSENT), f"{name} {kind}"
    path = ALGORITHMS.specs[algo].defaults
    assert path is not None
    text = " ".join(page.split())
    for kind in KINDS:
        assert defaults(path, kind).source in text
