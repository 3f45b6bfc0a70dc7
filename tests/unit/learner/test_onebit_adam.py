"""1-bit Adam and 0/1 Adam, codec and optimizer together, against the algorithms in numpy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import reduce_reference as naive
from penstock.configs.reduce import ReduceConfig
from penstock.configs.sections import LearnerConfig
from penstock.core.interfaces import AdamState, Codec, CodecContext, Collective
from penstock.learner.codecs.collective import SoloCollective, all_reduce_nbytes
from penstock.learner.codecs.registry import make_codec
from penstock.learner.extras.codecs.registry import is_variance_update
from penstock.learner.extras.codecs.variance import RenewedVariance
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from reduce_reference import clipped, coded
from reduce_ring import CPU, Floats, codec_for, run_ranks

SIZE, BLOCK, LR, EPS = 150, 40, 1e-2, 1e-5
ONEBIT: dict[str, Any] = {
    "codec": "onebit_adam",
    "warmup_updates": 8,
    "variance_interval": None,
}
RENEWED: dict[str, Any] = ONEBIT | {"variance_interval": 37}  # two parts, in turns of 16 updates
ZEROONE: dict[str, Any] = {"codec": "zeroone_adam", "variance_doubling": 2, "variance_interval": 8}
each = pytest.mark.parametrize(
    "options", [ONEBIT, RENEWED, ZEROONE], ids=["constant", "renewed", "0/1"]
)


class Rank(NamedTuple):
    """One learner's part."""

    optimizer: FlatOptimizer
    codec: Codec

    def step(self, grads: Floats, ring: Collective) -> Floats:
        optimizer, codec = self
        optimizer.grads.copy_(torch.from_numpy(grads))
        codec.begin(optimizer.updates)
        for bucket in codec.buckets:
            codec.reduce(bucket, optimizer.grads[bucket.start : bucket.stop], ring)
        optimizer.step(1.0, 0)
        return optimizer.values.numpy().copy()

    def state(self) -> list[Floats]:
        tensors = [self.optimizer.values, *self.optimizer.moments.values()]
        return [t.numpy().copy() for t in (*tensors, *self.codec.residuals().values())]


def make_rank(world: int, rank: int, options: dict[str, Any], clip: float | None = None) -> Rank:
    cfg = LearnerConfig(
        count=max(world, 2),  # one of two may be left alone
        lr=LR,
        eps=EPS,
        grad_clip=clip,
        reduce=ReduceConfig(**({"onebit_block": BLOCK} | options)),
    )
    optimizer = FlatOptimizer([("w", nn.Parameter(torch.zeros(SIZE)))], cfg)
    context = CodecContext(
        cfg.reduce, optimizer.parts, SIZE, CPU, world, rank, 0.9, clip, optimizer.adam
    )
    return Rank(optimizer, make_codec(context))


def shares(world: int, updates: int) -> Floats:
    """Shares of the mean gradient; learners have 1, 2, ... samples, and the last one at times 0."""
    rng = np.random.default_rng(1)
    scales = 10.0 ** rng.uniform(-3, 0, SIZE)
    grads = (rng.standard_normal((updates, world, SIZE)) + 0.3) * scales
    samples = np.tile(np.arange(1.0, world + 1), (updates, 1))
    samples[::5, -1] = 0.0
    weighted = grads * (samples / samples.sum(1, keepdims=True))[..., None]
    return weighted.astype(np.float32)  # type: ignore[no-any-return]


