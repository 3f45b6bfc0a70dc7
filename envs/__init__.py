"""Games: anything gymnasium can make, stepped as one vector the fastest way there is.

Importing this registers the ids `penstock/...`; it imports gymnasium, and no torch.
"""

from __future__ import annotations

import gymnasium

from penstock.core.observations import find_bad_observation
from penstock.envs.game import GameInfo, VectorGame
from penstock.envs.make import make, probe

__all__ = ["GameInfo", "VectorGame", "find_bad_observation", "make", "probe"]

gymnasium.register(
    "penstock/Synthetic-v0",
    entry_point="penstock.envs.synthetic:make_single",
    vector_entry_point="penstock.envs.synthetic:SyntheticVectorEnv",
)
gymnasium.register(
    "penstock/Memory-v0",
    entry_point="penstock.envs.memory:make_single",
    vector_entry_point="penstock.envs.memory:MemoryVectorEnv",
)
gymnasium.register("penstock/CarRacing-v0", entry_point="penstock.envs.car_racing:CarRacing")
gymnasium.register("penstock/Doom-v0", entry_point="penstock.envs.doom:DoomEnv")
gymnasium.register("penstock/MinAtar-v0", entry_point="penstock.envs.minatar:MinAtarEnv")
