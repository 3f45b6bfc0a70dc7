"""Batches drawn ahead: equal to `sample`, with clean ends, raised errors, and devices."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from penstock.replay.buffer import Replay, ReplaySource
from penstock.replay.errors import ReplayError
from penstock.replay.limiter import RateLimiter
from penstock.replay.samplers import Prioritized
from penstock.replay.sequences import Sequences

COLUMNS = {"obs": {"a": (np.float32, (3,)), "b": (np.uint8, (20, 20))}, "action": (np.int64, ())}


def add(replay: Replay, i: int) -> None:
    def obs(i: int) -> dict[str, Any]:
        return {"a": np.full(3, i, np.float32), "b": np.full((20, 20), i % 256, np.uint8)}

    replay.add(
        obs=obs(i), action=i, reward=i, terminated=False, truncated=False, next_obs=obs(i + 1)
    )


def made(steps: int = 100, **options: Any) -> Replay:
    replay = Replay(COLUMNS, 1000, seed=0, **options)
    for i in range(steps):
        add(replay, i)
    return replay


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "replay-prefetch"]


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert set(a) == set(b)
        for name in a:
            assert_same(a[name], b[name])
    else:
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetched_batches_equal_those_of_sample(prefetch: int) -> None:
    expected, replay = made(), made()
    batches = replay.batches(16, prefetch=prefetch)
    for _ in range(20):
        assert_same(next(batches), expected.sample(16))
    batches.close()
    assert not threads()


def test_exactly_prefetch_batches_are_drawn_ahead() -> None:
    replay = made(sampler=Prioritized())
    batches = replay.batches(8, prefetch=3)
    kept = [next(batches)]
    time.sleep(0.2)
    assert replay.sampler.state_dict()["drawn"] == 8 * 4
    kept += [next(batches) for _ in range(30)]  # and those that are kept are not overwritten
    for batch in kept:
        np.testing.assert_array_equal(batch.obs["a"][:, 0], batch.action)
        np.testing.assert_array_equal(batch.obs["b"][:, 7, 7], batch.action)
    batches.close()


def test_prefetch_thread_lives_from_the_first_batch_to_the_last() -> None:
    replay = made()
    batches = replay.batches(8)
    assert not threads()
    next(batches)
    assert threads()
    del batches
    assert not threads()
    for i, _ in enumerate(replay.batches(8)):
        if i == 3:
            break
    assert not threads()


def test_close_does_not_wait_for_batches_that_never_come() -> None:
    replay = made()
    batches = replay.batches(100)
    next(batches)
    for _ in range(3):
        next(batches)
    replay.table.valid[...] = False
    replay.table.stored = 0
    time.sleep(0.05)
    began_s = time.monotonic()
    batches.close()
    assert time.monotonic() - began_s < 2.0
    assert not threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_too_few_rows_are_awaited_until_a_timeout_error(prefetch: int) -> None:
    replay = made(5)
    with pytest.raises(
        ReplayError, match=r"no batch could be drawn for 0.3 s: 5 of 8 rows are stored; is anything"
    ):
        next(replay.batches(8, prefetch=prefetch, timeout_s=0.3))
    batches = replay.batches(8, prefetch=prefetch, timeout_s=30.0)

    def later() -> None:
        for i in range(5, 8):
            add(replay, i)

    adding = threading.Timer(0.2, later)
    adding.start()
    assert len(next(batches).action) == 8
    adding.join()
    batches.close()
    assert not threads()


def test_missing_sequences_are_awaited() -> None:
    replay = made(9, sequences=Sequences(10))
    with pytest.raises(ReplayError, match="no sequence is complete; is anything added"):
        next(replay.batches(4, timeout_s=0.2))
    add(replay, 9)
    assert next(replay.batches(4)).action.shape == (10, 4)


def test_waiting_for_the_limiter_ends_at_the_timeout_with_sequences() -> None:
    """The thread, too: the generator ends with it."""
    limiter = RateLimiter(samples_per_insert=1.0, min_size=20, batch=4)
    replay = made(20, sequences=Sequences(5), limiter=limiter, timeout_s=5.0)
    batches = replay.batches(4, prefetch=1, timeout_s=0.2)
    began_s = time.monotonic()
    with pytest.raises(ReplayError, match=r"no batch could be drawn for 0\.2 s: sampling 4 waits"):
        list(batches)
    assert time.monotonic() - began_s < 2.0


def test_errors_of_the_prefetch_thread_are_raised_in_the_caller() -> None:
    replay = made()
    with pytest.raises(ReplayError, match="a batch of 2000 is larger than the capacity"):
        made(1000).batches(2000).send(None)
    batches = replay.batches(8)
    next(batches)
    replay.sampler = None  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="sample"):
        list(itertools.islice(batches, 9))
    assert not threads()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"count": "x"}, "batch size 'x' must be a whole number and at least 1"),
        ({"count": 0}, "batch size 0 must be a whole number and at least 1"),
        ({"prefetch": -1}, r"prefetch -1 must be 0 \(no thread\) or more batches"),
        ({"prefetch": "x"}, "prefetch 'x' must be 0"),
        ({"timeout_s": 0}, "timeout_s 0 must be above 0 seconds"),
        ({"timeout_s": "x"}, "timeout_s 'x' must be above 0 seconds"),
        ({"device": "toaster"}, "device 'toaster' is none that torch knows"),
    ],
)
def test_invalid_prefetch_options_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ReplayError, match=words):
        made().batches(**{"count": 8} | options)


@pytest.mark.parametrize("options", [{}, {"sequences": Sequences(5, 2)}], ids=["rows", "sequences"])
def test_batches_can_be_torch_tensors(options: dict[str, Any]) -> None:
    assert_tensors("cpu", options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"sequences": Sequences(5, 2)}], ids=["rows", "sequences"])
def test_batches_can_be_tensors_on_a_gpu(options: dict[str, Any]) -> None:
    assert_tensors("cuda", options)


def assert_tensors(device: str, options: dict[str, Any]) -> None:
    import torch

    expected, replay = made(**options), made(**options)
    batches = replay.batches(16, device=device)
    for _ in range(12):
        batch, wanted = next(batches), expected.sample(16)
        assert isinstance(batch["keys"], np.ndarray)
        assert isinstance(batch.obs["b"], torch.Tensor)
        assert batch.reward.device.type == device
        assert batch.obs["b"].dtype == torch.uint8
        assert_same(_on_host(batch), dict(wanted))
    batches.close()
    assert not threads()


def _on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _on_host(child) for name, child in value.items()}
    return value.cpu().numpy() if hasattr(value, "cpu") else value


def test_numpy_batches_need_no_torch() -> None:
    code = """
