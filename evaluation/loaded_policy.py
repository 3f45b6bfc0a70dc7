"""A trained policy for use in another program: one call per decision, without a run or a process.

It takes observations as the environment returns them, and returns actions as the environment takes
them: the conversions of `penstock.envs` are done here, for one observation or for a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.algos.batch_policy import BatchPolicy
from penstock.configs.code_references import references
from penstock.configs.errors import UserError, whole_number
from penstock.configs.load import load_run
from penstock.configs.schema import Config
from penstock.core import used_names
from penstock.core.params import Float32
from penstock.envs import EnvInfo, find_bad_observation, find_bad_reward, probe
from penstock.envs.make import FirstIndex
from penstock.envs.packing import Packer, leaves_of, value_at
from penstock.envs.space_difference import brief, difference
from penstock.envs.vector_env import action_map
from penstock.evaluation.estimates import way_of
from penstock.evaluation.policy_source import trained_info
from penstock.learner.checkpoints.checkpoint_format import load
from penstock.learner.checkpoints.checkpoint_history import PLAY, checkpoint_folder
from penstock.learner.checkpoints.exported import Exported, read, write

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ActionDetails:
    """An action and what it was decided by, or N actions, with arrays ``[N, ...]``.

    Numbers of a single observation are float. What the policy does not have is None. Numbers of an
    action are described as the network decides them, from -1 to 1, before they are mapped to the
    bounds of the environment.
    """

    action: Any
    """As `LoadedPolicy` returns it."""
    state: Array | None
    """As `LoadedPolicy` returns it."""
    value: float | Array | None
    """The discounted return that is expected from the observation on, in the units of training: of
    actor-critics by their value head, of DQN the highest Q-value."""
    logits: Array | None
    """Of choices, ``[choices]``, those of a MultiDiscrete one after another; -1e9 if masked."""
    probabilities: Array | None
    """Of the same choices; those of each component add up to 1."""
    q: Array | None
    """Q-values, ``[actions]``; -1e9 if masked."""
    mean: Array | None
    """Of normal numbers, ``[numbers]``, before tanh if they are squashed (SAC, TD3, and
    `model.gaussian` squashed)."""
    std: Array | None
    """Standard deviations of the same numbers. None for TD3, whose actions have no distribution."""
    log_prob: float | Array | None
    """Log-probability of the action, or its log-density if it is numbers; of the most probable
    action too. None for DQN and TD3."""
    entropy: float | Array | None
    """Of that distribution, in nats. None for DQN and TD3, and for squashed numbers, whose entropy
    has no closed form."""


class PackedObservations(NamedTuple):
    """The arguments of a call, as a batch of B observations."""

    packed: Array
    """``[B, *shape]``"""
    state: Float32
    """``[B, state_size]``"""
    is_single: bool
    """Whether it was one observation without the axis of a batch."""


class LoadedPolicy:
    """A trained policy that is called: ``action, state = policy(observation, state)``.

        policy = penstock.load_policy("runs/my_run")
        observation, _ = env.reset()
        state = None
        while playing:
            action, state = policy(observation, state)
            observation, reward, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                observation, _ = env.reset()
                state = None

    It keeps nothing from one call to the next but its random numbers: what a recurrent network
    remembers is the ``state``, which goes from each call into the next. The state of other networks
    is None. One that reads its last reward (`reads_reward`) is called with it:
    ``policy(observation, state, reward)``. Not for several threads at once.
    """

    def __init__(
        self,
        config: Config,
        weights: Float32,
        own: tuple[spaces.Space[Any], spaces.Space[Any]],
        info: EnvInfo,
        sample: bool | None,
        seed: int,
        play: Mapping[str, Any] | None = None,
    ) -> None:
        """Users call `load_policy` instead.

        Args:
            config: the config of the run.
            weights: flat vector of the network's parameters.
            own: observation and action space of one environment, as it has them.
            info: the environment as Penstock packs its observations and actions.
            sample: whether actions are sampled; None follows ``play``.
            seed: of the random numbers of sampled actions.
            play: how to play the policy (`estimates.evidence`).
        """
        self.observation_space, self.action_space = own
        self.config = config
        """Config of the run that the policy comes from."""
        self.sample = way_of(play) == "sampled" if sample is None else sample
        """Whether actions are sampled as in training, instead of the most probable ones."""
        self._weights = weights
        self.info = info
        """The environment as Penstock packs its observations and actions."""
        self._play = play
        self._packer = Packer(config.env.id, self.observation_space, info.embed_above)
        self._to_env_actions = action_map(self.action_space)
        self._seed = whole_number("seed", seed, 0)

    def __call__(
        self,
        observation: Any,
        state: Array | None = None,
        reward: float | npt.ArrayLike | None = None,
    ) -> tuple[Any, Array | None]:
        """Decide what to do in an environment, or in each of a batch.

        Args:
            observation: one, as the environment returns it, or a batch [N, ...] (each entry of a
                Dict [N, ...]), as a vector environment returns them.
            state: what the previous call returned; None where an episode begins. If only some
                episodes of a batch begin, set their rows to 0: ``state[ended] = 0``.
            reward: what the action of the previous call was paid, raw, or [N] of them. Only a
                policy of which `reads_reward` is True needs it, from the second step of an episode
                on: where the state is None or 0 it is not used.

        Returns: the action and the next state. The action is one of `action_space`, int for a
            Discrete, or an array [N, ...] of them. The state is float32 [size] or [N, size], or
            None if the network has no memory.

        Raises:
            UserError: for what is not an observation of `observation_space`, a state or a reward of
                another shape, or a reward that is missing.
        """
        batch = self._batch(observation, state, reward)
        actions, next_state = self.batch_policy.decide(
            batch.packed, batch.state, sample=self.sample
        )
        env_actions = self._to_env_actions(actions)
        return self._action(env_actions, batch), self._next_state(next_state, batch)

    def details(
        self,
        observation: Any,
        state: Array | None = None,
        reward: float | npt.ArrayLike | None = None,
    ) -> ActionDetails:
        """Decide as a call does, and return what the decision was made of.

        Arguments and errors are those of a call. The first call makes the network that estimates
        the value, if there is one.
        """
        batch = self._batch(observation, state, reward)
        explained = self.batch_policy.explain(batch.packed, batch.state, sample=self.sample)
        explanation = explained.explanation
        return ActionDetails(
            action=self._action(self._to_env_actions(explanation.actions), batch),
            state=self._next_state(explained.next_state, batch),
            value=_number(explained.values, batch),
            logits=_row(explanation.logits, batch),
            probabilities=_row(explanation.probabilities, batch),
            q=_row(explanation.q, batch),
            mean=_row(explanation.mean, batch),
            std=_row(explanation.std, batch),
            log_prob=_number(explanation.log_prob, batch),
            entropy=_number(explanation.entropy, batch),
        )

    @cached_property
    def batch_policy(self) -> BatchPolicy:
        """The policy for packed observations, by which calls decide."""
        return BatchPolicy(self.config, self.info, self._weights, self._seed)

    @property
    def reads_reward(self) -> bool:
        """Whether calls need the last reward, as `model.core_inputs` names it."""
        core_inputs = self.batch_policy.core_inputs
        return core_inputs is not None and core_inputs.reads_reward

    def save(self, path: str | Path, *, half: bool = False) -> int:
        """Write the policy to one file, for `load_policy` without the run and its environment.

        Args:
            path: of the file, which is replaced if it exists.
            half: whether parameters are stored as float16.

        Returns: the size of the file in bytes.

        Raises:
            UserError: if it cannot be written.
        """
        return write(
            Path(path),
            self.config,
            (self.observation_space, self.action_space),
            self.info,
            self._weights,
            play=self._play,
            half=half,
        )

    def check(self, env: gymnasium.Env[Any, Any]) -> None:
        """Raise UserError unless ``env`` has the spaces of the environment it was trained on."""
        trained_spaces = self.observation_space, self.action_space
        if differs := difference(trained_spaces, (env.observation_space, env.action_space)):
            raise UserError(
                f"this policy was trained on {self.config.env.id}, whose {differs.column} are "
                f"{differs.trained}, and the environment's are {differs.present}; give it an "
                "environment with those, wrapped as in training (env.wrappers)"
            )

    def _leading_axes(self, observation: Any) -> tuple[int, ...]:
        """Returns () for one observation and (N,) for N of them.

        Raises UserError for anything else.
        """
        # All arrays of an observation have to agree in these axes.
        findings = list(_leading_axes_of_arrays(self.observation_space, observation))
        fault = next((finding for finding in findings if isinstance(finding, str)), "")
        leading_axes = {finding for finding in findings if not isinstance(finding, str)}
        if not fault and len(leading_axes) == 1:
            return leading_axes.pop()

        raise UserError(
            f"the observation is{fault or ' of parts that are not equally many'}: this policy was "
            f"trained on {self.config.env.id}, which shows {brief(self.observation_space)}; give "
            "it one of these, or a batch with one more axis in front"
        )

    def _batch(
        self, observation: Any, state: Array | None, reward: float | npt.ArrayLike | None
    ) -> PackedObservations:
        """Returns the arguments of a call as a batch; UserError as `__call__` says."""
        # A single observation becomes a batch of one.
        leading = self._leading_axes(observation)
        if not leading:
            observation = _with_leading_axis(self.observation_space, observation)
        count = leading[0] if leading else 1

        space = self.info.observation_space
        packed = np.empty((count, *space.shape), space.dtype)
        self._packer.write(observation, packed)
        if bad := find_bad_observation(packed[None], self.info.parts, None, self.info.counts):
            raise UserError(f"there is {bad}; correct what the environment returns")

        batch_state = self._state(state, leading, count)
        if self.reads_reward and state is not None:
            batch_state = self._paid(batch_state, reward, leading)
        return PackedObservations(packed, batch_state, is_single=not leading)

    def _state(self, state: Array | None, leading: tuple[int, ...], count: int) -> Float32:
        """Returns the ``state`` of ``count`` observations with these ``leading`` axes as a batch.

        None is that of the beginning of an episode, zeros. Raises UserError for a state of another
        shape, or for a network without memory.
        """
        size = self.batch_policy.state_size
        if state is None:
            return np.zeros((count, size), np.float32)
        if not size:
            raise UserError("a state was given to a policy without memory; leave it out")

        expected = (*leading, size)
        if np.shape(state) != expected:
            raise UserError(
                f"the state has shape {[*np.shape(state)]} where {[*expected]} belongs; give what "
                "the call before returned for as many observations, or None to begin anew"
            )
        return np.reshape(state, (count, size))

    def _paid(
        self, state: Float32, reward: float | npt.ArrayLike | None, leading: tuple[int, ...]
    ) -> Float32:
        """Returns a copy of states ``[B, state_size]`` with the last rewards; UserError for bad
        ones.

        States of 0 are those of episodes that begin, which have no last reward.
        """
        if reward is None:
            raise UserError(
                "this policy reads the last reward (model.core_inputs), and none was given; call "
                "policy(observation, state, reward) with what the last action was paid"
            )
        try:
            rewards = np.asarray(reward, np.float64)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the reward is {reward!r:.80}, which is no number; give what the last action was "
                "paid, one for each observation"
            ) from error
        if rewards.shape != leading:
            raise UserError(
                f"the reward has shape {[*rewards.shape]} where {[*leading]} belongs; give one for "
                "each observation"
            )
        if bad := find_bad_reward(rewards):
            raise UserError(f"there is {bad}; correct what the environment returns")

        core_inputs = self.batch_policy.core_inputs
        assert core_inputs is not None
        paid = state.copy()
        core_inputs.put_rewards(paid, np.where(state.any(1), rewards.reshape(-1), 0.0))
        return paid

    def _action(self, env_actions: Any, batch: PackedObservations) -> Any:
        """Returns the actions of a batch as `__call__` does."""
        if not batch.is_single:
            return env_actions
        is_discrete = isinstance(self.action_space, spaces.Discrete)
        return int(env_actions[0]) if is_discrete else env_actions[0]

    def _next_state(self, state: Float32, batch: PackedObservations) -> Array | None:
        """Returns the state after a batch as `__call__` does."""
        if not self.batch_policy.state_size:
            return None
        return state[0] if batch.is_single else state


def load_policy(
    source: str | Path,
    checkpoint: Literal["best", "last"] = "best",
    *,
    sample: bool | None = None,
    seed: int = 0,
    allow: Sequence[str] = (),
) -> LoadedPolicy:
    """Load the policy of a run, which may still be training, or of a file. Starts no process.

    The environment of a run is made once, to ask for its spaces, and closed.

    Args:
        source: folder of a run; or a file that `penstock export` or `LoadedPolicy.save` wrote, for
            which nothing else is needed.
        checkpoint: of a run: "best", by evaluation, or by the mean return in training if none was
            evaluated ("last" if there is no best one yet); or "last".
        sample: True draws actions as in training, by random numbers of ``seed``; False takes the
            most probable ones; None does what the run's evaluation found to be better, and takes
            the most probable ones if there was none.
        seed: of those random numbers.
        allow: names that the file, or a run that was not trained on this host, may import, such as
            "my_game:Net" or "my_game:*". Others are refused before anything is imported.

    Raises:
        UserError: if there is no such policy, or if it must not be loaded.
    """
    stored = stored_policy(source, checkpoint, allow)
    return LoadedPolicy(
        stored.config,
        stored.weights,
        stored.spaces,
        stored.info,
        sample=sample,
        seed=seed,
        play=stored.play,
    )


def stored_policy(
    source: str | Path, checkpoint: Literal["best", "last"] = "best", allow: Sequence[str] = ()
) -> Exported:
    """Returns the policy of a run or of a file, as an exported file holds it.

    The arguments and the errors are those of `load_policy`.
    """
    if Path(source).is_file():
        return read(Path(source), allow)

    config = load_run(source)
    used_names.check(references(config), allow, str(source))
    present_info = probe(config.env, first=FirstIndex.COMMAND)
    folder = checkpoint_folder(source, checkpoint)
    stored = load(folder)
    info = trained_info(config, folder, stored, present_info)
    return Exported(config, info.spaces, info, stored.weights, stored.meta.get(PLAY))


def _row(array: Array | None, batch: PackedObservations) -> Array | None:
    """Returns ``array`` ``[B, ...]``, without the axis of the batch for a single observation."""
    return array[0] if array is not None and batch.is_single else array


def _number(array: Array | None, batch: PackedObservations) -> float | Array | None:
    """Returns ``array`` ``[B]``, or its one number for a single observation."""
    return float(array[0]) if array is not None and batch.is_single else array


def _leading_axes_of_arrays(
    space: spaces.Space[Any], observation: Any
) -> Iterator[tuple[int, ...] | str]:
    """Yield for each array of an observation the axes in front of those of its space.

    They are () or (N,), N > 0. For an array that does not fit its space, what is wrong with it is
    yielded instead, as text that follows "the observation is".
    """
    for keys, part in leaves_of(space):
        name = ".".join(map(str, keys))
        place = f", in {name}," if keys else ""
        expected = part.shape or ()
        try:
            shape = np.shape(value_at(keys, observation))
        except (KeyError, IndexError, TypeError):
            yield f" without {name}"
            continue
        except ValueError:
            yield f"{place} of rows that differ in length"
            continue

        leading = shape[: len(shape) - len(expected)]
        fits = len(leading) <= 1 and shape[len(leading) :] == expected and 0 not in leading
        if fits:
            yield leading
        else:
            yield f"{place} of shape {[*shape]} where {[*expected]} belongs"


def _with_leading_axis(space: spaces.Space[Any], observation: Any) -> Any:
    """Returns one observation of ``space`` as a batch of one, with an axis in front."""
    if isinstance(space, spaces.Dict):
        return {
            key: _with_leading_axis(part, observation[key]) for key, part in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        return tuple(map(_with_leading_axis, space.spaces, observation))
    return np.asarray(observation)[None]
