"""Actors and learners of different releases: they train together, or both say which they have.

The earlier release is 0.1.0, a wheel of the commit that wrote tests/fixtures/0.1.0. The one of
another protocol is this checkout's wheel with the next version of the protocol in it.
"""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import __version__
from penstock.transport.wire import PROTOCOL_VERSION
from ray_cluster import cluster
from train_command import Command, assert_balanced, metrics

ROOT = Path(__file__).parents[2]
EARLIER = "0.1.0"
OPTIONS = ("actors.envs=8", "actors.unroll=8", "run.interval_s=0.1", "stop.return=null")
NEXT_PROTOCOL, NEXT_RELEASE = PROTOCOL_VERSION + 1, "9.9.9"
REFUSED_WITHIN_S = 30.0  # most of it is the start of Python on a busy machine

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(300)]


class OfRelease(Command):
    """``penstock`` of the wheel that is installed in ``lib``; None is that of this checkout."""

    def __init__(self, folder: Path, lib: Path | None, *arguments: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(lib or ROOT))
            super().__init__(folder, *arguments)

    def stop(self) -> None:
        """End it, with its processes."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)


Start = Callable[..., OfRelease]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[OfRelease] = []

    def penstock(lib: Path | None, *arguments: str) -> OfRelease:
        started.append(OfRelease(tmp_path, lib, *arguments))
        return started[-1]

    yield penstock
    for command in started:
        command.stop()


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def install(source: Path, into: Path) -> Path:
    """Build a wheel of ``source`` and install it without its dependencies."""
    for command in (
        ("build", "--no-isolation", "--outdir", into / "dist", source),
        ("pip", "install", "--no-deps", "--no-index", "--quiet", "--target", into / "lib"),
    ):
        wheels = [] if command[0] == "build" else list((into / "dist").glob("*.whl"))
        words = [str(word) for word in (*command, *wheels)]
        subprocess.run([sys.executable, "-m", *words], cwd=into, check=True, capture_output=True)
    return into / "lib"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of 0.1.0."""
    written = f"tests/fixtures/{EARLIER}/wire.msgpack"
    try:
        found = git("log", "--diff-filter=A", "--format=%H", "--", written).decode().split()
    except (OSError, subprocess.CalledProcessError):
        found = []
    if not found:
        pytest.skip(f"the history of this checkout does not reach back to {EARLIER}")
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(git("archive", found[-1]))) as archive:
        archive.extractall(folder / "source", filter="data")
    return install(folder / "source", folder)


