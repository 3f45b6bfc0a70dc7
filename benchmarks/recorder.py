"""What the time ledgers cost: nanoseconds of a span, and its share of actors' and learners' time.

CartPole's processes change parts most often of all. An actor that plays unrolls of it, and a
learner that trains on one in place, take turns with ledgers and without; beside it stands the same
by count: spans of a turn times what one costs alone.

    python benchmarks/recorder.py [--seconds 10] [--json] [--save]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common import finish, parser
from penstock.actors.role import Player
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.interfaces import Welcome
from penstock.core.params import POLICY_ID, Stamp
from penstock.envs import make, probe
from penstock.learner.publisher import Publisher
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.trainer import Trainer
from penstock.profiling.ledger import COUNT, Part, TimeLedger
from penstock.profiling.status import StatusPage
from penstock.replay import Accounting, SlotQueue
from penstock.transport.inproc import InprocLink
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard

SPANS = 100_000


class Silent(TimeLedger):
    """Writes nothing down."""

    __slots__ = ()

    def switch(self, part: Part) -> None:
        pass


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--seconds", type=float, default=10.0)
    options = args.parse_args()
    page, _ = StatusPage.create()
    ledger = page.ledger("main")
    span_ns = min(one_span_ns(ledger) for _ in range(7))
    result: dict[str, Any] = {"span_ns": span_ns, "asked_ns": 1000, "asked_share": 0.01}
    rows: list[list[Any]] = [["what", "spans", "us", "of it, by count", "slower, by the clock"]]
    rows.append(["a span", 1, span_ns / 1e3, "", ""])
    config = resolve("cartpole", [])
    makers = {"an actor's unroll": playing, "a learner's step": training}
    for name, maker in makers.items():
        with_, without = maker(config, ledger), maker(config, Silent())
        before = page.lanes["main"][COUNT]
        with_()
        spans = page.lanes["main"][COUNT] - before
        slow, fast = in_turns(with_, without, options.seconds)
        by_count = spans * span_ns * 1e-9 / fast
        result[name] = {"spans": spans, "s": fast, "by_count": by_count, "slower": slow / fast - 1}
        rows.append([name, spans, fast * 1e6, by_count, slow / fast - 1])
    finish("recorder", result, rows, options)


def one_span_ns(ledger: TimeLedger) -> float:
    began = time.perf_counter_ns()
    for _ in range(SPANS // 2):
        ledger.switch(Part.STEP)
        ledger.switch(Part.INFER)
    return (time.perf_counter_ns() - began) / SPANS


def in_turns(
    one: Callable[[], object], other: Callable[[], object], seconds: float
) -> tuple[float, float]:
    """Median seconds of a call of each."""
    times: tuple[list[float], list[float]] = ([], [])
    ends_s = time.perf_counter() + seconds
    while time.perf_counter() < ends_s:
        for call, found in zip((one, other), times, strict=True):
            began_s = time.perf_counter()
            call()
            found.append(time.perf_counter() - began_s)
    return float(np.median(times[0])), float(np.median(times[1]))


def playing(config: Config, ledger: TimeLedger) -> Callable[[], object]:
    """Plays an unroll into a slot."""
    trainer = Trainer(config, probe(config.env))
    store = SlotStore(trainer.spec, 2, shared=False)
    queue = SlotQueue(store, Accounting(), max_policy_lag=1 << 60)
    board = WeightsBoard.create(trainer.layout.size, shared=False)
    Publisher(trainer.published_tensors(), board).publish(POLICY_ID, Stamp(0, 0))
    link = InprocLink(Welcome(0, 0, trainer.spec, trainer.layout, {}), store, [board], want=2)
    game = make(config.env, config.actor_envs)
    player = Player(config, link, game, 0, 0, StatusPage.create()[0], ledger)

    def play() -> None:
        player.play(0.0)
        queue.release(queue.take(1, 0))

    return play


def training(config: Config, ledger: TimeLedger) -> Callable[[], object]:
    """Trains on one batch that is in place."""
    from penstock.bench.ceiling import staged

    info = probe(config.env)
    trainer = Trainer(config, info, ledger)
    batch: StagingBatch = staged(trainer, info)

    def train() -> None:
        trainer.step(batch)
        ledger.switch(Part.WAIT)

    return train


if __name__ == "__main__":
    main()
