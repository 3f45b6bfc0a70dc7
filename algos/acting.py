"""Policies, and what computes an actor's actions, as the algorithm of a config wants them.

`make_inference` is the registry of `core.interfaces.Inference`. Imports torch only if needed.
"""

from __future__ import annotations

from penstock.algos.registry import algorithm
from penstock.algos.samples import slot_spec
from penstock.configs.schema import Config
from penstock.core.interfaces import Inference
from penstock.core.machine import processor
from penstock.core.observations import Spaces
from penstock.models.acting import policy
from penstock.models.acting.inference import LocalInference
from penstock.models.acting.policy import Policy
from penstock.models.compute_form import Options, acting_forms
from penstock.models.timed_forms import Task, time_forms


def make_policy(config: Config, spaces: Spaces, seed: int, actor: int = 0) -> Policy:
    """The policy of actor number ``actor`` over ``actors.envs`` environments."""
    algo = algorithm(config.algo)
    shape = algo.network(config, spaces)
    sampler = algo.action_sampler(config, spaces, seed, actor)
    return policy.make_policy(config, spaces, shape, sampler)


def make_inference(config: Config, spaces: Spaces, seed: int, actor: int = 0) -> Inference:
    """The inference of actor number ``actor``, for one group of ``actors.envs`` environments."""
    return LocalInference([make_policy(config, spaces, seed, actor)])


def timed(config: Config, spaces: Spaces) -> tuple[Config, str]:
    """``config`` with the number format and the order of images in which this processor infers
    fastest, where `actors.precision` and `actors.memory_format` leave them open; and a sentence
    about the choice, empty where nothing is open."""
    actors, envs = config.actors, config.actor_envs
    shape = algorithm(config.algo).network(config, spaces)
    if actors.inference == "numpy":
        return config, ""
    options = Options(actors.precision, actors.memory_format, envs)
    forms = acting_forms(shape, options, envs, has_bf16=processor().has_bf16)
    if len(forms) == 1:
        return config, ""
    seen = (tuple(spaces.observation_space.shape), slot_spec(config, spaces).columns[0].dtype)
    timing = time_forms(Task(shape, seen, config.model, False, actors.threads), forms)
    form = timing.form
    chosen = {"precision": form.precision, "memory_format": form.memory_format}
    changed = config.model_copy(update={"actors": actors.model_copy(update=chosen)})
    return changed, f"actors infer in {timing}"
