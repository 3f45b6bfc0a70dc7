"""A worker of a parameter server, as a program that a test can kill.

    python server_worker.py ADDRESSES RANK SIZE CONFIG

Takes parameters once, says so on standard output, and never pushes.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

from penstock.configs.sections import LearnerConfig
from penstock.learner.extras.parameter_server.client import ServerClient
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer


def main() -> None:
    addresses, rank, size, text = sys.argv[1:]
    cfg = LearnerConfig.model_validate_json(text)
    optimizer = FlatOptimizer([("x", nn.Parameter(torch.zeros(int(size))))], cfg)
    client = ServerClient(addresses.split(","), int(rank), optimizer, cfg)
    while client.pull(1.0) is None:
        pass
    print("working", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
