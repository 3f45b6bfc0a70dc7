"""Copies by several threads are complete, also if one thread fails."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from penstock.core import cgroup
from penstock.learner.sources.staging import Copier, gather_threads

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_all_arrays_are_copied_once(threads: int, rows: int) -> None:
    rng = np.random.default_rng(0)
    whole = [rng.integers(0, 256, (rows, 2, n), np.uint8) for n in (3, 40_000, 300_000)]
    targets = [np.zeros_like(array) for array in whole]
    copier = Copier(threads)
    for first in (0, 1):  # places beside each other, as slots in a batch
        place = slice(first, first + 1)
        copier([(t[:, place], a[:, place]) for t, a in zip(targets, whole, strict=True)])
    copier.close()
    for target, array in zip(targets, whole, strict=True):
        np.testing.assert_array_equal(target, array)
    assert not [t for t in threading.enumerate() if t.name.startswith("copier")]


def test_error_in_a_copier_thread_is_raised() -> None:
    target, source = np.zeros((4, 100_000), np.float32), np.ones((4, 100_000), np.float64)
    copier = Copier(2)
    with pytest.raises(TypeError, match="cast"):
        copier([(target.astype(np.int32), source)])
    copier([(target, target + 1)])
    copier.close()
    assert target.min() == target.max() == 1


def test_gather_threads_are_a_quarter_of_the_cores_on_a_gpu_and_one_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda")
    for cores, threads in ((1, 1), (4, 1), (8, 2), (12, 3), (64, 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert gather_threads(None, gpu) == threads
        assert gather_threads(None, CPU) == 1
        assert gather_threads(3, CPU) == gather_threads(3, gpu) == 3
    monkeypatch.setattr(cgroup, "cores", lambda: 9.5)  # a container's quota
    assert gather_threads(None, gpu) == 2
