"""What the evaluator does with checkpoints and with what was evaluated before."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.configs.load import resolve
from penstock.envs import probe
from penstock.launch import evaluator
from penstock.launch.evaluator import best_so_far
from penstock.learner import checkpoint
from penstock.learner.checkpoint import Checkpoint
from penstock.models.fitting import net_shape
from penstock.profiling.status import Phase
from transport_world import context, reports


def test_the_best_so_far_is_read_from_what_was_written_down(tmp_path: Path) -> None:
    assert best_so_far(tmp_path) is None
    means = (3.0, None, 12.5, 7.0)
    lines = [json.dumps({"return": {"mean": mean}}) + "\n" for mean in means]
    (tmp_path / "evaluations.jsonl").write_text("".join(lines) + '{"retu\n')
    assert best_so_far(tmp_path) == 12.5


def test_a_run_that_ends_during_an_evaluation_leaves_nothing_of_it(tmp_path: Path) -> None:
    config = resolve("cartpole", ["eval.every_s=0.01", "eval.episodes=1000000"])
    ctx = context(tmp_path, "evaluator", config=config)
    layout = net_shape(config, probe(config.env)).layout
    role = threading.Thread(target=evaluator.run, args=(ctx,))

    def wait_for(phase: Phase) -> None:
        until_s = time.monotonic() + 20
        while ctx.status.phase != phase:
            assert time.monotonic() < until_s, Phase(ctx.status.phase)
            time.sleep(0.01)

    role.start()
    try:
        wait_for(Phase.WAITING)
        state = Checkpoint(layout, np.zeros(layout.size, np.float32))
        checkpoint.save(tmp_path / "checkpoints" / "last", state)
        wait_for(Phase.ENVIRONMENT)
    finally:
        ctx.stop()
        role.join()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last"]
    assert reports(ctx, "evaluation") == []


@pytest.mark.parametrize("links", [True, False])
def test_a_checkpoint_is_held_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.stat(tmp_path / "no such file"))
    last, held, best = (tmp_path / name for name in ("last", "held", "best"))
    last.mkdir()
    for text in ("old", "new"):
        (last / "new").write_text(text)
        (last / "new").replace(last / "file")
        evaluator._hold(last, held, "file")
    (last / "new").write_text("newer")
    (last / "new").replace(last / "file")
    assert (held / "file").read_text() == "new"
    evaluator._move(held, best)
    assert (best / "file").read_text() == "new"
    assert list(held.iterdir()) == []
