"""Environments: anything gymnasium can make, stepped as one vector the fastest way there is.

Importing this registers the ids `penstock/...`; it imports gymnasium, and no torch.
"""

from __future__ import annotations

import gymnasium

from penstock.envs.make import make, probe, uses_threads
from penstock.envs.packing import find_bad_observation, find_bad_reward
from penstock.envs.vector_env import BatchedEnv, EnvInfo

__all__ = [
    "BatchedEnv",
    "EnvInfo",
    "find_bad_observation",
    "find_bad_reward",
    "make",
    "probe",
    "uses_threads",
]

gymnasium.register(
    "penstock/Synthetic-v0",
    entry_point="penstock.envs.games.synthetic:make_single",
    vector_entry_point="penstock.envs.games.synthetic:SyntheticVectorEnv",
)
gymnasium.register(
    "penstock/SyntheticGames-v0",
    vector_entry_point="penstock.envs.games.synthetic:SyntheticGames",
)
gymnasium.register(
    "penstock/Memory-v0",
    entry_point="penstock.envs.games.memory:make_single",
    vector_entry_point="penstock.envs.games.memory:MemoryVectorEnv",
)
gymnasium.register("penstock/CarRacing-v0", entry_point="penstock.envs.games.car_racing:CarRacing")
gymnasium.register("penstock/Doom-v0", entry_point="penstock.envs.games.doom:DoomEnv")
gymnasium.register("penstock/MinAtar-v0", entry_point="penstock.envs.games.minatar:MinAtarEnv")