def reference(
    grads: Floats,
    sums: list[bool],
    clip: float | None,
    every: int | None = None,
    parts: int = 2,
) -> Floats:
    """Values after each update, all ranks at once. ``sums``: where the variance is updated.

    With ``every`` each rank has a variance of its own in the other updates, and in turns after so
    many updates one of the ``parts`` of v is the sum of theirs.
    """
    updates, world, size = grads.shape
    x, m, v = np.zeros((3, size))
    own_v: Any = None
    error, server_error = np.zeros((world, size)), np.zeros(size)
    width = naive.width_of(size, world, BLOCK, 32)
    found = np.zeros((updates, size))
    for t in range(1, updates + 1):
        if sums[t - 1]:
            g = clipped(grads[t - 1].astype(np.float64).sum(0), clip)
            m = 0.9 * m + 0.1 * g
            v = (0.999 * (1 - 0.999 ** (t - 1)) * v + 0.001 * g * g) / (1 - 0.999**t)
            root = np.sqrt(v) + EPS
        else:
            if every and own_v is None:
                own_v = np.tile(v * (1 - 0.999 ** (t - 1)) / world, (world, 1))
            if every and (t - 1) % every == 0:
                turn = (t - 1) // every % parts
                part = slice(turn * size // parts, (turn + 1) * size // parts)
                v[part] = own_v[:, part].sum(0) / (1 - 0.999 ** (t - 1))
                own_v[:, part] = own_v[:, part].mean(0)
                root = np.sqrt(v) + EPS
            total = np.zeros(size)
            for rank in range(world):
                own = clipped(grads[t - 1, rank].astype(np.float64), clip and clip / np.sqrt(world))
                local = (0.9 * m / world + 0.1 * own) / root
                bound = 0.1 / np.sqrt(0.001) / world
                total += coded(np.clip(local, -bound, bound), error[rank], width)
            m = coded(total, server_error, width) * root
            for rank in range(world if every else 0):
                own = clipped(grads[t - 1, rank].astype(np.float64), clip and clip / np.sqrt(world))
                square = own**2 + m**2 * (world - 1) / world**2
                own_v[rank] = 0.999 * own_v[rank] + 0.001 * square
        x = x - LR * m / (1 - 0.9**t) / root
        found[t - 1] = x
    return found


@each
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("world", [2, 4])
def test_ninety_steps_equal_the_numpy_algorithm(
    options: dict[str, Any], world: int, clip: float | None
) -> None:
    grads = shares(world, 90)

    def work(ring: Collective) -> Floats:
        rank = make_rank(world, ring.rank, options, clip)
        return np.stack([rank.step(g, ring) for g in grads[:, ring.rank]])

    first, *others = run_ranks(world, work)
    for other in others:
        assert np.array_equal(first.view(np.int32), other.view(np.int32))
    cfg = ReduceConfig(**options)
    sums = [is_variance_update(cfg, t) if options is ZEROONE else t < 8 for t in range(90)]
    wanted = reference(grads, sums, clip, 16 if options is RENEWED else None)
    np.testing.assert_allclose(first, wanted, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(("interval", "every", "parts"), [(5, 5, 1), (16 * 2 * SIZE, 16, 2 * SIZE)])
def test_variance_intervals_renew_all_or_single_values_by_length(
    interval: int, every: int, parts: int
) -> None:
    grads = shares(2, 60)

    def work(ring: Collective) -> Floats:
        rank = make_rank(2, ring.rank, ONEBIT | {"variance_interval": interval})
        return np.stack([rank.step(g, ring) for g in grads[:, ring.rank]])

    wanted = reference(grads, [t < 8 for t in range(60)], None, every, parts)
    np.testing.assert_allclose(run_ranks(2, work)[0], wanted, rtol=1e-3, atol=2e-5)


def test_the_interval_of_the_variance_doubles_up_to_its_bound() -> None:
    cfg = ReduceConfig(**ZEROONE)
    found = [t for t in range(40) if is_variance_update(cfg, t)]
    assert found == [0, 1, 2, 4, 6, 10, 14, 22, 30, 38]
    cfg = ReduceConfig(**ZEROONE | {"variance_interval": None})
    found = [t for t in range(80) if is_variance_update(cfg, t)]
    assert found == [0, 1, 2, 4, 6, 10, 14, 22, 30, 46, 62]


@each
def test_a_skipped_update_changes_nothing(options: dict[str, Any]) -> None:
    grads = shares(2, 16)  # the next update has a sum of variances

    def work(ring: Collective) -> None:
        rank = make_rank(2, ring.rank, options)
        for g in grads[:, ring.rank]:
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


@each
def test_restored_state_continues_as_the_original(options: dict[str, Any]) -> None:
    grads = shares(2, 40)

    def work(ring: Collective) -> None:
        one, two = (make_rank(2, ring.rank, options) for _ in range(2))
        for g in grads[:17, ring.rank]:
            one.step(g, ring)
        return_to(two, one.optimizer.values.clone(), one.optimizer.state_dict())
        for kind, values in two.codec.residuals().items():
            values.copy_(one.codec.residuals()[kind])
        for g in grads[17:, ring.rank]:
            assert np.array_equal(one.step(g, ring), two.step(g, ring))

    run_ranks(2, work)


@each
def test_rollback_discards_undone_gradients(options: dict[str, Any]) -> None:
    grads = shares(2, 70)
    grads[20:30] *= 1e3

    def work(ring: Collective) -> None:
        one, two = (make_rank(2, ring.rank, options) for _ in range(2))
        for g in grads[:20, ring.rank]:
            one.step(g, ring)
        values = one.optimizer.values.clone()
        kept = {name: array.copy() for name, array in one.optimizer.state_dict().items()}
        for g in grads[20:30, ring.rank]:
            one.step(g, ring)
        for rank in (one, two):
            return_to(rank, values, kept)
        for g in grads[30:, ring.rank]:
            assert np.array_equal(one.step(g, ring), two.step(g, ring))

    run_ranks(2, work)


def return_to(rank: Rank, values: torch.Tensor, state: dict[str, Any]) -> None:
    """As the learner restores a state: without the residuals of the codec."""
    rank.optimizer.values.copy_(values)
    rank.optimizer.load_state_dict(state)


@each
def test_gradients_that_grow_later_take_no_larger_steps_than_adams(options: dict[str, Any]) -> None:
    grads = shares(2, 40)
    grads[20:] *= 1e6

    def work(ring: Collective) -> Floats:
        rank = make_rank(2, ring.rank, options)
        return np.stack([rank.step(g, ring) for g in grads[:, ring.rank]])

    steps = np.abs(np.diff(run_ranks(2, work)[0], axis=0))
    assert steps.max() < 10 * LR * 0.1 / 0.001**0.5


def test_renewed_variance_of_one_rank_lags_torch_adam_by_one_update() -> None:
    grads = shares(2, 40).sum(1)
    weight = nn.Parameter(torch.zeros(SIZE))
    adam = torch.optim.Adam([weight], lr=LR, eps=EPS)
    rank = make_rank(1, 0, ONEBIT | {"variance_interval": 1})
    for t, g in enumerate(grads):
        before = adam.state[weight]["exp_avg_sq"].clone() if t else torch.zeros(SIZE)
        weight.grad = torch.from_numpy(g)
        adam.step()
        rank.step(g, SoloCollective(0, 1))
        if t > 8:
            found = rank.optimizer.moments["exp_avg_sq"] / (1 - 0.999 ** (t + 1))
            torch.testing.assert_close(found, before / (1 - 0.999**t), rtol=1e-4, atol=0)


def test_a_renewed_variance_is_never_negative() -> None:
    state = AdamState(torch.ones(4), torch.ones(4), torch.tensor(1e6), EPS)
    change = torch.tensor([-1.0, -1.0 - 1e-6, -0.5, 0.5])  # rounded: no sum of squares is below 0
    grads, new, ring = torch.zeros(4), torch.empty(4), SoloCollective(0, 1)
    RenewedVariance(state, 1, 1).begin(0, grads, change=change, new_change=new, ring=ring)
    assert state.exp_avg_sq.tolist() == [0.0, 0.0, 0.5, 1.5]


def test_a_renewed_variance_follows_gradients_that_grow() -> None:
    rng = np.random.default_rng(3)
    late = (rng.standard_normal((1500, 2, SIZE)) * 4 + 1).astype(np.float32)
    grads = np.concatenate([shares(2, 8), late])

    def work(ring: Collective) -> Floats:
        rank = make_rank(2, ring.rank, RENEWED)
        for g in grads[:, ring.rank]:
            rank.step(g, ring)
        return rank.state()[2] / (1 - 0.999 ** len(grads))

    found = run_ranks(2, work)[0]
    # Of the sum of two: 2 sigma^2 + (2 mean)^2. The momentum's own noise, a 19th of 2 sigma^2,
    # counts by half. About 1,500 squares have weight: a value differs by sqrt(2 / 1,500) = 4 %.
    expected = 2 * 4**2 * (1 + 0.5 / 19) + 2**2
    assert abs(found.mean() / expected - 1) < 0.02
    assert (abs(found / found.mean() - 1) < 0.2).all()


@pytest.mark.parametrize(
    ("name", "options", "least"),
    [
        ("onebit_adam", {"variance_interval": None}, 31.0),
        ("onebit_adam", {}, 29.0),
        ("zeroone_adam", {}, 29.0),
    ],
)
def test_bytes_after_the_warmup_match_a_sum_by_hand(
    name: str, options: dict[str, Any], least: float
) -> None:
    codec = codec_for(4, 0, [("w", (1_687_719,))], codec=name, **options)
    cycle = range(10**6, 10**6 + 512)
    sent = float(np.mean([codec.nbytes(update) for update in cycle]))
    assert all_reduce_nbytes(4 * 1_687_719, 4) / sent > least
