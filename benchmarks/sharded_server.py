"""The step of a learner with a parameter server of one shard and of several, each on a host.

    python benchmarks/sharded_server.py [--shards 4] [--link 100mbit] [--codec bf16] [--save]

A worker pushes a gradient of the Nature CNN's size, and pulls the parameters. Each shard
has a host of its own, whose link is limited both ways; the worker's link is not. Steps with one
shard and with several alternate. Hosts are network namespaces of this machine, so root is needed.
It fails where the interface of a shard has not counted the bytes of its part, so that no other way
between the processes is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from common import finish, parser
from hosts import LINKS, Hosts, hosts
from penstock.configs.sections import LearnerConfig
from penstock.learner.extras.parameter_server.client import ServerClient
from penstock.learner.extras.parameter_server.server import ParameterServer
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer

SIZE = 1_686_693  # parameters of the Nature CNN on Pong
PORT = 7800
WARM_UP, STEPS = 2, 12
MBIT = {"100mbit": 100.0, "1gbit": 1000.0}
MUST = 0.35
HEADERS = 0.1  # most that headers, acknowledgements and repeated requests add to the messages
END_S = 10.0


def config(shards: int, codec: str) -> LearnerConfig:
    """Two learners at a pace that never waits; one of them is simulated."""
    settings = {"pace": "tap", "count": 2, "server_shards": shards, "lr": 1e-4}
    return LearnerConfig.model_validate(settings | {"reduce": {"codec": codec}})


def serve(bind: str, shard: int, shards: int, codec: str) -> None:
    """One shard, until it is killed."""
    torch.set_num_threads(1)
    server = ParameterServer(config(shards, codec), bind, shard=shard)
    print("ready", flush=True)
    while True:
        server.turn(0.05)


def work(groups: list[list[str]], codec: str) -> None:
    """Time steps with each group of addresses in turn; prints their seconds as JSON."""
    torch.set_num_threads(1)
    clients = []
    for addresses in groups:
        cfg = config(len(addresses), codec)
        optimizer = FlatOptimizer([("all", nn.Parameter(torch.zeros(SIZE)))], cfg)
        optimizer.grads.normal_()
        clients.append(ServerClient(addresses, 0, optimizer, cfg))
        pull(clients[-1])
    seconds: list[list[float]] = [[] for _ in groups]
    for _ in range(WARM_UP + STEPS):
        for client, found in zip(clients, seconds, strict=True):
            began_s = time.perf_counter()
            client.push(1)
            pull(client)
            found.append(time.perf_counter() - began_s)
    print(json.dumps([found[WARM_UP:] for found in seconds]), flush=True)
    for client in clients:
        client.close()


def pull(client: ServerClient) -> None:
    """Wait for the parameters."""
    while client.pull(1.0) is None:
        pass


def measure(made: Hosts, stack: ExitStack, shards: int, link: str, codec: str) -> list[list[float]]:
    """Seconds of each step, with one shard and with ``shards``.

    Raises SystemExit where the traffic of a shard is not that of its part.
    """
    groups = [[f"tcp://{made.addresses[0]}:{PORT}"]]
    groups.append([f"tcp://{address}:{PORT}" for address in made.addresses[1 : shards + 1]])
    host = 0
    for addresses in groups:
        for shard, address in enumerate(addresses):
            of = f"{shard}/{len(addresses)}"
            program = [sys.executable, __file__, "--serve", address, of, "--codec", codec]
            process = subprocess.Popen(
                made.command(host, program), stdout=subprocess.PIPE, text=True
            )
            stack.callback(end, process)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            made.limit_both_ways(host, link)
            host += 1
    worker = [sys.executable, __file__, "--work", json.dumps(groups), "--codec", codec]
    done = subprocess.run(made.command(host, worker), stdout=subprocess.PIPE, text=True, check=True)
    for shard in range(shards + 1):
        check_traffic(made.traffic(shard), 1 if shard == 0 else shards, codec)
    found: list[list[float]] = json.loads(done.stdout)
    return found


def check_traffic(traffic: tuple[int, int], shards: int, codec: str) -> None:
    """Compare bytes received and sent by one of ``shards`` with those of its messages.

    It receives the first state (parameters and two moments, in fp32) and a push in each step, and
    sends the parameters once more than there are steps.
    """
    nbytes = 2 if codec == "bf16" else 4
    steps = WARM_UP + STEPS
    wanted = (SIZE * (3 * 4 + steps * nbytes) / shards, SIZE * (steps + 1) * nbytes / shards)
    for name, found, payload in zip(("received", "sent"), traffic, wanted, strict=True):
        if not payload <= found <= (1 + HEADERS) * payload:
            raise SystemExit(
                f"one of {shards} shards has {name} {found} bytes, and its messages have "
                f"{payload:.0f}; something else was measured"
            )


def end(process: subprocess.Popen[str]) -> None:
    """Kill a server, which keeps nothing."""
    process.kill()
    process.communicate(timeout=END_S)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shards", type=int, default=4)
    made.add_argument("--link", choices=list(MBIT), default="100mbit", help="of each shard")
    made.add_argument("--codec", choices=["none", "bf16"], default="none")
    made.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    made.add_argument("--work", help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.serve:
        shard, shards = map(int, args.serve[1].split("/"))
        return serve(args.serve[0], shard, shards, args.codec)
    if args.work:
        return work(json.loads(args.work), args.codec)
    assert args.link in LINKS
    with hosts(args.shards + 2) as found, ExitStack() as stack:
        seconds = measure(found, stack, args.shards, args.link, args.codec)
    one, several = (statistics.median(steps) for steps in seconds)
    nbytes = 2 if args.codec == "bf16" else 4
    on_link_s = 2 * nbytes * SIZE * 8 / (MBIT[args.link] * 1e6)
    rows: list[list[Any]] = [
        ["shards", "step (s)", "slowest (s)", "of one shard", "link alone (s)"]
    ]
    for count, steps, median in ((1, seconds[0], one), (args.shards, seconds[1], several)):
        rows.append([count, median, max(steps), median / one, on_link_s / count])
    result = {
        "parameters": SIZE,
        "link": args.link,
        "codec": args.codec,
        "shards": args.shards,
        "steps_s": {"1": seconds[0], str(args.shards): seconds[1]},
        "ratio": several / one,
        "must": MUST,
    }
    name = "sharded_server" if args.codec == "none" else f"sharded_server_{args.codec}"
    finish(name, result, rows, args)
    return None


if __name__ == "__main__":
    main()
