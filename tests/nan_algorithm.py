"""IMPALA's loss, which is NaN in some of its calls, by those of ``algo.settings``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.algos.impala import algorithm as impala


@dataclass
class Settings:
    """The loss is NaN from call ``first`` to ``last``, counted from 1, on learner ``rank``."""

    first: int = 5
    last: int = 7
    rank: int = 0
    discount: float = 0.99
    trace_lambda: float = 0.95
    rho_clip: float = 1.0
    c_clip: float = 1.0
    value_cost: float = 0.5
    entropy_cost: float = 0.01
    normalize_advantages: bool = False
    teacher: None = None


class Algorithm:
    """What ``algo.entry=nan_algorithm:Algorithm`` calls."""

    STATISTICS = impala.STATISTICS
    Settings = Settings

    def __init__(self) -> None:
        self.calls = 0

    def loss(
        self, net: Any, batch: Any, cfg: Any, envs: Any = slice(None), add_others: Any = None
    ) -> Any:
        import torch.distributed as dist

        self.calls += 1
        settings: Settings = cfg.settings
        total, sums = impala.loss(net, batch, settings, envs, add_others)  # type: ignore[arg-type]
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank == settings.rank and settings.first <= self.calls <= settings.last:
            total = total * float("nan")
        return total, sums
