"""PPO: an actor-critic that trains on each batch several times, within bounds."""
