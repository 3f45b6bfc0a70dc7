"""Means of sums on a device, and transfers between device and host."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from penstock.configs.errors import UserError
from penstock.device.choice import device_of, pick_device
from penstock.device.transfers import DeviceUploader, Download
from penstock.learner.device_statistics import ROWS, DeviceStatistics

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_means_over_samples_and_over_updates(device: str) -> None:
    made = DeviceStatistics(("loss", "kl"), torch.device(device))
    assert made.take(wait=True) == {}
    made.add(torch.tensor([3.0, 1.0], device=device))
    made.add(torch.tensor([5.0, 1.0], device=device))
    made.count(16)
    assert made.take(wait=True) == {}  # no update yet: it belongs to the next
    for norm in (2.0, 3.0):
        made.on_update(torch.tensor(norm, device=device))
    assert made.take(wait=True) == {"loss": 0.5, "kl": 0.125, "grad_norm": 2.5}
    assert made.take(wait=True) == {}


@pytest.mark.parametrize("device", DEVICES)
def test_sums_of_a_batch_count_once_and_updates_by_their_place_in_it(device: str) -> None:
    """Two batches, each of two epochs of two updates; the last epoch of the second is missing."""
    made = DeviceStatistics(
        ("loss", "kl"),
        torch.device(device),
        moments=("samples", "rho"),
        by_epoch=("kl",),
        epoch_updates=2,
        grad_clip=2.5,
    )
    for samples, rho, kls in ((4.0, 8.0, (0.0, 0.5, 1.0, 1.5)), (12.0, 8.0, (0.25, 0.75))):
        made.add_batch(torch.tensor([samples, rho], dtype=torch.float64, device=device))
        for position, kl in enumerate(kls):
            made.add(torch.tensor([1.0, 2 * kl], device=device))
            made.count(2)
            made.on_update(torch.tensor(2.0 + position, device=device), position)
    assert made.take(wait=True) == pytest.approx(
        {
            "loss": 0.5,
            "kl": 4 / 6,
            "samples": 1.0,
            "rho": 1.0,
            "grad_norm": (2 + 3 + 4 + 5 + 2 + 3) / 6,
            "grad_norm_clipped": (2 + 2.5 + 2.5 + 2.5 + 2 + 2.5) / 6,
            "kl_first_minibatch": 0.125,
            "kl_epoch_1": 1.5 / 4,
            "kl_epoch_2": 2.5 / 2,
        }
    )


def test_sums_of_a_batch_are_left_out_with_its_skipped_first_update() -> None:
    made = DeviceStatistics(("kl",), torch.device("cpu"), moments=("samples", "rho"))
    for norm in (math.nan, 1.0):
        made.add_batch(torch.tensor([2.0, norm]))
        for position in range(2):
            made.add(torch.tensor([2.0]))
            made.count(2)
            made.on_update(torch.tensor(norm), position)
    assert made.take() == {"kl": 1.0, "samples": 1.0, "rho": 0.5, "grad_norm": 1.0}
    made.add_batch(torch.tensor([2.0, 4.0]))
    made.on_update(torch.tensor(math.nan))
    made.on_update(torch.tensor(1.0), 1)
    assert made.take() == {"grad_norm": 1.0}
    assert made.last_skipped == "grad_norm nan"


@pytest.mark.parametrize("device", DEVICES)
def test_a_learner_without_samples_has_no_means_over_samples(device: str) -> None:
    """It took part in the updates of the others: a mean of 0 would count in the run's."""
    made = DeviceStatistics(("loss",), torch.device(device), by_epoch=("loss",), epoch_updates=1)
    for position in range(2):
        made.on_update(torch.tensor(2.0, device=device), position)
    assert made.take(wait=True) == {"grad_norm": 2.0}


def test_cpu_statistics_are_known_at_the_end_of_their_interval() -> None:
    made = DeviceStatistics(("loss",), torch.device("cpu"))
    for loss in (4.0, 8.0):
        made.add(torch.tensor([loss]))
        made.count(2)
        made.on_update(torch.tensor(1.0))
        assert made.take()["loss"] == loss / 2


