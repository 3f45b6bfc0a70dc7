"""A parameter server and its workers: every pace finds the optimum; none waits for dead workers."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from penstock.learner.extras.parameter_server.client import ServerClient
from server_rig import (
    OPTIMUM,
    SIZE,
    Rig,
    config,
    counted,
    optimizer_of,
    pulled,
    push,
    rigs,
    values,
)
from waiting import wait_until

WORKER = Path(__file__).parents[1] / "server_worker.py"


@pytest.fixture(params=[1, 3], ids=["one shard", "three shards"])
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    yield from rigs(tmp_path, request.param)


# ------------------------------------------------------------------------- they find the optimum


class Worker(threading.Thread):
    """Descends on its share of a quadratic problem, of which it sees two directions of eight.

    The distance to the optimum along its rows R is all it knows: gradient R'R (x - optimum).
    """

    def __init__(self, client: ServerClient, rank: int, begin: threading.Barrier) -> None:
        super().__init__(daemon=True)
        basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, SIZE)))
        self.rows = torch.from_numpy(basis[2 * rank : 2 * rank + 2].astype(np.float32))
        self.client, self.rank, self.begin = client, rank, begin
        self.events: list[tuple[float, str, int]] = []
        self.lags: list[int | None] = []
        self.error = float("inf")

    def run(self) -> None:
        wait = random.Random(self.rank)
        pulled(self.client)
        self.begin.wait()
        ends_s = time.monotonic() + 20.0
        while time.monotonic() < ends_s:
            reply = pulled(self.client)
            if reply.stop:  # then who waits is let go, too
                return
            self.events.append((time.monotonic(), "go", self.rank))
            self.lags.append(reply.lag)
            x = values(self.client)
            self.error = float((x - OPTIMUM).norm())
            time.sleep(wait.expovariate(1000.0))
            self.events.append((time.monotonic(), "push", self.rank))
            mean = self.rows.T @ (self.rows @ (x - OPTIMUM))
            push(self.client, mean, samples=4 + self.rank, stop=self.error < 0.01)


def trained(rig: Rig) -> list[Worker]:
    begin = threading.Barrier(4)
    workers = [Worker(rig.client(rank), rank, begin) for rank in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return workers


def widest_gap(workers: list[Worker]) -> int:
    """The most clocks anyone was ahead of the slowest when it went, by the workers' own watches."""
    clocks, widest = dict.fromkeys(range(4), 0), 0
    for _, event, rank in sorted(event for worker in workers for event in worker.events):
        if event == "push":
            clocks[rank] += 1
        else:
            widest = max(widest, clocks[rank] - min(clocks.values()))
    return widest


@pytest.mark.parametrize(
    ("pace", "staleness"), [("ssp", 0), ("ssp", 3), ("asp", 3), ("tap", 0), ("backup", 0)]
)
def test_every_pace_finds_the_optimum(rig: Callable[..., Rig], pace: str, staleness: int) -> None:
    made = rig(config(pace, staleness=staleness))
    workers = trained(made)
    assert min(worker.error for worker in workers) < 0.01
    pulled(workers[0].client)
    assert float((values(workers[0].client) - OPTIMUM).norm()) < 0.05
    figures = made.server.figures()
    assert figures["rejected"] == {}
    assert sum(figures["lag_histogram"].values()) > 20
    if pace in ("ssp", "asp"):
        assert widest_gap(workers) <= staleness
        assert figures["widest"] <= staleness
    if pace == "backup":
        assert set(figures["lag_histogram"]) == {"0"}
        assert sum(figures["late_histogram"].values()) > 0
        assert any(lag is None for worker in workers for lag in worker.lags[2:])


