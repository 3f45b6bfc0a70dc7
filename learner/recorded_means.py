"""Means of the numbers in the environments' `info` that `env.record` names."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from penstock.algos.slots import RecordedSum, UnrollSummary
from penstock.configs.sections import RECORD_MEANS
from penstock.core.notes import note_logger

# A mean is over at least so many values, if there were so many.
LEAST = 100

logger = note_logger(__name__)


class RecentMean:
    """The mean of the values since the last `take`, and of earlier ones up to `LEAST` in all."""

    def __init__(self) -> None:
        self._sums: deque[RecordedSum] = deque()
        """Sums over the values that may be part of the mean, the oldest first."""
        self._count = 0
        """Number of these values."""
        self._new_count = 0
        """Number of the values since the last `take`."""

    def add(self, values: RecordedSum) -> None:
        """Add the sum of some values."""
        if values.number:
            self._sums.append(values)
            self._count += values.number
            self._new_count += values.number

    def take(self) -> float | None:
        """Returns the mean; None before the first value."""
        needed = max(LEAST, self._new_count)
        self._new_count = 0
        while self._sums and self._count - self._sums[0].number >= needed:
            self._count -= self._sums.popleft().number
        if not self._count:
            return None
        return sum(values.total for values in self._sums) / self._count


class RecordedMeans:
    """The metrics of `env.record` of one learner; they begin anew with each process."""

    def __init__(self, record: Sequence[str]) -> None:
        """``record``: the keys of `env.record`."""
        self._means = {key: (RecentMean(), RecentMean()) for key in record}
        """Two means of each key, in the order of `RECORD_MEANS`."""
        self._missing = {*record}
        """Keys without a value so far."""
        self._episodes = 0

    def add(self, unrolls: UnrollSummary) -> None:
        """Add the values of unrolls."""
        self._episodes += len(unrolls.returns)
        for key, sums in unrolls.recorded.items():
            for mean, values in zip(self._means[key], sums, strict=True):
                mean.add(values)
            if sums[0].number:
                self._missing.discard(key)

    def interval(self) -> Mapping[str, float | None]:
        """Returns the metrics, by their names in metrics.jsonl.

        Notes once which keys have no value though many episodes have ended.
        """
        if self._missing and self._episodes >= LEAST:
            logger.info(
                "env.record: no step has had %s in its info, and %d episodes have ended; correct "
                "the name: `penstock check-env` lists those that there are",
                ", ".join(sorted(self._missing)),
                self._episodes,
            )
            self._missing.clear()

        return {
            name.format(key): mean.take()
            for key, means in self._means.items()
            for name, mean in zip(RECORD_MEANS, means, strict=True)
        }
