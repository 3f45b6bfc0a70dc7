"""A parameter server of several shards equals one of a single shard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.learner.extras.parameter_server import protocol
from penstock.learner.extras.parameter_server.client import ServerClient
from penstock.learner.extras.parameter_server.parameters import part_of
from penstock.learner.extras.parameter_server.protocol import ServerHeader, ServerMessageKind
from penstock.learner.extras.parameter_server.server import ParameterServer
from server_rig import SIZE, Rig, config, optimizer_of, pulled, push, rigs, values
from waiting import wait_until

ADAM = {"optimizer": "adam", "lr": 0.05, "grad_clip": 0.5}
GRADIENTS = [torch.randn(SIZE, generator=torch.Generator().manual_seed(n)) for n in range(12)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    yield from rigs(tmp_path)


def trained(made: Rig, gradients: list[Tensor]) -> ServerClient:
    """A worker after these gradients, each over three samples."""
    client = made.client(0)
    for gradient in gradients:
        pulled(client)
        push(client, gradient, samples=3)
    pulled(client)
    return client


@pytest.mark.parametrize("size", [4, 5, 1_686_693])
@pytest.mark.parametrize("shards", [1, 3, 4])
def test_shards_cover_the_vector_in_about_equal_parts(size: int, shards: int) -> None:
    parts = [part_of(size, shard, shards) for shard in range(shards)]
    assert (parts[0].start, parts[-1].stop) == (0, size)
    assert all(one.stop == other.start for one, other in pairwise(parts))
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("pace", ["ssp", "tap", "asp"])
def test_sharded_parameters_equal_those_of_one_shard(pace: str, tmp_path: Path) -> None:
    found = []
    for shards in (1, 2, 3):
        folder = tmp_path / str(shards)
        folder.mkdir()
        for make in rigs(folder, shards):
            found.append(values(trained(make(config(pace, 2, **ADAM)), GRADIENTS)).clone())
    assert found[0].norm() > 0.3
    for other in found[1:]:  # clipping and the step round in another order
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)


def test_gradient_is_clipped_by_its_norm_over_all_shards(rig: Callable[..., Rig]) -> None:
    made = rig(config("tap", 2, lr=1.0, grad_clip=5.0, server_shards=2))
    gradient = [6.0, 0.0, 0.0, 0.0, 8.0, 0.0, 0.0, 0.0]  # norm 10, and 6 and 8 in the shards
    client = trained(made, [torch.tensor(gradient)])
    torch.testing.assert_close(values(client), torch.tensor(gradient) * -0.5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_gradient_in_one_shard_changes_no_shard(
    rig: Callable[..., Rig], bad: float
) -> None:
    made = rig(config("ssp", 2, server_shards=2))
    gradient = torch.ones(SIZE)
    gradient[-1] = bad
    client = trained(made, [gradient])
    assert torch.equal(values(client), torch.zeros(SIZE))
    push(client, torch.ones(SIZE))
    pulled(client)
    torch.testing.assert_close(values(client), torch.full((SIZE,), -0.3))


def test_worker_proceeds_only_when_all_shards_release_it(tmp_path: Path) -> None:
    cfg = config("tap", 2, server_shards=2)
    addresses = [f"ipc://{tmp_path}/{shard}" for shard in range(2)]
    servers = [ParameterServer(cfg, at, shard=n) for n, at in enumerate(addresses)]
    client = ServerClient(addresses, 0, optimizer_of(cfg), cfg)

    def pull(*alive: ParameterServer, turns: int = 20) -> bool:
        for _ in range(turns):
            if client.pull(0.01) is not None:
                return True
            for server in alive:
                server.turn(0.01)
        return False

    try:
        assert pull(*servers)
        push(client, torch.ones(SIZE))
        assert not pull(servers[0])
        assert torch.equal(values(client)[SIZE // 2 :], torch.zeros(SIZE // 2))
        assert pull(servers[1])
        torch.testing.assert_close(values(client), torch.full((SIZE,), -0.3))
    finally:
        client.close()
        for server in servers:
            server.close()


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3)])
def test_a_checkpoint_is_resumed_with_another_number_of_shards(
    before: int, after: int, tmp_path: Path
) -> None:
    expected = []
    for made in rigs(tmp_path, 1):
        expected.append(values(trained(made(config("tap", 2, **ADAM)), GRADIENTS)).clone())
    state = None
    for made in rigs(tmp_path, before):
        client = trained(made(config("tap", 2, **ADAM)), GRADIENTS[:6])
        state = client.fetch(10.0)
        assert state is not None
        assert state.version == 6
        assert {array.shape for array in state.arrays.values()} == {(), (SIZE,)}
    for made in rigs(tmp_path, after):
        assert state is not None
        rig = made(config("tap", 2, **ADAM))
        optimizer = optimizer_of(rig.cfg, torch.from_numpy(state.values))
        optimizer.load_state_dict(state.arrays)
        client = ServerClient(rig.addresses, 0, optimizer, rig.cfg, version=6)
        for gradient in GRADIENTS[6:]:
            pulled(client)
            push(client, gradient, samples=3)
        assert pulled(client).version == 12
        expected.append(values(client).clone())
        client.close()
    torch.testing.assert_close(expected[1], expected[0])


class Shards:
    """Two shards and three workers, in one thread."""

    def __init__(self, folder: Path, staleness: int) -> None:
        self.cfg = cfg = config("ssp", 3, staleness=staleness, server_shards=2)
        addresses = [f"ipc://{folder}/{shard}" for shard in range(2)]
        self.servers = [ParameterServer(cfg, at, shard=n) for n, at in enumerate(addresses)]
        self.workers = [ServerClient(addresses, n, optimizer_of(cfg), cfg) for n in range(3)]

    def pull(self, *ranks: int, within_s: float = 5.0) -> set[int]:
        """Let workers pull; returns those that got parameters."""
        waiting, ends_s = set(ranks), time.monotonic() + within_s
        while waiting and time.monotonic() < ends_s:
            waiting = {rank for rank in waiting if self.workers[rank].pull(0.0) is None}
            self.turn()
        return set(ranks) - waiting

    def turn(self) -> None:
        for server in self.servers:
            while server.turn(0.01):
                pass

    def step(self, *ranks: int) -> None:
        """Let workers push, and pull where the pace allows that at once."""
        for rank in ranks:
            push(self.workers[rank], torch.ones(SIZE))
        self.turn()
        self.pull(*ranks, within_s=0.1)

    def cut(self, shard: int, rank: int) -> None:
        """The connection of a worker to a shard ends, as it does when packets are lost for long."""
        server = self.servers[shard]
        for name, member in list(server._members.items()):
            if member.rank == rank:
                server._remove(name)

    @property
    def clocks(self) -> list[dict[str, int]]:
        return [server.figures()["clocks"] for server in self.servers]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for server in self.servers:
            server.close()


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Callable[[int], Shards]]:
    made: list[Shards] = []

    def make(staleness: int) -> Shards:
        made.append(Shards(tmp_path, staleness))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_workers_that_lose_connections_to_different_shards_do_not_block_each_other(
    shards: Callable[[int], Shards],
) -> None:
    """Both are ahead and wait. If each began again in one shard only, as the slowest there, each
    would wait for the other in the other shard, and the slowest for both."""
    made = shards(1)
    assert made.pull(0, 1, 2) == {0, 1, 2}
    for _ in range(2):
        made.step(1, 2)
    assert made.pull(1, 2, within_s=0.2) == set()
    made.cut(shard=1, rank=1)
    made.cut(shard=0, rank=2)
    made.pull(1, 2, within_s=1.5)  # a request that is repeated finds out
    for _ in range(4):
        made.step(0)
        assert made.pull(0) == {0}
        made.step(*made.pull(1, 2, within_s=1.5))
    assert made.clocks[0] == made.clocks[1]


def test_worker_joining_within_a_push_has_one_clock_in_all_shards(
    shards: Callable[[int], Shards],
) -> None:
    """Else both would take turns from then on instead of working at the same time."""
    made = shards(0)
    first = made.workers[0]
    assert made.pull(0) == {0}
    head = ServerHeader(ServerMessageKind.PUSH, samples=1)
    part = protocol.pack_dense(np.ones(SIZE // 2, np.float32))
    first._shards[0].send(head, part)
    made.turn()
    made.pull(1, within_s=0.5)
    first._shards[1].send(head, part)
    made.turn()
    assert made.clocks[0] == made.clocks[1]
    assert made.pull(0, 1) == {0, 1}


def test_shard_that_missed_a_push_does_not_adopt_a_workers_state(
    shards: Callable[[int], Shards],
) -> None:
    """A worker's moments are those that it began with: the version of one shard says nothing about
    another one."""
    made = shards(1)
    assert made.pull(0) == {0}
    head = ServerHeader(ServerMessageKind.PUSH, samples=1)
    made.workers[0]._shards[0].send(head, protocol.pack_dense(np.ones(SIZE // 2, np.float32)))
    made.turn()
    assert made.pull(0) == {0}
    assert [server.pace.version for server in made.servers] == [1, 0]
    session = made.servers[1]._session
    made.cut(shard=1, rank=0)
    made.step(0)
    made.pull(0)
    assert made.servers[1]._session == session


def test_a_worker_of_another_shard_is_refused(rig: Callable[..., Rig]) -> None:
    made = rig(config("tap", 2, server_shards=2))
    crossed = ServerClient(made.addresses[::-1], 0, optimizer_of(made.cfg), made.cfg)
    with pytest.raises(Exception, match="has other settings of learner"):
        crossed.pull(5.0)
    crossed.close()


def test_a_worker_notices_which_shard_has_ended(tmp_path: Path) -> None:
    cfg = config("tap", 2, server_shards=2)
    addresses = [f"ipc://{tmp_path}/{shard}" for shard in range(2)]
    client = ServerClient(addresses, 0, optimizer_of(cfg), cfg)
    first = client.unreached()
    servers = [ParameterServer(cfg, at, shard=n) for n, at in enumerate(addresses)]
    try:
        assert first is not None
        assert not first.was_reached
        while client.pull(0.01) is None:
            for server in servers:
                server.turn(0.01)
        assert client.unreached() is None
        servers.pop().close()
        wait_until(lambda: client.unreached() is not None)
        lost = client.unreached()
        assert lost is not None
        assert (lost.shard, lost.was_reached) == (1, True)
        assert lost.seconds < 5.0
        servers.append(ParameterServer(cfg, addresses[1], shard=1))
        wait_until(lambda: client.unreached() is None)
    finally:
        client.close()
        for server in servers:
            server.close()
