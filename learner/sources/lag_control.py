"""Keeps policy lag within `transport.max_policy_lag`, by the number of slots that are lent.

The first number follows from the config (`configs.policy_lag`), for actors that are equally fast.
Where slots exceed the limit nevertheless, because actors differ, fewer are lent; where all stay
well below it for long, more. So slots are dropped for their lag only until the number is right, and
where a single actor is suspended.
"""

from __future__ import annotations

PATIENCE = 100  # turnovers of the slots in use with room for a batch more, before it is lent


class LagControl:
    """Decides how many slots may be lent or filled at a time.

    Args:
        most: this number at first, and the greatest one.
        batch_slots: slots of a batch: the least number, and the size of a change.
        limit: greatest policy lag of a slot when its batch is gathered, in optimizer steps.
        updates: optimizer steps of a batch, by which one batch more raises the lag.
    """

    def __init__(self, most: int, batch_slots: int, limit: int, updates: int) -> None:
        self.slots = most
        """The most slots that may be lent or filled at a time."""
        self._most = most
        self._batch_slots = batch_slots
        self._limit = limit
        self._updates = updates
        self._ignored = 0  # slots that were in use at the last change, and were not taken since
        self._taken = 0
        self._greatest = 0  # lag of a slot since the last change

    def took(self, slots: int, lag: int, in_use: int) -> None:
        """Note that ``slots`` slots with a lag of up to ``lag`` were taken or dropped, while
        ``in_use`` are lent or filled.
        """
        if self._ignored > 0:
            self._ignored -= slots
            return
        self._taken += slots
        self._greatest = max(self._greatest, lag)
        if self._greatest > self._limit:
            fewer = min(self.slots, in_use) - self._batch_slots
            self._change(max(self._batch_slots, fewer), in_use)
        elif self._taken > PATIENCE * in_use:
            room = self._greatest + self._updates <= self._limit
            self._change(min(self._most, self.slots + room * self._batch_slots), in_use)

    def _change(self, slots: int, in_use: int) -> None:
        self.slots, self._ignored = slots, in_use
        self._taken = self._greatest = 0
