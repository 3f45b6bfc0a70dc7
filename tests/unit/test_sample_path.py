"""Which files a sample goes through on one host, from the environment's step to the gradient.

`python tests/unit/test_sample_path.py [TARGET [OVERRIDE ...]]` prints the way.

The way begins where the environment returns from the last step of an unroll, and ends where
gradients are computed of a batch that holds it. A file is on it if one of its functions runs on the
way; its place is where it first has the sample: where it is called with it or a call returns it.
While a source is asked for a batch, that is where its functions return: a request goes against the
way. What the first unrolls alone do is set-up, and so is not seen.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.actors.role import Player
from penstock.configs.load import resolve
from penstock.core.interfaces import Welcome
from penstock.core.params import POLICY_ID, Stamp
from penstock.envs import make, probe
from penstock.learner.factory import make_trainer
from penstock.learner.publisher import Publisher
from penstock.learner.role import make_source
from penstock.profiling.ledger import TimeLedger
from penstock.profiling.status import StatusPage
from penstock.replay import Accounting
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.weights_board import WeightsBoard

ROOT = Path(__file__).resolve().parents[2]
ASIDE = {  # with all that they call
    "profiling/": "time ledger and status page",
    "replay/accounting.py": "counts",
    "learner/progress.py": "counts",
    "algos/diagnostics.py": "figures",
    "configs/schedules.py": "numbers of the config",
    "learner/device_statistics.py": "figures",
    "transport/shm/host.py": "who joins and leaves",
    "transport/shm/arena.py": "the order of stores",
    "models/acting/": "the policy's memory is reset before its next step",
    "learner/base_trainer.py": "the statistics before a batch, for an update that is skipped",
    "core/interfaces/": "hooks that do nothing",
    "learner/sync/": "what learners agree on: sums, no samples",
    "learner/optimizers/": "gradients are set to zero before they are computed",
}
FILES, ROOM_CHANGES = 22, 9


class Way:
    """Files in the order in which they have the sample; a profiler of the calling thread."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._asking = False
        self._aside: FrameType | None = None
        self._over = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        name = file_of(frame)
        if self._over or event not in ("call", "return"):
            return
        if self._aside is not None:
            if event == "return" and frame is self._aside:
                self._aside = None
            return
        if not name:
            if event == "return" and frame.f_code.co_name == "step" and is_env(frame.f_back):
                self.files.clear()  # only the last step counts
                self._pass_back(frame)
        elif event == "call":
            if name.startswith(tuple(ASIDE)):
                self._aside = frame
            elif not self._asking:
                self.files.setdefault(name)
            self._over = name == "algos/ops/backward.py"
        elif self._asking:
            self.files.setdefault(name)
        else:
            self._pass_back(frame)

    def _pass_back(self, frame: FrameType) -> None:
        """A call returns what it has to the nearest file of the project."""
        caller = frame.f_back
        while caller is not None and not file_of(caller):
            caller = caller.f_back
        if caller is not None:
            self.files.setdefault(file_of(caller))

    @contextmanager
    def asking(self) -> Iterator[None]:
        self._asking = True
        yield
        self._asking = False


def file_of(frame: FrameType) -> str:
    """Below the project's root; empty for what belongs to no room, and for the seam of devices,
    whose functions do nothing on a CPU."""
    name = frame.f_code.co_filename.removeprefix(f"{ROOT}/").removeprefix("penstock/")
    return name if not name.startswith(("/", "<", "tests/", ".venv/", "device/")) else ""


def is_env(frame: FrameType | None) -> bool:
    return frame is not None and file_of(frame) == "envs/vector_env.py"


def rooms(files: Sequence[str]) -> list[str]:
    """Where it goes, one room after the other."""
    return [room for room, _ in groupby(name.partition("/")[0] for name in files)]


def way_of_a_sample(target: str, *overrides: str) -> list[str]:
    """The files that an unroll's last step goes through, actor and learner in this thread."""
    config = resolve(target, ["learner.prefetch=0", "learner.device=cpu", *overrides])
    page, descriptor = StatusPage.create()
    os.close(descriptor)
    ledger, way = TimeLedger(), Way()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainer = make_trainer(config, probe(config.env), ledger)
        source = make_source(config, trainer, Accounting(), 1, 2, ledger, page)
        board = WeightsBoard.create(trainer.layout.size)
        Publisher(trainer.published_tensors(), board).publish(POLICY_ID, Stamp(0, 0))
        welcome = Welcome(1, 0, trainer.spec, trainer.layout, {})
        host = ShmHost(folder / "socket", welcome, [board], source.store)
        for each in (board, source.store, host):
            stack.callback(each.close)
        link = attached(
            host, lambda: ShmLink(folder / "socket", trainer.spec, config.transport.slots)
        )
        source.open(host)
        stack.callback(source.close)
        game = make(config.env, config.actor_envs)
        player = Player(config, link, game, 0, 0, page, ledger)
        stack.callback(player.close)

        def turn() -> None:
            batch = None
            while batch is None:
                player.play(1.0)
                with way.asking():
                    batch = source.next(0.0)
            source.release(batch, trainer.step(batch, trainer.plan_updates(batch)))

        for _ in range(3):
            turn()
        before = sys.getprofile()
        sys.setprofile(way)
        try:
            turn()
        finally:
            sys.setprofile(before)
        link.close()
    return list(way.files)


def attached(host: ShmHost, join: Callable[[], ShmLink]) -> ShmLink:
    """What ``join`` returns, while ``host`` is served."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(join()))
    thread.start()
    while thread.is_alive():
        host.poll(0.01)
    return found[0]  # type: ignore[no-any-return]


def table_of_the_page() -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## The path of a sample\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)


def test_path_of_a_sample_has_the_documented_files() -> None:
    files = way_of_a_sample("cartpole", "actors.envs=4", "actors.unroll=8", "actors.count=1")
    assert table_of_the_page() == files, "docs/architecture.md has another way"
    assert files[0] == "envs/vector_env.py"
    assert files[-1] == "algos/ops/backward.py"
    assert len(files) <= FILES, "\n".join(files)
    assert len(rooms(files)) - 1 <= ROOM_CHANGES, " → ".join(rooms(files))


if __name__ == "__main__":
    target, *overrides = sys.argv[1:] or ["cartpole"]
    found = way_of_a_sample(target, *overrides)
    print("\n".join(found))
    passed = rooms(found)
    print(f"{len(found)} files, {len(passed) - 1} changes of room: {' → '.join(passed)}")
