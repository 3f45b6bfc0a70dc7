"""Learners and actors that are started separately, as on several machines."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.learner.checkpoints import checkpoint_format
from penstock.transport.zmq import keys
from train_command import SMALL, Command, Penstock, assert_balanced, metrics, updates

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

RUN = ("cartpole", *SMALL, "run.dir=run", "checkpoint.every_steps=10")
FOLDERS = (Path("run"), Path("run/rank-1"))
TORCHRUN = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
START_S = 80.0  # four processes that import torch, on a machine that has other things to do


def free_ports(count: int) -> int:
    """The first of so many ports, side by side and free a moment ago."""
    while True:
        with ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(count)]
            probes[0].bind(("127.0.0.1", 0))
            first = int(probes[0].getsockname()[1])
            try:
                for i, probe in enumerate(probes[1:], 1):
                    probe.bind(("127.0.0.1", first + i))
            except (OSError, OverflowError):
                continue
            return first


def actors(penstock: Penstock, port: int) -> list[Command]:
    """One for each of two learners."""
    return [
        penstock("actor", f"--connect=tcp://127.0.0.1:{port + r}", f"--dir=actor-{r}", "--json")
        for r in range(2)
    ]


def saved(tmp_path: Path) -> bool:
    return (tmp_path / "run/checkpoints/last").exists() and all(
        updates(tmp_path / folder) > 50 for folder in FOLDERS
    )


def stop(commands: list[Command]) -> None:
    for command in commands:
        command.process.send_signal(signal.SIGTERM)
    assert [command.end()[0] for command in commands] == [143, 143]


def test_learners_started_by_hand_end_together_and_resume_together(
    penstock: Penstock, tmp_path: Path
) -> None:
    store, port = free_ports(1), free_ports(2)
    where = ("--world=2", f"--store=127.0.0.1:{store}", f"--bind=tcp://127.0.0.1:{port}")

    def learners(*options: str) -> list[Command]:
        command = ("learner", *RUN, *where, *options, "--json")
        return [penstock(*command, f"--rank={rank}") for rank in range(2)]

    played = actors(penstock, port)
    first, second = learners()
    first.wait_until(lambda: saved(tmp_path), START_S)
    os.kill(second.pid_of("learner-1"), signal.SIGKILL)
    ends = [command.end() for command in (first, second)]
    assert [code for code, _, _ in ends] == [1, 1]
    assert sentence(ends[0][2]) == (
        "learner-0: rank 1 has ended or cannot be reached; start all of them again with --resume "
        "auto, to go on from the last checkpoint"
    )
    assert "learner-1: was killed by SIGKILL" in ends[1][2]
    reached = updates(tmp_path / "run") + 20
    answers: list[dict[str, Any]] = []
    for command in learners("--resume=auto", f"stop.learner_steps={reached}"):
        code, answer, err = command.end()
        assert code == 0, err
        answers.append(answer)
    for answer in answers:
        assert answer["learner_steps"] >= reached
        assert_balanced(answer)
    assert {answer["trained_steps"] for answer in answers} == {answers[0]["trained_steps"]}
    assert {answer["exit_reason"] for answer in answers} == {"learner_steps"}
    assert [command.end()[0] for command in played] == [0, 0], "they end with the run"


def test_lost_shard_ends_all_learners_which_resume_from_the_checkpoint(
    penstock: Penstock, tmp_path: Path
) -> None:
    store, port = free_ports(1), free_ports(4)  # two for actors, then two for shards
    keys.make_keys(tmp_path / "keys")
    where = ("--world=2", f"--store=127.0.0.1:{store}", f"--bind=tcp://127.0.0.1:{port}")
    served = ("learner.pace=ssp", "learner.server_shards=2", "transport.curve=keys")

    def learners(*options: str) -> list[Command]:
        command = ("learner", *RUN, *where, *served, *options, "--json")
        return [penstock(*command, f"--rank={rank}") for rank in range(2)]

    played = [
        penstock(
            *("actor", f"--connect=tcp://127.0.0.1:{port + rank}", f"--dir=actor-{rank}"),
            *("--curve=keys", "--json"),
        )
        for rank in range(2)
    ]
    first, second = learners()
    first.wait_until(lambda: saved(tmp_path), START_S)
    os.kill(second.pid_of("server-1"), signal.SIGKILL)
    ends = [command.end() for command in (first, second)]
    assert [code for code, _, _ in ends] == [1, 1]
    assert sentence(ends[0][2]) == (
        "learner-0: shard 1 of the parameter server, with rank 1, has ended or cannot be reached; "
        "start all of them again with --resume auto, to go on from the last checkpoint"
    )
    assert "server-1: was killed by SIGKILL" in ends[1][2]
    before = len(metrics(tmp_path / "run"))
    reached = updates(tmp_path / "run") + 20
    for command in learners("--resume=auto", f"stop.learner_steps={reached}"):
        code, answer, err = command.end()
        assert code == 0, err
        assert answer["learner_steps"] >= reached
        assert_balanced(answer)
    assert min(m["learner_steps"] for m in metrics(tmp_path / "run")[before:]) >= 10
    at_end = checkpoint_format.load(tmp_path / "run/checkpoints/last").meta["progress"]
    assert at_end["learner_steps"] >= reached
    for command in played:  # those of a learner that ends as another has wait for the next
        command.process.send_signal(signal.SIGTERM)
        # An actor whose run is over handles no signal any more while it exits.
        assert command.end()[0] in (0, 143, -signal.SIGTERM)


@pytest.mark.slow
def test_learner_without_a_shard_may_leave_and_rejoin(penstock: Penstock, tmp_path: Path) -> None:
    store, port = free_ports(1), free_ports(3)  # two for actors, then one for the shard
    where = ("--world=2", f"--store=127.0.0.1:{store}", f"--bind=tcp://127.0.0.1:{port}")

    def learner(rank: int, *options: str) -> Command:
        command = ("learner", *RUN, *where, "learner.pace=ssp", *options, "--json")
        return penstock(*command, f"--rank={rank}")

    played = actors(penstock, port)
    first, second = (learner(rank) for rank in range(2))
    first.wait_until(lambda: saved(tmp_path), START_S)
    os.kill(second.pid_of("learner-1"), signal.SIGKILL)
    code, _, err = second.end()
    assert code == 1, err
    before = updates(tmp_path / "run")
    first.wait_until(lambda: updates(tmp_path / "run") > before + 50, START_S)
    again, lines = learner(1, "--resume=auto"), len(metrics(tmp_path / "run/rank-1"))
    first.wait_until(lambda: len(metrics(tmp_path / "run/rank-1")) > lines + 3, START_S)
    # it has the parameters of the others, not those of its start
    assert min(m["learner_steps"] for m in metrics(tmp_path / "run/rank-1")[lines:]) > before
    stop([again, first])
    stop(played)


@pytest.mark.slow
def test_torchrun_restarts_all_learners_from_the_checkpoint(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun would say that it has set it
    port = free_ports(2)
    played = actors(penstock, port)
    options = ("-m", "penstock", "learner", *RUN, f"--bind=tcp://127.0.0.1:{port}")
    run = penstock(*TORCHRUN, *options, module="torch.distributed.run")
    run.wait_until(lambda: saved(tmp_path), START_S)
    os.kill(run.pid_of("learner-1"), signal.SIGKILL)
    before, reached = len(metrics(tmp_path / "run")), updates(tmp_path / "run")
    run.wait_until(lambda: updates(tmp_path / "run/rank-1") > reached + 50, START_S)
    # Without the checkpoint, the first lines after the restart would be of the first updates.
    assert min(m["learner_steps"] for m in metrics(tmp_path / "run")[before:]) >= 20
    os.kill(run.process.pid, signal.SIGTERM)
    run.process.communicate(timeout=60)
    stop(played)


def sentence(err: str) -> str:
    """The one that says what went wrong; there must be no traceback with it."""
    assert "Traceback" not in err
    [said] = [line for line in err.splitlines() if line.startswith("penstock: ")]
    return said.removeprefix("penstock: ")


def start(penstock: Penstock, store: int, rank: int, world: int, *options: str) -> Command:
    """A learner that is to meet others at a port."""
    port = free_ports(1) - rank
    where = (f"--rank={rank}", f"--world={world}", f"--store=127.0.0.1:{store}")
    return penstock("learner", *RUN, *where, f"--bind=tcp://127.0.0.1:{port}", *options, "--json")


@pytest.mark.slow
def test_ranks_that_never_connect_are_named(penstock: Penstock) -> None:
    store = free_ports(1)
    come = [start(penstock, store, rank, 4, "run.start_timeout_s=10") for rank in (0, 2)]
    ends = [command.end() for command in come]
    assert [code for code, _, _ in ends] == [2, 2]
    said = sentence(ends[0][2])
    assert said.startswith(
        "the learners could not form a group: rank 1, 3 did not come within 10 s"
    )
    assert (
        "with the same --world and --store, check that no firewall separates it from 127.0" in said
    )


@pytest.mark.slow
def test_missing_rank_0_is_named(penstock: Penstock) -> None:
    store = free_ports(1)
    code, _, err = start(penstock, store, 1, 2, "run.start_timeout_s=5").end()
    assert code == 2
    assert sentence(err).startswith(
        f"no answer from 127.0.0.1:{store}, where rank 0 serves the store, within "
        "run.start_timeout_s = 5 s (Connection refused); start rank 0 with the same address"
    )


@pytest.mark.parametrize(
    ("worlds", "option", "difference"),
    [
        ((2, 2), "learner.lr=0.005", "learner.lr: it is {} on rank {} and {} on rank {}"),
        pytest.param(
            *((2, 3), "learner.lr=0.003", "learner.count: it is {} on rank {} and {} on rank {}"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["option", "world"],
)
def test_learners_with_different_configs_name_the_difference(
    penstock: Penstock, worlds: tuple[int, int], option: str, difference: str
) -> None:
    store = free_ports(1)
    options = ("learner.lr=0.003", option)
    learners = [start(penstock, store, r, worlds[r], options[r]) for r in range(2)]
    values: list[object] = [0.003, 0.005] if worlds[0] == worlds[1] else [2, 3]
    for rank, command in enumerate(learners):
        code, _, err = command.end()
        assert code == 2
        told = difference.format(values[rank], rank, values[1 - rank], 1 - rank)
        assert sentence(err) == (
            f"learners disagree on {told}; start all with the same config and version"
        )


def test_taken_store_port_is_refused_in_one_sentence(penstock: Penstock) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, _, err = start(penstock, port, 0, 2).end()
    assert code == 2
    assert sentence(err).startswith(f"the store at 127.0.0.1:{port} cannot be served (")
    assert sentence(err).endswith("at an address of its machine and on a port that is free")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rank=1"], "and --world, --store is missing"),
        (["--rank=0", "--world=2", "--store=nowhere"], "--store nowhere is not a host and port"),
        (
            ["--rank=0", "--world=2", "--store=127.0.0.1:1", "learner.reduce.interface=eth77"],
            "learner.reduce.interface eth77 does not exist; this machine has",
        ),
    ],
)
def test_invalid_machine_options_are_refused_in_one_sentence(
    penstock: Penstock, options: list[str], sentence: str
) -> None:
    bind = "--bind=tcp://127.0.0.1:7700"
    code, answer, err = penstock("learner", *RUN, bind, *options, "--json").end()
    assert code == 2
    assert err.startswith("penstock: ")
    assert len(err.splitlines()) == 1
    assert sentence in answer["error"]