import sys
import numpy as np
from penstock.replay import Replay
replay = Replay({"obs": (np.float32, (3,)), "action": (np.int64, ())}, 100)
obs = np.zeros(3, np.float32)
replay.add(obs=obs, action=0, reward=0, terminated=False, truncated=False, next_obs=obs + 1)
heavy = {"torch", "zmq", "pydantic", "gymnasium"}
print(len(next(replay.batches(1)).action), heavy & {*sys.modules})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 set()\n"


def test_rows_taken_by_another_thread_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the question whether a batch can be drawn and the draw itself."""
    replay, missing = made(10, max_times_sampled=1), ReplaySource.why_not

    def taken_then(source: ReplaySource) -> str:
        text = missing(source)
        if len(replay) == 10:
            replay.sample(8)
        return text

    monkeypatch.setattr(ReplaySource, "why_not", taken_then)
    with pytest.raises(ReplayError, match=r"for 0\.05 s: 2 of 8 rows are stored"):
        next(replay.batches(8, prefetch=0, timeout_s=0.05))


def test_samples_taken_by_another_thread_do_not_delay_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread waits for the limiter no longer than for a batch, so that it sees the end."""
    limiter = RateLimiter(samples_per_insert=1.0, min_size=10, batch=4)
    replay, missing = made(10, limiter=limiter, timeout_s=5.0), ReplaySource.why_not
    taken = threading.Event()

    def taken_then(source: ReplaySource) -> str:
        text = missing(source)
        while not text and not missing(source):
            replay.sample(4)
            taken.set()
        return text

    monkeypatch.setattr(ReplaySource, "why_not", taken_then)
    batches = replay.batches(4, prefetch=1, timeout_s=0.2)
    began_s = time.monotonic()
    with pytest.raises(ReplayError, match=r"for 0\.2 s: sampling 4 waits"):
        next(batches)
    assert taken.is_set()
    assert time.monotonic() - began_s < 2.0
    assert not threads()