def test_single_worker_equals_its_optimizer_in_torch(rig: Callable[..., Rig]) -> None:
    cfg = config("ssp", 2, optimizer="adam", lr=0.01, eps=1e-8)
    client = rig(cfg).client(0, values=torch.ones(SIZE))
    alone = nn.Parameter(torch.ones(SIZE))
    adam = torch.optim.Adam([alone], lr=0.01, eps=1e-8)
    for _ in range(10):
        pulled(client)
        push(client, values(client) - OPTIMUM, samples=7)
        alone.grad = alone.detach() - OPTIMUM
        adam.step()
    reply = pulled(client)
    torch.testing.assert_close(values(client), alone.detach())
    assert (reply.version, reply.samples, reply.tally[1], reply.lag) == (10, 70, 70, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("pace", ["ssp", "asp"])
def test_workers_with_a_gpu_reach_the_optimum(rig: Callable[..., Rig], pace: str) -> None:
    made = rig(config(pace, 2, device="cuda"))
    one, other = made.client(0), made.client(1)
    for client in (one, other):
        assert values(client).is_cuda
        pulled(client)
    push(one, torch.full((SIZE,), 2.0), samples=4)
    push(other, torch.arange(SIZE) * 1.0, samples=4)
    assert pulled(one).lag == 0
    wait_until(lambda: made.server.figures()["version"] == 2)
    for client in (one, other):
        pulled(client)
        expected = -0.3 * (2.0 + torch.arange(SIZE))
        torch.testing.assert_close(values(client).cpu(), expected)
    state = one.fetch(5.0)
    assert state is not None
    assert state.version == 2


# ------------------------------------------------------------------------------------ who waits


def test_worker_beyond_the_bound_retries_its_pull_until_others_push(
    rig: Callable[..., Rig],
) -> None:
    made = rig(config("ssp", 2, staleness=0))
    fast, slow = made.client(0), made.client(1)
    pulled(fast)
    pulled(slow)
    push(fast, torch.ones(SIZE))
    assert fast.pull(0.05) is None
    assert fast.pull(0.05) is None
    push(slow, torch.ones(SIZE), samples=3)
    reply = pulled(fast)
    assert (reply.version, reply.samples, reply.lag, reply.workers) == (2, 4, 0, 2)
    assert pulled(slow).lag == 1


def test_worker_without_data_does_not_block_the_others(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=0))
    fast, empty = made.client(0), made.client(1)
    pulled(fast)
    pulled(empty)
    push(fast, torch.ones(SIZE))
    assert empty.push(0) is None
    assert pulled(fast).version == 1


@pytest.mark.system
@pytest.mark.parametrize("pace", ["ssp", pytest.param("backup", marks=pytest.mark.slow)])
def test_killed_worker_does_not_block_the_others(rig: Callable[..., Rig], pace: str) -> None:
    made = rig(config(pace, staleness=0))
    command = [
        sys.executable,
        str(WORKER),
        ",".join(made.addresses),
        "2",
        str(SIZE),
        made.cfg.model_dump_json(),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as doomed:
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == b"working\n"
        others = [made.client(0), made.client(1)]
        for client in others:
            pulled(client)
        for client in others:
            push(client, torch.ones(SIZE))
        assert [client.pull(0.1) for client in others] == [None, None]
        doomed.kill()
        killed_s = time.monotonic()
        replies = [pulled(client) for client in others]
        assert time.monotonic() - killed_s < 1.0
        assert [reply.workers for reply in replies] == [2, 2]


def test_worker_that_leaves_does_not_block_the_others(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=0))
    one, other = made.client(0), ServerClient(made.addresses, 1, optimizer_of(made.cfg), made.cfg)
    pulled(one)
    pulled(other)
    push(one, torch.ones(SIZE))
    other.close()
    assert pulled(one).workers == 1


def test_stop_flag_of_one_worker_reaches_all_workers(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 3, staleness=0))
    clients = [made.client(rank) for rank in range(3)]
    for client in clients:
        assert not pulled(client).stop
    push(clients[0], torch.ones(SIZE))
    push(clients[1], torch.ones(SIZE), stop=True)
    replies = [pulled(client) for client in clients[:2]]  # though the third has not pushed
    assert [reply.stop for reply in replies] == [True, True]


def test_counts_accumulate_and_sums_are_of_the_current_workers(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=0))
    one, other = made.client(0), made.client(1)
    for client in (one, other):
        pulled(client)
    one.push(0, (10.0, 20.0, 1.0, 5.0, 50.0, 2.0))
    other.push(0, (1.0, 2.0, 0.0, -7.0, 30.0, 1.0), nan=True)
    assert pulled(one).tally == (11.0, 22.0, 1.0, -2.0, 80.0, 3.0)
    pulled(other)
    one.push(0, (10.0, 20.0, 1.0, 6.0, 60.0, 3.0))
    other.push(0, (0.0, 0.0, 0.0, -7.0, 30.0, 1.0))
    reply = pulled(one)
    assert reply.tally == (21.0, 42.0, 2.0, -1.0, 90.0, 4.0)
    assert reply.nan
    assert not reply.stop


