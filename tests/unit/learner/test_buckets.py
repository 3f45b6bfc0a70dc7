"""Gradient parts, buckets, packed bits and counted bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.configs.errors import UserError
from penstock.configs.reduce import ReduceConfig
from penstock.core.interfaces import Bucket, CodecContext, GradientPart
from penstock.learner.codecs.buckets import bucket_nbytes, buckets_of, parts_of
from penstock.learner.codecs.registry import make_codec
from penstock.learner.extras.codecs.packing import Packing
from penstock.learner.group.collective import GroupCollective
from reduce_ring import CPU, codec_for, run_ranks


def test_gradient_parts_follow_one_another() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 4), nn.Linear(5, 6))
    assert parts_of(net.named_parameters()) == (
        GradientPart("0.weight", 0, 96, False, 3),
        GradientPart("0.bias", 96, 99, True, 1),
        GradientPart("1.weight", 99, 129, False, 6),
        GradientPart("1.bias", 129, 135, True, 1),
    )


def test_bucket_size_follows_the_device_unless_set() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:1")
    assert (bucket_nbytes(None, cpu), bucket_nbytes(None, gpu)) == (1_000_000, 25_000_000)
    assert bucket_nbytes(0.5, cpu) == bucket_nbytes(0.5, gpu) == 500_000


def part(name: str, start: int, stop: int) -> GradientPart:
    return GradientPart(name, start, stop, False)


def test_buckets_are_whole_parameters_and_the_last_come_first() -> None:
    a, b, c, d, e = (part("a", 0, 4), part("b", 4, 6), part("c", 6, 30), part("d", 30, 31),
                     part("e", 31, 40))  # fmt: skip
    assert buckets_of([a, b, c, d, e], nbytes=40) == (
        Bucket(30, 40, (d, e)),  # ten values: exactly full
        Bucket(6, 30, (c,)),  # too large for any
        Bucket(0, 6, (a, b)),
    )
    assert buckets_of([a, b, c, d, e], nbytes=10**6) == (Bucket(0, 40, (a, b, c, d, e)),)
    assert [bucket.size for bucket in buckets_of([a, b, c, d, e], 1)] == [9, 1, 24, 2, 4]
    assert buckets_of([], 100) == ()


@pytest.mark.parametrize(
    ("bits", "offset", "values", "packed"),
    [
        (1, 0, [1, 0, 1, 1, 0, 0, 0, 1], 0b10001101),
        (2, 1, [1, 0, -1, 1], 0b10_00_01_10),
        (4, 4, [-4, 3], 0b0111_0000),
        (8, 100, [-100], 0),
        (8, 100, [100], 200),
    ],
)
def test_packed_byte_matches_the_value_by_hand(
    bits: int, offset: int, values: list[int], packed: int
) -> None:
    packing = Packing(bits, offset, CPU)
    out = torch.empty(1, dtype=torch.uint8)
    packing.pack(torch.tensor(values, dtype=torch.int8), out)
    assert out.item() == packed


@pytest.mark.parametrize(("bits", "offset"), [(1, 0), (2, 1), (4, 7), (8, 127)])
def test_packed_values_are_restored(bits: int, offset: int) -> None:
    packing = Packing(bits, offset, CPU)
    high = min(2**bits - 1 - offset, 127)
    shape = (3, 5 * packing.per_byte)
    values = torch.from_numpy(np.random.default_rng(0).integers(-offset, high, shape, np.int8))
    rows = torch.zeros(3, 12, dtype=torch.uint8)  # of messages that have something in front
    packing.pack(values, rows[:, 7:])
    out = torch.empty_like(values)
    packing.unpack(rows[:, 7:], out)
    assert torch.equal(out, values)
    assert not rows[:, :7].any()


def test_packed_bits_equal_those_of_numpy() -> None:
    signs = torch.from_numpy(np.random.default_rng(1).integers(0, 2, 800, np.int8))
    out = torch.empty(100, dtype=torch.uint8)
    Packing(1, 0, CPU).pack(signs, out)
    assert np.array_equal(out.numpy(), np.packbits(signs.numpy(), bitorder="little"))


def test_out_of_range_value_affects_no_other() -> None:
    packing = Packing(2, 1, CPU)
    packed = torch.empty(1, dtype=torch.uint8)
    packing.pack(torch.tensor([1, -128, 0, -1], dtype=torch.int8), packed)
    out = torch.empty(4, dtype=torch.int8)
    packing.unpack(packed, out)
    assert out[[0, 2, 3]].tolist() == [1, 0, -1]


def test_a_collective_counts_what_a_ring_sends() -> None:
    def work(ring: GroupCollective) -> list[Any]:
        total = torch.full((6,), float(ring.rank))
        ring.all_reduce(total)
        counts = [ring.sent_nbytes]
        most = torch.tensor([float(ring.rank), -float(ring.rank)])
        ring.all_reduce_max(most)
        counts.append(ring.sent_nbytes)
        turned = torch.empty(3, 2, dtype=torch.uint8)
        ring.all_to_all(turned, torch.arange(6, dtype=torch.uint8).view(3, 2) + 10 * ring.rank)
        counts.append(ring.sent_nbytes)
        together = torch.empty(3, 2, dtype=torch.int32)
        ring.all_gather(together, torch.full((2,), ring.rank, dtype=torch.int32))
        counts.append(ring.sent_nbytes)
        return [counts, total.tolist(), most.tolist(), turned.tolist(), together.tolist()]

    for rank, (counts, total, most, turned, together) in enumerate(run_ranks(3, work)):
        # 2 * 2/3 of 24 bytes; of 8 bytes, in whole ones; 2/3 of 6 bytes; 8 bytes to two others
        assert np.diff([0, *counts]).tolist() == [32, 10, 4, 16]
        assert total == [3.0] * 6
        assert most == [2.0, 0.0]
        assert turned == [[2 * rank + 10 * r, 2 * rank + 1 + 10 * r] for r in range(3)]
        assert together == [[0, 0], [1, 1], [2, 2]]


ONE = (("w", (10, 100)),)


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ({"codec": "none"}, 6000),  # 2 * 3/4 * 4000
        ({"codec": "bf16"}, 3000),  # 3 * 250 * 2, twice
        ({"codec": "int8", "block": 100}, 3 * 3 * (84 + 4) * 2),  # 250 values in 3 blocks of 84
        ({"codec": "onebit"}, 3 * (256 // 8 + 8) * 2),  # 250 values in one block of 256
        ({"codec": "terngrad"}, 6 + 3 * (256 // 4) + 3 * (256 // 2)),
        # the scale, and 256 ternary values
        ({"codec": "terngrad", "reternarize": True}, 6 + 3 * (256 // 4) * 2),
        ({"codec": "dropping"}, 3 * 10 * 8),  # 1 % of 1000
        ({"codec": "dgc", "warmup_updates": 0}, 3 * 1 * 8),
        (
            {"codec": "dgc", "warmup_updates": 4},
            6000,
        ),  # a quarter of the values from each of four: dense is as good
        ({"codec": "powersgd"}, 2 * 3 * 2 * (10 + 100)),  # 2 * 3/4 * 4 bytes, two columns
    ],
)
def test_bytes_of_an_update_match_a_sum_by_hand(options: dict[str, Any], nbytes: int) -> None:
    codec = codec_for(4, 0, ONE, **({"warmup_updates": 3} | options))
    assert codec.nbytes(3) == nbytes


TOWERS = (
    *(("hidden.0.weight", (2, 4, 64)), ("hidden.0.bias", (2, 64))),
    *(("hidden.1.weight", (2, 64, 64)), ("hidden.1.bias", (2, 64))),
    *(("policy.weight", (2, 64)), ("policy.bias", (2,))),
    *(("value.weight", (1, 64)), ("value.bias", (1,))),
)  # of CartPole's preset


def test_bytes_of_powersgd_on_two_towers_match_a_sum_by_hand() -> None:
    """Of 9,155 values the two matrices of 64 x 64 have factors, of 2 * (64 + 64) values each."""
    codec = codec_for(4, 0, TOWERS, codec="powersgd", warmup_updates=0, bucket_mb=1.0)
    assert codec.nbytes(0) == 6 * (9155 - 2 * 64 * 64 + 2 * 2 * (64 + 64))  # 2 * 3/4 * 4 bytes


def test_a_group_of_one_sends_nothing() -> None:
    for name in ("none", "int8", "terngrad", "dgc"):
        assert codec_for(1, 0, codec=name).nbytes(10**6) == 0


def test_invalid_codecs_are_refused() -> None:
    with pytest.raises(ValueError, match="codec 'auto' is not one of"):
        make_codec(CodecContext(ReduceConfig(codec="auto"), [], 0, CPU, 2, 0))
    with pytest.raises(UserError, match=r"of 127 learners at most.*learner\.count is 128"):
        codec_for(128, 0, codec="terngrad")
