"""Decisions for any number of observations at once, for programs that call a trained policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.algos.registry import algorithm
from penstock.algos.samples import network_shape
from penstock.configs.schema import Config
from penstock.core.observations import Spaces, views
from penstock.core.params import Array, Float32
from penstock.models.acting.acting_network import ActingNetwork
from penstock.models.acting.categorical import ActionSampler, Explanation
from penstock.models.acting.critic import Critic, make_critic, state_values
from penstock.models.acting.exploration import exploring_weights
from penstock.models.acting.policy import core_inputs_of, make_network, state_size_of
from penstock.models.core_inputs import CoreInputs
from penstock.models.fitting import mask_of

MOST_ROWS = 1024
"""Rows that are decided at once, which bounds the memory of a network; more are decided in turn.
CartPole's MLP needs a fifth more time for 4,096 rows at once than for four times 1,024."""


Indices = npt.NDArray[np.int64]


class Workspace(NamedTuple):
    """The memory in which batches of up to so many rows are decided."""

    network: ActingNetwork
    sampler: ActionSampler
    state: Float32
    """The recurrent state, ``[rows, size]``."""


class ExplainedBatch(NamedTuple):
    """Decisions for B observations, and what they were made of."""

    explanation: Explanation
    values: Float32 | None
    """The values of the states ``[B]``, None if the network does not estimate them."""
    next_state: Float32
    """``[B, state_size]``"""


class RecordedBatch(NamedTuple):
    """Decisions for B observations, and what a learner needs to know of them; all are copies."""

    actions: Array
    """As `BatchPolicy.decide` returns them."""
    next_state: Float32
    """``[B, state_size]``"""
    recorded: Mapping[str, Array]
    """What is recorded of the actions, ``[B, ...]`` by the name of its column: `action` too where a
    learner trains on other numbers than those that are played."""

    def select(self, chosen: Array) -> RecordedBatch:
        """Returns some of the decisions."""
        recorded = {name: values[chosen] for name, values in self.recorded.items()}
        return RecordedBatch(self.actions[chosen], self.next_state[chosen], recorded)


