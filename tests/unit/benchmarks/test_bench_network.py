"""The gradients that `penstock bench reduce` reduces."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.configs.errors import UserError
from penstock.configs.sections import LearnerConfig
from penstock.core.control import Channel
from penstock.core.interfaces import CodecContext
from penstock.learner.codecs.buckets import parts_of
from penstock.learner.codecs.collective import SoloCollective
from penstock.learner.codecs.registry import make_codec
from penstock.models.actions import discrete
from penstock.models.layout import CnnShape
from simulated import group
from simulated.gradients import Draws, Passes
from simulated.network import entries, parse_count, shares_of_backward

SMALL = entries(130_000)
SIZE = sum(math.prod(shape) for _, shape in SMALL)


LEARNER = """
import socket, sys, time
end = socket.socket(fileno=int(sys.argv[1]))
end.recv(1000)
while time.process_time() < float(sys.argv[2]):
    pass
end.send(sys.argv[3].encode()) if sys.argv[3] else end.recv(1000)
"""


@contextmanager
def learner(folder: Path, cpu_s: float, answer: str) -> Iterator[group.Learners]:
    """A learner that computes for so long, and then answers or waits."""
    ours, theirs = Channel.pair()
    command = [sys.executable, "-c", LEARNER, str(theirs.fileno()), str(cpu_s), answer]
    with theirs, subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as process:
        yield group.Learners([process], [ours], [folder / "log"])
        process.kill()
    ours.close()


def draw(draws: Draws, step: int) -> Tensor:
    return draws(step, torch.empty(SIZE))


def layers(vector: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.split(vector, [math.prod(shape) for _, shape in SMALL]))


def test_default_size_is_the_atari_network() -> None:
    shape = CnnShape(channels=4, height=84, width=84, actions=discrete(6), obs_scale=1 / 255)
    assert tuple(entries(1_700_000)) == shape.layout.entries
    assert shape.layout.size == 1_687_719


def test_network_of_another_size_is_close_to_it() -> None:
    # 16 units are 16 * (3136 + 1 + 7) = 50,304 values.
    for wanted in (200_000, 5_000_000, 20_000_000):
        assert abs(sum(math.prod(s) for _, s in entries(wanted)) - wanted) <= 50_304 / 2


@pytest.mark.parametrize(
    ("text", "count"), [("1.7M", 1_700_000), ("300k", 300_000), ("200000", 200_000), ("1g", 10**9)]
)
def test_sizes_are_parsed_from_text(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "many", "nan", "-1M", "100", "2G", "1.7MB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--parameters .*must be a number such as 1\.7M"):
        parse_count(text)


def test_backward_pass_time_is_divided_among_layers() -> None:
    # Multiplications: weights times the places that a convolution's output has.
    weights = [8192 * 400, 32, 32768 * 81, 64, 36864 * 49, 64, 1605632, 512, 3072, 6, 512, 1]
    expected = [weight / sum(weights) for weight in weights]
    assert shares_of_backward(entries(1_700_000)) == pytest.approx(expected)


def test_gradients_of_layers_are_heavy_tailed_with_individual_scales() -> None:
    values = layers(draw(Draws(SMALL, rank=0, world=1), 0))
    sizes = [layer.numel() for layer in values]
    assert sizes[4:8] == [36864, 64, 50176, 16]
    for layer, deviation in (
        (values[4], 36864**-0.5),
        (values[5], 4 * 36864**-0.5),
        (values[6], 50176**-0.5),
    ):
        assert float(layer.std()) == pytest.approx(deviation, rel=0.4)
    deviations = values[6].abs() / values[6].std()
    # Of a normal distribution 0.27 % lie beyond 3 deviations and 0.0000 % beyond 8.
    assert float((deviations > 3).float().mean()) > 0.005
    assert float(deviations.max()) > 8


def test_a_rank_gives_its_share_of_the_mean() -> None:
    alone, one_of_four = (draw(Draws(SMALL, 0, world), 0) for world in (1, 4))
    torch.testing.assert_close(alone, 4 * one_of_four)


def signs_alike(a: Tensor, b: Tensor) -> float:
    return float((a.sign() == b.sign()).float().mean())


def test_ranks_and_steps_share_only_the_signal() -> None:
    first = draw(Draws(SMALL, rank=0, world=2), 0)
    for rank, step in ((0, 1), (1, 0), (1, 1)):
        other = draw(Draws(SMALL, rank=rank, world=2), step)
        assert 0.5 < signs_alike(first, other) < 0.6
    assert torch.equal(first, draw(Draws(SMALL, rank=0, world=2), 0))
    # Over 40 draws the noise falls to half of the signal.
    draws = [Draws(SMALL, rank, world=4) for rank in range(4)]
    means = [
        sum((draw(one, step) for one in draws for step in steps), torch.zeros(SIZE))
        for steps in (range(10), range(10, 20))
    ]
    assert signs_alike(*means) > 0.7


def test_simulated_backward_takes_the_set_time_and_returns_its_gradient() -> None:
    parts = parts_of((name, torch.empty(shape, device="meta")) for name, shape in SMALL)
    cfg = LearnerConfig(count=2).reduce
    codec = make_codec(CodecContext(cfg, parts, SIZE, torch.device("cpu"), 2, 0))
    gradient = draw(Draws(SMALL, rank=0, world=2), 0)
    started: list[tuple[int, int]] = []

    class Noted(SoloCollective):
        def all_reduce(self, values: Tensor) -> None:
            started.append((int(values.storage_offset()), values.numel()))
            super().all_reduce(values)

    with ThreadPoolExecutor(1) as thread:
        passes = Passes(parts, 0.0, [0.001] * len(parts), codec, Noted(0, 2), thread, overlap=True)
        for _ in range(2):
            passes(gradient)
            torch.testing.assert_close(passes.grads, 2 * gradient, rtol=0, atol=0)
        passes.close()
    edges = [(bucket.start, bucket.size) for bucket in codec.buckets]
    assert started == edges * 2
    assert all(before[0] > after[0] for before, after in pairwise(edges))


def test_computing_learner_is_awaited_and_a_stuck_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("waits for the others\n")
    monkeypatch.setattr(group, "STUCK_S", 0.5)
    with learner(tmp_path, 1.5, '{"done": true}') as slow:
        assert slow.do("any") == [{"done": True}]
    stuck = "learner 0 was stuck in the job 'any': waits for the others"
    with learner(tmp_path, 0.1, "") as waiting, pytest.raises(RuntimeError, match=stuck):
        waiting.do("any")
