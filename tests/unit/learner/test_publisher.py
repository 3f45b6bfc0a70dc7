"""Actors read from the board what the learner published."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.core.params import POLICY_ID, Stamp
from penstock.learner.publisher import Publisher
from penstock.transport.shm.weights_board import WeightsBoard

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_publisher_publishes_a_copy(device: str) -> None:
    board = WeightsBoard.create(7, shared=False)
    tensors = [torch.arange(5.0, device=device), torch.full((2,), 9.0, device=device)]
    publisher = Publisher(tensors, board)
    publisher.publish(POLICY_ID, Stamp(2, 10))
    tensors[0].zero_()
    publisher.flush(wait=True)
    out = np.empty(7, np.float32)
    assert board.read(out) == Stamp(2, 10)
    assert out.tolist() == [0, 1, 2, 3, 4, 9, 9]


@pytest.mark.parametrize("device", DEVICES)
def test_newest_publication_replaces_earlier_ones(device: str) -> None:
    board = WeightsBoard.create(3, shared=False)
    values = torch.zeros(3, device=device)
    publisher = Publisher([values], board)
    for version in range(50):
        values.fill_(version)
        publisher.publish(POLICY_ID, Stamp(0, version))
    publisher.flush(wait=True)
    out = np.empty(3, np.float32)
    assert board.read(out) == Stamp(0, 49)
    assert out.tolist() == [49, 49, 49]
    assert board.read(out, newer_than=Stamp(0, 49)) is None


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_any_memory_format_and_type_are_published_in_their_order(device: str) -> None:
    board = WeightsBoard.create(9, shared=False)
    turned = torch.arange(6.0, device=device).view(3, 2).t()  # not contiguous
    counts = torch.tensor([7, 8, 9], device=device)
    publisher = Publisher([turned, counts], board)
    publisher.publish(POLICY_ID, Stamp(0, 1))
    publisher.flush(wait=True)
    out = np.empty(9, np.float32)
    board.read(out)
    assert out.tolist() == [0, 2, 4, 1, 3, 5, 7, 8, 9]
