"""The metrics of a run as TensorBoard reads them, in the folder `tensorboard` of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError

FLUSH_S = 10
SKIPPED = "_histogram"


class Board:
    """Writes each interval as scalars over agent steps. The library is imported by the first: it
    must not delay the start of a run."""

    def __init__(self, run_dir: Path) -> None:
        """Raises UserError where the library is missing."""
        if find_spec("tensorboardX") is None:
            raise UserError(
                "run.tensorboard=true needs tensorboardX, which is not installed; "
                "run pip install 'penstock[tensorboard]', or set run.tensorboard=false"
            )
        self._folder = run_dir / "tensorboard"
        self._writer: Any = None

    def metrics(self, metrics: Mapping[str, Any]) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=FLUSH_S)
        for tag, value in scalars(metrics):
            self._writer.add_scalar(tag, value, metrics.get("env_steps", 0))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def scalars(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Tag and value of every number: `ledger/compute`, `ledgers/actor-0/step`, `ranks/1/...`.
    Histograms, texts and what is unknown yet are left out."""
    for name, value in metrics.items():
        tag = f"{prefix}{name}"
        if isinstance(value, list):
            value = {str(i): entry for i, entry in enumerate(value)}
        if isinstance(value, Mapping) and not name.endswith(SKIPPED):
            yield from scalars(value, f"{tag}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield tag, float(value)
