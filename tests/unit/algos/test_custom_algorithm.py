"""Custom algorithms: optional parts, settings, and error messages."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lockstep_run import of_kind, train_in_lockstep
from pages import code
from penstock.algos.custom.algorithm import custom
from penstock.algos.registry import algorithm
from penstock.algos.samples import make_receive, process, slot_spec
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.interfaces import Transitions
from penstock.core.specs import HEADER, Column
from penstock.envs import EnvInfo, probe
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.factory import make_trainer
from penstock.learner.offpolicy import OffPolicyTrainer
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


def test_custom_algorithm_needs_only_a_loss(write: Write) -> None:
    cfg = config(write(PLAIN), "algo.reward_clip=1", "algo.epochs=2")
    made = Trainer(cfg, probe(cfg.env))
    staged = batch(made)
    before = made.optimizer.values.clone()
    made.step(staged)
    assert not torch.equal(made.optimizer.values, before)
    assert made.progress.learner_steps == 2
    figures = {"grad_norm", "grad_norm_clipped", "learning_rate"}
    assert set(made.statistics()) == {"mean_value"} | figures
    columns = made.spec.views(made.spec.zeros())
    columns["reward"][...] = 5.0
    process(cfg.algo, columns)
    assert (columns["reward"] == 1).all()


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("None", "loss returned NoneType; return the loss and the sums of STATISTICS"),
        ("total", "loss returned Tensor; return the loss and"),
        ("(total[None], sums)", r"loss returned a loss of shape \[1\]; return .* shape \[\]"),
        ("(total.item(), sums)", "loss returned a loss of type float"),
        (
            "(total, 1.0)",
            r"loss returned statistics of type float, and STATISTICS has 1 name \(mean_value\)",
        ),
        ("(total, sums.repeat(2))", r"loss returned statistics of shape \[2\], and STATISTICS"),
    ],
)
def test_return_value_of_a_loss_is_checked(returned: str, sentence: str, write: Write) -> None:
    text = PLAIN.replace("return values", "total, sums = values")
    cfg = config(write(f"{text}    return {returned}\n"))
    made = Trainer(cfg, probe(cfg.env))
    with pytest.raises(UserError, match=sentence):
        made.step(batch(made))


def test_custom_algorithm_may_define_columns_process_and_figures(write: Write) -> None:
    entry = write(
        PLAIN
        + """
from penstock.algos.impala import algorithm as impala
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
        (
            "from os import abort",
            "{}:abort",
            [],
            "makes no algorithm; name a class that",
        ),
        ("from subprocess import Popen", "{}:Popen", [], "makes no algorithm; name a class that"),
        ("from code import interact", "{}:interact", [], "makes no algorithm; name a class that"),
        ("def make(): return 3", "{}:make", [], "has no STATISTICS and no loss"),
        ("import no_such_thing", "{}", [], "no_such_thing is not installed"),
        ("1 / 0", "{}", [], "failed with ZeroDivisionError"),
    ],
)
def test_mistakes_of_a_custom_algorithm_are_refused_in_one_sentence(
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
def test_settings_of_a_custom_algorithm_are_checked(
    write: Write, kind: str, option: str, sentence: str
) -> None:
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


OFF_POLICY = """
import numpy as np
from penstock.models.acting.categorical import EpsilonGreedySampler
from penstock.models.acting.gaussian import SquashedGaussianSampler
from penstock.models.fitting import gaussian_shape, q_shape
from own_offpolicy import Update
from penstock.algos.dqn import algorithm as dqn
class Choices:
    Update = Update
    class Settings:
        temperature, bonus, least_bonus, tau = 0.1, 0.5, -1.0, 0.5
        def __init__(self, epsilon: float = 0.5): self.epsilon = epsilon
    def network(self, config, spaces): return q_shape(config, spaces, duelling=True)
    def action_sampler(self, config, spaces, seed, actor):
        epsilon = np.full(config.actor_envs, config.algo.settings.epsilon)
        return EpsilonGreedySampler(2, epsilon, np.random.default_rng(seed))
class Numbers(Choices):
    def network(self, config, spaces): return gaussian_shape(config, spaces)
    def action_sampler(self, config, spaces, seed, actor):
        rng = np.random.default_rng(seed)
        return SquashedGaussianSampler(spaces.action_space.shape, config.actor_envs, (-1, 1), rng)
class Own(Choices):
    def columns(self, *game): return dqn.columns(*game)[:-1]
    def check(self, columns, layout): raise ValueError("never sound")
    def process(self, cfg, columns): columns["reward"][...] = cfg.settings.epsilon
class Unrecorded(Choices):
    def action_sampler(self, config, spaces, seed, actor):
        sampler = super().action_sampler(config, spaces, seed, actor)
        sampler.recorded = {"q_max": sampler.recorded["q_max"]}
        return sampler
"""
CHOICES = EnvInfo(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2), 1, "")
NUMBERS = EnvInfo(spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-2, 2, (2,), np.float32), 1, "")


