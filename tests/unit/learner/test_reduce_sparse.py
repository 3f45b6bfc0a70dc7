"""The selection of the largest values, and Deep Gradient Compression by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.learner.extras.codecs.sparse import SAMPLED_FROM, largest
from reduce_ring import Floats, codec_for, reduce_all, run_ranks


def naive_largest(values: Floats, count: int) -> set[int]:
    def key(i: int) -> tuple[float, int]:
        return (-np.inf if np.isnan(values[i]) else -float(abs(values[i])), i)

    return set(sorted(range(len(values)), key=key)[:count])


@given(
    hnp.arrays(
        np.float32,
        st.integers(1, 60),
        elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, 3e38, np.inf])
        | st.floats(width=32, allow_nan=False),
    ),
    st.data(),
)
def test_largest_selects_the_exact_count_and_the_first_of_equals(values: Floats, data: Any) -> None:
    count = data.draw(st.integers(1, len(values)))
    places = largest(torch.from_numpy(values), count)
    assert len(places) == count
    assert set(places.tolist()) == naive_largest(values, count)


@pytest.mark.parametrize("count", [1, 7, 300, SAMPLED_FROM, 3 * SAMPLED_FROM])
@pytest.mark.parametrize("kind", ["normal", "equal", "zeros", "rising", "few", "lumps", "nan"])
def test_largest_with_a_sampled_threshold_are_found(kind: str, count: int) -> None:
    size = 3 * SAMPLED_FROM
    rng = np.random.default_rng(0)
    values = rng.standard_normal(size).astype(np.float32)
    if kind == "equal":
        values = np.sign(values)
    elif kind == "zeros":
        values[:] = 0.0
    elif kind == "rising":
        values.sort()
    elif kind == "few":
        values[rng.permutation(size)[100:]] = 0.0
    elif kind == "lumps":  # just where the sample looks, so that its threshold is too high
        values[::101] *= 1000.0
    elif kind == "nan":
        values[5] = np.nan
    places = largest(torch.from_numpy(values), count)
    assert len(places) == count
    magnitudes = np.abs(values)
    magnitudes[np.isnan(values)] = np.inf
    assert np.array_equal(
        np.sort(places.numpy()), np.sort(np.argsort(-magnitudes, kind="stable")[:count])
    )


def test_number_of_sent_values_is_of_the_whole_gradient() -> None:
    shapes = [(f"w{i}", (15, 10)) for i in range(40)]
    codec = codec_for(4, 0, shapes, codec="dropping", density=0.01, bucket_mb=1e-6)
    (bucket,) = codec.buckets
    assert codec.count(bucket, 0) == 60  # type: ignore[attr-defined]


def steps_of(
    grads: list[list[float]], world: int = 1, layers: Sequence[int] = (), **options: Any
) -> list[list[float]]:
    """The sums of a run whose ranks all have these gradients, of ``layers`` of so many values."""
    shapes = [(f"b{i}", (size,)) for i, size in enumerate(layers or [len(grads[0])])]

    def work(ring: Any) -> list[list[float]]:
        codec = codec_for(world, ring.rank, shapes, momentum=0.5, **options)
        return [
            reduce_all(codec, ring, update, np.array(grad, np.float32)).tolist()
            for update, grad in enumerate(grads)
        ]

    first, *others = run_ranks(world, work)
    assert all(other == first for other in others)
    return first


def test_dgc_matches_figures_by_hand() -> None:
    grads = [[1.0, 2.0, 3.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    # u   1 2 3    1.5 1 1    .75 0 .5      0 0 .25     (0 where it was sent, before the next)
    # v   1 2 3    2.5 3 1    3.25 0 1.5    0 0 1.75
    assert steps_of(grads, codec="dgc", dgc_density=0.34, warmup_updates=0) == [
        [0.0, 0.0, 3.0], [0.0, 3.0, 0.0], [3.25, 0.0, 0.0], [0.0, 0.0, 1.75],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "clips", [{"dgc_clip": 2.0}, {"grad_clip": 2.0}, {"dgc_clip": 2.0, "grad_clip": 1.0}]
)
def test_dgc_clips_by_the_root_of_the_number_of_ranks(clips: dict[str, Any]) -> None:
    """To its own bound, or else to that of the learner."""
    (sums,) = steps_of([[6.0, 8.0]], world=4, codec="dgc", warmup_updates=0, **clips)
    assert sums == pytest.approx([0.0, 4 * 0.8], rel=1e-6)  # norm 10 becomes 2 / sqrt(4)


@pytest.mark.parametrize("bucket_mb", [1.0, 1e-6])
@pytest.mark.parametrize("codec", ["dropping", "dgc"])
def test_largest_values_are_of_all_layers_with_any_bucket_size(
    codec: str, bucket_mb: float
) -> None:
    options: dict[str, Any] = {"codec": codec, "bucket_mb": bucket_mb, "warmup_updates": 0}
    options |= {"density": 0.5, "dgc_density": 0.5}
    grads = [0.1, -0.3, 0.2, 0.05, 50.0, 60.0]
    (sums,) = steps_of([grads], world=2, layers=(4, 2), **options)
    assert sums == pytest.approx([0.0, -0.6, 0.0, 0.0, 100.0, 120.0])


@pytest.mark.parametrize("bucket_mb", [1.0, 1e-6])
def test_dgc_clips_the_whole_gradient_before_accumulating(bucket_mb: float) -> None:
    """Norm 10 of all layers together becomes 2 / sqrt(4); each layer alone has less than 10."""
    options: dict[str, Any] = {"codec": "dgc", "warmup_updates": 0, "bucket_mb": bucket_mb}
    options["dgc_density"] = 1.0
    grads = [[6.0, 8.0]] * 2
    first, second = steps_of(grads, world=4, layers=(1, 1), dgc_clip=2.0, **options)
    assert first == pytest.approx([4 * 0.6, 4 * 0.8], rel=1e-6)
    assert second == pytest.approx(first, rel=1e-6), "all was sent, so no momentum is left"


def test_dropping_matches_figures_by_hand() -> None:
    grads = [[1.0, -3.0, 2.0], [1.0, 1.0, -1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert steps_of(grads, world=2, codec="dropping", density=0.34) == [
        [0.0, -6.0, 0.0], [4.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2.0],
    ]  # fmt: skip


def test_dgc_density_falls_in_steps_during_the_warm_up() -> None:
    codec: Any = codec_for(2, 0, codec="dgc", dgc_density=0.001, warmup_updates=10)
    densities = [codec.density(update) for update in range(0, 70, 10)]
    assert densities == [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001, 0.001]
    assert codec.density(9) == 0.25
    codec = codec_for(2, 0, codec="dgc", dgc_density=0.01, warmup_updates=10)
    assert [codec.density(update) for update in (0, 20, 30, 50)] == [0.25, 0.015625, 0.01, 0.01]
