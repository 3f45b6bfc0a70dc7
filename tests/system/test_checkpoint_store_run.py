"""A run with checkpoints in a simulated S3 is resumed on a host that has nothing else of it."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from train_command import SMALL, Penstock, assert_balanced

pytestmark = pytest.mark.system


def test_a_run_is_resumed_on_another_host_from_its_store(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "simulated")
        fsspec.filesystem("s3").mkdir("penstock-test")
        command = ("train", "cartpole", "--json", *SMALL, "checkpoint.store=s3://penstock-test/run")
        first = penstock(*command, "run.dir=here", "stop.env_steps=20000")
        code, before, err = first.end()
        assert code == 0, err
        code, _, err = penstock(*command, "run.dir=there", "stop.env_steps=30000").end()
        assert code == 2
        assert "holds the checkpoints of a run; resume that by --resume auto" in err
        again = (*command, "run.dir=there", "stop.env_steps=30000", "--resume", "must")
        code, after, err = penstock(*again).end()
        assert code == 0, err
        assert f"takes g0-step-{before['learner_steps']}.safetensors from s3://" in err
        assert after["learner_steps"] > before["learner_steps"]
        assert after["env_steps"] >= 30000 > before["env_steps"]
        assert_balanced(after)
        names = {p.rpartition("/")[2] for p in fsspec.filesystem("s3").ls("penstock-test/run")}
        assert f"g1-step-{after['learner_steps']}.safetensors" in names
    finally:
        server.stop()