def replayed(entry: str, *options: str) -> Config:
    return config(entry, "algo.data=transitions", "algo.reward_scale=0.5", *options)


@pytest.fixture
def off_policy(write: Write, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(EXAMPLES)
    return write(OFF_POLICY)


def random_batch() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "obs": rng.normal(size=(8, 4)).astype(np.float32),
        "action": rng.integers(0, 2, 8).astype(np.int32),
        "reward": np.ones(8, np.float32),
        "next_obs": rng.normal(size=(8, 4)).astype(np.float32),
        "discount": np.full(8, 0.9, np.float32),
    }


def test_custom_replay_algorithm_trains_and_resumes(off_policy: str) -> None:
    made, other = (OffPolicyTrainer(replayed(f"{off_policy}:Choices"), CHOICES) for _ in range(2))
    assert len(made.update(random_batch())) == 8
    figures = {"grad_norm", "learning_rate"}
    assert set(made.statistics()) == {"q_loss", "td_error", "policy_entropy"} | figures
    other.load_state_dict(made.state_dict())
    for ours, theirs in zip(made.published_tensors(), other.published_tensors(), strict=True):
        theirs.data.copy_(ours.data)
    np.testing.assert_array_equal(made.update(random_batch()), other.update(random_batch()))
    assert torch.equal(made.published_tensors()[0], other.published_tensors()[0])


RETURNS: dict[str, str] = {
    "None": r"Update\.take returned NoneType; return an UpdateResult\(errors, sums, norm\)",
    "tuple(made)": r"Update\.take returned tuple; return an ",
    "made._replace(errors=made.errors[1:])": r"errors of shape \[7\] for a batch of 8; .* \[8\]",
    "made._replace(errors=made.errors[:, None])": r"errors of shape \[8, 1\] for a batch of 8",
    "made._replace(errors=made.errors.tolist())": r"errors of type list for a batch of 8",
    "made._replace(errors=made.errors.requires_grad_())": r"float32 with a gradient; .*detach",
    "made._replace(errors=made.errors.long())": r"int64 without a gradient; return floats",
    "made._replace(norm=0.5)": r"norm of type float for a batch of 8; .* shape \[\]",
    "made._replace(sums=made.sums[:2])": r"Update\.take returned statistics of shape \[2\], and "
    r"Update\.statistics has 3 names \(q_loss, td_error, policy_entropy\); return a tensor",
}


@pytest.mark.parametrize("returned", RETURNS)
def test_return_value_of_take_is_checked(returned: str, off_policy: str, write: Write) -> None:
    entry = write(
        OFF_POLICY
        + f"""
class Wrong(Choices):
    class Update(Update):
        def take(self, batch, *rest):
            made = super().take(batch, *rest)
            return {returned}
"""
    )
    trainer = OffPolicyTrainer(replayed(f"{entry}:Wrong"), CHOICES)
    with pytest.raises(UserError, match=RETURNS[returned]):
        trainer.update(random_batch())


def test_update_class_with_missing_methods_is_refused(off_policy: str, write: Write) -> None:
    entry = write(
        OFF_POLICY
        + """
class Lacks(Choices):
    class Update:
        statistics = published = take = ()
        def __init__(self, cfg, context): pass
"""
    )
    with pytest.raises(
        UserError, match="its Update has no state and no loaded; an Update has stat"
    ):
        OffPolicyTrainer(replayed(f"{entry}:Lacks"), CHOICES)


def test_custom_replay_algorithm_has_columns_that_fit_the_actions(off_policy: str) -> None:
    choices, numbers = replayed(f"{off_policy}:Choices"), replayed(f"{off_policy}:Numbers")
    spec = slot_spec(choices, CHOICES)
    columns = spec.views(spec.zeros())
    columns["reward"][...], columns["alive"][...] = 4, True
    columns["action"][...] = 2
    with pytest.raises(ValueError, match="actions from 2 to 2, there are 2"):
        make_receive(choices.algo, CHOICES)(columns)
    columns["action"][...] = 1
    make_receive(choices.algo, CHOICES)(columns)
    assert (columns["reward"] == 2).all()
    assert (columns["priority"] == 2).all()
    spec = slot_spec(numbers, NUMBERS)
    assert "priority" not in [column.name for column in spec.columns]
    columns = spec.views(spec.zeros())
    columns["reward"][...] = 4
    process(numbers.algo, columns)
    assert (columns["reward"] == 2).all()
    columns["action"][...] = 3
    with pytest.raises(ValueError, match=r"an action of 3\.0"):
        make_receive(numbers.algo, NUMBERS)(columns)
    several = algorithm(choices.algo).columns(
        CHOICES.observation_space, spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]))
    )
    assert Column("action", "<i4", (2, 2)) in several
    assert "priority" not in [column.name for column in several]
    one = replace(NUMBERS, action_space=spaces.Box(-1, 1, (), np.float32))
    assert "priority" not in [column.name for column in slot_spec(numbers, one).columns]