class BatchPolicy:
    """Decides for any number of observations in one call.

    It keeps nothing of them from one call to the next but its random numbers. The weights are in
    memory once: a batch is computed in a `Workspace` of the next power of two of rows, which all
    have the same network. Not for several threads at once.
    """

    state_size: int
    """Number of float32 values that a network with memory remembers of a row; 0 without."""
    core_inputs: CoreInputs | None
    """What of the last action and reward they have. The action is written here, the reward by the
    caller (`CoreInputs.put_rewards`)."""

    def __init__(self, config: Config, spaces: Spaces, weights: Float32, seed: int = 0) -> None:
        """Create a policy.

        Args:
            config: of the run.
            spaces: of its environments.
            weights: flat vector of the network's parameters.
            seed: of the random numbers of sampled actions.

        Raises:
            UserError: if no network fits the spaces, or `actors.inference` cannot compute it.
        """
        self._config = config
        self._spaces = spaces
        self._weights = weights
        self._untrained = False
        self._epsilon: float | None = None
        self._shape = network_shape(config, spaces)
        self.state_size = state_size_of(self._shape)
        self.core_inputs = core_inputs_of(self._shape)
        self._mask = mask_of(spaces)

        # The network is made for one row, and shared by the workspaces for more.
        self._seeds = np.random.SeedSequence(seed)
        sampler, memory = self._memory(1)
        network = make_network(config.actors, self._shape, sampler.outputs, memory)
        self._workspaces = {1: Workspace(network, sampler, memory)}

        self._exploring = exploring_weights(self._shape, seed)
        self._load(number=0)

    def decide(self, observations: Array, state: Float32, *, sample: bool) -> tuple[Array, Float32]:
        """Decide for each of B observations.

        Args:
            observations: ``[B, *shape]``, as they are packed (`envs.packing.Packer`); B > 0.
            state: what the network remembers of each, float32 ``[B, state_size]``; zeros where an
                episode begins.
            sample: whether actions are drawn as in training, instead of the most probable ones.

        Returns: the actions, int32 ``[B, *shape]`` for choices or float32 ``[B, *shape]`` for
            numbers, which `envs.vector_env.action_map` maps to those of an environment; and the
            next state, ``[B, state_size]``. Both are copies.
        """
        count = len(observations)
        if count > MOST_ROWS:
            parts = [
                self.decide(observations[rows], state[rows], sample=sample)
                for rows in _slices(count)
            ]
            actions = np.concatenate([part for part, _ in parts])
            return actions, np.concatenate([next_state for _, next_state in parts])

        workspace = self._compute(observations, state, explores=sample)
        decided = workspace.sampler.decide(sample=sample)[:count].copy()
        return decided, self._next_state(workspace, decided)

    def load(self, weights: Float32, *, untrained: bool, number: int = 0) -> None:
        """Decide by other weights from now on, which are copied.

        Args:
            weights: flat vector of the network's parameters.
            untrained: whether they are those before the network's first update, for which some
                algorithms act at random.
            number: of the weights, on which the noise of noisy layers depends.
        """
        self._weights = weights.copy()
        self._untrained = untrained
        self._load(number)
        self.__dict__.pop("_critic", None)

    def act(self, observations: Array, state: Float32, numbers: Indices) -> RecordedBatch:
        """Decide for each of B observations as actors do in training.

        Args:
            observations: as for `decide`.
            state: as for `decide`.
            numbers: int64 ``[B]``, the number of each one's seat, on which its exploration may
                depend (`ActionSampler.explore_as`).
        """
        count = len(observations)
        if count > MOST_ROWS:
            batches = [
                self.act(observations[rows], state[rows], numbers[rows]) for rows in _slices(count)
            ]
            names = batches[0].recorded
            return RecordedBatch(
                np.concatenate([batch.actions for batch in batches]),
                np.concatenate([batch.next_state for batch in batches]),
                {name: _joined([batch.recorded[name] for batch in batches]) for name in names},
            )

        workspace = self._compute(observations, state, explores=True)
        workspace.sampler.explore_as(numbers)
        actions = workspace.sampler.sample()[:count].copy()
        columns = workspace.sampler.recorded.items()
        return RecordedBatch(
            actions,
            self._next_state(workspace, actions),
            {name: values[:count].copy() for name, values in columns},
        )

    def explain(self, observations: Array, state: Float32, *, sample: bool) -> ExplainedBatch:
        """Decide as `decide` does, and return what the decisions were made of."""
        count = len(observations)
        if count > MOST_ROWS:
            batches = [
                self.explain(observations[rows], state[rows], sample=sample)
                for rows in _slices(count)
            ]
            explanations = [batch.explanation for batch in batches]
            columns = zip(*explanations, strict=True)
            return ExplainedBatch(
                Explanation(*map(_joined, columns)),
                _joined([batch.values for batch in batches]),
                _joined([batch.next_state for batch in batches]),
            )

        workspace = self._compute(observations, state, explores=sample)
        explanation = workspace.sampler.explain(sample=sample).first(count)
        values = state_values(self._critic, explanation, observations, state)
        next_state = self._next_state(workspace, explanation.actions)
        return ExplainedBatch(explanation, values, next_state)

    def _load(self, number: int) -> None:
        """Load `_weights` into the network, and tell the samplers of them."""
        network = self._workspaces[1].network
        if self._exploring is None:
            network.load(self._weights)
        else:
            self._epsilon = self._exploring.take(network, self._weights, number)
        for workspace in self._workspaces.values():
            self._tell(workspace.sampler)

    def _tell(self, sampler: ActionSampler) -> None:
        """Tell a sampler of the present weights."""
        sampler.on_new_weights(untrained=self._untrained)
        if self._epsilon is not None:
            sampler.on_new_epsilon(self._epsilon)

    def _compute(self, observations: Array, state: Float32, *, explores: bool) -> Workspace:
        """Returns the workspace whose sampler has the outputs for the observations, in its first
        columns.

        ``explores``: whether noisy layers have noise.
        """
        count = len(observations)
        workspace = self._workspace(count)
        if self._exploring is not None:
            self._exploring.prepare(workspace.network, explores=explores)
        outputs = workspace.sampler.outputs
        workspace.state[:count] = state
        workspace.network.forward(observations)
        # A sampler decides for the other rows too, so it needs numbers there.
        outputs[:, count:] = 0

        if self._mask is not None:
            (mask,) = views((self._mask,), np.asarray(observations, np.uint8)).values()
            forbidden = np.zeros(outputs.shape, np.bool_)
            forbidden[:, :count] = mask.T == 0
            workspace.sampler.forbid(forbidden)
        return workspace

    def _next_state(self, workspace: Workspace, actions: Array) -> Float32:
        """Returns a copy of the state after ``actions`` ``[B, *shape]`` were decided."""
        next_state = workspace.state[: len(actions)].copy()
        if self.core_inputs is not None:
            self.core_inputs.put_actions(next_state, actions)
        return next_state

    def _workspace(self, count: int) -> Workspace:
        """Returns the workspace for ``count`` rows."""
        rows = 1 << (count - 1).bit_length()
        if rows not in self._workspaces:
            sampler, state = self._memory(rows)
            network = self._workspaces[1].network.sharing_weights(sampler.outputs, state)
            self._workspaces[rows] = Workspace(network, sampler, state)
        return self._workspaces[rows]

    def _memory(self, rows: int) -> tuple[ActionSampler, Float32]:
        """Returns a sampler for so many rows, with a seed of its own, and their recurrent state."""
        actors = self._config.actors.model_copy(update={"envs": rows})
        config = self._config.model_copy(update={"actors": actors})
        [seeds] = self._seeds.spawn(1)
        seed = int(seeds.generate_state(1)[0])
        sampler = algorithm(config.algo).action_sampler(config, self._spaces, seed, 0)
        self._tell(sampler)
        return sampler, np.zeros((rows, self.state_size), np.float32)

    @cached_property
    def _critic(self) -> Critic | None:
        return make_critic(self._shape, self._weights)


def _slices(count: int) -> list[slice]:
    """Returns the rows of each part of a batch that is decided at once."""
    return [slice(first, first + MOST_ROWS) for first in range(0, count, MOST_ROWS)]


def _joined(parts: Sequence[Any]) -> Any:
    """Returns the array of all rows, given those of their parts; None where these are None."""
    return None if parts[0] is None else np.concatenate(parts)
