"""`penstock render slurm` on a real SLURM: a controller and two nodes on this machine.

Needs root and Debian's slurm-wlm and munge. Steps are tracked by `proctrack/linuxproc`, since a
container may have no control groups.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from train_command import assert_balanced, last, metrics

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "scancel", "setpriv")
MISSING = [
    name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
]
pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=f"needs root and {MISSING}"),
]

MARKER = "PENSTOCK_TEST"
WAIT_S = 120.0
CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17001 CPUs=2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17002 CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def run(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd).stdout


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    """A SLURM of two nodes, found by SLURM_CONF."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as place,
        pytest.MonkeyPatch.context() as patch,
    ):
        folder = Path(place)
        folder.chmod(0o755)
        for name in ("munge", "state"):
            (folder / name).mkdir()
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        run("chown", "-R", "munge", str(folder / "munge"))
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin")
        munge = folder / "munge"
        files = [
            f"--{what}={munge / what}" for what in ("socket", "pid-file", "log-file", "seed-file")
        ]
        user = ["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups"]
        daemons = [
            [*user, "munged", "--foreground", f"--key-file={key}", *files],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "n1"],
            ["slurmd", "-D", "-N", "n2"],
        ]
        made: list[subprocess.Popen[bytes]] = []
        try:
            for daemon in daemons:
                made.append(
                    subprocess.Popen(daemon, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                )
                time.sleep(0.5)
            wait_until(lambda: run("sinfo", "-h", "-o", "%T").split() == ["idle"])
            yield
        finally:
            for process in reversed(made):
                process.send_signal(signal.SIGTERM)
                process.wait()


def wait_until(condition: Callable[[], object]) -> None:
    ends_s = time.monotonic() + WAIT_S
    while True:
        try:
            if condition():
                return
        except (OSError, LookupError, subprocess.CalledProcessError):
            pass
        assert time.monotonic() < ends_s
        time.sleep(0.2)


def state(job: str) -> str:
    fields = dict(
        word.split("=", 1) for word in run("scontrol", "show", "job", job).split() if "=" in word
    )
    return fields["JobState"]


def start_now(job: str) -> None:
    """Have a job that was queued again start as soon as its nodes are free, not minutes later."""
    wait_until(lambda: run("sinfo", "-h", "-o", "%T").split() == ["idle"])
    time.sleep(2)
    run("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: state(job) == "RUNNING")


def left() -> list[psutil.Process]:
    """Processes that this test's jobs have started and that still run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any("penstock" in word or "raylet" in word or "gcs_server" in word for word in words):
            try:
                if "SLURM_JOB_ID" in process.environ():
                    found.append(process)
            except psutil.Error:
                continue
    return found


@pytest.mark.parametrize("engine", ["ray", "none"])
def test_slurm_job_trains_is_requeued_and_resumes(slurm: None, tmp_path: Path, engine: str) -> None:
    run_dir = tmp_path / "run"
    options = ["stop.return=null", "stop.minutes=10", "actors.count=2", "run.dir=run"]
    size = ["--nodes", "2", "--cpus", "2", "--grace", "20", "--engine", engine]
    script = tmp_path / "job.sbatch"
    script.write_text(run("penstock", "render", "slurm", "cartpole", *options, *size))
    job = run("sbatch", "--parsable", str(script), cwd=tmp_path).strip()
    try:
        wait_until(lambda: last(run_dir)["trained_steps"] > 10_000)
        run("scancel", "--batch", "--signal=USR1", job)  # as before the end of its time
        wait_until(lambda: state(job) == "PENDING")
        assert left() == []
        saved = json.loads((run_dir / "summary.json").read_text())
        assert saved["exit_reason"] == "terminated"
        assert_balanced(saved)
        lines = len(metrics(run_dir))
        start_now(job)
        wait_until(lambda: len(metrics(run_dir)) > lines + 2)
        assert metrics(run_dir)[lines]["trained_steps"] >= saved["trained_steps"]
        run("scancel", "--batch", "--signal=USR2", job)  # as a user ends it
        wait_until(lambda: state(job) == "FAILED")  # by its exit code
    finally:
        subprocess.run(["scancel", job], check=False)
        wait_until(lambda: not left())
    again = json.loads((run_dir / "summary.json").read_text())
    assert again["trained_steps"] > saved["trained_steps"]
    assert_balanced(again)