def test_custom_replay_algorithm_may_define_its_own_columns(off_policy: str) -> None:
    cfg = replayed(f"{off_policy}:Own", "algo.settings.epsilon=0.25", "algo.n_step=5")
    spec = slot_spec(cfg, CHOICES)
    columns = spec.views(spec.zeros())
    process(cfg.algo, columns)
    assert (columns["reward"] == 0.25).all()
    with pytest.raises(ValueError, match="never sound"):
        make_receive(cfg.algo, CHOICES)(columns)
    assert algorithm(cfg.algo).data(cfg.algo) == Transitions(5)


def test_action_sampler_must_record_every_action_column(off_policy: str) -> None:
    good, bad = replayed(f"{off_policy}:Choices"), replayed(f"{off_policy}:Unrecorded")
    assert algorithm(good.algo).action_sampler(good, CHOICES, 0, 0)
    with pytest.raises(UserError, match="action_sampler does not record q_taken, which its slots"):
        algorithm(bad.algo).action_sampler(bad, CHOICES, 0, 0)


@pytest.mark.parametrize(
    ("entry", "data", "sentence"),
    [
        (
            "own_offpolicy",
            "unrolls",
            "algo.entry own_offpolicy trains on transitions, as it has network, action_sampler and "
            "Update, and algo.data is unrolls; set algo.data=transitions",
        ),
        (
            "own_algorithm",
            "transitions",
            "algo.entry own_algorithm trains on unrolls, as it has STATISTICS and loss, and "
            "algo.data is transitions; set algo.data=unrolls",
        ),
        (
            "math",
            "transitions",
            "algo.entry math has no network and no action_sampler and no Update; an algorithm with "
            "algo.data transitions has network, action_sampler and Update, as penstock/algos/dqn "
            "and examples/own_offpolicy.py do",
        ),
    ],
)
def test_a_module_of_the_other_kind_is_refused(
    entry: str, data: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    custom.cache_clear()
    cfg = config(entry, f"algo.data={data}")
    with pytest.raises(UserError) as raised:
        make_trainer(cfg, CHOICES)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["algo.n_step=3"], "algo.n_step 3 is for algo.data transitions, and algo.data is unrolls"),
        (["algo.epochs=2", "algo.data=transitions"], "algo.epochs 2 is for algo.data unrolls"),
        (
            ["algo.normalize_rewards=true", "algo.data=transitions"],
            "algo.normalize_rewards true is for algo.data unrolls, and algo.data is transitions; "
            "set algo.data=unrolls or algo.normalize_rewards=false",
        ),
        (["replay.alpha=1"], "replay.alpha has no effect with algo.data unrolls, which does not"),
        (["algo.data=transitions", "model.core=lstm"], "and algo.name custom is neither"),
        (["algo.data=fresh"], "algo.data is 'fresh'; it must be 'unrolls' or 'transitions'; the"),
    ],
)
def test_options_that_contradict_the_data_spec_are_refused(
    options: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        config("own_offpolicy", *options)


def test_missing_entry_option_is_reported() -> None:
    with pytest.raises(UserError, match=r"algo\.entry is missing; it must be `module`"):
        resolve("Acrobot-v1", ["algo.name=custom"])


@pytest.mark.slow
def test_the_example_on_replay_needs_no_torch_on_actors() -> None:
    program = (
        "import sys; from penstock.algos.acting import make_inference; "
        "from penstock.configs.load import resolve; from penstock.envs import probe; "
        "config = resolve('own_offpolicy.yaml'); make_inference(config, probe(config.env), 0); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=EXAMPLES, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_the_example_on_replay_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    small = [
        *("transport.kind=inproc", "actors.count=1", "actors.envs=4", "actors.unroll=8"),
        *("replay.min_size=64", "replay.batch_size=16", "replay.checkpoint=true"),
        *("checkpoint.every_steps=20", "stop.return=null"),
    ]
    for folder, steps, resume in (("once", 40, "no"), ("twice", 20, "no"), ("twice", 40, "must")):
        options = [*small, f"stop.learner_steps={steps}"]
        cfg = resolve(str(EXAMPLES / "own_offpolicy.yaml"), options)
        [stop] = of_kind(train_in_lockstep(tmp_path / folder, cfg, resume), "stop")
        assert (stop["reason"], stop["error"]) == ("learner_steps", "")
    once, twice = (
        checkpoint_format.load(tmp_path / folder / "checkpoints" / "last")
        for folder in ("once", "twice")
    )
    assert np.array_equal(once.weights, twice.weights)
    assert "target" in once.arrays
    assert np.array_equal(once.arrays["target"], twice.arrays["target"])


@pytest.mark.parametrize("of", ["the tutorial", "the example"])
def test_tutorial_and_example_algorithms_train(of: str, write: Write) -> None:
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
def test_custom_algorithm_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 130
