"""Dense codecs: by hand, by statistics, and at the size of the documented figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from penstock.learner.codecs import two_phase
from penstock.learner.codecs.collective import SoloCollective
from penstock.learner.group.collective import GroupCollective
from reduce_ring import CPU, SIZE, Floats, codec_for, gradients, reduce_all, run_ranks

NATURE = (
    ("0.weight", (32, 4, 8, 8)), ("0.bias", (32,)), ("1.weight", (64, 32, 4, 4)), ("1.bias", (64,)),
    ("2.weight", (64, 64, 3, 3)), ("2.bias", (64,)), ("3.weight", (512, 3136)), ("3.bias", (512,)),
    ("policy.weight", (6, 512)), ("policy.bias", (6,)), ("value.weight", (1, 512)),
    ("value.bias", (1,)),
)  # fmt: skip
LATE = 10**6


def coded(codec: Any, values: list[float], pads: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Head, bytes, and what is read of one block."""
    block = torch.tensor([values])
    heads = torch.empty(1, codec.head)
    codes = torch.empty(1, len(values) * codec.bits // 8, dtype=torch.uint8)
    codec.encode(block, torch.tensor([pads]), heads, codes)
    read = torch.empty_like(block)
    codec.decode(heads, codes, read)
    return heads[0], codes[0], read[0]


def test_int8_matches_figures_by_hand() -> None:
    codec = codec_for(2, 0, codec="int8")
    heads, codes, read = coded(codec, [-254.0, 3.2, 2.8, 0.0])
    assert heads.tolist() == [2.0]
    assert codes.view(torch.int8).tolist() == [-127, 2, 1, 0]
    assert read.tolist() == [-254.0, 4.0, 2.0, 0.0]


def test_onebit_matches_figures_by_hand() -> None:
    codec = codec_for(2, 0, codec="onebit")
    heads, codes, read = coded(codec, [1.0, -2.0, 3.0, -4.0, 0.0, -6.0, 2.0, -8.0])
    assert heads.tolist() == [1.5, -5.0]
    assert codes.tolist() == [0b01010101]
    assert read.tolist() == [1.5, -5.0] * 4


def test_onebit_means_leave_padding_out() -> None:
    codec = codec_for(2, 0, codec="onebit")
    heads, _, read = coded(codec, [1.0, -2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0], pads=5.0)
    assert heads.tolist() == [2.0, -2.0]
    assert read[:3].tolist() == [2.0, -2.0, 2.0]


@pytest.mark.parametrize(("values", "heads"), [([1.0] * 8, [1.0, 0.0]), ([-1.0] * 8, [0.0, -1.0])])
def test_onebit_with_equal_signs_is_exact(values: list[float], heads: list[float]) -> None:
    found, _, read = coded(codec_for(2, 0, codec="onebit"), values)
    assert found.tolist() == heads
    assert read.tolist() == values


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("name", ["onebit", "dropping", "dgc"])
def test_sums_and_residuals_add_up_to_all_gradients(name: str, world: int) -> None:
    grads = gradients(world, 30)
    # without momentum, what dgc adds up is the gradient
    options: dict[str, Any] = {"codec": name, "warmup_updates": 2, "onebit_block": 64}

    def work(ring: GroupCollective) -> npt.NDArray[np.float64]:
        codec = codec_for(world, ring.rank, momentum=0.0, **options)
        sums = [reduce_all(codec, ring, t, g) for t, g in enumerate(grads[:, ring.rank])]
        error = dict(codec.residuals())
        if name == "dgc":
            del error["momentum"]
        held = np.sum([values.numpy().astype(np.float64) for values in error.values()], axis=0)
        if ring.rank > 0:
            return held  # type: ignore[no-any-return]
        return held + np.sum(sums, axis=0, dtype=np.float64)  # type: ignore[no-any-return]

    total = np.sum(run_ranks(world, work), axis=0)
    np.testing.assert_allclose(total, grads.sum((0, 1), dtype=np.float64), atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e25])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "name",
    ["onebit", "terngrad", "dropping", "dgc", "powersgd", "int8", "onebit_adam", "zeroone_adam"],
)
def test_all_ranks_skip_the_step_of_a_gradient_without_a_finite_norm(
    name: str, clip: float | None, value: float
) -> None:
    """The norm of the sums decides (`FlatOptimizer.step`); 1e25 is finite, and its square not."""
    world = 3
    grads = gradients(world, 3)
    grads[1, 1, 100:120] = value
    grads[2] = 0.0

    def work(ring: GroupCollective) -> list[bool]:
        codec = codec_for(world, ring.rank, codec=name, warmup_updates=0, grad_clip=clip)
        return [
            bool(torch.from_numpy(reduce_all(codec, ring, LATE + t, own)).norm().isfinite())
            for t, own in enumerate(grads[:, ring.rank])
        ]

    assert run_ranks(world, work) == [[True, False, True]] * world


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e30])  # the last has no norm in float32
@pytest.mark.parametrize("name", ["onebit", "dropping", "dgc", "powersgd", "onebit_adam"])
def test_skipped_step_keeps_the_residuals_of_all_ranks(name: str, value: float) -> None:
    grads = gradients(2, 4)
    grads[3, 1, 0] = value  # in one bucket of one rank
    options: dict[str, Any] = {"codec": name, "warmup_updates": 1, "onebit_block": 64}

    def work(ring: GroupCollective) -> None:
        codec = codec_for(2, ring.rank, **options)
        for t in range(3):
            reduce_all(codec, ring, t, grads[t, ring.rank])
        before = {kind: values.clone() for kind, values in codec.residuals().items()}
        sums = torch.from_numpy(reduce_all(codec, ring, 3, grads[3, ring.rank]))
        assert not torch.linalg.vector_norm(sums).isfinite()
        assert before["error"].any()
        for kind, values in codec.residuals().items():
            assert torch.equal(values, before[kind])

    run_ranks(2, work)


