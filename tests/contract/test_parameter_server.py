"""A parameter server and its workers: every pace finds the optimum, none waits for the dead."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from torch import Tensor, nn

from penstock.configs.errors import UserError
from penstock.configs.schema import LearnerConfig
from penstock.learner.optimizer import FlatOptimizer
from penstock.learner.server import protocol
from penstock.learner.server.client import Reply, ServerClient
from penstock.learner.server.members import rules
from penstock.learner.server.protocol import Head, Kind, Payload, Tally
from penstock.learner.server.server import ParameterServer
from penstock.transport import keys
from penstock.transport.checksum import crc32

WORKER = Path(__file__).parents[1] / "server_worker.py"
SIZE = 8
OPTIMUM = torch.linspace(-3.0, 4.0, SIZE)
SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.3, "grad_clip": None}


def config(pace: str, count: int = 4, **settings: Any) -> LearnerConfig:
    return LearnerConfig.model_validate({"pace": pace, "count": count} | SGD | settings)


def optimizer_of(cfg: LearnerConfig, values: Tensor | None = None) -> FlatOptimizer:
    start = torch.zeros(SIZE) if values is None else values
    device = "cuda" if cfg.device == "cuda" else "cpu"
    return FlatOptimizer([("x", nn.Parameter(start.to(device, copy=True)))], cfg)


class Rig:
    """A server in a thread."""

    def __init__(self, folder: Path, cfg: LearnerConfig, curve: Path | None = None) -> None:
        self.cfg = cfg
        self.address = f"ipc://{folder}/s"
        self.server = ParameterServer(cfg, self.address, curve=curve)
        self._clients: list[ServerClient] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            self.server.turn(0.02)

    def client(self, rank: int, values: Tensor | None = None, **begun: Any) -> ServerClient:
        optimizer = optimizer_of(self.cfg, values)
        self._clients.append(ServerClient(self.address, rank, optimizer, self.cfg, **begun))
        return self._clients[-1]

    def stop(self) -> None:
        """End the server alone."""
        self._stop = True
        self._thread.join()
        self.server.close()

    def close(self) -> None:
        while self._clients:
            self._clients.pop().close()
        if not self._stop:
            self.stop()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(cfg: LearnerConfig, **options: Any) -> Rig:
        made.append(Rig(tmp_path, cfg, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def pulled(client: ServerClient, timeout_s: float = 10.0) -> Reply:
    reply = client.pull(timeout_s)
    assert reply is not None, client.said
    return reply


def push(client: ServerClient, mean: list[float] | Tensor, samples: int = 1, **told: Any) -> None:
    client._optimizer.grads.copy_(torch.as_tensor(mean) * samples)
    client.push(samples, counted(samples), **told)


def counted(steps: int, returns: float = 0.0) -> Tally:
    """So many agent steps, and episodes with so much return of late."""
    return (0.0, float(steps), 0.0, returns, 0.0, 1.0)


def values(client: ServerClient) -> Tensor:
    return client._optimizer.values


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


def test_one_worker_alone_does_what_its_optimizer_would(rig: Callable[..., Rig]) -> None:
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
def test_workers_may_have_a_gpu(rig: Callable[..., Rig], pace: str) -> None:
    made = rig(config(pace, 2, device="cuda"))
    one, other = made.client(0), made.client(1)
    for client in (one, other):
        assert values(client).is_cuda
        pulled(client)
    push(one, torch.full((SIZE,), 2.0), samples=4)
    push(other, torch.arange(SIZE) * 1.0, samples=4)
    assert pulled(one).lag == 0
    _until(lambda: made.server.figures()["version"] == 2)
    for client in (one, other):
        pulled(client)
        expected = -0.3 * (2.0 + torch.arange(SIZE))
        torch.testing.assert_close(values(client).cpu(), expected)
    state = one.fetch(5.0)
    assert state is not None
    assert state.version == 2


# ------------------------------------------------------------------------------------ who waits


def test_who_must_wait_asks_again(rig: Callable[..., Rig]) -> None:
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


def test_who_has_no_data_holds_nobody_up(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=0))
    fast, empty = made.client(0), made.client(1)
    pulled(fast)
    pulled(empty)
    push(fast, torch.ones(SIZE))
    assert empty.push(0) is None
    assert pulled(fast).version == 1


@pytest.mark.system
@pytest.mark.parametrize("pace", ["ssp", "backup"])
def test_the_killed_hold_nobody_up(rig: Callable[..., Rig], pace: str) -> None:
    made = rig(config(pace, staleness=0))
    command = [
        sys.executable,
        str(WORKER),
        made.address,
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


def test_who_leaves_holds_nobody_up(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=0))
    one, other = made.client(0), ServerClient(made.address, 1, optimizer_of(made.cfg), made.cfg)
    pulled(one)
    pulled(other)
    push(one, torch.ones(SIZE))
    other.close()
    assert pulled(one).workers == 1


def test_all_hear_that_one_stops(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 3, staleness=0))
    clients = [made.client(rank) for rank in range(3)]
    for client in clients:
        assert not pulled(client).stop
    push(clients[0], torch.ones(SIZE), checkpoint=True)
    push(clients[1], torch.ones(SIZE), stop=True)
    replies = [pulled(client) for client in clients[:2]]  # though the third has not pushed
    assert [reply.stop for reply in replies] == [True, True]
    assert [reply.checkpoint for reply in replies] == [False, True]


def test_counts_add_up_and_sums_are_those_of_now(rig: Callable[..., Rig]) -> None:
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


def test_what_is_counted_last_counts_when_all_stop(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=0))
    one, slow = made.client(0), made.client(1)
    for client in (one, slow):
        pulled(client)
    one.push(0, stop=True)
    assert pulled(one).stop  # though the other has not pushed
    push(one, torch.ones(SIZE), samples=5)
    reply = pulled(one)
    assert (reply.tally[1], reply.samples) == (5, 0)


def test_without_having_pulled_a_push_only_tells(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=0))
    one, other = made.client(0), made.client(1)
    for client in (one, other):
        pulled(client)
    push(one, torch.ones(SIZE))
    one.push(0, counted(5), checkpoint=True)
    push(other, torch.ones(SIZE))
    reply = pulled(other)
    assert reply.checkpoint
    assert reply.tally[1] == 7
    pulled(one)
    push(one, torch.ones(SIZE))
    assert one.pull(0.1) is None  # the turn that it only told in was none: the other's is next
    assert made.server.rejected == {}


# ---------------------------------------------------------------------------- whose parameters


def test_the_first_worker_brings_the_parameters(rig: Callable[..., Rig]) -> None:
    made = rig(config("tap", 2))
    first, second = made.client(0, values=OPTIMUM), made.client(1)
    pulled(first)
    pulled(second)
    torch.testing.assert_close(values(second), OPTIMUM)


def test_a_run_goes_on_from_what_was_fetched(rig: Callable[..., Rig]) -> None:
    cfg = config("ssp", 2, optimizer="adam", lr=0.01)
    made = rig(cfg)
    client = made.client(0)
    for _ in range(3):
        pulled(client)
        push(client, values(client) - OPTIMUM, samples=5)
    pulled(client)
    state = client.fetch(5.0)
    assert state is not None
    assert (state.version, state.samples, state.tally) == (3, 15, counted(15))
    expected = _two_more(client)
    made.close()

    again = rig(cfg)
    late = again.client(1)  # with nothing: takes what the others have
    pulled(late)
    begun = {"version": state.version, "samples": state.samples, "tally": state.tally}
    resumed = again.client(0, values=torch.from_numpy(state.values), **begun)
    resumed._optimizer.load_state_dict(state.arrays)
    assert pulled(resumed).version == 3
    torch.testing.assert_close(_two_more(resumed), expected)
    assert pulled(resumed).samples == 25
    push(late, torch.ones(SIZE))  # at parameters that are no more
    reply = pulled(late)
    assert (reply.version, reply.lag) == (5, None)
    torch.testing.assert_close(values(late), expected)


def _two_more(client: ServerClient) -> Tensor:
    for _ in range(2):
        push(client, values(client) - OPTIMUM, samples=5)
        pulled(client)
    return values(client).clone()


def test_a_new_server_takes_what_the_workers_have(rig: Callable[..., Rig]) -> None:
    cfg = config("ssp", 2)
    made = rig(cfg)
    client = made.client(0)
    for _ in range(2):
        pulled(client)
        push(client, torch.ones(SIZE))
    pulled(client)
    before = values(client).clone()
    push(client, torch.ones(SIZE))
    made.stop()
    again = rig(cfg)
    reply = pulled(client)
    assert (reply.version, reply.lag) == (2, None)  # the last push is lost, and nothing else
    torch.testing.assert_close(values(client), before)
    assert again.server.figures()["version"] == 2


# ---------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"lr": 0.2}, "other settings"), ({"count": 3}, "other settings")],
)
def test_other_settings_are_refused(
    rig: Callable[..., Rig], settings: dict[str, Any], says: str
) -> None:
    made = rig(config("ssp", 2))
    cfg = made.cfg.model_copy(update=settings)
    client = ServerClient(made.address, 1, optimizer_of(cfg), cfg)
    with pytest.raises(UserError, match=f"learner 1 has {says}"):
        client.pull(5.0)
    client.close()


def test_another_number_of_parameters_is_refused(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2))
    pulled(made.client(0))
    other = FlatOptimizer([("x", nn.Parameter(torch.zeros(5)))], made.cfg)
    client = ServerClient(made.address, 1, other, made.cfg)
    with pytest.raises(UserError, match="has 5 parameters, and the others have 8"):
        client.pull(5.0)
    client.close()


def test_who_joined_before_there_were_parameters_is_refused_too(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2))
    with zmq.Context() as context, context.socket(zmq.DEALER) as early:
        early.connect(made.address)
        join = Head(Kind.JOIN, rank=1, session=7, entries=5, rules=rules(made.cfg))
        early.send_multipart(protocol.encode(join))
        assert protocol.decode(early.recv_multipart()).head.kind == Kind.WELCOME
        assert pulled(made.client(0)).workers == 1
        answer = protocol.decode(early.recv_multipart())
        assert answer.head.kind == Kind.REFUSE
        assert "has 5 parameters, and the others have 8" in protocol.text(answer)


def test_another_release_is_told_so(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2))
    head = bytearray(protocol.encode(Head(Kind.JOIN, entries=SIZE))[0])
    head[4] += 1
    head[-4:] = crc32(bytes(head[:-4])).to_bytes(4, "little")
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.connect(made.address)
        other.send_multipart([bytes(head), b""])
        answer = protocol.decode(other.recv_multipart())
    assert protocol.text(answer).startswith("the parameter server speaks another version")


def test_a_rank_is_there_once(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2))
    pulled(made.client(0))
    second = made.client(0)
    assert second.pull(0.3) is None
    assert second.said == "another learner with rank 0 is there"


def test_garbage_is_counted_and_dropped(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=0))
    client = made.client(0)
    pulled(client)
    gradient = protocol.pack_dense(np.ones(SIZE, np.float32))
    sound = protocol.encode(Head(Kind.PUSH, session=1, samples=1), gradient)
    shapeless: list[list[Payload]] = [[b"x"] * 3, [b""], [b"PNPS" * 20, b""], [b"x" * 10_000_000]]
    _throw(made.address, [*shapeless, [sound[0], sound[1][:-1]], sound])
    _until(lambda: sum(made.server.rejected.values()) == 6)
    assert set(made.server.rejected) == {"frames", "header", "size", "unknown"}
    client._send(Head(Kind.PUSH, samples=1), protocol.pack_dense(np.ones(SIZE + 1, np.float32)))
    reply = pulled(client)  # its turn is taken, with nothing
    assert (reply.version, reply.lag) == (0, None)
    push(client, torch.full((SIZE,), torch.nan))
    assert pulled(client).version == 0
    client.push(1)
    push(client, torch.ones(SIZE))  # has not asked in between
    assert pulled(client).version == 0
    push(client, torch.ones(SIZE))
    assert pulled(client).version == 1
    assert made.server.rejected["not_pulled"] == 1
    assert made.server.rejected["not_finite"] == 2


def _throw(address: str, messages: list[list[Payload]]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        for message in messages:
            socket.send_multipart(message)


def _until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < ends_s, "it did not come true in time"
        time.sleep(0.005)


@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq without CURVE")
def test_strangers_do_not_get_in(rig: Callable[..., Rig], tmp_path: Path) -> None:
    folder, other = tmp_path / "keys", tmp_path / "other"
    keys.new(folder)
    keys.new(other)
    made = rig(config("ssp", 2), curve=folder)
    pulled(made.client(0, curve=folder))
    assert made.client(1, curve=other).pull(0.3) is None
    assert made.client(1).pull(0.3) is None
