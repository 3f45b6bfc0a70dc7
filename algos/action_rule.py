"""How the outputs of a network decide an action, for those that compute policies without a sampler:
an exported graph, and a teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.algos.registry import algorithm
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.observations import Spaces
from penstock.models.acting.categorical import (
    CategoricalSampler,
    EpsilonGreedySampler,
    MultiCategoricalSampler,
    MultiEpsilonGreedySampler,
)
from penstock.models.acting.gaussian import GaussianSampler, NoisySampler, SquashedGaussianSampler
from penstock.models.actions import ActionSpec, Numbers, action_spec, discrete


@dataclass(frozen=True)
class ActionRule:
    """How the outputs of a network decide an action."""

    actions: ActionSpec
    has_values: bool = False
    """Whether the outputs are Q-values, of which the highest counts."""
    log_std: tuple[float, float] | None = None
    """Bounds of the logarithms of standard deviations."""
    deterministic: bool = False
    """Whether the outputs are the numbers of an action alone, without deviations."""


def action_rule(config: Config, spaces: Spaces) -> ActionRule:
    """Returns how a run's algorithm decides actions.

    Raises:
        UserError: if it does so by a sampler of its own.
    """
    sampler = algorithm(config.algo).action_sampler(config, spaces, 0, 0)
    # A class derived from one of these samplers may decide in another way.
    if type(sampler) is EpsilonGreedySampler:
        return ActionRule(discrete(len(sampler.outputs)), has_values=True)
    if type(sampler) is MultiEpsilonGreedySampler:
        return ActionRule(action_spec(config, spaces), has_values=True)
    if type(sampler) in (CategoricalSampler, MultiCategoricalSampler):
        return ActionRule(action_spec(config, spaces))

    shape = spaces.action_space.shape
    assert shape is not None
    if type(sampler) is GaussianSampler:
        return ActionRule(Numbers(shape, sampler.squashed))
    if type(sampler) is SquashedGaussianSampler:
        return ActionRule(Numbers(shape, squashed=True), log_std=sampler.log_std_bounds)
    if type(sampler) is NoisySampler:
        return ActionRule(Numbers(shape, squashed=True), deterministic=True)

    name = type(sampler).__name__
    raise UserError(
        f"algo.name {config.algo.name} decides actions by {name}, a sampler of its own, which only "
        "Python computes on actors: it can neither be exported as ONNX nor teach; use a sampler of "
        "penstock.models.acting, or export a .safetensors file"
    )
