"""Makes what computes an actor's actions, as the algorithm of a config needs it.

`make_inference` is the registry of `core.interfaces.Inference`. Torch is imported only by the
networks that need it.
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


def make_policy(config: Config, spaces: Spaces, seed: int, actor: int = 0) -> Policy:
    """Returns the policy of one actor.

    Args:
        config: its policy plays `actors.envs` environments.
        spaces: of these environments.
        seed: of the random generator that draws actions.
        actor: number of the actor, on which its exploration may depend.
    """
    shape = network_shape(config, spaces)
    sampler = algorithm(config.algo).action_sampler(config, spaces, seed, actor)
    return policy.make_policy(config, spaces, shape, sampler, seed=seed)


def make_inference(config: Config, spaces: Spaces, seed: int, actor: int = 0) -> Inference:
    """Returns the inference of one actor; the arguments are those of `make_policy`."""
    weights_size = network_shape(config, spaces).layout.size
    return LocalInference(make_policy(config, spaces, seed, actor), weights_size)
