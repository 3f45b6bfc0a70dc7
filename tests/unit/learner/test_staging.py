"""Staging batches: slots of a store that are gathered together, against one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.specs import Column, SlotSpec
from penstock.learner.sources import staging
from penstock.learner.sources.staging import Copier, StagingBatch
from penstock.transport.shm.store import SlotStore

CPU = torch.device("cpu")
SLOTS = 5
COUNTED = (
    Column("terminated", "|b1"),
    Column("truncated", "|b1"),
    Column("alive", "|b1"),
    Column("policy_version", "<u4"),
    Column("episode_return", "<f4"),
    Column("episode_length", "<i4"),
)
# Columns of each kind: small and large, by row, by slot, by environment, and side rows.
COLUMNS = (
    Column("obs", "|u1", (3, 5), "unroll+1"),
    Column("action", "<i8", (2,)),
    Column("reward", "<f4"),
    *COUNTED,
    Column("logits", "<f4", (300,)),
    Column("seat", "|u1", rows="slot"),
    Column("policy_id", "<u2", rows="slot"),
    Column("core_state", "<f4", (40,), "slot"),
    Column("side_obs", "|u1", (7,), "side"),
)
FRAMES = (Column("frame", "|u1", (9, 4), "frames"), *COUNTED)


@pytest.fixture(params=[1, 3], ids=lambda envs: f"envs-{envs}")
def envs(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(params=[COLUMNS, FRAMES], ids=["rows", "frames"])
def store(request: pytest.FixtureRequest, envs: int) -> Iterator[SlotStore]:
    columns: tuple[Column, ...] = request.param
    rng = np.random.default_rng(envs)
    store = SlotStore(SlotSpec(4, envs, columns, side=2), 9, shared=False)
    for slot in store.slots:
        for raw in slot.payload:
            raw[...] = rng.integers(0, 256, raw.size, np.uint8)
        for flag in ("terminated", "truncated", "alive"):
            slot.columns[flag][...] = rng.integers(0, 2, slot.columns[flag].shape)
        slot.header["steps"] = 3 + slot.index
        slot.header["started_s"] = 20.0 - slot.index
        slot.header["published_s"] = 30.0 + slot.index
    yield store
    store.close()


@pytest.mark.parametrize("small_nbytes", [0, 200, 1 << 14])
@pytest.mark.parametrize("threads", [1, 2])
def test_slots_of_a_store_are_gathered_as_slots_with_memory_of_their_own(
    store: SlotStore, small_nbytes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "SMALL_BLOCK_NBYTES", small_nbytes)
    spec = store.geometry.spec
    copier = Copier(threads)
    batch = StagingBatch(spec, SLOTS, CPU, copier, store=store)
    expected = StagingBatch(spec, SLOTS, CPU)
    for indices in ([7, 0, 3, 8, 1], [2, 2, 5, 4, 6]):
        slots = [store.slots[index] for index in indices]
        batch.gather(slots)
        expected.gather(slots)
        for name, array in expected.arrays.items():
            assert array.tobytes() == batch.arrays[name].tobytes(), name
        assert batch.headers.tobytes() == expected.headers.tobytes()
        assert batch.steps == sum(3 + index for index in indices)
        assert batch.started_s == 20.0 - max(indices)
        assert batch.keys.tolist() == expected.keys.tolist()
    copier.close()


def test_each_slot_has_its_own_part_of_every_column(store: SlotStore, envs: int) -> None:
    spec = store.geometry.spec
    batch = StagingBatch(spec, SLOTS, CPU, store=store)
    slots = [store.slots[index] for index in (4, 8, 0, 2, 6)]
    batch.gather(slots)
    for column in spec.columns:
        axis = len(spec.rows_of(column)) - 1
        parts = np.split(batch.arrays[column.name], SLOTS, axis)
        for part, slot in zip(parts, slots, strict=True):
            assert part.tobytes() == slot.columns[column.name].tobytes(), column.name


def test_a_gathered_batch_shares_no_memory_with_its_slots(store: SlotStore) -> None:
    batch = StagingBatch(store.geometry.spec, SLOTS, CPU, store=store)
    batch.gather(store.slots[:SLOTS])
    arrays: dict[str, Any] = {name: array.tobytes() for name, array in batch.arrays.items()}
    headers = batch.headers.tobytes()
    for slot in store.slots:
        slot.header["steps"] = 99
        for raw in slot.payload:
            raw[...] = 1
    assert {name: array.tobytes() for name, array in batch.arrays.items()} == arrays
    assert batch.headers.tobytes() == headers
