"""Sends the metrics and videos of a run to Weights & Biases, in a separate process.

The library starts threads and a service, waits for the network, and can hang. It therefore runs in
another process, which receives each interval over a socket: a full socket drops it, the death of
the process is reported once, and at the end the process has `run.grace_s` to send the rest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.control import Channel
from penstock.core.files import open_private, write_atomic
from penstock.core.interfaces import Json, MetricSink
from penstock.core.processes import die_with, python
from penstock.monitor.metric_groups import scalars, tag
from penstock.monitor.new_videos import TAG, NewVideos

if TYPE_CHECKING:
    from penstock.configs.schema import Config

ID_FILE = "wandb-id"
NICE = 10
NAME = "W&B"


def make(config: Config, run_dir: Path) -> MetricSink:
    """Makes the sink of `run.wandb`."""
    return WandbWriter(
        run_dir,
        project=config.run.wandb or "",
        config=config.model_dump(mode="json"),
        finish_s=config.run.grace_s,
    )


class WandbWriter(MetricSink):
    """Sends each interval to the process of W&B."""

    def __init__(self, run_dir: Path, project: str, config: Json, finish_s: float) -> None:
        """Start the process.

        Args:
            run_dir: the folder of the run.
            project: name at W&B.
            config: options of the run.
            finish_s: seconds that the process has at the end of the run.
        """
        self._finish_s = finish_s
        self._stored = run_dir / "wandb"
        self._log = run_dir / "logs" / "wandb.log"
        self._channel, process_end = Channel.pair()
        with process_end, open(self._log, "ab", opener=open_private) as log:
            self._process = subprocess.Popen(
                python("penstock.monitor.wandb", process_end.fileno(), os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[process_end.fileno()],
                start_new_session=True,
                umask=0o077,
            )
        self._pidfd = os.pidfd_open(self._process.pid)

        # The first message says which run it is; all others are of metrics.
        run = {"project": project, "dir": str(run_dir), "name": run_dir.name, "id": _id(run_dir)}
        self._channel.send({**run, "config": config})

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        """Send one interval.

        Raises:
            OSError: with the reason, if it cannot be sent: the process is too slow, or has ended.
        """
        if self._channel.send({"metrics": metrics}):
            return
        if self._process.poll() is None:
            raise OSError(
                errno.EAGAIN, "its process is too slow, so some metrics are left out", NAME
            )
        raise OSError(errno.EPIPE, f"its process has ended, the cause is in {self._log}", NAME)

    def close(self) -> None:
        """Let the process send the rest; after the time limit its process group is killed."""
        if self._channel.closed:
            return

        self._channel.close()
        has_finished = False
        with contextlib.suppress(KeyboardInterrupt):
            ready, _, _ = select.select([self._pidfd], [], [], self._finish_s)
            has_finished = bool(ready)
        if not has_finished:
            has_data = any(self._stored.glob("*run-*/*.wandb"))
            advice = "send the rest with `wandb sync`" if has_data else "no data was stored"
            print(f"{NAME} did not finish within {self._finish_s:g} s: {advice}", file=sys.stderr)

        # Before `wait` no other process can have its number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._pidfd)


def main() -> None:
    """Main function of the process: log received metrics until the connection is closed.

    Its arguments are the descriptor of the connection, and the pid of the supervisor, with which it
    ends.
    """
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    parent_pid = int(sys.argv[2])
    die_with(parent_pid, signal.SIGTERM)
    os.nice(NICE)
    messages = _messages(channel)
    first = next(messages)
    videos = NewVideos(Path(first["dir"]))
    import wandb

    run = wandb.init(
        project=first["project"],
        name=first["name"],
        id=first["id"],
        dir=first["dir"],
        config=first["config"],
        resume="allow",
    )
    # W&B's own step must not decrease, as agent steps do at a resume.
    env_steps = tag("env_steps")
    run.define_metric("*", step_metric=env_steps)
    position: dict[str, Any] = {}  # agent steps of the last interval

    def send_videos() -> None:
        for path in videos.take():
            with contextlib.suppress(OSError, ValueError):  # deleted meanwhile
                run.log({**position, TAG: wandb.Video(str(path), format="mp4")})

    for message in messages:
        figures = {tag(path): value for path, value in scalars(message["metrics"])}
        run.log(figures)
        position = {env_steps: figures[env_steps]} if env_steps in figures else {}
        send_videos()
    send_videos()  # the last one is recorded when training has ended
    run.finish()


def _messages(channel: Channel) -> Iterator[dict[str, Any]]:
    """Yields the messages of the writer, and waits for more until it closes the connection."""
    while not channel.closed:
        yield from channel.receive()
        if not channel.closed:
            select.select([channel.fileno()], [], [])


def _id(run_dir: Path) -> str:
    """Returns the id of the run at W&B, unchanged after a resume."""
    path = run_dir / ID_FILE
    with contextlib.suppress(OSError):
        if stored_id := path.read_text():
            return stored_id

    new_id = secrets.token_hex(6)
    with contextlib.suppress(OSError):  # a full disk ends no run
        write_atomic(path, new_id)
    return new_id


if __name__ == "__main__":
    main()
