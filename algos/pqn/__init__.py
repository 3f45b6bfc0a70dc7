"""PQN: Q-learning on fresh unrolls, without replay and without a target network."""