@pytest.mark.parametrize("name", ["bf16", "int8", "onebit"])
def test_results_do_not_depend_on_the_chunk_size(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grads = gradients(3, 3)
    options: dict[str, Any] = {"codec": name, "block": 20, "onebit_block": 20, "warmup_updates": 0}

    def work(ring: GroupCollective) -> list[Floats]:
        codec = codec_for(3, ring.rank, **options)
        return [reduce_all(codec, ring, t, g) for t, g in enumerate(grads[:, ring.rank])]

    whole = run_ranks(3, work)[0]
    monkeypatch.setattr(two_phase, "PIECE", 100)
    assert np.array_equal(run_ranks(3, work)[0], whole)


def test_error_feedback_makes_the_mean_of_many_steps_accurate() -> None:
    grads = np.random.default_rng(0).standard_normal((3, SIZE)).astype(np.float32)

    def work(ring: GroupCollective) -> list[Floats]:
        codec = codec_for(3, ring.rank, codec="onebit", warmup_updates=0)
        return [reduce_all(codec, ring, t, grads[ring.rank]) for t in range(100)]

    sums = run_ranks(3, work)[0]
    wanted = grads.sum(0)
    one, hundred = (
        np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        for found in (sums[0], np.mean(sums, axis=0))
    )
    assert one > 0.3
    assert hundred < 0.1


def sum_of_signs(probabilities: Floats) -> npt.NDArray[np.float64]:
    """Distribution ``[values, 2 world + 1]`` of the sum of independent draws of -1, 0 or 1.

    ``probabilities``: ``[world, values]``, signed.
    """
    world, size = probabilities.shape
    found = np.zeros((size, 2 * world + 1))
    for i in range(size):
        total = np.ones(1)
        for p in probabilities[:, i]:
            total = np.convolve(total, [max(-p, 0.0), 1 - abs(p), max(p, 0.0)])
        found[i] = total
    return found


@pytest.mark.parametrize("reternarize", [False, True])
def test_terngrad_has_the_expected_mean_and_variance(reternarize: bool) -> None:
    world, updates, copies = 3, 40, 50  # each value is drawn 2000 times
    grads = np.random.default_rng(3).uniform(-1, 1, (world, 120)).astype(np.float32)
    grads[:, 0] = (9.0, -7.0, 0.1)  # clipped
    clipped = np.clip(grads, *(np.sqrt((grads**2).mean(1, keepdims=True)) * s for s in (-2.5, 2.5)))
    scale = float(np.abs(clipped).max())

    def work(ring: GroupCollective) -> Floats:
        shapes = [("w", (copies, 120))]
        codec = codec_for(world, ring.rank, shapes, codec="terngrad", reternarize=reternarize)
        many = np.tile(grads[ring.rank], copies)
        return np.stack([reduce_all(codec, ring, t, many) for t in range(updates)])

    found = run_ranks(world, work)[0].reshape(-1, 120).astype(np.float64)
    steps = np.arange(-world, world + 1)
    chances = sum_of_signs(clipped / scale)
    mean = scale * chances @ steps
    second = np.abs(steps) * world if reternarize else steps**2
    variance = scale**2 * chances @ second - mean**2
    np.testing.assert_allclose(mean, clipped.sum(0), atol=1e-5)
    deviations = (found.mean(0) - mean) / np.sqrt(variance / len(found))
    assert np.abs(deviations).max() < 4.5
    assert np.square(deviations).mean() == pytest.approx(1.0, abs=0.5)
    assert (found.var(0) / variance).mean() == pytest.approx(1.0, abs=0.05)


def test_terngrad_has_a_scale_for_each_tower_and_codes_no_bias() -> None:
    """Values of one magnitude are all sent as it, so that the sums are exact by hand."""
    weights = [1.0, -1.0, -1.0, 1.0, 100.0, 100.0, -100.0, 100.0]
    biases = [0.1, 30.0, -0.7, 0.0]
    grads = np.array(weights + biases, np.float32)
    shapes = [("w.weight", (2, 2, 2)), ("w.bias", (2, 2))]

    def work(ring: GroupCollective) -> Floats:
        codec = codec_for(3, ring.rank, shapes, codec="terngrad")
        return reduce_all(codec, ring, 0, grads)

    for found in run_ranks(3, work):
        np.testing.assert_allclose(found, 3 * grads, rtol=1e-6)


def test_terngrad_draws_differ_by_rank_and_update_and_are_reproducible() -> None:
    grad = np.full(SIZE, 0.5, np.float32)
    grad[::2] = 1.0

    def draw(rank: int, update: int) -> Floats:
        codec = codec_for(2, rank, codec="terngrad")
        return reduce_all(codec, SoloCollective(rank, 2), update, grad)

    assert np.array_equal(draw(0, 0), draw(0, 0))
    assert not np.array_equal(draw(0, 0), draw(0, 1))
    assert not np.array_equal(draw(0, 0), draw(1, 0))


def test_powersgd_sums_matrices_of_its_rank_exactly() -> None:
    rng = np.random.default_rng(0)
    left = rng.standard_normal((3, 30, 2))
    right = rng.standard_normal((2, 40))  # the ranks' rows span the same space
    grads = (left @ right).astype(np.float32).reshape(3, -1)

    def work(ring: GroupCollective) -> Floats:
        codec = codec_for(
            3, ring.rank, [("w", (30, 40))], codec="powersgd", warmup_updates=0, bucket_mb=1.0
        )
        return reduce_all(codec, ring, 0, grads[ring.rank])

    for found in run_ranks(3, work):
        np.testing.assert_allclose(found, grads.sum(0), rtol=1e-3, atol=1e-4)


def test_powersgd_sums_matrices_of_its_rank_exactly_in_each_tower() -> None:
    """The towers' matrices have different factors: together they are of rank 4."""
    rng = np.random.default_rng(0)
    left = rng.standard_normal((3, 2, 30, 2))
    right = rng.standard_normal((2, 2, 40))  # the ranks' rows span the same space, in each tower
    weights = (left @ right).astype(np.float32).reshape(3, -1)
    biases = rng.standard_normal((3, 80)).astype(np.float32)
    grads = np.concatenate([weights, biases], axis=1)
    shapes = [("w.weight", (2, 30, 40)), ("w.bias", (2, 40))]

    def work(ring: GroupCollective) -> tuple[Floats, int]:
        codec = codec_for(3, ring.rank, shapes, codec="powersgd", warmup_updates=0, bucket_mb=1.0)
        return reduce_all(codec, ring, 0, grads[ring.rank]), ring.sent_nbytes

    for found, sent_nbytes in run_ranks(3, work):
        np.testing.assert_allclose(found, grads.sum(0), rtol=1e-3, atol=1e-4)
        assert sent_nbytes < 0.2 * 2 * 2 / 3 * 4 * grads.shape[1], "and sends a few factors"


def test_powersgd_on_a_cpu_makes_no_gpu_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        raise ValueError(f"Expected a cuda device, but got: {device}")  # as torch does

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    codec = codec_for(2, 0, codec="powersgd", warmup_updates=0)
    reduce_all(codec, SoloCollective(0, 2), 0, gradients(1, 1)[0, 0])
    assert torch.cuda.synchronize is synchronize, "it is as it was before"


def test_error_of_a_collective_is_raised_by_powersgd() -> None:
    class LostError(Exception):
        pass

    class Broken(SoloCollective):
        def all_reduce(self, tensor: Tensor) -> None:
            raise LostError("rank 1 is gone")

    codec = codec_for(2, 0, codec="powersgd", warmup_updates=0)
    with pytest.raises(LostError, match="rank 1 is gone"):
        reduce_all(codec, Broken(0, 2), 0, gradients(1, 1)[0, 0])


@pytest.mark.parametrize(
    "name", ["none", "bf16", "int8", "onebit", "terngrad", "dropping", "powersgd"]
)
def test_group_of_one_returns_its_gradients_unchanged(name: str) -> None:
    grads = gradients(1, 1)[0, 0]
    codec = codec_for(1, 0, codec=name, warmup_updates=0)
    (found,) = run_ranks(1, lambda ring: reduce_all(codec, ring, 0, grads))
    assert np.array_equal(found, grads)


@pytest.mark.parametrize(
    ("options", "fewer", "error"),
    [
        ({"codec": "fp16"}, 1.999, 6e-4),
        ({"codec": "bf16"}, 1.999, 4e-3),
        ({"codec": "int8"}, 3.9, 1.4e-2),
        ({"codec": "onebit"}, 30, 1.0),
        ({"codec": "terngrad"}, 10, 2.0),
        ({"codec": "terngrad", "reternarize": True}, 14, 4.0),
        ({"codec": "dropping"}, 24, 1.0),
        ({"codec": "dgc"}, 220, 1.0),
        ({"codec": "powersgd"}, 100, 1.0),
    ],
)
def test_bytes_and_error_on_a_nature_cnn_are_as_documented(
    options: dict[str, Any], fewer: float, error: float
) -> None:
    world, size = 4, 1_687_719
    grads = np.random.default_rng(0).standard_normal((world, size)).astype(np.float32)

    def work(ring: GroupCollective) -> tuple[int, int, float]:
        codec = codec_for(world, ring.rank, NATURE, bucket_mb=1.0, **options)
        found = reduce_all(codec, ring, LATE, grads[ring.rank])
        wanted = grads.sum(0)
        missed = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
        return ring.sent_nbytes, codec.nbytes(LATE), missed

    for sent, theory, missed in run_ranks(world, work):
        assert sent == theory
        assert 2 * 3 / 4 * 4 * size / sent >= fewer
        assert missed < error


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["fp16", "int8", "onebit", "terngrad", "dropping", "dgc", "powersgd"]
)
def test_a_gpu_computes_what_a_cpu_does(name: str) -> None:
    grads = torch.from_numpy(gradients(1, 1)[0, 0])
    found = []
    for device in (CPU, torch.device("cuda")):
        codec = codec_for(4, 1, codec=name, warmup_updates=0, device=device)
        work = grads.to(device, copy=True)
        codec.begin(LATE)
        for bucket in codec.buckets:
            codec.reduce(bucket, work[bucket.start : bucket.stop], SoloCollective(1, 4))
        found.append(work.cpu())
    if name == "terngrad":  # draws of its own: only the scales are the same
        units = [values[:1200].abs().max().item() for values in found]
        assert units[0] == pytest.approx(units[1], rel=1e-5)
    else:
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
