"""torch.profiler over some turns of a learner that is at work, when somebody asks for it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.core.control import Message

ASKED = ("path", "turns", "seconds", "host")


class TorchTrace:
    """Does nothing until it is asked to, and nothing again once the trace is written."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._path = Path()
        self._turns = 0
        self._until_s = 0.0

    def hear(self, messages: Iterable[Message]) -> None:
        """Begin if the supervisor says so."""
        for message in messages:
            if message["kind"] == "torch_profile" and self._profile is None:
                self._begin(**{name: message[name] for name in ASKED})

    def turn(self) -> None:
        """A turn has ended."""
        if self._profile is None:
            return
        self._turns -= 1
        if self._turns > 0 and time.monotonic() < self._until_s:
            return
        self._profile.stop()
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp")
        with suppress(OSError, RuntimeError):  # a full disk does not end a run; nothing is there
            self._profile.export_chrome_trace(str(temporary))
            temporary.replace(self._path)
        self._profile = None

    def _begin(self, path: str, turns: int, seconds: float, host: bool) -> None:
        """Record from now on, for so many turns or so long, whichever is over first; then write a
        Chrome trace to ``path``, which is there when it is whole. Without the ``host``'s side what
        a GPU does is hardly slowed."""
        kinds = [ProfilerActivity.CPU] if host else []
        kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=kinds, acc_events=True)  # torch warns without
        self._profile.start()
        self._path, self._turns, self._until_s = Path(path), turns, time.monotonic() + seconds
