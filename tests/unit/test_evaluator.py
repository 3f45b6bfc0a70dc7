"""What the evaluator does with checkpoints and with what was evaluated before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.launch import evaluator
from penstock.launch.evaluator import best_so_far


def test_the_best_so_far_is_read_from_what_was_written_down(tmp_path: Path) -> None:
    assert best_so_far(tmp_path) is None
    means = (3.0, 12.5, 7.0)
    lines = [json.dumps({"return": {"mean": mean}}) + "\n" for mean in means]
    (tmp_path / "evaluations.jsonl").write_text("".join(lines))
    assert best_so_far(tmp_path) == 12.5


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
