"""What adding an algorithm takes: its config, its functions and one registration, all in this
file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep_run import of_kind, train_in_lockstep
from penstock.algos.base import AlgorithmFactory, ReplayAlgorithm
from penstock.algos.dqn import algorithm as dqn
from penstock.algos.registry import algorithm
from penstock.algos.replay_update import Batch, UpdateContext, UpdateResult
from penstock.configs.algorithms import ALGORITHMS, AlgorithmSpec, OffPolicyConfig
from penstock.configs.errors import UserError
from penstock.configs.keys import algorithms, options
from penstock.configs.load import dump, resolve
from penstock.configs.reference import reference
from penstock.configs.schema import Config
from penstock.configs.section import Contradiction
from penstock.configs.value_types import NotNegative, Positive
from penstock.core.interfaces import SampleSpec, Transitions, Unrolls
from penstock.core.observations import Spaces
from penstock.core.specs import Column
from penstock.learner.checkpoints import checkpoint_format
from penstock.models.acting.categorical import EpsilonGreedySampler
from penstock.models.fitting import HeadShape, q_shape
from penstock.models.torch_nets import build_net


class SarsaConfig(OffPolicyConfig):
    """Expected SARSA."""

    name: Literal["sarsa"] = "sarsa"
    curiosity: Positive = 0.25
    """Share of random actions of `sarsa`."""
    cost: NotNegative = 0.0
    """What `sarsa` takes off every reward."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.cost > self.reward_scale:
            yield Contradiction(
                ("algo.cost", "algo.reward_scale"),
                f"algo.cost {self.cost:g} is above algo.reward_scale; set algo.cost=0",
            )


class SarsaUpdate:
    """Q-values, whose own next values are the target: none lags behind."""

    statistics = ("q_loss",)

    def __init__(self, cfg: SarsaConfig, ctx: UpdateContext) -> None:
        self._cfg = cfg
        self._net = build_net(ctx.shape, ctx.dtype).to(ctx.device)
        self._optimizer = ctx.optimizer("q", self._net.named_parameters())
        self.published = [self._optimizer.values, *self._net.buffers()]

    def take(self, batch: Batch | None, total: float, number: int, env_steps: int) -> UpdateResult:
        self._optimizer.zero_grad()
        errors = torch.zeros(0) if batch is None else self._backward(batch, total)
        if batch is not None:
            assert batch["mask"].shape == (total, 3), "its own column, and samples are transitions"
        norm = self._optimizer.step(total, env_steps)
        return UpdateResult(errors.abs(), errors.square().sum()[None], norm)

    def _backward(self, batch: Batch, total: float) -> Tensor:
        with torch.no_grad():
            after, share = self._net(batch["next_obs"]), self._cfg.curiosity
            value = (1 - share) * after.amax(1) + share * after.mean(1)
            goal = batch["reward"] - self._cfg.cost + batch["discount"] * value
        q: Tensor = self._net(batch["obs"])
        errors: Tensor = goal - q.gather(1, batch["action"].long()[:, None])[:, 0]
        self._optimizer.prepare_backward(total)
        errors.square().dot(batch["weights"]).backward()
        return errors.detach()

    def state(self) -> dict[str, Tensor]:
        return {}

    def loaded(self) -> None:
        pass


def columns(observation_space: Any, action_space: Any) -> tuple[Column, ...]:
    return *dqn.columns(observation_space, action_space), Column("mask", "<f4", (3,))


def process(cfg: SarsaConfig, columns: dict[str, Any]) -> None:
    dqn.prioritize(cfg, 1, columns)
    columns["mask"][...] = 1


def network(config: Config, spaces: Spaces) -> HeadShape:
    return q_shape(config, spaces)


def action_sampler(config: Config, spaces: Spaces, seed: int, actor: int) -> EpsilonGreedySampler:
    cfg = config.algo
    assert isinstance(cfg, SarsaConfig), cfg
    epsilon = np.full(config.actor_envs, cfg.curiosity)
    return EpsilonGreedySampler(int(spaces.action_space.n), epsilon, np.random.default_rng(seed))


SARSA = ReplayAlgorithm[SarsaConfig](
    columns,
    dqn.check,
    process,
    network,
    action_sampler,
    SarsaUpdate,
    batch_columns=("mask",),
)
SPEC = AlgorithmSpec(SarsaConfig, f"{__name__}:SARSA")


@pytest.fixture
def registered() -> Iterator[None]:
    ALGORITHMS.register(SPEC)
    yield
    ALGORITHMS.unregister(SPEC.name)


