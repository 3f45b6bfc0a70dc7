"""1-bit LAMB, codec and optimizer together, against the paper's algorithm in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import reduce_reference as naive
from penstock.configs.reduce import ReduceConfig
from penstock.configs.sections import LearnerConfig
from penstock.core.interfaces import Codec, CodecContext, Collective
from penstock.learner.codecs.registry import make_codec
from penstock.learner.extras.optimizers.frozen_lamb import CODEC_STATE
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from reduce_reference import clipped, coded
from reduce_ring import CPU, Floats, run_ranks

LAYERS = [(9, 10), (10,), (5, 10)]
SIZE, WARM_UP, LR, EPS, BLOCK = 150, 8, 0.02, 1e-6, 40
UPDATES = 60


class LambRank:
    """One learner's part."""

    def __init__(
        self, world: int, rank: int, *, clip: float | None = None, decay: float = 0.0
    ) -> None:
        options = {"warmup_updates": WARM_UP, "onebit_block": BLOCK}
        reduce = ReduceConfig.model_validate({"codec": "onebit_lamb"} | options)
        cfg = LearnerConfig(
            count=world,
            optimizer="lamb",
            lr=LR,
            eps=EPS,
            grad_clip=clip,
            weight_decay=decay,
            reduce=reduce,
        )
        named = [(f"w{i}", nn.Parameter(v)) for i, v in enumerate(first_values())]
        self.optimizer = FlatOptimizer(named, cfg)
        context = CodecContext(
            reduce,
            self.optimizer.parts,
            SIZE,
            CPU,
            world,
            rank,
            0.9,
            clip,
            self.optimizer.adam,
        )
        self.codec: Codec = make_codec(context)

    def step(self, grads: Floats, ring: Collective) -> Floats:
        optimizer, codec = self.optimizer, self.codec
        optimizer.grads.copy_(torch.from_numpy(grads))
        codec.begin(optimizer.updates)
        for bucket in codec.buckets:
            codec.reduce(bucket, optimizer.grads[bucket.start : bucket.stop], ring)
        optimizer.step(1.0, 0)
        return optimizer.values.numpy().copy()

    def state(self) -> list[Floats]:
        tensors = [self.optimizer.values, *self.optimizer.tensors().values()]
        return [t.numpy().copy() for t in (*tensors, *self.codec.residuals().values())]


def first_values() -> list[torch.Tensor]:
    """Two layers of normal numbers, and between them one of zeros."""
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(shape).astype(np.float32) for shape in LAYERS]
    made[1][:] = 0.0
    return [torch.from_numpy(values) for values in made]


def gradients(world: int, updates: int = UPDATES) -> Floats:
    """Shares of the mean gradient ``[updates, world, SIZE]``: those of the last layer grow with the
    updates, the others become smaller."""
    rng = np.random.default_rng(1)
    scales = 10.0 ** rng.uniform(-2, 0, SIZE) / world
    last = np.where(np.arange(SIZE) < 100, 0.3, 4.0)
    change = 1 + (last - 1) * np.linspace(0, 1, updates)[:, None, None]
    made = (rng.standard_normal((updates, world, SIZE)) + 0.3) * scales * change
    return made.astype(np.float32)


