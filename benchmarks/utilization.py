"""How long the learner waits for data when the actors could supply more than it can train on.

The synthetic game costs next to nothing, so actors outrun the learner. Beside the run stands the
learner's ceiling, its rate on a batch that is in place already, from the same process settings. A
run with prefetching off shows what it is worth.

    python benchmarks/learner_wait.py [--seconds 30] [--json] [--save]
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from common import finish, median_of, parser
from penstock.actors.main import Player
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.envs import make, probe
from penstock.learner.publish import Publisher
from penstock.learner.staging import StagingBatch
from penstock.learner.trainer import Trainer
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Accounting, SlotQueue
from penstock.transport.base import Stamp, Welcome
from penstock.transport.inproc import InprocLink
from penstock.transport.shm.board import WeightsBoard
from penstock.transport.shm.store import SlotStore
from runs import dropped_fraction, train, trained_rate

GAME = ("env.kwargs.obs_shape=[64]", "model.hidden=[256,256]", "stop.return=null", "actors.count=1")
MODES = {
    "prefetch": ("learner.prefetch=1", "transport.slots=2"),
    "no prefetch": ("learner.prefetch=0", "transport.slots=2"),
}
WARM_UP_S = 5.0


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--seconds", type=float, default=30.0)
    options = args.parse_args()
    config = resolve("synthetic", GAME)
    supply, ceiling = rates_alone(config)
    minutes = f"stop.minutes={options.seconds / 60}"
    runs = {name: one(minutes, *GAME, *mode) for name, mode in MODES.items()}
    result = {
        "supply_steps_per_s": supply,
        "ceiling_steps_per_s": ceiling,
        "supply_over_ceiling": supply / ceiling,
        "runs": runs,
        "asked_wait_fraction": 0.05,
        "aim_wait_fraction": 0.01,
    }
    rows: list[list[Any]] = [["what", "steps/s", "waits", "of the ceiling", "queue full"]]
    rows.append(["one actor alone", supply, "", supply / ceiling, ""])
    rows.append(["learner alone, data in place", ceiling, "", 1.0, ""])
    for name, run in runs.items():
        rate = run["steps_per_s"]
        rows.append([name, rate, run["wait_fraction"], rate / ceiling, run["queue_fill"]])
    finish("learner_wait", result, rows, options)


def one(*overrides: str) -> dict[str, float]:
    summary = train("synthetic", *overrides)
    steady = [m for m in summary["intervals"] if m["time_s"] >= WARM_UP_S][:-1]
    return {
        "steps_per_s": trained_rate(summary, WARM_UP_S),
        "wait_fraction": float(np.mean([m["learner_wait_fraction"] for m in steady])),
        "compute_fraction": float(np.mean([m["learner_compute_fraction"] for m in steady])),
        "queue_fill": float(np.mean([m["queue_fill"] for m in steady])),
        "dropped": dropped_fraction(summary),
    }


def rates_alone(config: Config) -> tuple[float, float]:
    """Steps per second that one actor makes and that the learner trains on, each alone."""
    trainer = Trainer(config, probe(config.env))
    store = SlotStore(trainer.spec, 2, shared=False)
    queue = SlotQueue(store, Accounting(), max_policy_lag=1 << 60)
    board = WeightsBoard.create(trainer.layout.size, shared=False)
    Publisher(trainer.published(), board).publish(Stamp(0, 0))
    link = InprocLink(Welcome(0, 0, trainer.spec, trainer.layout, {}), store, board, want=2)
    game = make(config.env, config.actors.envs)
    player = Player(config, link, game, 0, 0, lambda: None, TimeLedger())
    batch = StagingBatch(trainer.spec, 1, trainer.device)

    def play() -> None:
        player.play(0.0)
        slots = queue.take(1, 0)
        batch.gather(slots)
        queue.release(slots)

    def supply() -> float:
        return per_second(play) * batch.steps

    def ceiling() -> float:
        return per_second(lambda: trainer.train(batch)) * batch.steps

    return median_of(supply)[0], median_of(ceiling)[0]


def per_second(call: Any) -> float:
    calls, began_s = 0, time.perf_counter()
    while time.perf_counter() < began_s + 2.0:
        call()
        calls += 1
    return calls / (time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