def chosen(*more: str) -> Config:
    return resolve("cartpole_dqn", ["algo.name=sarsa", *more])


@pytest.mark.usefixtures("registered")
def test_config_accepts_the_new_algorithm_with_its_options(tmp_path: Path) -> None:
    assert chosen().algo == SarsaConfig(reward_scale=0.1)
    cfg = chosen("algo.curiosity=0.5")
    assert cfg.algo == SarsaConfig(reward_scale=0.1, curiosity=0.5)
    (tmp_path / "again.yaml").write_text(dump(cfg))
    assert resolve(str(tmp_path / "again.yaml")) == cfg
    assert Config.model_validate(cfg.model_dump(mode="json")) == cfg
    assert algorithm(cfg.algo).data(cfg.algo) == Transitions(1)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algo.curiosity=0", r"algo\.curiosity is 0; it must be a number above 0; the default is"),
        ("algo.curiosty=1", r"no option algo\.curiosty; the nearest option is algo\.curiosity"),
        (
            "algo.tau=1",
            r"algo\.tau; it is an option of algo\.name sac or td3, sarsa has name, discount",
        ),
        ("algo.cost=2", r"algo\.cost 2 is above algo\.reward_scale; set algo\.cost=0"),
        ("learner.batch_size=1", r"learner\.batch_size; the equivalent is replay\.batch_size"),
        (
            "model.core=lstm",
            r"model\.core lstm is for actor-critics and r2d2, and algo\.name sarsa is",
        ),
        ("learner.gather_threads=3", r"gather_threads 3 has no effect with algo\.name sarsa"),
        (
            "algo.name=sasra",
            r"must be 'impala', 'ppo', 'custom', 'dqn', 'r2d2', 'pqn', 'sac', 'td3', 'distill' or "
            r"'sarsa'; the",
        ),
    ],
)
def test_invalid_options_of_the_new_algorithm_are_refused_with_a_reason(
    override: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        chosen(override)


@pytest.mark.usefixtures("registered")
def test_reference_page_lists_the_new_algorithm() -> None:
    page = reference()
    assert "### algo.name=sarsa\n\nExpected SARSA.\n" in page
    assert "| `algo.cost` | a number of at least 0 | `0.0` | What `sarsa` takes off" in page
    assert "algo.cost" in options("sarsa")
    assert "algo.cost" not in options("dqn")


@pytest.mark.usefixtures("registered")
def test_new_algorithm_trains_in_lockstep_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    small = [
        *("transport.kind=inproc", "actors.count=1", "actors.envs=4", "actors.unroll=8"),
        *("replay.min_size=64", "replay.batch_size=16", "replay.checkpoint=true"),
        *("checkpoint.every_steps=15", "stop.return=null"),
    ]
    for folder, steps, resume in (("once", 30, "no"), ("twice", 15, "no"), ("twice", 30, "must")):
        cfg = chosen(*small, f"stop.learner_steps={steps}")
        heard = train_in_lockstep(tmp_path / folder, cfg, resume)
        [stop] = of_kind(heard, "stop")
        assert (stop["reason"], stop["error"]) == ("learner_steps", "")
        assert of_kind(heard, "metrics")[-1]["q_loss"] > 0
    once, twice = (
        checkpoint_format.load(tmp_path / folder / "checkpoints" / "last").weights
        for folder in ("once", "twice")
    )
    assert np.array_equal(once, twice)


def test_unregistered_algorithm_is_unknown_again() -> None:
    before = algorithms()
    ALGORITHMS.register(SPEC)
    ALGORITHMS.unregister("sarsa")
    assert algorithms() == before
    with pytest.raises(UserError, match=r"algo\.name is 'sarsa'; it must be 'impala', 'ppo', 'cus"):
        chosen()
    assert "sarsa" not in reference()


@pytest.mark.usefixtures("registered")
def test_registering_an_algorithm_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="algorithm sarsa exists already"):
        ALGORITHMS.register(AlgorithmSpec(SarsaConfig, "elsewhere:SARSA"))


@pytest.mark.parametrize("name", [name for name in algorithms() if name != "custom"])
def test_data_spec_of_each_algorithm_matches_its_config(name: str) -> None:
    cfg = ALGORITHMS.specs[name].config()
    kind = Unrolls if cfg.trains_on == "unrolls" else SampleSpec
    assert isinstance(algorithm(cfg).data(cfg), kind)


FACTORIES: tuple[AlgorithmFactory[SarsaConfig], ...] = (SARSA,)  # held against the Protocol by mypy
