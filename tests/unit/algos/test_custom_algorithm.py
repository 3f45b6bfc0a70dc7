"""An algorithm of one's own: what it may leave out, its settings, and what is said of mistakes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pages import code
from penstock.algos import process, slot_spec
from penstock.algos.custom import custom
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.specs import HEADER
from penstock.envs import probe
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.trainer import Trainer
from penstock.transport.shm.store import Slot

EXAMPLES = Path(__file__).parents[3] / "examples"
PLAIN = """
import torch
STATISTICS = ("mean_value",)
def loss(net, batch, cfg, envs, add_others):
    outputs, values = net(batch["obs"][:, envs])
    return values.square().sum() + outputs.square().sum(), values.detach().sum()[None]
"""
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a module of the name that is returned."""
    monkeypatch.syspath_prepend(tmp_path)
    custom.cache_clear()

    def to(text: str) -> str:
        name = f"mine_{len(list(tmp_path.iterdir()))}_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return to


def config(entry: str, *options: str, game: str = "Acrobot-v1") -> Config:
    small = ("actors.envs=4", "actors.unroll=3", "learner.device=cpu")
    return resolve(game, ["algo.name=custom", f"algo.entry={entry}", *small, *options])


def batch(made: Trainer) -> StagingBatch:
    payload = made.spec.zeros()
    columns = made.spec.views(payload)
    columns["obs"][...] = np.random.default_rng(0).normal(size=columns["obs"].shape)
    columns["alive"][...] = True
    header = np.zeros((), HEADER)
    header["steps"] = columns["alive"].size
    staged = StagingBatch(made.spec, 1, made.device)
    staged.gather([Slot(0, header, tuple(payload), columns)])
    return staged


def test_a_loss_is_enough(write: Write) -> None:
    cfg = config(write(PLAIN), "algo.reward_clip=1", "algo.epochs=2")
    made = Trainer(cfg, probe(cfg.env))
    staged = batch(made)
    before = made.optimizer.values.clone()
    made.step(staged)
    assert not torch.equal(made.optimizer.values, before)
    assert made.progress.learner_steps == 2
    assert set(made.statistics()) == {"mean_value", "grad_norm"}
    columns = made.spec.views(made.spec.zeros())
    columns["reward"][...] = 5.0
    process(cfg.algo, columns)
    assert (columns["reward"] == 1).all()


def test_it_may_have_all_that_others_have(write: Write) -> None:
    entry = write(
        PLAIN
        + """
from penstock.algos import impala
from penstock.core.specs import Column
class Algorithm:
    STATISTICS = ("ones", "cost")
    class Settings:
        def __init__(self, cost: float = 1.0): self.cost = cost
    def columns(self, *game): return (*impala.columns(*game), Column("mine", "<f4"))
    def process(self, cfg, columns): columns["mine"][...] = cfg.settings.cost
    def whole(self, cfg): return True
    def prepare(self, net, batch, cfg, parts, add_others):
        return {"one": torch.ones_like(batch["reward"])}
    def going_on(self, net, batch, cfg, parts, add_others): return bool(batch["one"].sum() < 0)
    def loss(self, net, batch, cfg, envs, add_others):
        assert batch["alive"][:, envs].shape[1] == 4
        total, _ = loss(net, batch, cfg, envs, add_others)
        return total, torch.stack((batch["one"].sum(), batch["mine"].sum()))
"""
    )
    options = ("algo.settings.cost=3", "algo.epochs=5", "learner.micro_batch=1")
    cfg = config(f"{entry}:Algorithm", *options)
    info = probe(cfg.env)
    made = Trainer(cfg, info)
    columns = slot_spec(cfg, info).views(slot_spec(cfg, info).zeros())
    process(cfg.algo, columns)
    assert (columns["mine"] == 3).all()
    made.step(batch(made))
    assert made.progress.learner_steps == 1, "it said that one epoch is enough"
    assert made.statistics()["ones"] == 1


@pytest.mark.parametrize(
    ("text", "entry", "options", "sentence"),
    [
        ("", "no_such", [], "algo.entry no_such: there is no module no_such in"),
        ("x = 1", "{}", [], "has no STATISTICS and no loss; an algorithm has STATISTICS and loss"),
        ("STATISTICS = ()", "{}", [], "has no loss; an algorithm has"),
        (PLAIN, "{}:Nothing", [], "has no class or function Nothing"),
        (PLAIN, "{}", ["algo.settings.cost=1"], r"has no Settings, .* algo.settings \{'cost': 1"),
        ("import no_such_thing", "{}", [], "no_such_thing is not installed"),
        ("1 / 0", "{}", [], "failed with ZeroDivisionError"),
    ],
)
def test_mistakes_are_said_in_a_sentence(
    write: Write, text: str, entry: str, options: list[str], sentence: str
) -> None:
    cfg = config(entry.format(write(text)), *options)
    with pytest.raises(UserError, match=sentence) as raised:
        Trainer(cfg, probe(cfg.env))
    assert "\n" not in str(raised.value)


SETTINGS = (
    PLAIN
    + """
import dataclasses, pydantic
@dataclasses.dataclass
class Plain:
    cost: float = 1.0
class Checked(pydantic.BaseModel):
    cost: float = pydantic.Field(1.0, gt=0)
Settings = {}
"""
)


@pytest.mark.parametrize(
    ("kind", "option", "sentence"),
    [
        ("Plain", "algo.settings.price=1", "there is no option price; the nearest is cost|choose"),
        ("Checked", "algo.settings.cost=-1", "cost: Input should be greater than 0; correct algo"),
    ],
)
def test_settings_are_checked(write: Write, kind: str, option: str, sentence: str) -> None:
    cfg = config(write(SETTINGS.replace("{}", kind)), option)
    with pytest.raises(UserError, match=sentence):
        Trainer(cfg, probe(cfg.env))


def test_the_example_needs_no_torch_on_actors_and_finds_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Row 1 ends the game; row 3, after the reset, is cut off where V is 8; the last goes on."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import own_algorithm  # type: ignore[import-not-found]

    rows: dict[str, Any] = {
        "reward": torch.tensor([1.0, 2, 0, 4, 0, 6])[:, None],
        "terminated": torch.tensor([0, 1, 0, 0, 0, 0], dtype=torch.bool)[:, None],
        "truncated": torch.tensor([0, 0, 0, 1, 0, 0], dtype=torch.bool)[:, None],
    }
    values = torch.tensor([9.0, 9, 9, 9, 8, 9, 10])[:, None]
    found = own_algorithm.returns(rows, values, 0.5)[:, 0].tolist()
    assert (found[0], found[1], found[3], found[5]) == (2.0, 2.0, 8.0, 11.0)
    assert "torch" not in vars(own_algorithm)
    sys.modules.pop("own_algorithm")


@pytest.mark.parametrize("of", ["the tutorial", "the example"])
def test_what_is_shown_of_an_own_algorithm_trains(of: str, write: Write) -> None:
    """Two actions are nearly alike at first, so that the entropy is log 2."""
    example = (EXAMPLES / "own_algorithm.py").read_text()
    entry = write(example if of == "the example" else code("own-algorithm.md", "python", 1))
    cfg = config(entry, "algo.settings.entropy_cost=0.5", game="penstock/Synthetic-v0")
    made = Trainer(cfg, probe(cfg.env))
    before = made.optimizer.values.clone()
    made.step(batch(made))
    assert not torch.equal(made.optimizer.values, before)
    assert made.statistics()["entropy"] == pytest.approx(math.log(2), abs=1e-3)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100
