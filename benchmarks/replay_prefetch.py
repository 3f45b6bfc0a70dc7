"""What drawing batches ahead gives a learner (`learner.prefetch=2`), of what it could give.

A learner draws by turns from two replays of its process, which are filled and stay as they are: one
draws in the learner's thread, one ahead in a thread of its own. A pair of such turns, one after the
other, takes a fraction of a second, so that the machine's other users slow both alike; the gain is
the median of all pairs. A share s of drawing could at most make the learner 1 / (1 - s) times as
fast; `of possible` is the achieved part. `benchmarks/replay_utilization.py` measures whole runs.

    python benchmarks/replay_prefetch.py [--seconds 30] [--json] [--save]
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from common import finish, parser
from penstock.actors.role import Player
from penstock.configs.load import resolve
from penstock.core.interfaces import StepHooks, Welcome
from penstock.core.params import POLICY_ID, Stamp
from penstock.envs import make, probe
from penstock.learner.factory import AnyTrainer, make_trainer
from penstock.learner.publisher import Publisher
from penstock.learner.role import make_source
from penstock.learner.sources.replay import ReplayDataSource
from penstock.profiling.ledger import TimeLedger
from penstock.profiling.status import StatusPage
from penstock.replay import Accounting
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.weights_board import WeightsBoard
from replay_utilization import AHEAD, CASES, ONE, Workload

IN_LINE = "0"  # learner.prefetch
TURN_S = 0.1
STORED = 2000
UNBOUND = ("replay.samples_per_insert=null", f"replay.min_size={STORED}", "replay.capacity=4000")


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--seconds", type=float, default=30.0, help="of each case")
    args.add_argument("--only", choices=CASES, help="one case instead of all")
    options = args.parse_args()
    cases = {n: w for n, w in CASES.items() if options.only in (None, n)}
    found = {name: case(workload, options.seconds) for name, workload in cases.items()}
    heads = ("ms_in_line", "ms_ahead", "drawing", "waits", "gain", "possible", "of_possible")
    rows = [["learner", *heads], *([n, *(r[h] for h in heads)] for n, r in found.items())]
    asked = {"waits": 0.01, "of_possible": 0.95}
    finish("replay_prefetch", {"cases": found, "asked": asked}, rows, options)


def case(workload: Workload, seconds: float) -> dict[str, Any]:
    """Turns of both modes for about ``seconds``, and their medians."""
    settings = (*ONE, *workload.options, *UNBOUND)
    config = resolve(workload.target, (*settings, "learner.prefetch=0"))
    trainer = make_trainer(config, probe(config.env), TimeLedger())
    with ExitStack() as stack:
        sources = {
            mode: filled(workload.target, (*settings, f"learner.prefetch={mode}"), trainer, stack)
            for mode in (IN_LINE, AHEAD)
        }
        for source in sources.values():
            measured(trainer, source, 3)
        count = max(2, round(TURN_S / measured(trainer, sources[IN_LINE], 3)[0]))
        taken: dict[str, list[tuple[float, float]]] = {IN_LINE: [], AHEAD: []}
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            first = len(taken[AHEAD]) % 2
            for mode in ((IN_LINE, AHEAD), (AHEAD, IN_LINE))[first]:
                taken[mode].append(measured(trainer, sources[mode], count))
    in_line, ahead = np.array(taken[IN_LINE]), np.array(taken[AHEAD])
    drawing = float(in_line[:, 1].sum() / in_line[:, 0].sum())
    gain, possible = median(in_line[:, 0] / ahead[:, 0]), 1 / (1 - drawing)
    return {
        "pairs": len(ahead),
        "ms_in_line": median(in_line[:, 0]) * 1e3,
        "ms_ahead": median(ahead[:, 0]) * 1e3,
        "drawing": drawing,
        "waits": float(ahead[:, 1].sum() / ahead[:, 0].sum()),
        "gain": gain,
        "possible": possible,
        "of_possible": gain / possible,
    }


def filled(
    target: str, settings: tuple[str, ...], trainer: AnyTrainer, stack: ExitStack
) -> ReplayDataSource:
    """A source whose replay has `STORED` steps. Its actor has stopped."""
    config = resolve(target, settings)
    folder = Path(stack.enter_context(TemporaryDirectory()))
    pages = [StatusPage.create() for _ in range(2)]
    for _, descriptor in pages:
        os.close(descriptor)
    source = make_source(config, trainer, Accounting(), 1, 2, TimeLedger(), pages[0][0])
    assert isinstance(source, ReplayDataSource)
    board = WeightsBoard.create(trainer.layout.size)
    Publisher(trainer.published_tensors(), board).publish(POLICY_ID, Stamp(0, 0))
    welcome = Welcome(1, 0, trainer.spec, trainer.layout, {})
    host = ShmHost(folder / "socket", welcome, [board], source.store)
    for each in (board, source.store, host, source):
        stack.callback(each.close)
    slots = config.transport.slots
    source.open(host)
    joined: list[ShmLink] = []

    def join() -> None:
        joined.append(ShmLink(folder / "socket", trainer.spec, slots))

    served(join, lambda: source.next(0.01))
    player = Player(
        config, joined[0], make(config.env, config.actor_envs), 0, 0, pages[1][0], TimeLedger()
    )
    stack.callback(player.close)
    while source.figures()["replay_size"] < STORED:
        player.play(0.1)
        source.next(0.0)
    return source


def served(task: Callable[[], None], serve: Callable[[], object]) -> None:
    """Run a task in a thread, and serve it meanwhile."""
    thread = threading.Thread(target=task)
    thread.start()
    while thread.is_alive():
        serve()


class Announcing(StepHooks):
    """Tells a source of each backward pass."""

    def __init__(self, source: ReplayDataSource) -> None:
        self._source = source

    def before_backward(self) -> None:
        self._source.on_backward()


def measured(trainer: Any, source: ReplayDataSource, updates: int) -> tuple[float, float]:
    """Seconds of an update, and those of them that pass until there is a batch."""
    hooks = Announcing(source)
    waited_s, began_s = 0.0, time.perf_counter()
    for _ in range(updates):
        asked_s = time.perf_counter()
        while (batch := source.next(1.0)) is None:
            pass
        waited_s += time.perf_counter() - asked_s
        source.release(batch, trainer.step(batch, hooks=hooks))
    return (time.perf_counter() - began_s) / updates, waited_s / updates


if __name__ == "__main__":
    main()
