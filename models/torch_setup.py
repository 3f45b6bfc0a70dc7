"""Process-wide settings of torch, for actors and learners that compute on the CPU."""

from __future__ import annotations

import torch

from penstock.core.memory import keep_freed_memory


def set_up_torch(threads: int) -> None:
    """Fix torch's threads, and keep freed activations for the next step."""
    torch.set_num_threads(threads)
    keep_freed_memory()
