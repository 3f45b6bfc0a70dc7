"""Learners killed under the real supervisor at the worst moments; see also `test_learners`."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.learner.checkpoints import checkpoint_format
from train_command import SMALL, Command, Penstock, assert_balanced, last, updates

pytestmark = [pytest.mark.system, pytest.mark.timeout(150)]

COMMAND = ("train", "cartpole", "--json", *SMALL, "run.dir=run", "stop.minutes=5")


class Learners:
    """A run of several learners, in the folder of the test."""

    def __init__(self, penstock: Penstock, folder: Path, count: int, *options: str) -> None:
        self.count, self.dir = count, folder / "run"
        self.run: Command = penstock(
            *COMMAND, f"learner.count={count}", f"actors.count={count}", *options
        )

    def train_on(self, more: int = 20) -> None:
        """Wait until they have taken so many more steps."""
        before = updates(self.dir)
        self.run.wait_until(lambda: updates(self.dir) > before + more)

    def are_whole(self, restarts: int) -> bool:
        """Whether all live, after so many of them were started again."""
        now = last(self.dir)
        return bool(now["learners_alive"] == self.count and now["learners_restarted"] == restarts)

    def begin(self) -> None:
        self.train_on()
        self.run.wait_until(lambda: self.are_whole(0))

    def pid(self, rank: int) -> int:
        pid = self.run.pid_of(f"learner-{rank}")
        assert pid, f"learner-{rank} does not run"
        return pid

    def phase(self, penstock: Penstock, rank: int) -> str:
        """What a learner is doing, as `penstock status` has it; "" where nobody answers."""
        code, told, _ = penstock("status", "run", "--json").end()
        found = [p for p in told.get("processes", []) if p["name"] == f"learner-{rank}"]
        return str(found[0]["phase"]) if code == 0 and found else ""

    def kill(self, ranks: Sequence[int], signum: int = signal.SIGKILL) -> None:
        """Send a signal to learners, as near to at once as it gets."""
        for pid in [self.pid(rank) for rank in ranks]:
            os.kill(pid, signum)

    def recover(self, restarts: int) -> None:
        """Wait until those killed are back, and all train."""
        self.run.wait_until(lambda: self.are_whole(restarts))
        self.train_on()

    def end(self, unequal_steps: int = 0) -> None:
        """Stop the run; it must say that nothing but the learners' own went wrong.

        ``unequal_steps``: by how many the learners' own optimizer steps may differ.
        """
        os.kill(self.run.process.pid, signal.SIGTERM)
        code, answer, err = self.run.end()
        assert code == 143, err
        assert_balanced(answer)
        assert answer["accounting"]["lost"]["learner"] > 0
        assert answer["actors_restarted"] == 0
        saved = checkpoint_format.load(self.dir / "checkpoints" / "last")
        behind = answer["learner_steps"] - saved.meta["progress"]["learner_steps"]
        assert 0 <= behind <= unequal_steps


@pytest.mark.slow
def test_run_survives_two_learners_killed_at_once(penstock: Penstock, tmp_path: Path) -> None:
    """Half of them, the one that leads among these."""
    learners = Learners(penstock, tmp_path, 4)
    learners.begin()
    learners.kill([0, 2])
    learners.train_on()
    learners.recover(restarts=2)
    learners.end()


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["local_sgd", "ssp"])
def test_run_under_each_pace_survives_a_killed_learner(
    penstock: Penstock, tmp_path: Path, pace: str
) -> None:
    learners = Learners(penstock, tmp_path, 3, f"learner.pace={pace}")
    learners.begin()
    learners.kill([0])
    learners.train_on()
    learners.recover(restarts=1)
    # Between two averages each learner counts its own steps; it makes up to 8 of them.
    learners.end(unequal_steps=8 if pace == "local_sgd" else 0)


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(2, id="joining", marks=pytest.mark.slow),
        pytest.param(0, id="leading", marks=pytest.mark.slow),
    ],
)
def test_run_survives_a_learner_killed_while_a_group_forms(
    penstock: Penstock, tmp_path: Path, victim: int
) -> None:
    """The group forms for as long as a member of it stands still."""
    learners = Learners(penstock, tmp_path, 3)
    learners.begin()
    learners.kill([2])
    learners.run.wait_until(lambda: learners.run.pid_of("learner-2"))  # as it starts again
    learners.train_on(1)  # the two others
    learners.kill([1], signal.SIGSTOP)
    runtime = runtime_folder(learners.run)
    learners.run.wait_until(lambda: (runtime / "group-3").exists())  # where it waits for the others
    learners.kill([victim])
    learners.kill([1], signal.SIGCONT)
    learners.recover(restarts=2)
    learners.end()


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["bsp", "local_sgd", "ssp"])
def test_next_learner_saves_a_run_stopped_as_its_first_learner_dies(
    penstock: Penstock, tmp_path: Path, pace: str
) -> None:
    """Another one stands still, so that no group can form before the run ends."""
    options = (f"learner.pace={pace}", "learner.reduce.timeout_s=2", "run.grace_s=30")
    learners = Learners(penstock, tmp_path, 3, *options)
    learners.begin()
    reached = updates(learners.dir)
    stopped = learners.pid(2)
    os.kill(stopped, signal.SIGSTOP)
    first = learners.pid(0)
    os.kill(learners.run.process.pid, signal.SIGTERM)  # first, or it may be told to start again
    os.kill(first, signal.SIGKILL)
    saved = learners.dir / "checkpoints" / "last"
    learners.run.wait_until(lambda: checkpoint_format.exists(saved))
    os.kill(stopped, signal.SIGCONT)
    code, answer, err = learners.run.end()
    assert code == 143, err
    assert "another learner writes the checkpoint" in err
    assert_balanced(answer)
    stored = checkpoint_format.load(saved)
    steps = stored.meta["progress"]["learner_steps"]
    assert steps >= reached
    assert stored.arrays["optimizer/steps"] > 0


@pytest.mark.slow
def test_best_checkpoint_never_gets_worse_when_the_saving_learner_changes(
    penstock: Penstock, tmp_path: Path
) -> None:
    learners = Learners(penstock, tmp_path, 2, "checkpoint.every_steps=20")
    best, found = learners.dir / "checkpoints" / "best", [0.0]

    def rises() -> bool:
        """Whether a better one is there than before; a worse one never is."""
        now = (
            checkpoint_format.load(best).meta["best_return"]
            if checkpoint_format.exists(best)
            else None
        )
        found.append(found[-1] if now is None else now)
        assert found[-1] >= found[-2]
        return found[-1] > found[-2]

    for _ in range(3):
        learners.run.wait_until(rises)
    learners.kill([0])
    learners.train_on()
    learners.run.wait_until(rises)
    learners.recover(restarts=1)
    learners.end()
    rises()
    assert (
        checkpoint_format.load(learners.dir / "checkpoints" / "last").meta["best_return"]
        == found[-1]
    )


def runtime_folder(run: Command) -> Path:
    """Where the processes of a run meet; its supervisor holds it."""
    opened = (os.readlink(link) for link in Path(f"/proc/{run.process.pid}/fd").iterdir())
    return next(Path(path) for path in opened if Path(path).name.startswith("penstock-"))


@pytest.mark.slow
def test_resumed_first_learner_killed_before_the_first_group_loses_no_state(
    penstock: Penstock, tmp_path: Path
) -> None:
    """It alone had read the checkpoint: the other must not begin anew without it."""
    learners = Learners(penstock, tmp_path, 2)
    learners.begin()
    os.kill(learners.run.process.pid, signal.SIGTERM)
    assert learners.run.end()[0] == 143
    saved = checkpoint_format.load(learners.dir / "checkpoints" / "last").meta["progress"]
    learners = Learners(penstock, tmp_path, 2, "--resume=must", "checkpoint.every_steps=5")
    learners.run.wait_until(lambda: learners.run.pid_of("learner-1"))
    learners.kill([1], signal.SIGSTOP)
    learners.run.wait_until(lambda: learners.phase(penstock, 0) == "reducing")  # for want of 1
    learners.kill([0], signal.SIGSTOP)
    learners.kill([1], signal.SIGCONT)
    runtime = runtime_folder(learners.run)
    learners.run.wait_until(lambda: (runtime / "group-1").exists())  # where 1 waits for 0
    learners.kill([0])
    learners.recover(restarts=1)
    again = checkpoint_format.load(learners.dir / "checkpoints" / "last").meta["progress"]
    assert again["generation"] == saved["generation"] + 1
    assert again["learner_steps"] > saved["learner_steps"]
    os.kill(learners.run.process.pid, signal.SIGTERM)
    assert learners.run.end()[0] == 143


@pytest.mark.parametrize("shard", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_ends_with_a_shard_of_its_server_and_is_resumed_with_another_number(
    penstock: Penstock, tmp_path: Path, shard: int
) -> None:
    served = ("learner.pace=ssp", "learner.server_shards=2", "checkpoint.every_steps=10")
    learners = Learners(penstock, tmp_path, 2, *served, "run.restarts=0")
    learners.train_on(40)
    doomed = learners.run.pid_of(f"server-{shard}")
    assert doomed
    os.kill(doomed, signal.SIGKILL)
    code, answer, err = learners.run.end()
    assert code == 1, err
    assert f"server-{shard}: was killed by SIGKILL" in answer["error"]
    saved = checkpoint_format.load(learners.dir / "checkpoints" / "last")
    steps = saved.meta["progress"]["learner_steps"]
    assert steps >= 10
    options = ("learner.count=2", "learner.pace=ssp", "learner.server_shards=3")
    command = (*COMMAND, *options, f"stop.learner_steps={steps + 50}", "--resume", "must")
    code, answer, err = penstock(*command).end()
    assert code == 0, err
    assert answer["learner_steps"] >= steps + 50
    assert_balanced(answer)
