"""Penstock feeds learners: a distributed actor-learner system for reinforcement learning."""

__version__ = "0.1.0"
