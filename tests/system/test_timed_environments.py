"""Runs that determine the number of environments of an actor, with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.configs.load import load_run
from penstock.monitor.run_folder.lines import objects
from train_command import SMALL, Penstock

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

NUMBERS = (16, 32, 64)  # that keep a batch of unrolls of 32 steps within the bounds


def notes(run_dir: Path) -> list[str]:
    """What the run printed of its environments."""
    found: list[dict[str, Any]] = objects((run_dir / "logs" / "events.jsonl").read_bytes())
    return [e["text"] for e in found if e["text"].startswith("actors.envs: ")]


def test_number_of_environments_is_timed_stored_and_kept_by_a_resume(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_dir = tmp_path / "run"
    options = [*SMALL, "actors.unroll=32", "actors.envs=auto", "run.dir=run"]
    code, _, err = penstock("train", "cartpole", "--json", *options, "stop.learner_steps=20").end()
    assert code == 0, err
    envs = load_run(run_dir).actors.envs
    assert envs in NUMBERS
    [note] = notes(run_dir)
    assert f"actors.envs: {envs} environments for each actor, " in note
    assert "timed now" in note
    assert len(list((tmp_path / "cache" / "penstock" / "envs").glob("*.json"))) == 1
    config = run_dir / "config.yaml"
    kept = next(n for n in NUMBERS if n != envs)
    config.write_text(config.read_text().replace(f"envs: {envs}", f"envs: {kept}"))
    further = [*options, "stop.learner_steps=40", "--resume", "must"]
    code, _, err = penstock("train", "cartpole", "--json", *further).end()
    assert code == 0, err
    assert load_run(run_dir).actors.envs == kept
    assert f"{kept} environments for each actor, as the run began" in notes(run_dir)[-1]
    assert "resumed with changed options: stop.learner_steps 20 -> 40" in err
