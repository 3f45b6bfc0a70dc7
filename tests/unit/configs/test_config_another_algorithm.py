"""A target with another algorithm than its own: the preset and the options that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.algos.custom.config import CustomConfig
from penstock.algos.dqn.config import DqnConfig
from penstock.algos.impala.config import ImpalaConfig
from penstock.algos.ppo.config import PpoConfig
from penstock.algos.sac.config import SacConfig
from penstock.configs.errors import UserError
from penstock.configs.layers import REWARD_OPTIONS
from penstock.configs.load import resolve, resolve_target
from penstock.configs.section import Section


def test_another_algorithm_starts_from_its_defaults_in_any_order_of_overrides() -> None:
    plain = resolve("x:f", ["algo.name=dqn", "env.kind=vector"]).algo
    for name in ("algo.name=dqn", "algo={name: dqn}"):
        assert resolve("synthetic", [name]).algo == plain
    for overrides in (["algo.name=dqn", "algo.n_step=5"], ["algo.n_step=5", "algo.name=dqn"]):
        assert resolve("synthetic", overrides).algo == plain.model_copy(update={"n_step": 5})
    assert resolve("cartpole", ["algo.name=impala"]) == resolve("cartpole")
    assert resolve("cartpole", ["algo={}"]).algo == ImpalaConfig()
    assert resolve("cartpole", ["algo.name=dqn", "algo.name=impala"]) != resolve("cartpole")


OWN = ("algo.name=custom", "algo.entry=mine", "algo.data=transitions")


def test_options_that_another_algorithm_drops_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "env: {id: Acrobot-v1}\nalgo: {name: dqn, discount: 0.9, n_step: 3, huber: 2.0}\n"
    )
    assert resolve_target(str(file), OWN).note == (
        "algo.name custom in place of dqn: algo.discount 0.9 -> 0.99, algo.n_step 3 -> 1 by "
        "default; without algo.huber 2.0"
    )
    assert resolve_target(str(file), [*OWN, "algo.n_step=4"]).note == (
        "algo.name custom in place of dqn: algo.discount 0.9 -> 0.99 by default; "
        "without algo.huber 2.0"
    )
    over = tmp_path / "over.yaml"
    over.write_text("base: cartpole_ppo\nalgo: {name: impala, entropy_cost: 0.03}\n")
    given, left = resolve("cartpole_ppo").algo.model_dump(), resolve(str(over)).algo.model_dump()
    note = resolve_target(str(over)).note
    assert note.startswith("algo.name impala in place of ppo: ")
    assert "entropy_cost" not in note
    assert f"algo.epochs {given['epochs']}" in note.partition("without")[2]
    assert left["entropy_cost"] == 0.03
    for target, overrides in (
        ("cartpole", []),
        ("cartpole", ["algo.name=ppo"]),  # which is another preset
        ("CartPole-v1", ["algo.name=sac"]),  # which has none
        ("cartpole", ["algo.name=impala"]),
        ("Acrobot-v1", ["algo.name=ppo"]),
    ):
        assert resolve_target(target, overrides).note == ""


def test_a_preset_with_another_algorithm_is_that_of_its_game_and_the_algorithm() -> None:
    for target in ("cartpole", "CartPole-v1", "cartpole_dqn"):
        found = resolve_target(target, ["learner.eps=1", "algo.name=ppo"])
        assert found.name == "cartpole_ppo"
        assert found.config == resolve("cartpole_ppo", ["learner.eps=1"])
    said = resolve_target("cartpole", ["algo.name=ppo"]).origin
    assert said == "preset cartpole_ppo, which is cartpole with algo.name ppo"
    assert resolve_target("lunarlander", ["algo.name=ppo"]).origin == "preset lunarlander"


@pytest.mark.parametrize("algo", ["impala", "dqn"])
def test_preset_with_another_algorithm_keeps_only_the_environment(
    algo: str, tmp_path: Path
) -> None:
    given = [f"algo.name={algo}", "learner.eps=1e-3"]
    lent = ["algo.reward_scale=0.1", "env.kind=vector"]
    plain = resolve("x:f", [*given, *lent]).model_dump(exclude={"env"})
    for target in ("lunarlander", "LunarLander-v3"):
        found = resolve_target(target, given)
        assert found.config.model_dump(exclude={"env"}) == plain
        assert found.config.env.id == "LunarLander-v3"
    file = tmp_path / "mine.yaml"
    file.write_text(
        "base: lunarlander\nlearner: {lr: 0.5, eps: 1e-3}\nreplay: {}\n"
        f"algo: {{name: {algo}}}\n"
    )
    found = resolve_target(str(file))
    assert found.config.learner.lr == 0.5, "what the file sets is the user's"
    assert found.note.endswith("of the preset's other sections only env is kept")
    plain["learner"]["lr"] = 0.5
    plain["replay"] = resolve("x:f").model_dump()["replay"]  # an empty map clears
    assert found.config.model_dump(exclude={"env"}) == plain


@pytest.mark.parametrize("target", ["ALE/Pong-v5", "pong", "pong_apex"])
def test_environment_with_several_presets_takes_that_of_the_algorithm(target: str) -> None:
    """And not that of any Atari game, whose algorithm is the same."""
    for algo, name in (("ppo", "pong"), ("dqn", "pong_apex"), ("impala", "pong_impala")):
        found = resolve_target(target, [f"algo.name={algo}", "learner.eps=1"])
        assert (found.name, found.config) == (name, resolve(name, ["learner.eps=1"]))


@pytest.mark.parametrize(
    ("target", "algo", "clip", "scale"),
    [
        ("doom_basic", "impala", None, 0.01),
        ("breakout", "impala", 1.0, 1.0),
        ("ALE/Freeway-v5", "dqn", 1.0, 1.0),
        ("lunarlander", "impala", None, 0.1),
        ("LunarLander-v3", "dqn", None, 0.1),
        ("CartPole-v1", "sac", None, 0.02),
        ("Acrobot-v1", "dqn", None, 1.0),
    ],
)
def test_another_algorithm_keeps_options_that_describe_the_environment(
    target: str, algo: str, clip: float | None, scale: float
) -> None:
    found = resolve(target, [f"algo.name={algo}"]).algo
    assert (found.discount, found.reward_clip, found.reward_scale) == (0.99, clip, scale)
    given = ["algo.discount=0.5", "algo.reward_clip=2", "algo.reward_scale=3"]
    own = resolve(target, [*given, f"algo.name={algo}"]).algo
    assert (own.discount, own.reward_clip, own.reward_scale) == (0.5, 2.0, 3.0)


def test_options_that_describe_the_environment_can_be_overridden(tmp_path: Path) -> None:
    over = tmp_path / "over.yaml"
    over.write_text("base: breakout\nalgo: {name: impala, discount: 0.9}\n")
    found = resolve(str(over)).algo
    assert (found.discount, found.reward_clip, found.name) == (0.9, 1.0, "impala")
    assert resolve(str(over), ["algo.reward_clip=null"]).algo.reward_clip is None
    with pytest.raises(UserError, match=r"configs/breakout\.yaml:\d+: .*needs unclipped rewards"):
        resolve(str(over), ["algo.normalize_rewards=true"])
    over.write_text("env: {id: x}\nalgo: 3\n")
    assert resolve(str(over), ["algo.name=sac"]).algo == SacConfig()


@pytest.mark.parametrize("algo", [ImpalaConfig, PpoConfig, CustomConfig, DqnConfig, SacConfig])
def test_every_algorithm_has_the_options_that_describe_the_environment(algo: type[Section]) -> None:
    assert set(REWARD_OPTIONS) <= algo.model_fields.keys()
