"""`learner.pull`: prefetched and cached parameters, and the staleness of their gradients.

Values are those of plain SGD at a rate of 0.3: each push of a mean gradient of 1 takes 0.3 off.
A worker has its own pushes in its parameters at once, whatever it has pulled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from penstock.learner.extras.parameter_server.client import ServerClient
from server_rig import OPTIMUM, SIZE, Rig, config, pulled, push, rigs, values
from waiting import wait_until

ONES = torch.ones(SIZE)


@pytest.fixture(params=[1, 3], ids=["one shard", "three shards"])
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    yield from rigs(tmp_path, request.param)


def step(client: ServerClient) -> float:
    """One step as of a learner: the value that its gradient is of."""
    if client.needs_pull:
        pulled(client)
    found = values(client).clone()
    assert torch.equal(found, found[:1].expand(SIZE))  # the same in every shard
    client.ask_ahead()
    push(client, ONES)
    return float(found[0])


def reach(made: Rig, version: int) -> None:
    """Wait until every shard has made so many updates."""
    wait_until(lambda: all(server.pace.version == version for server in made.servers))


def requests(client: ServerClient) -> int:
    """Pulls that were sent."""
    return client._shards[0].requests


def test_worker_adds_its_own_push_to_an_earlier_prefetched_pull(
    rig: Callable[..., Rig],
) -> None:
    made = rig(config("ssp", 2, staleness=1, pull="ahead"))
    client = made.client(0)
    found = [step(client) for _ in range(4)]
    assert found == pytest.approx([0.0, -0.3, -0.6, -0.9])
    assert pulled(client).version == 3
    assert client.last.lag == 1
    for server in made.servers:
        wait_until(lambda server=server: server.pace.lag == Counter({0: 1, 1: 3}))  # type: ignore[misc]


def test_every_pull_is_prefetched_without_a_staleness_bound(rig: Callable[..., Rig]) -> None:
    made = rig(config("tap", 2, pull="ahead"))
    one, other = made.client(0), made.client(1)
    pulled(other)
    assert [step(one) for _ in range(3)] == pytest.approx([0.0, -0.3, -0.6])
    reach(made, 3)
    push(other, ONES)
    pulled(other)
    assert other.last.lag == 3


def test_cached_parameters_are_pulled_again_only_beyond_the_bound(rig: Callable[..., Rig]) -> None:
    """Clocks 0, 1, 2 use version 0. The pull for clock 3 is asked for in clock 2, at version 2."""
    made = rig(config("ssp", 2, staleness=2, pull="cached"))
    client = made.client(0)
    found = [step(client) for _ in range(7)]
    assert found == pytest.approx([-0.3 * pushes for pushes in range(7)])
    pulled(client)
    assert requests(client) == 4  # for clocks 0, 3, 5 and 7
    for server in made.servers:
        # 0, 1, 2; version 2 at 3 and 4 updates; version 4 at 5 and 6
        wait_until(lambda server=server: server.pace.lag == Counter({0: 1, 1: 3, 2: 3}))  # type: ignore[misc]
        assert not server.rejected


def test_pull_of_a_cached_worker_waits_for_the_slowest_worker(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=1, pull="cached"))
    fast, slow = made.client(0), made.client(1)
    pulled(slow)
    assert [step(fast) for _ in range(2)] == pytest.approx([0.0, -0.3])
    assert fast.pull(0.2) is None  # clock 2, and the slowest is at 0
    push(slow, ONES)
    assert step(fast) == pytest.approx(-0.9), "both own pushes once, and the other's"
    assert made.server.pace.widest == 1


@pytest.mark.parametrize("pull", ["newest", "cached"])
def test_staleness_bound_larger_than_any_message_field_is_served(
    rig: Callable[..., Rig], pull: str
) -> None:
    made = rig(config("ssp", 2, staleness=1 << 40, pull=pull))
    client = made.client(0)
    assert [step(client) for _ in range(2)] == pytest.approx([0.0, -0.3])


@pytest.mark.parametrize("pull", ["ahead", "cached"])
@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}, partial(SGD, lr=0.1, momentum=0.9)),
        ({"optimizer": "adam", "lr": 0.1, "eps": 1e-8}, partial(Adam, lr=0.1, eps=1e-8)),
    ],
)
def test_single_worker_reads_its_writes_and_equals_torch(
    rig: Callable[..., Rig], pull: str, settings: dict[str, Any], reference: Any
) -> None:
    client = rig(config("ssp", 2, staleness=3, pull=pull, **settings)).client(0)
    alone = nn.Parameter(torch.zeros(SIZE))
    optimizer = reference([alone])
    for _ in range(12):
        if client.needs_pull:
            pulled(client)
        torch.testing.assert_close(values(client), alone.detach(), rtol=1e-5, atol=1e-6)
        client.ask_ahead()
        push(client, values(client) - OPTIMUM, samples=7)
        alone.grad = alone.detach() - OPTIMUM
        optimizer.step()


def test_pushes_of_other_workers_are_added_to_own_pushes(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=3, pull="ahead"))
    one, other = made.client(0), made.client(1)
    pulled(other)
    assert step(one) == 0.0
    reach(made, 1)
    push(other, 2 * ONES)
    reach(made, 2)
    assert step(one) == pytest.approx(-0.3)  # asked for before either push
    assert step(one) == pytest.approx(-0.3 - 0.6 - 0.3)


@pytest.mark.parametrize("pull", ["ahead", "cached"])
def test_two_workers_converge_at_a_rate_that_needs_their_own_pushes(
    rig: Callable[..., Rig], pull: str
) -> None:
    """Without their own pushes they end at a distance of 0.04 and 1.3 from the optimum."""
    made = rig(config("ssp", 2, staleness=3, lr=0.4, pull=pull))
    workers = [made.client(rank) for rank in range(2)]
    for worker in workers:
        pulled(worker)
    for number in range(40):
        worker = workers[number % 2]
        if worker.needs_pull:
            pulled(worker)
        worker.ask_ahead()
        push(worker, values(worker) - OPTIMUM)
        reach(made, number + 1)
    state = workers[0].fetch(5.0)
    assert state is not None
    assert float((torch.from_numpy(state.values) - OPTIMUM).norm()) < 0.01


def test_fetching_the_state_does_not_replace_a_pull(rig: Callable[..., Rig]) -> None:
    """`fetch` brings newer values here: the next gradient needs a pull, to be as stale as told."""
    made = rig(config("ssp", 2, staleness=3, pull="cached"))
    client = made.client(0)
    step(client)
    state = client.fetch(5.0)
    assert state is not None
    assert state.values.tolist() == pytest.approx([-0.3] * SIZE)
    assert client.needs_pull
    assert step(client) == pytest.approx(-0.3)
    for server in made.servers:
        wait_until(lambda server=server: server.pace.lag == Counter({0: 2}))  # type: ignore[misc]


def test_pending_prefetched_pull_ends_with_the_run(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=1, pull="ahead"))
    fast, slow = made.client(0), made.client(1)
    pulled(slow)
    step(fast)
    step(fast)
    assert fast.pull(0.1) is None
    slow.push(0, stop=True)
    assert pulled(fast).stop


@pytest.mark.parametrize("pull", ["newest", "ahead"])
def test_a_push_beyond_the_bound_is_refused(rig: Callable[..., Rig], pull: str) -> None:
    """Whatever a worker believes, the server counts what its parameters include."""
    made = rig(config("ssp", 2, staleness=1, pull=pull))
    client = made.client(0)
    pulled(client)
    for _ in range(4):
        push(client, ONES)
    for server in made.servers:
        wait_until(lambda server=server: server.rejected == {"not_pulled": 2})  # type: ignore[misc]
        assert server.pace.lag == Counter({0: 1, 1: 1})
