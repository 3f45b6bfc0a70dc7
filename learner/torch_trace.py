"""Records a torch.profiler trace of some turns of a running learner, on request."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.core.control import Message

# Fields of a request: the arguments of `TorchTrace._begin`.
REQUEST_FIELDS = ("path", "turns", "seconds", "host")


class TorchTrace:
    """Records one trace at a time: idle until a request arrives, and again once it is written."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        """The recording in progress."""
        self._path = Path()
        """Where its trace is written."""
        self._remaining_turns = 0
        self._deadline_s = 0.0
        """When it ends at the latest (CLOCK_MONOTONIC)."""

    def handle_messages(self, messages: Iterable[Message]) -> None:
        """Start a trace if "torch_profile" is among the supervisor's messages."""
        for message in messages:
            if message["kind"] == "torch_profile" and self._profile is None:
                self._begin(**{name: message[name] for name in REQUEST_FIELDS})

    def turn(self) -> None:
        """Note the end of a turn; write the trace when it was the last.

        If the disk is full there is no file, and the run goes on.
        """
        if self._profile is None:
            return
        self._remaining_turns -= 1
        if self._remaining_turns > 0 and time.monotonic() < self._deadline_s:
            return

        self._profile.stop()
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp")
        with suppress(OSError, RuntimeError):
            self._profile.export_chrome_trace(str(temporary))
            temporary.replace(self._path)
        self._profile = None

    def _begin(self, path: str, turns: int, seconds: float, host: bool) -> None:
        """Record ``turns`` turns or ``seconds`` seconds, whichever is shorter, then write a trace.

        The Chrome trace appears at ``path`` when it is complete. Without the ``host``'s events the
        GPU is hardly slowed.
        """
        kinds = [ProfilerActivity.CPU] if host else []
        kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=kinds, acc_events=True)  # torch warns without
        self._profile.start()

        self._path = Path(path)
        self._remaining_turns = turns
        self._deadline_s = time.monotonic() + seconds
