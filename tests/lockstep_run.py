"""A run of the lockstep mode in this process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from penstock.algos.custom.algorithm import custom
from penstock.configs.schema import Config
from penstock.core.control import Channel
from penstock.core.role import RoleContext
from penstock.launch import lockstep
from penstock.profiling.status import StatusPage


def train_in_lockstep(folder: Path, config: Config, resume: str = "no") -> list[dict[str, Any]]:
    """Runs a complete lockstep run and returns all messages that it reported."""
    custom.cache_clear()
    ours, theirs = Channel.pair()
    page, descriptor = StatusPage.create()
    ctx = RoleContext(
        "lockstep", 0, 0, 1, folder, folder, Channel(theirs), page, config, resume=resume
    )
    heard: list[dict[str, Any]] = []

    def listen() -> None:
        while not ctx.stopping():
            heard.extend(ours.receive())
            if any(message["kind"] == "final" for message in heard):
                ctx.stop()
            time.sleep(0.005)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        lockstep.run(ctx)
    finally:
        ctx.stop()
        thread.join()
        for end in (ours, ctx.channel, page):
            end.close()
        os.close(descriptor)
    return heard


def of_kind(heard: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Returns the messages of one kind."""
    return [message for message in heard if message["kind"] == kind]
