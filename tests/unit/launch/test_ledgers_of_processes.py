"""Time ledgers and processor times that the supervisor reads from a stopped process."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.engines.local import LocalHandle
from penstock.launch.ledgers import Ledgers

SPEC = RoleSpec("actor", 0, "does_not_matter:run", Stage.ACTORS)


def test_processor_time_is_reported_from_the_second_interval_of_a_process(tmp_path: Path) -> None:
    child = LocalHandle(SPEC, 0, {}, tmp_path / "actor-0.log")
    try:
        child.signal(signal.SIGSTOP)
        child.page.ledger("main")
        ledgers, children = Ledgers(), {"actor-0": child}
        assert ledgers.interval({}) == {"ledgers": {}, "cpu": {}}
        first = ledgers.interval(children)
        assert (set(first["ledgers"]), first["cpu"]) == ({"actor-0"}, {})
        assert ledgers.interval(children)["cpu"] == {"actor-0": 0.0}
    finally:
        child.signal(signal.SIGKILL)
        child.reap()


def test_exhausted_descriptors_give_no_figures_and_no_error(tmp_path: Path) -> None:
    child = LocalHandle(SPEC, 0, {}, tmp_path / "actor-0.log")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        child.signal(signal.SIGSTOP)
        child.page.ledger("main")
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        figures = Ledgers().interval({"actor-0": child})
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert figures == {"ledgers": {}, "cpu": {}}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        child.signal(signal.SIGKILL)
        child.reap()
