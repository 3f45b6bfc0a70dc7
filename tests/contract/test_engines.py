"""Contract of `Engine` and `Handle`: every registered engine, and the one of `agent_engine`."""

from __future__ import annotations

import os
import select
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_engine import AgentEngine
from penstock.configs.errors import UserError
from penstock.core.interfaces import (
    Bundle,
    Engine,
    EngineContext,
    EngineFactory,
    Handle,
    Liveness,
)
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.engines.registry import ENGINES, make_engine
from penstock.launch.profile_watch import take_reading
from penstock.launch.topology import role_arguments
from penstock.profiling.ledger import Part
from penstock.profiling.report.readings import PACKED, Thread
from ray_cluster import cluster
from waiting import wait_until

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
WAIT_S = 20.0
SLACK_NS = 1_000_000_000  # in which a report of another host arrives
ALL: dict[str, EngineFactory] = {**ENGINES, "agents": AgentEngine}
BUNDLES = (Bundle("learners", ("learner-0",), 1), Bundle("actors", ("actor-0", "actor-1"), 2))


@pytest.fixture(scope="module", autouse=True)
def tiny_roles() -> Iterator[None]:
    """Roles find `tiny_roles`, also on the hosts of a cluster that is started later."""
    path = [str(HERE.parent / "system"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        yield


@pytest.fixture(scope="module", autouse=True)
def ray_address(tiny_roles: None) -> Iterator[str]:
    with cluster(nodes=2) as made:
        yield made.address


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path, as a runtime folder has."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        (Path(place) / "logs").mkdir()
        yield Path(place)


@pytest.fixture(params=sorted(ALL))
def engine(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    monkeypatch.setitem(ENGINES, request.param, ALL[request.param])
    address = request.getfixturevalue("ray_address") if request.param == "ray" else None
    with closing(make_engine(request.param, EngineContext(folder, cluster=address))) as made:
        made.reserve(BUNDLES)
        yield made


def start(engine: Engine, folder: Path, main: str, name: str = "actor-0", at: int = 0) -> Handle:
    """A role of `tiny_roles`."""
    role, _, index = name.partition("-")
    learns = role == "learner"
    stage = Stage.LEARNER if learns else Stage.ACTORS
    spec = RoleSpec(role, int(index), f"tiny_roles:{main}", stage, informed=learns)
    arguments = role_arguments(folder, folder) | {"run_id": 1, "grace_s": 1.0}
    return engine.start(spec, at, arguments, folder / "logs" / f"{name}.log")


def next_message(handle: Handle, kind: str) -> dict[str, Any]:
    """The next message of a kind; those before it are lost."""
    found: list[dict[str, Any]] = []

    def arrived() -> bool:
        found.extend(message for message in handle.receive() if message["kind"] == kind)
        return bool(found)

    wait_until(arrived)
    return found[0]


def end(handle: Handle) -> tuple[int, list[dict[str, Any]]]:
    """Wait for a confirmed death; the exit code, and the messages until then."""
    said: list[dict[str, Any]] = []

    def dead() -> bool:
        said.extend(handle.receive())
        return handle.liveness() is Liveness.DEAD

    wait_until(dead)
    said += handle.receive()
    return handle.reap(), said


def test_every_role_has_an_address(engine: Engine) -> None:
    addresses = engine.endpoints()
    assert set(addresses) == {"learner-0", "actor-0", "actor-1"}
    assert addresses["actor-0"] == addresses["actor-1"]  # of one bundle


def test_handle_shows_status_and_usage_of_its_role(engine: Engine, folder: Path) -> None:
    handle = start(engine, folder, "work", at=3)
    assert (handle.spec.name, handle.incarnation, bool(handle.host)) == ("actor-0", 3, True)
    next_message(handle, "ready")
    wait_until(lambda: handle.receive() or handle.status().produced_steps > 10)
    status = handle.status()
    assert status.began
    assert (status.phase, status.incarnation) == ("environment", 3)
    assert status.produced_steps >= 10 * status.sequence > 0
    assert 0 <= time.monotonic() - status.alive_s < 5
    assert 0 <= time.monotonic() - status.phase_s < WAIT_S
    wait_until(lambda: handle.receive() or handle.usage().age_s)
    usage = handle.usage()
    assert psutil.pid_exists(usage.pid)
    assert usage.state
    assert usage.cpu_s is not None
    assert handle.liveness() is Liveness.ALIVE
    reading = take_reading(handle)
    assert (reading.spec, reading.pid) == (handle.spec, usage.pid)
    assert arrived(handle, 0) == []  # this role keeps no ledger


def arrived(handle: Handle, since_ns: int) -> list[Thread]:
    """The spans of a role, once its host has sent them."""
    found: list[Thread] = []

    def here() -> bool:
        handle.receive()
        threads = handle.spans(since_ns)
        found.extend(threads or ())
        return threads is not None

    wait_until(here)
    return found


def test_spans_of_a_role_are_complete_and_by_the_clock_of_this_host(
    engine: Engine, folder: Path
) -> None:
    since_ns = time.perf_counter_ns()
    handle = start(engine, folder, "measure")
    next_message(handle, "ready")
    wait_until(lambda: handle.receive() or len(handle.usage().threads) == 1)
    [thread] = arrived(handle, since_ns)
    assert (thread.process, thread.name, thread.pid) == ("actor-0", "main", handle.usage().pid)
    assert len(thread.spans) > PACKED, "they need several messages"
    assert thread.spans.part.tolist()[-20_000:] == [Part.STEP, Part.WAIT] * 10_000
    begin_ns, end_ns = thread.spans.begin_ns, thread.spans.end_ns
    assert (begin_ns[1:] == end_ns[:-1]).all()
    assert since_ns <= begin_ns[0] < end_ns[-1] < time.perf_counter_ns() + SLACK_NS
    later_ns = time.perf_counter_ns()
    [thread] = arrived(handle, later_ns)
    assert begin_ns[-1] < thread.spans.end_ns[-1], "they are those of now"
    assert thread.spans.begin_ns[0] >= later_ns - SLACK_NS
    reading = take_reading(handle)
    assert sum(reading.lanes["main"].values()) > 0
    assert since_ns < reading.at_ns < time.perf_counter_ns()


def test_messages_pass_both_ways_and_the_last_arrive_before_the_end(
    engine: Engine, folder: Path
) -> None:
    handle = start(engine, folder, "learn", "learner-0")
    handle.send({"kind": "first"})  # before there is a process that could take it
    next_message(handle, "ready")
    handle.send({"kind": "actors", "alive": 7})
    wait_until(lambda: next_message(handle, "metrics")["time_s"] == 1.0)
    handle.signal(signal.SIGTERM)
    code, said = end(handle)
    assert code == 0
    assert said[-1]["kind"] == "final"
    assert said[-1]["heard"] == [{"kind": "first"}, {"kind": "actors", "alive": 7}]


def test_stacks_of_a_role_are_written_to_the_logs(engine: Engine, folder: Path) -> None:
    handle = start(engine, folder, "work")
    next_message(handle, "ready")
    stacks = folder / "logs" / "actor-0.stacks"
    handle.signal(signal.SIGUSR1)
    wait_until(lambda: handle.receive() or "tiny_roles.py" in stacks.read_text())
    assert handle.liveness() is Liveness.ALIVE


def test_a_killed_role_is_confirmed_dead_with_its_last_counters(
    engine: Engine, folder: Path
) -> None:
    handle = start(engine, folder, "crash_once")
    wait_until(lambda: handle.liveness() is Liveness.DEAD)
    status = handle.status()
    assert (status.produced_steps, status.sequence) == (100, 4)
    assert handle.reap() == -signal.SIGKILL


def test_handle_kills_a_role_that_ignores_sigterm(engine: Engine, folder: Path) -> None:
    handle = start(engine, folder, "deaf")
    next_message(handle, "ready")
    handle.signal(signal.SIGTERM)
    time.sleep(0.2)
    handle.receive()
    assert handle.liveness() is Liveness.ALIVE
    handle.signal(signal.SIGKILL)
    assert end(handle)[0] == -signal.SIGKILL


def test_crashed_role_leaves_its_error_report_and_output(engine: Engine, folder: Path) -> None:
    handle = start(engine, folder, "crash", at=2)
    wait_until(lambda: handle.liveness() is Liveness.DEAD)
    assert handle.log_tail().endswith("ValueError: crash of incarnation 2")
    code, said = end(handle)
    assert code == 1
    assert said[-1]["message"] == "ValueError: crash of incarnation 2"


def test_message_or_end_of_a_role_makes_a_descriptor_readable(engine: Engine, folder: Path) -> None:
    handle = start(engine, folder, "work")
    ends_s = time.monotonic() + WAIT_S
    said: list[dict[str, Any]] = []

    def wait() -> None:
        poller = select.poll()
        for fd in engine.filenos():
            poller.register(fd, select.POLLIN)
        assert poller.poll(max(0.0, ends_s - time.monotonic()) * 1000), "nothing woke it"

    while not said:
        wait()
        said = handle.receive()
    handle.signal(signal.SIGKILL)
    while handle.liveness() is not Liveness.DEAD:
        wait()
        handle.receive()
    handle.reap()


def test_incarnations_of_a_role_have_separate_state(engine: Engine, folder: Path) -> None:
    first, second = (start(engine, folder, "work", at=at) for at in (0, 1))
    for handle in (first, second):
        next_message(handle, "ready")
    first.signal(signal.SIGKILL)
    assert end(first)[0] == -signal.SIGKILL
    second.receive()
    assert second.liveness() is Liveness.ALIVE


def test_no_process_outlives_its_engine(engine: Engine, folder: Path) -> None:
    handle = start(engine, folder, "deaf")
    next_message(handle, "ready")
    wait_until(lambda: handle.receive() or (handle.status().began and handle.usage().pid))
    pid = handle.usage().pid
    assert psutil.pid_exists(pid)
    engine.close()
    wait_until(lambda: not psutil.pid_exists(pid))


def test_arguments_that_no_message_can_hold_are_refused(engine: Engine, folder: Path) -> None:
    spec = RoleSpec("actor", 0, "tiny_roles:work", Stage.ACTORS)
    long = {"run_id": 1, "grace_s": 1.0, "curve": "x" * 300_000}
    arguments = role_arguments(folder, folder) | long
    with pytest.raises(UserError, match=r"of actor-0 are 3..,... bytes of JSON, and its process"):
        engine.start(spec, 0, arguments, folder / "logs" / "actor-0.log")


def test_only_launch_run_imports_the_engines() -> None:
    launch = HERE.parents[1] / "launch"
    texts = {path.name: path.read_text() for path in launch.glob("*.py")}
    assert [n for n, text in texts.items() if "from penstock.launch.engines" in text] == ["run.py"]
