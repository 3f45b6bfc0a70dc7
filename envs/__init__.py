"""Games: anything gymnasium can make, stepped as one vector the fastest way there is.

Importing this registers `penstock/Synthetic-v0`; it imports gymnasium, and no torch.
"""

from __future__ import annotations

import gymnasium

from penstock.envs.game import GameInfo, VectorGame, find_bad_observation
from penstock.envs.make import make, probe

__all__ = ["GameInfo", "VectorGame", "find_bad_observation", "make", "probe"]

gymnasium.register(
    "penstock/Synthetic-v0",
    entry_point="penstock.envs.synthetic:make_single",
    vector_entry_point="penstock.envs.synthetic:SyntheticVectorEnv",
)
