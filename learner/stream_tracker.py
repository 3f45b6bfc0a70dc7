"""What a learner hears of the actors and connectors that feed it, and what it makes of that."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable

from penstock.core.control import Message
from penstock.replay import Accounting

ARRIVAL_S = 5.0  # that what a dead actor sent may still be on its way
RECEIVED = ("slots", "steps", "raw_nbytes", "coded_nbytes")


class StreamTracker:
    """Call `hear` with every message of the supervisor, and `close_streams` now and then."""

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting
        self._connectors: dict[int, Message] = {}  # the last word of each incarnation
        self._ended: deque[tuple[float, Message]] = deque()  # with the time of arrival

    def hear(self, messages: Iterable[Message]) -> None:
        now_s = time.monotonic()
        for message in messages:
            if message["kind"] == "actor_ended":
                self._ended.append((now_s, message))
            elif message["kind"] == "connector":
                self._ended += [(now_s, stream) for stream in message.pop("streams", ())]
                self._connectors[message["incarnation"]] = message

    def close_streams(self, *, everything_arrived: bool = False) -> None:
        """Count what the ended had produced and what never came, once nothing more can come."""
        now_s = time.monotonic()
        while self._ended and (everything_arrived or now_s - self._ended[0][0] > ARRIVAL_S):
            _, end = self._ended.popleft()
            self._accounting.ended(
                end["actor"],
                end["incarnation"],
                end["sequence"],
                end["produced_steps"],
                trusted=end.get("kind") == "actor_ended",
            )

    @property
    def actors(self) -> int:
        """Actors of the newest connector."""
        return self._connectors[max(self._connectors)]["actors"] if self._connectors else 0

    def received(self) -> dict[str, dict[str, int]]:
        """What has come over the wire so far, through all connectors one after the other."""
        said = self._connectors.values()
        return {"received": {n: sum(c[n] for c in said) for n in RECEIVED}} if said else {}

    def drops(self) -> dict[str, dict[str, int]]:
        """What was not trained on, by reason: steps, and for ``rejected`` messages."""
        rejected: Counter[str] = Counter()
        for connector in self._connectors.values():
            rejected.update(connector["rejected"])
        return {
            "dropped": dict(self._accounting.dropped),
            "lost": dict(self._accounting.lost),
            "rejected": dict(rejected),
        }
