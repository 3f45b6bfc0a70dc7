"""The order `timeline`: what the threads of a live run did in its last minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.watch.orders import Orders
from penstock.watch.profiles import recorded_of
from train_command import SMALL, Penstock, trained

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_a_timeline_of_a_living_run_has_all_its_processes(
    penstock: Penstock, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = penstock("train", "cartpole", *SMALL, "run.dir=run", "stop.minutes=10")
    run.wait_until(lambda: trained(folder))
    assert Orders().give("timeline", folder) == {}
    found = recorded_of(folder)
    parts = {
        thread["name"]: {found["parts"].get(sign) for sign in thread["signs"]}
        for thread in found["threads"]
    }
    assert {"forward", "backward"} <= parts["learner-0/main"]
    assert {"step", "infer"} <= parts["actor-0/main"]
    assert "wait" in parts["supervisor-0/main"]
    assert 0 < found["to"] - found["from"] < 61e6
    assert "the trace has" in found["note"]
    (folder / "timeline.json").unlink()
    (folder / "timeline.json").mkdir()
    with pytest.raises(UserError, match=r"no timeline was recorded: .* could not be written"):
        Orders().give("timeline", folder)
    run.process.terminate()
    run.process.communicate(timeout=60)
    assert run.process.returncode == 143
    with pytest.raises(UserError):
        Orders().give("timeline", folder)