@pytest.mark.parametrize("device", DEVICES)
def test_skipped_updates_are_counted_and_excluded_from_means(device: str) -> None:
    made = DeviceStatistics(("loss", "kl"), torch.device(device))
    for loss, norm in ((4.0, 1.0), (math.nan, math.nan), (math.inf, math.inf), (8.0, 3.0)):
        made.add(torch.tensor([loss, 1.0], device=device))
        made.count(2)
        made.on_update(torch.tensor(norm, device=device))
    assert made.take(wait=True) == {"loss": 3.0, "kl": 0.5, "grad_norm": 2.0}
    assert (made.skipped, made.skipped_in_row) == (2, 0)
    assert made.last_skipped == "loss inf, grad_norm inf"
    for _ in range(3):
        made.add(torch.tensor([1.0, 1.0], device=device))
        made.on_update(torch.tensor(math.nan, device=device))
    assert made.take(wait=True) == {}
    assert (made.skipped, made.skipped_in_row) == (5, 3)
    made.forget_skipped()
    assert (made.skipped, made.skipped_in_row) == (5, 0)


def test_nonfinite_statistic_of_a_valid_update_is_left_out() -> None:
    made = DeviceStatistics(("loss", "kl"), torch.device("cpu"))
    made.add(torch.tensor([1.0, math.inf]))
    made.count(1)
    made.on_update(torch.tensor(1.0))
    assert made.take() == {"loss": 1.0, "grad_norm": 1.0}
    assert made.skipped == 0


def test_more_updates_than_one_transfer_are_counted() -> None:
    made = DeviceStatistics(("loss",), torch.device("cpu"))
    for i in range(2 * ROWS + 5):
        made.add(torch.tensor([float(i % 2)]))
        made.count(1)
        made.on_update(torch.tensor(math.nan if i == ROWS else 1.0))
    found = made.take()
    assert found["loss"] == pytest.approx((ROWS + 2) / (2 * ROWS + 4))
    assert made.skipped == 1


@pytest.mark.gpu
def test_gpu_statistics_need_no_wait_and_lose_no_update() -> None:
    made = DeviceStatistics(("loss",), torch.device("cuda"))
    values = torch.ones(4096, 4096, device="cuda")

    def update(values: torch.Tensor, loss: float, products: int) -> None:
        for _ in range(products):
            values = values @ values / 4096
        made.add(values[0, :1] * loss)
        made.count(1)
        made.on_update(values[0, 0])

    update(values, 1.0, 1)  # loads the kernels and pins memory, which may wait for the GPU
    assert made.take(wait=True)["loss"] == pytest.approx(1.0)
    for loss in (1.0, 2.0, 3.0):
        update(values, loss, 50)
    assert made.take() == {}  # it still computes
    found = made.take(wait=True)
    assert found == {"loss": pytest.approx(2.0), "grad_norm": pytest.approx(1.0)}


@pytest.mark.parametrize("device", DEVICES)
def test_values_fetched_later_are_those_of_the_request(device: str) -> None:
    values = torch.arange(5.0, device=device)
    sent = Download(values if device == "cuda" else values.clone())
    values += 1  # behind it on the stream
    assert isinstance(sent.get(), np.ndarray)
    assert sent.is_ready
    assert sent.get().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("device", DEVICES)
def test_uploader_sends_arrays_to_the_device(device: str) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    there = torch.ones(2, device=device)
    uploader = DeviceUploader(device_of(pick_device(device)))
    placed = uploader.send({"a": array, "there": there}).tensors_on_current_stream()
    assert placed["there"] is there
    if device == "cuda":
        array[...] = 0  # it was copied
    assert placed["a"].device.type == device
    assert placed["a"].cpu().tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("sums", "shape"), [([1.0], r"\[1\]"), ([1.0, 2.0, 3.0], r"\[3\]")])
def test_sums_that_do_not_match_the_names_are_refused(sums: list[float], shape: str) -> None:
    made = DeviceStatistics(("loss", "kl"), torch.device("cpu"))
    sentence = (
        rf"loss returned statistics of shape {shape}, and STATISTICS has 2 names \(loss, kl\); "
    )
    with pytest.raises(UserError, match=sentence):
        made.add(torch.tensor(sums))
    with pytest.raises(UserError, match="loss returned statistics of type list, and STATISTICS"):
        made.add(sums)  # type: ignore[arg-type]