class Reference:
    """Algorithm 1 of the paper in float64, for all ranks at once, layer by layer."""

    def __init__(self, world: int, clip: float | None, decay: float) -> None:
        self.x = np.concatenate([v.numpy().ravel() for v in first_values()]).astype(np.float64)
        self.world, self.clip, self.decay = world, clip, decay
        self.m, self.v, self.fresh = np.zeros((3, SIZE))  # v and fresh without bias correction
        self.error, self.server_error = np.zeros((world, SIZE)), np.zeros(SIZE)
        self.average, self.factor = [0.0] * len(LAYERS), [1.0] * len(LAYERS)
        stops = np.cumsum([int(np.prod(shape)) for shape in LAYERS])
        self.layers = [slice(b - int(np.prod(s)), b) for s, b in zip(LAYERS, stops, strict=True)]
        self.t = 0

    def step(self, shares: Floats) -> None:
        self.t += 1
        old = self.m
        if self.t <= WARM_UP:
            g = clipped(shares.astype(np.float64).sum(0), self.clip)
            self.m = 0.9 * old + 0.1 * g
            self.v = 0.999 * self.v + 0.001 * g * g
            self.fresh = self.v.copy()
            self.frozen = np.sqrt(self.v / (1 - 0.999**self.t)) + EPS
        else:
            self.m = self.exchanged(shares, old)
            g = (self.m - 0.9 * old) / 0.1
            self.fresh = 0.999 * self.fresh + 0.001 * g * g
        now = np.sqrt(self.fresh / (1 - 0.999**self.t)) + EPS
        plain = self.m / (1 - 0.9**self.t) / self.frozen
        for i, layer in enumerate(self.layers):
            self.move(i, layer, plain[layer], (self.frozen[layer] / now[layer]).max())

    def exchanged(self, shares: Floats, old: Any) -> Any:
        """The momentum that all ranks receive: signs with error feedback, in both directions."""
        width = naive.width_of(SIZE, self.world, BLOCK, 32)
        bound = 0.1 / np.sqrt(0.001) / self.world
        total = np.zeros(SIZE)
        for rank in range(self.world):
            own = shares[rank].astype(np.float64)
            own = clipped(own, self.clip and self.clip / np.sqrt(self.world))
            momentum = (0.9 * old / self.world + 0.1 * own) / self.frozen
            total += coded(np.clip(momentum, -bound, bound), self.error[rank], width)
        return coded(total, self.server_error, width) * self.frozen

    def move(self, i: int, layer: slice, plain: Any, ratio: float) -> None:
        x = self.x[layer]
        u = plain + self.decay * x
        lengths = float(np.linalg.norm(x)), float(np.linalg.norm(u))
        c = min(max(lengths[0] / lengths[1], 0.01), 10.0) if all(lengths) else None
        if self.t <= WARM_UP:
            used = 1.0 if c is None else c
            if c is not None:
                self.average[i] = 0.9 * self.average[i] + 0.1 * c if self.average[i] else c
        else:
            if self.decay:
                share = min(1.0, float(np.linalg.norm(plain)) / lengths[1])
                ratio = ratio * share + 1 - share
            ratio = min(max(ratio, 0.5), 4.0)
            last = self.factor[i]
            self.factor[i] = min(max(ratio, 0.9 * last), 1.1 * last)
            used = self.average[i] * self.factor[i]
        self.x[layer] = x - LR * used * u


@pytest.mark.parametrize(("clip", "decay"), [(None, 0.0), (0.5, 0.0), (None, 0.1)])
@pytest.mark.parametrize("world", [2, 4])
def test_sixty_steps_equal_the_numpy_algorithm(
    world: int, clip: float | None, decay: float
) -> None:
    grads = gradients(world)

    def work(ring: Collective) -> Floats:
        rank = LambRank(world, ring.rank, clip=clip, decay=decay)
        return np.stack([rank.step(g, ring) for g in grads[:, ring.rank]])

    first, *others = run_ranks(world, work)
    for other in others:
        assert np.array_equal(first.view(np.int32), other.view(np.int32))
    reference = Reference(world, clip, decay)
    factors = []
    for shares, found in zip(grads, first, strict=True):
        reference.step(shares)
        factors.append(list(reference.factor))
        np.testing.assert_allclose(found, reference.x, rtol=2e-3, atol=5e-5)
    late = np.array(factors[WARM_UP:])
    assert late[-1, 0] > 1.05
    if clip is None:
        assert late[-1, 2] < 0.95
    changes = late[1:] / late[:-1]
    assert np.isclose(changes, 1.1).any() or np.isclose(changes, 0.9).any()


def test_first_step_matches_figures_by_hand() -> None:
    """x = (3, 4), g = (1, 2): u = (1, 1) after the corrections, so c = 5 / sqrt(2)."""
    cfg = LearnerConfig(
        count=2,
        optimizer="lamb",
        lr=0.1,
        eps=1e-12,
        reduce=ReduceConfig.model_validate({"codec": "onebit_lamb", "warmup_updates": 1}),
    )
    optimizer = FlatOptimizer([("w", nn.Parameter(torch.tensor([3.0, 4.0])))], cfg)
    optimizer.grads.copy_(torch.tensor([1.0, 2.0]))
    optimizer.step(1.0, 0)
    length = 0.1 * 5 / 2**0.5
    np.testing.assert_allclose(optimizer.values.numpy(), [3 - length, 4 - length], rtol=1e-5)
    state = optimizer.state_dict()
    np.testing.assert_allclose(state["lamb_coefficient"], [5 / 2**0.5], rtol=1e-5)
    # The second update brings a momentum of g' = (0, 0): m = 0.9 m'. The fresh variance falls to
    # 0.999 v', its correction rises from 0.001 to 0.001999: the root of v / w is sqrt(1.999/0.999)
    # for both values. The factor may rise by a tenth only.
    optimizer.grads.copy_(0.9 * torch.tensor([0.1, 0.2]))
    optimizer.step(1.0, 0)
    np.testing.assert_allclose(optimizer.state_dict()["lamb_factor"], [1.1], rtol=1e-5)
    step = length * 1.1 * 0.9 * 0.1 / (1 - 0.81)
    expected = [3 - length - step, 4 - length - step]
    np.testing.assert_allclose(optimizer.values.numpy(), expected, rtol=1e-5)


