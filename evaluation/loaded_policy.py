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
from penstock.evaluation.evaluate import checkpoint_folder, fitted
from penstock.evaluation.exported import read, write
from penstock.learner.checkpoints.checkpoint_format import load
from penstock.learner.checkpoints.checkpoint_history import PLAY
from penstock.models.acting.policy import Policy

Array = npt.NDArray[Any]
SIZES = 8  # sizes of a batch that are kept ready


class LoadedPolicy:
    """Call it: ``action, state = policy(observation, state)``.

    It keeps nothing from one call to the next but its random numbers: what a recurrent network
    remembers is the ``state``, which goes from each call into the next, and is None for the others.
    Not for several threads at once.
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
        """``own`` are the observation and action space of one environment, as it has them;
        ``play`` is `estimates.evidence` on how to play the policy, followed if ``sample`` is
        None."""
        self.observation_space, self.action_space = own
        self.config = config
        """Of the run that it comes from."""
        self.sample = way_of(play) == "sampled" if sample is None else sample
        """Whether actions are sampled as in training, instead of the most probable ones."""
        self._weights, self._info = weights, info
        self._play, self._seed = play, whole_number("seed", seed, 0)
        self._made = 0  # number of policies made so far, each of which has its own seed
        self._packer = Packer(config.env.id, self.observation_space)
        self._to_game = action_map(self.action_space)
        self._by_size: dict[int, Policy] = {}

    def __call__(self, observation: Any, state: Array | None = None) -> tuple[Any, Array | None]:
        """What to do, and what to remember.

        Args:
            observation: one, as the environment returns it, or a batch [N, ...] (each entry of a
                Dict [N, ...]), as a vector environment returns them.
            state: what the call before returned; None where an episode begins. Of a batch in which
                some episodes begin set those rows to 0: ``state[ended] = 0``.

        Returns:
            An action of `action_space`, int for a Discrete, or an array [N, ...] of them; and the
            state, float32 [size] or [N, size], or None where the network has no memory.

        Raises UserError for what is not an observation of `observation_space`.
        """
        lead = self._leading(observation)
        if not lead:
            observation = _one_more_axis(self.observation_space, observation)
        count = lead[0] if lead else 1
        space = self._info.observation_space
        packed = np.empty((count, *space.shape), space.dtype)
        self._packer.write(observation, packed)
        if bad := find_bad_observation(packed[None], self._info.parts, None, self._info.counts):
            raise UserError(f"there is {bad}; correct what the environment returns")
        policy = self._policy(count)
        self._remember(policy, state, lead)
        action = policy.act(packed) if self.sample else policy.greedy(packed)
        env_actions = self._to_game(action)
        after = policy.state.copy() if policy.state.size else None
        if lead:
            return env_actions, after
        is_choice = isinstance(self.action_space, spaces.Discrete)
        one = int(env_actions[0]) if is_choice else env_actions[0]
        return one, None if after is None else after[0]

    def save(self, path: str | Path, *, half: bool = False) -> int:
        """Write it to one file that `load_policy` takes, where neither the run nor the environment
        is; its size in bytes. With ``half`` parameters are stored as float16. Raises UserError."""
        own = self.observation_space, self.action_space
        return write(Path(path), self.config, own, self._info, self._weights, self._play, half)

    def check(self, env: gymnasium.Env[Any, Any]) -> None:
        """Raise UserError unless ``env`` has the spaces of the environment it was trained on."""
        trained = self.observation_space, self.action_space
        if differs := difference(trained, (env.observation_space, env.action_space)):
            raise UserError(
                f"this policy was trained on {self.config.env.id}, whose {differs.column} are "
                f"{differs.trained}, and the environment's are {differs.present}; give it an "
                "environment with those, wrapped as in training (env.wrappers)"
            )

    def _leading(self, observation: Any) -> tuple[int, ...]:
        """() for one observation, (N,) for N of them; UserError for anything else."""
        leads = list(_leads(self.observation_space, observation))
        wrong = next((lead for lead in leads if isinstance(lead, str)), "")
        found = {lead for lead in leads if not isinstance(lead, str)}
        if not wrong and len(found) == 1:
            return found.pop()
        raise UserError(
            f"the observation is{wrong or ' of parts that are not equally many'}: this policy was "
            f"trained on {self.config.env.id}, which shows {brief(self.observation_space)}; give "
            "it one of these, or a batch with one more axis in front"
        )

    def _policy(self, count: int) -> Policy:
        """The policy over ``count`` environments."""
        if count not in self._by_size:
            if len(self._by_size) == SIZES:
                self._by_size.pop(next(iter(self._by_size)))
            actors = self.config.actors.model_copy(update={"envs": count})
            config = self.config.model_copy(update={"actors": actors})
            seed = np.random.SeedSequence(self._seed, spawn_key=(self._made,))
            self._made += 1
            number = int(seed.generate_state(1)[0])
            policy = self._by_size[count] = make_policy(config, self._info, number)
            policy.load(self._weights)
        return self._by_size[count]

    def _remember(self, policy: Policy, state: Array | None, lead: tuple[int, ...]) -> None:
        if not policy.state.size:
            if state is not None:
                raise UserError("a state was given to a policy without memory; leave it out")
            return
        if state is None:
            policy.reset(np.ones(len(policy.state), np.bool_))
            return
        wanted = (*lead, policy.state.shape[1])
        if np.shape(state) != wanted:
            raise UserError(
                f"the state has shape {[*np.shape(state)]} where {[*wanted]} belongs; give what "
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
    """The policy of a run, which may still be training, or of a file. Starts no process.

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

    The environment of a run is made once, to ask for its spaces, and closed. Raises UserError.
    """
    if Path(source).is_file():
        exported = read(Path(source), allow)
        about = exported.spaces, exported.info, sample, seed, exported.play
        return LoadedPolicy(exported.config, exported.weights, *about)

    config = load_run(source)
    used_names.check(references(config), allow, str(source))
    game = make(config.env, 1)
    game.close()
    folder = checkpoint_folder(source, checkpoint)
    stored = load(folder)
    weights = fitted(config, folder, stored, game)
    about = game.info.spaces, game.info, sample, seed, stored.meta.get(PLAY)
    return LoadedPolicy(config, weights, *about)


def _leads(space: spaces.Space[Any], found: Any) -> Iterator[tuple[int, ...] | str]:
    """Of each array the axes before those of its space, or what is wrong with it."""
    for keys, part in leaves_of(space):
        name = ".".join(map(str, keys))
        place = f", in {name}," if keys else ""
        own = part.shape or ()
        try:
            shape = np.shape(value_at(keys, found))
        except (KeyError, IndexError, TypeError):
            yield f" without {name}"
            continue
        except ValueError:
            yield f"{place} of rows that differ in length"
            continue
        lead = shape[: len(shape) - len(own)]
        if len(lead) <= 1 and shape[len(lead) :] == own and 0 not in lead:
            yield lead
        else:
            yield f"{place} of shape {[*shape]} where {[*own]} belongs"


def _one_more_axis(space: spaces.Space[Any], found: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _one_more_axis(part, found[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(_one_more_axis, space.spaces, found))
    return np.asarray(found)[None]
