"""A trained policy for use in another program: one call per decision, without a run or a process.

It takes observations as the environment returns them, and returns actions as the environment takes
them: the conversions of `penstock.envs` are done here, for one observation or for a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.algos.acting import make_policy
from penstock.configs.code_references import references
from penstock.configs.errors import UserError, whole_number
from penstock.configs.load import load_run
from penstock.configs.schema import Config
from penstock.core import used_names
from penstock.core.params import Float32
from penstock.envs import EnvInfo, find_bad_observation, make
from penstock.envs.packing import Packer, leaves_of, value_at
from penstock.envs.space_difference import brief, difference
from penstock.envs.vector_env import action_map
from penstock.evaluation.estimates import way_of
from penstock.evaluation.evaluate import checkpoint_folder, fitting_weights
from penstock.evaluation.exported import read, write
from penstock.learner.checkpoints.checkpoint_format import load
from penstock.learner.checkpoints.checkpoint_history import PLAY
from penstock.models.acting.policy import Policy

Array = npt.NDArray[Any]
SIZES = 8
"""Batch sizes for which a policy is kept ready."""


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
    is None. Not for several threads at once.
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
        self._info = info
        self._play = play
        self._packer = Packer(config.env.id, self.observation_space)
        self._to_env_actions = action_map(self.action_space)

        # A policy for each size of a batch, and how many were made: each has its own seed.
        self._seed = whole_number("seed", seed, 0)
        self._by_size: dict[int, Policy] = {}
        self._policies_made = 0

    def __call__(self, observation: Any, state: Array | None = None) -> tuple[Any, Array | None]:
        """Decide what to do in an environment, or in each of a batch.

        Args:
            observation: one, as the environment returns it, or a batch [N, ...] (each entry of a
                Dict [N, ...]), as a vector environment returns them.
            state: what the previous call returned; None where an episode begins. If only some
                episodes of a batch begin, set their rows to 0: ``state[ended] = 0``.

        Returns: the action and the next state. The action is one of `action_space`, int for a
            Discrete, or an array [N, ...] of them. The state is float32 [size] or [N, size], or
            None if the network has no memory.

        Raises:
            UserError: for what is not an observation of `observation_space`, or a state of another
                shape.
        """
        # A single observation becomes a batch of one.
        leading = self._leading_axes(observation)
        is_batch = bool(leading)
        if not is_batch:
            observation = _with_leading_axis(self.observation_space, observation)
        count = leading[0] if is_batch else 1

        space = self._info.observation_space
        packed = np.empty((count, *space.shape), space.dtype)
        self._packer.write(observation, packed)
        if bad := find_bad_observation(packed[None], self._info.parts, None, self._info.counts):
            raise UserError(f"there is {bad}; correct what the environment returns")

        policy = self._policy(count)
        self._set_state(policy, state, leading)
        actions = policy.act(packed) if self.sample else policy.greedy(packed)
        env_actions = self._to_env_actions(actions)
        next_state = policy.state.copy() if policy.state.size else None
        if is_batch:
            return env_actions, next_state

        is_discrete = isinstance(self.action_space, spaces.Discrete)
        action = int(env_actions[0]) if is_discrete else env_actions[0]
        return action, None if next_state is None else next_state[0]

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
            self._info,
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

    def _policy(self, count: int) -> Policy:
        """Returns the policy over ``count`` environments. `SIZES` of them are kept ready."""
        if count in self._by_size:
            return self._by_size[count]

        # Make a policy with a seed of its own, in place of the oldest one.
        if len(self._by_size) == SIZES:
            oldest = next(iter(self._by_size))
            self._by_size.pop(oldest)
        actors = self.config.actors.model_copy(update={"envs": count})
        config = self.config.model_copy(update={"actors": actors})
        seeds = np.random.SeedSequence(self._seed, spawn_key=(self._policies_made,))
        self._policies_made += 1
        policy = make_policy(config, self._info, int(seeds.generate_state(1)[0]))
        self._by_size[count] = policy
        policy.load(self._weights)
        return policy

    def _set_state(self, policy: Policy, state: Array | None, leading: tuple[int, ...]) -> None:
        """Copy ``state``, of observations with these ``leading`` axes, into the policy.

        None sets it to zeros, as at the beginning of an episode. Raises UserError for a state of
        another shape, or for a network without memory.
        """
        if not policy.state.size:
            if state is not None:
                raise UserError("a state was given to a policy without memory; leave it out")
            return
        if state is None:
            policy.reset(np.ones(len(policy.state), np.bool_))
            return

        expected = (*leading, policy.state.shape[1])
        if np.shape(state) != expected:
            raise UserError(
                f"the state has shape {[*np.shape(state)]} where {[*expected]} belongs; give what "
                "the call before returned for as many observations, or None to begin anew"
            )
        policy.state[:] = state


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
    if Path(source).is_file():
        exported = read(Path(source), allow)
        return LoadedPolicy(
            exported.config,
            exported.weights,
            exported.spaces,
            exported.info,
            sample=sample,
            seed=seed,
            play=exported.play,
        )

    config = load_run(source)
    used_names.check(references(config), allow, str(source))
    env = make(config.env, 1, whole_games=True)
    env.close()
    folder = checkpoint_folder(source, checkpoint)
    stored = load(folder)
    weights = fitting_weights(config, folder, stored, env)
    return LoadedPolicy(
        config,
        weights,
        env.info.spaces,
        env.info,
        sample=sample,
        seed=seed,
        play=stored.meta.get(PLAY),
    )


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
