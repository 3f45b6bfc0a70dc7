"""The reducer after a lost reduction."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from penstock.learner.codecs.collective import SoloCollective
from penstock.learner.codecs.reducer import Reducer
from penstock.learner.sync.gradient_sync import GroupLostError
from penstock.models.flat_parameters import flatten
from penstock.profiling.ledger import TimeLedger
from reduce_ring import SHAPES, codec_for


class Connection:
    """Is open while anything refers to it, as gloo's are."""


class LostRing(SoloCollective):
    """Fails while it uses a connection."""

    def all_reduce(self, tensor: Tensor) -> None:
        connection = Connection()
        self.opened = weakref.ref(connection)
        raise GroupLostError("a peer closed its connection")


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_lost_reduction_keeps_no_connection_open() -> None:
    """Other learners notice the loss only when this one's connections close, so that must not wait
    for a garbage collection, which may be half a minute away."""
    nets = [nn.Parameter(torch.ones(shape)) for _, shape in SHAPES]
    grads = torch.zeros_like(flatten(nets))
    for parameter, part in zip(nets, grads.split([p.numel() for p in nets]), strict=True):
        parameter.grad = part.view(parameter.shape)
    ring = LostRing(0, 2)
    with ThreadPoolExecutor(1) as thread:
        codec = codec_for(4, 1, codec="none")
        reducer = Reducer(grads, nets, codec, ring, thread, TimeLedger(), overlap=True)
        reducer.prepare_backward(0, 1.0)
        torch.stack([parameter.sum() for parameter in nets]).sum().backward()
        try:
            reducer.finish(0, 1.0)
        except GroupLostError:
            pass
        else:
            pytest.fail("the reduction was not lost")
        reducer.close()
    assert ring.opened() is None
