"""DQN: Q-values learnt from replay."""
