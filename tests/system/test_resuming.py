"""A run resumes after its checkpoints were damaged, and from a named checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.errors import UserError
from penstock.launch import run
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import FILE

pytestmark = [pytest.mark.system, pytest.mark.timeout(60)]

SMALL = ["transport.kind=inproc", "actors.envs=8", "actors.unroll=8", "checkpoint.every_steps=4"]


def steps_in(folder: Path) -> int:
    return int(checkpoint_format.load(folder).meta["progress"]["learner_steps"])


def test_damaged_run_resumes_from_its_newest_intact_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    last = folder / "checkpoints" / "last"
    until = [*SMALL, "stop.return=null"]
    assert (
        run.train("cartpole", [*until, "stop.learner_steps=12", f"run.dir={folder}"], "no", True)
        == 0
    )
    data = bytearray((last / FILE).read_bytes())
    data[len(data) // 2] ^= 4
    (last / FILE).write_bytes(data)
    assert run.train(str(folder), ["stop.learner_steps=16"], "auto", True) == 0
    assert "the checksum of" in (said := capfd.readouterr().err)
    assert "the run resumes from" in said
    assert (last.with_name("damaged-1") / FILE).read_bytes() == bytes(data)
    assert steps_in(last) == 16
    new = tmp_path / "new"
    source = str(last.with_name("step-12"))
    options = [*until, f"run.dir={new}", "stop.learner_steps=14"]
    assert run.train("cartpole", options, "no", True, source) == 0
    summary: dict[str, Any] = json.loads((new / "summary.json").read_text())
    assert (summary["learner_steps"], steps_in(new / "checkpoints" / "last")) == (14, 14)
    assert summary["resumed"]
    for path in (last, *last.parent.glob("step-*")):
        (path / FILE).write_bytes(b"")
    assert run.train(str(folder), ["stop.learner_steps=20"], "auto", True) == 2
    assert not (last / FILE).read_bytes(), "it is not begun anew over a damaged run"


def test_folder_of_a_run_is_refused_as_a_target(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("env: {id: CartPole-v1}\n")
    with pytest.raises(UserError, match="resume it with --resume auto, or give"):
        run.train(str(tmp_path), [], "no", True)