@pytest.fixture(scope="module")
def other_protocol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a release with the next version of the protocol."""
    lib = install(ROOT, tmp_path_factory.mktemp("other_protocol"))
    for path, old, new in (
        ("transport/wire.py", "PROTOCOL_VERSION = 1\n", f"PROTOCOL_VERSION = {NEXT_PROTOCOL}\n"),
        ("__init__.py", f'__version__ = "{__version__}"', f'__version__ = "{NEXT_RELEASE}"'),
    ):
        text = (lib / "penstock" / path).read_text()
        assert old in text
        (lib / "penstock" / path).write_text(text.replace(old, new))
    return lib


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def learner(start: Start, lib: Path | None, bind: str | None, *options: str) -> OfRelease:
    where = () if bind is None else (f"--bind={bind}",)
    command = ("learner", "cartpole", *OPTIONS, "run.dir=run", "--json", *where, *options)
    return start(lib, *command)


def actor(start: Start, lib: Path | None, address: str, name: str) -> OfRelease:
    return start(lib, "actor", f"--connect={address}", f"--dir={name}", "--json")


def steps(folder: Path) -> int:
    return max((int(m["trained_steps"]) for m in metrics(folder / "run")), default=0)


def error_of(command: Command) -> str:
    """The only sentence of a command that has ended with exit code 2."""
    code, answer, err = command.end()
    assert code == 2, err
    assert "Traceback" not in err
    said = str(answer["error"])
    assert "\n" not in said
    assert said in err
    return said


@pytest.mark.parametrize("way", ["tcp", "folder"])
@pytest.mark.parametrize("older", ["actor", "learner"])
def test_run_trains_with_actors_or_learner_of_an_earlier_release(
    start: Start, earlier: Path, tmp_path: Path, way: str, older: str
) -> None:
    bind = free_address() if way == "tcp" else None
    libs = (None, earlier) if older == "actor" else (earlier, None)
    run = learner(start, libs[0], bind, "stop.learner_steps=300")
    if bind is None:  # an actor is given the folder of a run that is live
        run.wait_until(lambda: (tmp_path / "run" / "supervisor.json").exists())
    actor(start, libs[1], bind or "run", "other")
    code, summary, err = run.end()
    assert code == 0, err
    assert summary["learner_steps"] >= 300
    assert_balanced(summary)
    assert summary.get("rejected", {}) == {}


def test_actor_of_another_protocol_is_refused_with_both_versions(
    start: Start, other_protocol: Path, tmp_path: Path
) -> None:
    bind = free_address()
    run = learner(start, None, bind)
    actor(start, None, bind, "same")
    run.wait_until(lambda: steps(tmp_path) > 0)
    began_s = time.monotonic()
    said = error_of(actor(start, other_protocol, bind, "other"))
    assert time.monotonic() < began_s + REFUSED_WITHIN_S
    assert said == (
        f"the learner at {bind} speaks version {PROTOCOL_VERSION} of the protocol instead of "
        f"{NEXT_PROTOCOL}, and this actor has Penstock {NEXT_RELEASE}; use the same release on "
        "both sides"
    )
    reached = steps(tmp_path)
    run.wait_until(lambda: steps(tmp_path) > reached + 1000)
    run.stop()
    events = [
        json.loads(line) for line in (tmp_path / "run/logs/events.jsonl").read_text().splitlines()
    ]
    refusals = [event["text"] for event in events if event["kind"] == "rejected"]
    assert (
        f"a peer speaks version {NEXT_PROTOCOL} of the protocol instead of {PROTOCOL_VERSION}, and "
        f"the learner has Penstock {__version__}; use the same release on both sides"
    ) in refusals
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert_balanced(summary)
    assert summary["actors_restarted"] == 0


def test_actor_names_a_learner_of_another_protocol(
    start: Start, other_protocol: Path, tmp_path: Path
) -> None:
    bind = free_address()
    run = learner(start, other_protocol, bind)
    said = error_of(actor(start, None, bind, "same"))
    assert f"speaks version {NEXT_PROTOCOL} of the protocol instead of {PROTOCOL_VERSION}" in said
    assert said.endswith(f"has Penstock {__version__}; use the same release on both sides")
    assert run.process.poll() is None


def test_a_config_of_the_future_is_refused_with_both_releases(
    start: Start, other_protocol: Path, tmp_path: Path
) -> None:
    """The same protocol, and an option with an effect that this release does not have."""
    lib = tmp_path / "lib"
    subprocess.run(["cp", "-r", other_protocol, lib], check=True)
    wire = lib / "penstock/transport/wire.py"
    ours = f"PROTOCOL_VERSION = {PROTOCOL_VERSION}\n"
    wire.write_text(wire.read_text().replace(f"PROTOCOL_VERSION = {NEXT_PROTOCOL}\n", ours))
    sections = lib / "penstock/configs/sections.py"
    field = "    id: Text\n"
    assert field in sections.read_text()
    sections.write_text(sections.read_text().replace(field, f"{field}    future: int = 1\n", 1))
    bind = free_address()
    run = learner(start, lib, bind)
    assert error_of(actor(start, None, bind, "same")) == (
        f"the config that the learner at {bind} sent cannot be read (this actor has no option "
        f"'env.future'); the learner has Penstock {NEXT_RELEASE}, and this actor {__version__}: "
        "use the same release on both sides"
    )
    assert run.process.poll() is None


def test_learners_of_different_releases_form_no_group(start: Start, earlier: Path) -> None:
    store = free_address().removeprefix("tcp://")
    where = ("--world=2", f"--store={store}", "--bind=ipc://wire", "--json")
    command = ("learner", "cartpole", *OPTIONS, *where)
    ranks = [
        start(lib, *command, f"--rank={rank}", f"run.dir=run-{rank}")
        for rank, lib in enumerate((None, earlier))
    ]
    releases = (__version__, EARLIER)
    for me, rank in enumerate(ranks):
        assert error_of(rank) == (
            f"learners disagree on the version of penstock: it is {releases[me]} on rank {me} and "
            f"{releases[1 - me]} on rank {1 - me}; start all with the same config and version"
        )


def test_a_ray_node_of_another_release_is_named(start: Start, other_protocol: Path) -> None:
    with cluster(nodes=1, cores=1) as made:  # too few for the run, which goes to the other node
        made.add_node(num_cpus=4, env_vars={"PYTHONPATH": str(other_protocol)})
        options = (*OPTIONS, "actors.count=2", "run.dir=run", "--json")
        on_ray = ("--engine", "ray", "--address", made.address)
        said = error_of(start(None, "train", "cartpole", *options, *on_ray))
    assert said.startswith("a host agent could not be started on the Ray cluster: ")
    assert f" has Penstock {NEXT_RELEASE}, and the run {__version__}; install the same" in said
