"""Hostile processes on this host: a false learner, and one that writes to the store."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import zmq

from penstock.configs.load import resolve
from penstock.transport import wire
from penstock.transport.wire import Header, MessageKind
from train_command import SMALL, Command, Penstock, metrics

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

BAIT = """
from pathlib import Path

Path("imported").touch()

def make(**kwargs):
    Path("called").touch()
"""


@contextmanager
def stranger(config: dict[str, Any], address: str = "tcp://127.0.0.1:*") -> Iterator[str]:
    """Answers every HELLO with a sound WELCOME of this config; the address where it does."""
    meta = {
        "spec": {"unroll": 1, "envs": 1, "side": 0, "columns": [["x", "<f4", [], "unroll"]]},
        "layout": [["w", [1]]],
        "config": config,
        "boot_id": "",
        "unix_path": "",
    }
    welcome = wire.encode(Header(MessageKind.WELCOME, run_id=7), meta)
    stop = threading.Event()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(address)
    bound = router.getsockopt_string(zmq.LAST_ENDPOINT)

    def answer() -> None:
        while not stop.is_set():
            if router.poll(20):
                peer, *_ = router.recv_multipart()
                router.send_multipart([peer, *welcome])

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield bound
    finally:
        stop.set()
        thread.join()
        context.destroy(0)


def config_of(*overrides: str) -> dict[str, Any]:
    return resolve("bait:make", overrides).model_dump(mode="json")


@pytest.mark.parametrize(
    "overrides", [(), ("env.id=CartPole-v1", "env.wrappers=[bait:make]")], ids=["env", "wrapper"]
)
def test_actor_never_runs_code_that_a_foreign_learner_names(
    penstock: Penstock, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    (tmp_path / "bait.py").write_text(BAIT)
    with stranger(config_of(*overrides)) as address:
        code, answer, err = penstock("actor", "--connect", address, "--dir=a", "--json").end()
    assert code == 2, err
    assert "Traceback" not in err
    assert answer["error"].startswith(f"the learner at {address} names env.")
    assert "'bait:make', which this actor would run or open" in answer["error"]
    assert not (tmp_path / "imported").exists()


def test_code_outside_the_allow_list_is_not_run_from_any_learner(
    penstock: Penstock, tmp_path: Path
) -> None:
    (tmp_path / "bait.py").write_text(BAIT)
    with stranger(config_of(), f"ipc://{tmp_path}/wire") as address:
        options = ("--connect", address, "--dir=a", "--allow=my_game:*", "--json")
        code, answer, _ = penstock("actor", *options).end()
        assert (code, "none of --allow my_game:*" in answer["error"]) == (2, True)
        assert not (tmp_path / "imported").exists()
        # The folder is this user's own: without --allow it is trusted, and the bait is run.
        code, answer, _ = penstock("actor", *options[:3], "--json").end()
    assert (tmp_path / "called").exists()
    assert (code, "environment bait:make must return" in answer["error"]) == (2, True)


def test_unreadable_config_of_a_learner_is_reported_in_one_sentence(penstock: Penstock) -> None:
    with stranger({"env": {"id": 3}, "of_the_future": {}}) as address:
        code, answer, err = penstock("actor", "--connect", address, "--dir=a", "--json").end()
    assert code == 2
    assert "Traceback" not in err
    assert f"the config that the learner at {address} sent cannot be read" in answer["error"]


def test_foreign_data_in_the_store_is_reported_in_one_sentence(penstock: Penstock) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    where = ("--rank=0", "--world=2", f"--store=127.0.0.1:{port}", "learner.reduce.interface=lo")
    learner = penstock("learner", "cartpole", *SMALL, *where, "run.dir=run", "--json")
    store = dist.PrefixStore(  # type: ignore[attr-defined]
        "attempt-0",
        dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=False, wait_for_workers=False
        ),
    )
    store.set("hello-1", "no JSON")
    code, answer, err = learner.end()
    assert code == 2
    assert "Traceback" not in err
    assert "what the store holds for rank 1 is not what a learner of Penstock" in answer["error"]


def test_actors_join_by_the_folder_of_the_run(penstock: Penstock, tmp_path: Path) -> None:
    """The default without --bind: a socket that only this user reaches, named by the run."""
    (tmp_path / "bait.py").write_text(
        "import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    )
    actor = penstock("actor", "--connect", "./run", "--dir=a", "--json")
    learner = penstock("learner", "bait:make", *SMALL, "run.dir=run", "--json")
    learner.wait_until(lambda: _trains(learner, tmp_path / "run"))
    folder = tmp_path / "run/sockets"
    assert folder.stat().st_mode & 0o777 == 0o700
    for command in (learner, actor):
        command.process.send_signal(signal.SIGINT)
    code, _, err = learner.end()
    assert code == 130
    assert f"start actors with: penstock actor --connect ipc://{folder}/wire" in err
    assert actor.end()[0] == 130


def _trains(learner: Command, run_dir: Path) -> bool:
    time.sleep(0.1)
    return any(line["learner_steps"] > 1 for line in metrics(run_dir))
