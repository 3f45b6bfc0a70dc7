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
gymnasium.register(
    "penstock/HiddenArm-v0",
    entry_point="penstock.envs.games.hidden_arm:make_single",
    vector_entry_point="penstock.envs.games.hidden_arm:HiddenArmVectorEnv",
)
gymnasium.register("penstock/CarRacing-v0", entry_point="penstock.envs.games.car_racing:CarRacing")
gymnasium.register("penstock/Doom-v0", entry_point="penstock.envs.games.doom:DoomEnv")
gymnasium.register("penstock/MinAtar-v0", entry_point="penstock.envs.games.minatar:MinAtarEnv")
gymnasium.register(
    "penstock/BitFlip-v0", vector_entry_point="penstock.envs.games.bit_flip:BitFlipVectorEnv"
)
gymnasium.register(
    "penstock/RockPaperScissors-v0",
    vector_entry_point="penstock.envs.games.rock_paper_scissors:RockPaperScissors",
)
gymnasium.register(
    "penstock/ConnectFour-v0", vector_entry_point="penstock.envs.games.connect_four:ConnectFour"
)
gymnasium.register("penstock/Kuhn-v0", vector_entry_point="penstock.envs.games.kuhn:KuhnPoker")
gymnasium.register("penstock/Leduc-v0", vector_entry_point="penstock.envs.games.leduc:LeducPoker")
gymnasium.register(
    "penstock/SlimeVolley-v0", vector_entry_point="penstock.envs.games.slime_volley:SlimeVolley"
)
gymnasium.register(
    "penstock/PredatorPrey-v0", vector_entry_point="penstock.envs.games.predator_prey:PredatorPrey"
)