def test_counts_pushed_after_the_stop_are_included(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=0))
    one, slow = made.client(0), made.client(1)
    for client in (one, slow):
        pulled(client)
    one.push(0, stop=True)
    assert pulled(one).stop  # though the other has not pushed
    push(one, torch.ones(SIZE), samples=5)
    reply = pulled(one)
    assert (reply.tally[1], reply.samples) == (5, 0)


def test_push_without_a_pull_sends_counts_only(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=0))
    one, other = made.client(0), made.client(1)
    for client in (one, other):
        pulled(client)
    push(one, torch.ones(SIZE))
    one.push(0, counted(5))
    wait_until(lambda: made.server._tally()[1] == 6)  # nothing orders the messages of two workers
    push(other, torch.ones(SIZE))
    reply = pulled(other)
    assert reply.tally[1] == 7
    pulled(one)
    push(one, torch.ones(SIZE))
    assert one.pull(0.1) is None  # the turn that it only told in was none: the other's is next
    assert made.server.rejected == {}


# --------------------------------------------------------------------------------- in few bits


def test_bf16_rounding_error_is_sent_with_later_pushes(rig: Callable[..., Rig]) -> None:
    made = rig(config("tap", 2, lr=1.0, reduce={"codec": "bf16"}))
    client = made.client(0)
    exact = torch.zeros(SIZE)
    for number in range(1, 65):
        pulled(client)
        gradient = torch.linspace(0.5, 2.0, SIZE) * (1 + 2**-9 + number / 1000)
        push(client, gradient)
        exact -= gradient
    pulled(client)
    state = client.fetch(10.0)
    assert state is not None
    # without feedback the error of 64 gradients would be up to 64 times that of one
    np.testing.assert_allclose(state.values, exact.numpy(), atol=2**-8 * 2.2)


def test_bf16_rounding_error_of_a_clipped_outlier_is_dropped(rig: Callable[..., Rig]) -> None:
    made = rig(config("tap", 2, lr=1.0, grad_clip=1.0, reduce={"codec": "bf16"}))
    client = made.client(0)
    pulled(client)
    outlier = torch.zeros(SIZE)
    outlier[0] = 1e18 * (1 + 2**-9)
    push(client, outlier)
    expected = torch.zeros(SIZE)
    expected[0] = -1.0
    for _ in range(3):
        pulled(client)
        push(client, torch.full((SIZE,), 0.125))
        expected -= 0.125
    pulled(client)
    torch.testing.assert_close(values(client), expected, rtol=2**-7, atol=2**-7)


def test_bf16_parameters_are_rounded_for_the_worker_but_not_in_the_server(
    rig: Callable[..., Rig],
) -> None:
    made = rig(config("ssp", 2, lr=1.0, reduce={"codec": "bf16"}))
    client = made.client(0, torch.full((SIZE,), 1.0 + 2**-12))
    pulled(client)
    torch.testing.assert_close(values(client), torch.ones(SIZE), rtol=0, atol=0)
    push(client, torch.full((SIZE,), -0.5))
    pulled(client)
    assert torch.equal(values(client), torch.full((SIZE,), 1.5))
    state = client.fetch(10.0)
    assert state is not None
    np.testing.assert_array_equal(state.values, np.full(SIZE, 1.5 + 2**-12, np.float32))


def test_a_gradient_that_bf16_cannot_hold_is_refused_and_forgotten(rig: Callable[..., Rig]) -> None:
    made = rig(config("tap", 2, lr=1.0, reduce={"codec": "bf16"}))
    client = made.client(0)
    for gradient in (torch.full((SIZE,), 3.4e38), torch.ones(SIZE)):
        pulled(client)
        push(client, gradient)
    pulled(client)
    assert torch.equal(values(client), torch.full((SIZE,), -1.0))
