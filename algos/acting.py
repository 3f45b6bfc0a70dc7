"""Policies, and what computes an actor's actions, as the algorithm of a config wants them.

`make_inference` is the registry of `core.interfaces.Inference`. Imports torch only if needed.
"""

from __future__ import annotations

from penstock.algos.registry import algorithm
from penstock.algos.samples import network_shape
from penstock.configs.schema import Config
from penstock.core.interfaces import Inference
from penstock.core.observations import Spaces
from penstock.models.acting import policy
from penstock.models.acting.inference import LocalInference
from penstock.models.acting.policy import Policy
from penstock.models.fitting import AnyShape


def make_policy(config: Config, spaces: Spaces, seed: int, actor: int = 0) -> Policy:
    """The policy of actor number ``actor`` over ``actors.envs`` environments."""
    return _policy_of(network_shape(config, spaces), config, spaces, seed, actor)


def make_inference(config: Config, spaces: Spaces, seed: int, actor: int = 0) -> Inference:
    """The inference of actor number ``actor``, for ``actors.envs`` environments."""
    shape = network_shape(config, spaces)
    return LocalInference(_policy_of(shape, config, spaces, seed, actor), shape.layout.size)


def _policy_of(shape: AnyShape, config: Config, spaces: Spaces, seed: int, actor: int) -> Policy:
    sampler = algorithm(config.algo).action_sampler(config, spaces, seed, actor)
    return policy.make_policy(config, spaces, shape, sampler)
