"""Every codec on real groups of 3 and 4 processes, against naive computations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reduce_reference as naive
from penstock.configs.reduce import CODECS, ReduceConfig
from reduce_ranks import CASES, LARGE, ODD, UPDATES
from reduce_ring import SIZE, Floats, codec_for, gradients

RANKS = 4
WORLDS = (4, 3)
TESTS = Path(__file__).parents[1]
Results = list[dict[str, Any]]

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(180),  # four processes that import torch, on two cores
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank ended with, by ``<world>/<case>/<what>``."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(TESTS / "reduce_ranks.py")]
    started = [
        subprocess.Popen([*command, str(rank), str(RANKS), str(folder)], env=env)
        for rank in range(RANKS)
    ]
    try:
        assert [process.wait(150) for process in started] == [0] * RANKS
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [dict(np.load(folder / f"rank-{rank}.npz")) for rank in range(RANKS)]


def of(results: Results, world: int, case: str, what: str) -> list[Floats]:
    return [results[rank][f"{world}/{case}/{what}"] for rank in range(world)]


each_world = pytest.mark.parametrize("world", WORLDS)
each_case = pytest.mark.parametrize("case", CASES)
each_large = pytest.mark.parametrize("case", LARGE)


def expected(world: int, case: str) -> Floats | None:
    """What the naive computation gives; None where there is none."""
    options = CASES[case]
    codec = codec_for(world, 0, **options)
    cuts = [(bucket.start, bucket.stop) for bucket in codec.buckets]
    grads = gradients(world, UPDATES)
    count: Callable[..., int] = getattr(codec, "count", lambda *_: 0)
    counts = [[count(bucket, update) for bucket in codec.buckets] for update in range(UPDATES)]
    name, warm = options["codec"], options.get("warmup_updates", 100)
    exact: Floats = grads.sum(1)
    if name == "none":
        return exact
    if name in ("fp16", "bf16"):
        return naive.two_phase(grads, cuts, 1 << 16, 2, lambda x: naive.half(x, name), False)
    if name == "int8":
        block = options.get("block", 512)
        return naive.two_phase(grads, cuts, block, 4, naive.int8_block, False)
    if name == "onebit":
        block = options.get("onebit_block", 4096)
        coded = naive.two_phase(grads[warm:], cuts, block, 32, naive.onebit_block, True)
        return np.concatenate([exact[:warm], coded])
    if name in ("onebit_adam", "zeroone_adam", "onebit_lamb"):
        sums_gradients = CODECS.specs[name].reduces_gradients
        assert sums_gradients
        cfg = ReduceConfig(**options)
        late = [u for u in range(UPDATES) if not sums_gradients(cfg, u)]
        block = options.get("onebit_block", 4096)
        # Without an optimizer the momentum is 0 before each update, and nothing is divided.
        bound = np.float32(0.1 / 0.001**0.5 / world)
        momenta = np.clip(np.float32(0.1) * grads[late], -bound, bound)
        exact[late] = naive.two_phase(momenta, cuts, block, 32, naive.onebit_block, True)
        return exact
    if name == "dropping":
        return naive.dropping(grads, [(0, SIZE)], counts[0])
    if name == "dgc":
        return naive.dgc(grads, [(0, SIZE)], counts, 0.9, options.get("dgc_clip"))
    return None


@each_world
@each_case
def test_all_ranks_end_with_the_same_bits(results: Results, world: int, case: str) -> None:
    for what in ("sums", *ODD, "after nan", "after inf"):
        first, *others = of(results, world, case, what)
        assert first.dtype == np.float32
        for other in others:
            assert np.array_equal(first.view(np.int32), other.view(np.int32)), what


@each_world
@each_case
def test_sums_are_those_of_the_naive_computation(results: Results, world: int, case: str) -> None:
    sums, wanted = of(results, world, case, "sums")[0], expected(world, case)
    if wanted is None:
        codec = CASES[case]["codec"]  # these two have tests of their own
        assert codec in ("terngrad", "powersgd"), f"add the naive computation of {codec}"
        return
    if CASES[case]["codec"] in ("int8", "fp16", "bf16"):
        assert np.array_equal(sums, wanted)
    np.testing.assert_allclose(sums, wanted, rtol=1e-5, atol=1e-6)
    assert np.array_equal(sums == 0, wanted == 0)


@each_world
@each_case
def test_bytes_are_exactly_those_of_the_theory(results: Results, world: int, case: str) -> None:
    for sent, theory in zip(
        of(results, world, case, "sent"), of(results, world, case, "theory"), strict=True
    ):
        assert sent.tolist() == theory.tolist()
        assert min(sent) > 0


@each_world
@each_large
def test_codec_after_a_rollback_equals_a_new_codec(results: Results, world: int, case: str) -> None:
    again = of(results, world, case, "from the first again")
    for first, second in zip(of(results, world, case, "sums"), again, strict=True):
        assert np.array_equal(first, second)


@each_world
@each_large
def test_restored_residuals_continue_as_in_the_first_codec(
    results: Results, world: int, case: str
) -> None:
    if CASES[case]["codec"] == "powersgd":
        pytest.skip("draws its factors again, as it says")
    for on, resumed in zip(
        of(results, world, case, "straight on"), of(results, world, case, "resumed"), strict=True
    ):
        assert np.array_equal(on, resumed)


@each_world
@pytest.mark.parametrize("kind", ODD)
@each_case
def test_extreme_and_nonfinite_gradients_do_not_break_later_reductions(
    results: Results, world: int, case: str, kind: str
) -> None:
    found = of(results, world, case, kind)[0]
    if kind == "zeros":
        assert not found.any()
    elif kind in ("nan", "inf"):
        assert not np.isfinite(found).all()
    elif kind == "denormal":
        assert np.abs(found).max() < 1e-40
    elif CASES[case]["codec"] in ("onebit_adam", "zeroone_adam", "onebit_lamb"):
        assert 0.1 < np.abs(found).max() < 10  # bounded by Adam's largest step
    elif CASES[case]["codec"] != "fp16":  # too large for its exponent
        assert np.isfinite(found).all()
        assert np.abs(found).max() > (0.01 if "dgc_clip" in CASES[case] else 1e14)
    if kind in ("nan", "inf"):
        assert np.isfinite(of(results, world, case, f"after {kind}")[0]).all()


@each_world
def test_terngrad_sums_whole_multiples_of_a_scale(results: Results, world: int) -> None:
    grads = gradients(world, UPDATES)[0]
    for case, most in (("terngrad", world), ("terngrad-again", 1)):
        sums = of(results, world, case, "sums")[0][0]
        for layer, is_bias in ((slice(0, 1200), False), (slice(1240, 1429), False),
                               (slice(1436, 1532), False), (slice(1532, 1628), False),
                               (slice(1200, 1240), True), (slice(1431, 1436), True),
                               (slice(1628, 1652), True)):  # fmt: skip
            if is_bias:
                np.testing.assert_allclose(sums[layer], grads[:, layer].sum(0), rtol=1e-5)
                continue
            values = grads[:, layer].astype(np.float64)
            deviation = np.sqrt((values**2).mean(1))
            scale = np.minimum(np.abs(values).max(1), 2.5 * deviation).max()
            unit = scale * (world if case == "terngrad-again" else 1)
            multiples = sums[layer] / unit
            np.testing.assert_allclose(multiples, multiples.round(), atol=1e-5)
            assert 1 <= np.abs(multiples.round()).max() <= most


@each_world
def test_powersgd_sums_and_residuals_add_up_to_all_gradients(results: Results, world: int) -> None:
    grads = gradients(world, UPDATES).astype(np.float64)
    sums = of(results, world, "powersgd", "sums")
    held = [found[1:].sum(0) for found in of(results, world, "powersgd", "residual")]
    np.testing.assert_allclose(
        sums[0].sum(0, dtype=np.float64) + np.sum(held, 0), grads.sum((0, 1)), atol=1e-5
    )
