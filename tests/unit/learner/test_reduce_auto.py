"""The choice of `codec: auto`, from given and from measured times."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.autotune.codec import (
    Choice,
    Cost,
    NetworkCost,
    candidates,
    decide,
    finalists,
    predict_s,
)
from penstock.configs.group import goes_with
from penstock.configs.learner import OPTIMIZERS
from penstock.configs.sections import LearnerConfig
from penstock.core.interfaces import Collective
from penstock.learner.codecs.auto import choose_codec
from penstock.learner.codecs.buckets import parts_of
from penstock.learner.codecs.collective import (
    SoloCollective,
    all_gather_nbytes,
    all_reduce_nbytes,
    all_to_all_nbytes,
)
from penstock.learner.codecs.registry import CODECS
from simulated.network import entries

SLOW = NetworkCost(12_500_000, 0.001)  # 100 Mbit/s


def test_predicted_step_time_matches_figures_by_hand() -> None:
    # 5 ms + 2.55 MB / 12.5 MB/s + 3 exchanges of 1 ms
    int8 = Cost(0.005, 2_550_000)
    assert predict_s(int8, SLOW, buckets=3) == pytest.approx(0.005 + 0.204 + 0.003)


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        ({"none": 0.8, "bf16": 0.4, "int8": 0.2, "onebit": 0.04, "dgc": 0.03}, ("int8",)),
        ({"none": 0.8, "int8": 0.2}, ("int8",)),
        ({"none": 0.8}, ("none",)),
        ({"none": 0.8, "dgc": 0.001}, ("none",)),
        ({"none": 1.04, "bf16": 1.0}, ("none",)),  # gains less than 5 per cent
        ({"none": 1.06, "bf16": 1.0}, ("none", "bf16")),  # close enough to try both
        ({"none": 1.99, "int8": 1.0, "dgc": 0.1}, ("none", "int8")),
        ({"none": 2.0, "int8": 1.0, "dgc": 0.1}, ("int8",)),
    ],
)
def test_finalists_are_the_fastest_predictions(
    predicted: dict[str, float], expected: tuple[str, ...]
) -> None:
    assert finalists(predicted) == expected


def test_lossy_codecs_are_reported_and_not_taken() -> None:
    predicted = {"none": 0.819, "bf16": 0.43, "int8": 0.212, "onebit": 0.0366, "dgc": 0.02}
    assert decide({"int8": 0.231}, predicted, SLOW) == Choice(
        "int8",
        "int8: reducing a step's gradients takes 231 ms on this network of 100 Mbit/s; predicted: "
        "bf16 430 ms, none 819 ms; predicted of lossy codecs, which are used only if they are "
        "named: dgc 20 ms, onebit 36.6 ms",
    )


def test_lossy_codec_without_a_measured_gain_is_not_chosen() -> None:
    measured = {"none": 0.104, "int8": 0.1}
    assert decide(measured, measured, SLOW).codec == "none"
    assert decide(measured | {"none": 0.106}, measured, SLOW).codec == "int8"


def test_single_finalist_is_chosen() -> None:
    assert decide({"none": 0.3}, {"none": 0.2}, SLOW) == Choice(
        "none", "none: reducing a step's gradients takes 300 ms on this network of 100 Mbit/s"
    )


TRIED = [name for name, spec in CODECS.specs.items() if spec.tried_by_auto]


def fitting(optimizer: str) -> list[str]:
    spec = OPTIMIZERS.specs[optimizer]
    return [name for name in TRIED if goes_with(CODECS.specs[name], spec)]


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_codecs_that_are_unfit_for_the_optimizer_are_not_tried(optimizer: str) -> None:
    cfg = LearnerConfig.model_validate({"count": 2, "optimizer": optimizer})
    found = candidates(cfg)
    assert found == fitting(optimizer)
    assert "none" in found
    assert "onebit" not in found  # signs ruin the second moment


WITH_SGD = fitting("sgd")


def test_every_codec_but_those_of_adam_and_lamb_is_tried_with_sgd() -> None:
    assert candidates(LearnerConfig(count=2, optimizer="sgd")) == WITH_SGD
    assert set(TRIED) - set(WITH_SGD) == {"onebit_adam", "zeroone_adam", "onebit_lamb"}


class Wire(SoloCollective):
    """Takes a second for every ``rate`` bytes that a rank would send."""

    def __init__(self, world: int, rate: float) -> None:
        super().__init__(0, world)
        self._rate = rate

    def all_reduce(self, values: Tensor) -> None:
        time.sleep(all_reduce_nbytes(values.nbytes, self.world) / self._rate)
        super().all_reduce(values)

    def all_to_all(self, out: Tensor, given: Tensor) -> None:
        time.sleep(all_to_all_nbytes(given.nbytes, self.world) / self._rate)
        super().all_to_all(out, given)

    def all_gather(self, out: Tensor, given: Tensor) -> None:
        time.sleep(all_gather_nbytes(given.nbytes, self.world) / self._rate)
        super().all_gather(out, given)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def chosen(ring: Collective) -> Choice:
    listed = entries(200_000)
    parts = parts_of((name, torch.empty(shape, device="meta")) for name, shape in listed)
    cfg = LearnerConfig(count=4, optimizer="sgd")
    return choose_codec(cfg, parts, parts[-1].stop, torch.device("cpu"), ring)


def test_codec_with_few_bytes_wins_on_a_slow_network(one_thread: None) -> None:
    # fp32 sends 1.07 MB of the 178,599 values in 107 ms, int8 in 27 ms.
    choice = chosen(Wire(4, 10_000_000))
    assert choice.codec == "int8"
    [rate] = re.findall(r"network of ([\d,]+) Mbit/s", choice.text)
    assert 70 < float(rate.replace(",", "")) < 85  # of 80
    for name in set(WITH_SGD) - {choice.codec}:
        assert f"{name} " in choice.text


def test_ranks_that_share_memory_use_no_codec(one_thread: None) -> None:
    assert chosen(SoloCollective(0, 4)).codec == "none"


def test_a_codec_that_cannot_sum_over_so_many_ranks_is_left_out() -> None:
    cfg = LearnerConfig(count=128, optimizer="sgd")
    parts = parts_of([("w", torch.empty(4, 4))])
    choice = choose_codec(cfg, parts, 16, torch.device("cpu"), SoloCollective(0, 128))
    assert "onebit" in choice.text
    assert "terngrad" not in choice.text