def test_a_layer_that_was_zero_in_the_warm_up_moves_afterwards() -> None:
    grads = gradients(2)
    zero = slice(90, 100)
    grads[:WARM_UP, :, zero] = 0.0

    def work(ring: Collective) -> Floats:
        rank = LambRank(2, ring.rank)
        return np.stack([rank.step(g, ring) for g in grads[:, ring.rank]])

    found = run_ranks(2, work)[0]
    assert not found[WARM_UP - 1, zero].any()
    assert found[-1, zero].any()
    assert np.isfinite(found).all()


@pytest.mark.parametrize("after", [4, 20])
def test_a_skipped_update_changes_nothing_of_lamb(after: int) -> None:
    grads = gradients(2)

    def work(ring: Collective) -> None:
        rank = LambRank(2, ring.rank, decay=0.1)
        for g in grads[:after, ring.rank]:
            rank.step(g, ring)
        before = rank.state()
        bad = grads[0, ring.rank].copy()
        if ring.rank == 1:
            bad[3] = np.inf
        rank.step(bad, ring)
        for now, was in zip(rank.state(), before, strict=True):
            assert np.array_equal(now, was)
        assert np.isfinite(rank.step(grads[1, ring.rank], ring)).all()

    run_ranks(2, work)


@pytest.mark.parametrize("after", [4, 20])
def test_restored_state_of_lamb_continues_as_the_original(after: int) -> None:
    grads = gradients(2)

    def work(ring: Collective) -> None:
        one, two = (LambRank(2, ring.rank) for _ in range(2))
        for g in grads[:after, ring.rank]:
            one.step(g, ring)
        two.optimizer.values.copy_(one.optimizer.values)
        two.optimizer.load_state_dict(one.optimizer.state_dict())
        for kind, values in two.codec.residuals().items():
            values.copy_(one.codec.residuals()[kind])
        for g in grads[after:, ring.rank]:
            assert np.array_equal(one.step(g, ring), two.step(g, ring))

    run_ranks(2, work)


def test_a_run_continues_with_and_without_the_codec() -> None:
    coded = LambRank(2, 0).optimizer
    named = [(f"w{i}", nn.Parameter(v)) for i, v in enumerate(first_values())]
    plain = FlatOptimizer(named, LearnerConfig(optimizer="lamb"))
    plain.grads.fill_(1.0)
    plain.step(1.0, 0)
    coded.load_state_dict(plain.state_dict())
    state = coded.state_dict()
    assert np.array_equal(state["exp_avg_sq_fresh"], plain.state_dict()["exp_avg_sq"])
    assert state["lamb_coefficient"].tolist() == [0.0] * 3
    coded.grads.fill_(1.0)
    coded.step(1.0, 0)
    plain.load_state_dict(coded.state_dict())
    assert plain.updates == 2
    assert not plain.state_dict().keys() & set(CODEC_STATE)
    with pytest.raises(ValueError, match="state of"):
        coded.load_state_dict(
            FlatOptimizer(named, LearnerConfig(optimizer="sgd")).state_dict(),
        )


def test_single_coefficient_of_an_old_checkpoint_is_given_to_each_tower() -> None:
    cfg = LearnerConfig(count=2, optimizer="lamb", reduce=ReduceConfig(codec="onebit_lamb"))
    shapes = {"a.weight": (2, 3, 4), "a.bias": (2, 4), "b.weight": (5, 4)}
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    optimizer = FlatOptimizer(named, cfg)
    state = optimizer.state_dict()
    assert state["lamb_factor"].shape == (5,)
    state["lamb_factor"] = np.array([2.0, 3.0, 4.0], np.float32)
    state["lamb_coefficient"] = np.array([0.1, 0.2, 0.3], np.float32)
    optimizer.load_state_dict(state)
    assert optimizer.state_dict()["lamb_factor"].tolist() == [2.0, 2.0, 3.0, 3.0, 4.0]
    assert optimizer.state_dict()["lamb_coefficient"] == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])
