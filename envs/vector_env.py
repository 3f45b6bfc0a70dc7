"""One vector of environments, with one meaning of a step for all kinds of them.

Invariants:
- NEXT_STEP autoreset. When a step ends environment i's episode, the observation it writes is the
  episode's final one. The *next* step only resets i: its action is ignored, its reward 0, both
  flags False, and the observation it writes is the first of the next episode.
- `terminated` and `truncated` are never both set: where the environment sets both, terminated wins.
- Where Atari's lives are episodes, `life_lost` marks those that end while their game continues.
- `shortened` marks the end of a first episode that was truncated before its time limit.
- `dropped` marks the steps that failed where failed episodes are dropped: each of them was replaced
  by a reset, as the step after an episode's end.
- Rewards are raw. Discrete actions count from 0, wherever the environment's own begin, and Box
  actions run from -1 to 1 in each value, whatever the environment's bounds are. The environment
  gets its own, in the dtype of its space.
- Observations are one array per row: see `penstock.envs.packing`.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from penstock.configs.errors import UserError
from penstock.core.notes import note_logger
from penstock.core.observations import MASK, UNBOUNDED, ObservationPart, is_bounded
from penstock.core.place import exit_refused
from penstock.core.specs import GIVEN, Column, plain_dtype
from penstock.envs.action_names import action_names
from penstock.envs.failed_episodes import DROPPED
from penstock.envs.first_episodes import SHORTENED
from penstock.envs.instances import release
from penstock.envs.lives import LIFE_LOST
from penstock.envs.packing import MOST_CHOICES, Packer, find_bad_observation
from penstock.envs.process_state import sides_differ, users_side
from penstock.envs.rendering import pictures, pictures_per_s
from penstock.envs.saved_state import restore, state_of
from penstock.envs.space_difference import brief
from penstock.envs.space_misfit import stacking_misfit

logger = note_logger(__name__)

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]

Actions = Discrete | MultiDiscrete | Box

FINAL_KEYS = ("final_obs", "final_observation", "terminal_observation")  # in `info`
RECORDED = "recorded"  # in metadata: dtypes of the columns that an environment records, by name
WATCHED = "watched"  # in metadata of `SinglesVectorEnv`: the keys of `info` in `env.record`
SEATS = "seats"  # in metadata: rows of one game
PLAYING = "playing"  # in `info` of an environment with seats: the rows that play, bool [count]
READ = frozenset((SHORTENED, DROPPED, MASK, *FINAL_KEYS))
MASK_IN_INFO = (
    f"an {MASK} in its info, which no network sees; set "
    "'env.wrappers=[penstock.envs.masks:MaskFromInfo]', which puts it into the observation"
)
_ABOUT_ACTIONS = re.compile(r"\b(action|move|legal|illegal|invalid)s?\b", re.IGNORECASE)
CONSTANTS = (int, float, np.generic, type(None))  # observations, or parts, that cannot change
NUMBERS = (int, float, np.number, np.bool_)
TAKE_RESULTS = SyncVectorEnv.step.__code__, SyncVectorEnv.reset.__code__
SEEDS = 2**30  # ale-py takes int32, and gives environment i of a vector seed + i


@dataclass(frozen=True)
class EnvInfo:
    """The properties of an environment for a policy, and how it is stepped."""

    observation_space: Box
    """Of one environment, as packed."""
    action_space: Actions
    """Of one environment; MultiDiscrete where the environment has MultiBinary.

    Policies choose 0 ... n - 1 also where `start` is not 0, and from -1 to 1 also where the bounds
    are others.
    """
    frames_per_step: int
    """Emulator frames in one agent step; 1 where there is no emulator."""
    how: str
    """A sentence to print: what steps the environments, and which faster way was not used and why.
    """
    parts: tuple[ObservationPart, ...] = ()
    """The parts of an observation packed into bytes; empty where it is one array."""
    own_spaces: tuple[Space[Any], Space[Any]] | None = None
    """The environment's own, of observations and of actions; None: those above."""
    recorded: tuple[Column, ...] = ()
    """Further columns of a slot, whose values the environment gives in the `info` of a step: those
    that it declares, then two for each key of `env.record` (`watched_columns`)."""

    @classmethod
    def of_spaces(
        cls, name: str, spaces: tuple[Space[Any], Space[Any]], frames_per_step: int, how: str
    ) -> EnvInfo:
        """Describe an environment by its own spaces.

        Args:
            name: of the environment, for messages.
            spaces: the environment's own spaces of observations and of actions.
            frames_per_step: emulator frames in one agent step.
            how: the sentence for the field ``how``.

        Raises:
            UserError: for spaces that Penstock cannot play.
        """
        action_space = checked_actions(name, spaces[1])
        packer = Packer(name, spaces[0])
        check_mask(name, packer.parts, action_space)
        return cls(packer.space, action_space, frames_per_step, how, packer.parts, spaces)

    @property
    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        """The environment's own spaces, of observations and of actions."""
        return self.own_spaces or (self.observation_space, self.action_space)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of choices of each component of an action; empty for a Box."""
        return counts_of(self.action_space)


class SinglesVectorEnv(SyncVectorEnv):
    """Steps single environments one by one.

    Of their infos it keeps the keys in `READ`, each with the value True, the columns that the
    environments record, and the numbers of `env.record`. gymnasium makes an array of each entry,
    over all environments, and raises if two do not fit into one: None and a number, or arrays of
    different lengths. It takes the dtype of the first.

    A checkpoint holds the attributes of this class by their names (`penstock.envs.saved_state`).
    """

    beat: Callable[[], object] | None = None
    """Called after the reset of each environment, which may take long."""
    _resetting = False  # whether `reset` runs

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._resetting = True
        try:
            return super().reset(seed=seed, options=options)
        finally:
            # The class's own value applies again, and no saved state holds the attribute.
            del self._resetting

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        # Called after each environment's reset or step. The observations are stacked after the last
        # one, and until then another environment may write to the same memory.
        self._env_obs[env_num] = copied(self._env_obs[env_num])
        if self.beat is not None and (self._resetting or self._autoreset_envs[env_num]):
            self.beat()
        # Not an attribute: a saved state of 0.1 has none.
        recorded, watched = self.metadata.get(RECORDED), self.metadata.get(WATCHED)
        if READ.isdisjoint(env_info.keys()) and not recorded and not watched:
            return vector_infos
        kept = dict.fromkeys(READ & env_info.keys(), True)
        kept |= {name: env_info[name] for name in recorded or () if name in env_info}
        kept |= {key: as_number(key, env_info[key]) for key in watched or () if key in env_info}
        return super()._add_info(vector_infos, kept, env_num)


class BatchedEnv:
    """Steps `count` environments together; the module says what a step means.

    The observations go to an array of the caller, such as a slot:

        env = penstock.envs.make(config.env, count=8)
        space = env.info.observation_space
        observations = np.zeros((8, *space.shape), space.dtype)
        env.reset_into(seed, observations)
        reward, terminated, truncated = env.step_into(actions, observations)
    """

    life_lost: Flags | None = None
    """Of the last step: which episodes ended with a life, while their game continues."""
    shortened: Flags | None = None
    """Of the last step: which first episodes were truncated before their time limit."""
    dropped: Flags | None = None
    """Of the last step: which environments failed in it, and have begun another episode."""
    playing: Flags | None = None
    """Of the last step or reset: the rows whose next step is a decision, where the environment says
    it; None: all but those whose episode has just ended."""
    recorded: Mapping[str, Array]
    """Values of the last step for `info.recorded`, each ``[count]``, in the same arrays always."""

    def __init__(
        self,
        name: str,
        vector: VectorEnv,
        frames_per_step: int,
        how: str,
        record: Sequence[str] = (),
    ) -> None:
        """Take over a vector environment.

        Args:
            name: of the environment, for messages.
            vector: the environments, which `close` closes.
            frames_per_step: emulator frames in one agent step.
            how: the sentence for `EnvInfo.how`.
            record: the keys of `env.record`.

        Raises:
            UserError: if Penstock cannot play the environments.
        """
        _check_autoreset(name, vector)
        own_spaces = vector.single_observation_space, vector.single_action_space
        info = EnvInfo.of_spaces(name, own_spaces, frames_per_step, how)
        declared = recorded_columns(name, vector.metadata)
        self._declared = tuple(column.name for column in declared)
        self._watched = tuple(key for key in record if key not in self._declared)
        if self._watched and isinstance(vector, SinglesVectorEnv):
            vector.metadata = {**vector.metadata, WATCHED: self._watched}
        watched = (column for key in self._watched for column in watched_columns(key))
        self.info = replace(info, recorded=(*declared, *watched))
        self.count = vector.num_envs
        self.recorded = {c.name: np.zeros(self.count, c.dtype) for c in self.info.recorded}
        # Rows of one game may pause and end apart.
        self._has_seats = vector.metadata.get(SEATS, 1) > 1
        self._name = name
        self._vector = vector
        self._singles = isinstance(vector, SyncVectorEnv)
        self._to_game = action_map(vector.single_action_space)
        self._shown: Array | None = None  # the observations that the policy acts on
        self._over: tuple[Any, Any] = (False, False)
        # It is true in the first step after a reset, and where the sides differ.
        self._on_users_side = True
        self._mask_in_info = False
        self._pack_by(Packer(name, own_spaces[0]))

    def pack_as(self, space: Space[Any]) -> None:
        """Pack observations in the order of the parts of ``space``, which has the same parts.

        Call it before `reset_into`. A policy reads the parts where they were in training.
        """
        packer = Packer(self._name, space)
        if packer.parts != self.info.parts:
            own_spaces = space, self.info.spaces[1]
            self.info = replace(self.info, parts=packer.parts, own_spaces=own_spaces)
            self._pack_by(packer)

    def _pack_by(self, packer: Packer) -> None:
        self._pack = packer
        part = next((part for part in packer.parts if part.name == MASK), None)
        self._mask_bytes = slice(part.offset, part.offset + part.nbytes) if part else slice(0)
        # A copy of the masks in them, as their memory may be a slot that was passed on.
        self._mask = None if part is None else np.ones((self.count, part.nbytes), np.uint8)

    @property
    def vector(self) -> VectorEnv:
        """The vector environment that it steps."""
        return self._vector

    def watch_precision(self, writes: int = 1000) -> None:
        """Look for what networks will not see, and note it for the user.

        Of the next ``writes`` observations these are numbers that float32 does not tell apart; of
        the next reset it is an action mask in the `info`.
        """
        self._pack.watches = writes

    def reset_into(self, seed: int, out: Array) -> None:
        """Begin new episodes everywhere, and write their first observations.

        Args:
            seed: >= 0. The same seed gives the same episodes. Environments may be seeded with seed,
                seed + 1, ..., so the seeds of two vectors must differ by more than `count`.
            out: the array for the observations, [count, *shape] of the observation space's dtype.

        Raises:
            UserError: for a mistake of the environment that is understood.
            Exception: any other error of the environment.
        """
        self._on_users_side = True
        try:
            with users_side():
                observations, info = self._vector.reset(seed=seed % SEEDS)
        except SystemExit as error:
            raise exit_refused(f"environment {self._name}", error) from error
        except Exception as error:
            self._explain(error)
            raise
        self._mask_in_info = MASK in info and self._mask is None and bool(self.info.counts)
        if self._mask_in_info and self._pack.watches:
            logger.info("environment %s gives %s", self._name, MASK_IN_INFO)
        self._pack.write(observations, out)
        self._shown, self._over = out, (False, False)
        if self._has_seats:
            self.playing = self._playing(info)
        if self._mask is not None:
            np.copyto(self._mask, out[:, self._mask_bytes])

    def step_into(self, actions: Array, out: Array) -> tuple[Array, Flags, Flags]:
        """Step every environment, and write the observations that follow.

        Args:
            actions: contiguous int32 or int64 [count], or [count, *shape] where several things are
                chosen, each in 0 ... n - 1, which is not checked; for a Box float32
                [count, *shape], where values beyond -1 and 1 are clipped.
            out: the array for the observations, as in `reset_into`.

        Returns:
            reward (real [count]), terminated and truncated (bool [count]). The environment does not
            write to them again, and the caller must not.

        Raises:
            UserError: for a mistake of the environment that is understood.
            Exception: any other error of the environment.
        """
        # A new array, as the environment may write to its actions, or keep them.
        mapped = self._to_game(actions)
        try:
            observations, reward, terminated, truncated, info = self._step(mapped)
        except SystemExit as error:
            raise exit_refused(f"environment {self._name}", error) from error
        except Exception as error:
            self._check_choices(actions, error)
            self._check_shut(error)
            self._explain(error)
            self._check_allowed(actions, error)
            raise
        # Some vector environments return flags as the integers 0 and 1, which ~ does not negate.
        terminated, truncated = np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_)
        reward = np.asarray(reward)
        self.life_lost, self.shortened = info.get(LIFE_LOST), info.get(SHORTENED)
        self.dropped = info.get(DROPPED)
        if info and self._singles and (sign := own_reset(info, terminated, truncated)):
            raise UserError(f"environment {self._name}: {sign}")
        if self.recorded:
            self._record(info)
        self._pack.write(observations, out)
        self._shown, self._over = out, (terminated, truncated)
        if self._has_seats:
            self.playing = self._playing(info)
        if self._mask is not None:
            np.copyto(self._mask, out[:, self._mask_bytes])
        return reward, terminated, truncated > terminated

    def state_dict(self) -> Any:
        """Returns the environments' state between two steps, as plain data.

        `penstock.envs.saved_state` describes it.

        Raises:
            NotSavableError: if the state cannot be saved.
        """
        return state_of(self._vector)

    def load_state_dict(self, state: Any) -> None:
        """Continue from a `state_dict` of environments that were made alike.

        Call `reset_into` before.

        Raises:
            NotSavableError: if the state does not fit; the environments must not be used then.
        """
        restore(self._vector, state)

    def pictures(self) -> list[Array]:
        """Returns pictures of the last step, uint8 [H, W, 3] each, oldest first.

        The list is empty if the environment was not made to be filmed, or cannot render itself.
        """
        with users_side():
            return [*pictures(self._vector)]

    @property
    def action_names(self) -> tuple[str, ...]:
        """The names of an action's choices, or of its numbers; empty if they are not known.

        If an action has several choices, their names come one after another.
        """
        counts = self.info.counts
        count = sum(counts) if counts else math.prod(self.info.action_space.shape or ())
        return action_names(self._name, self._vector, count)

    @property
    def pictures_per_s(self) -> float:
        """Pictures per second at the speed for human players."""
        return pictures_per_s(self._vector)

    def close(self) -> None:
        """Close the environments. An error of theirs becomes a note: no result depends on it."""
        release(self._vector)
        try:
            with users_side():
                self._vector.close()
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}"
            logger.info("environment %s raised %s in close(); correct it", self._name, what)

    def _step(self, actions: Array) -> Any:
        """Step the vector, with the process state of the user's code only where that differs."""
        if not self._on_users_side:
            return self._vector.step(actions)
        with users_side():
            results = self._vector.step(actions)
        self._on_users_side = sides_differ()
        return results

    def _record(self, info: Mapping[str, Any]) -> None:
        """Keep the values of the columns that the environment records, and of `env.record`."""
        for name in self._declared:
            values = self.recorded[name]
            if name in info:
                values[:] = info[name]
            elif self._only_resets():
                values[:] = 0
            else:
                raise UserError(
                    f"environment {self._name} records {name} by its metadata[{RECORDED!r}], and "
                    "the info of a step has no such key; return a value in each step"
                )
        for key in self._watched:
            values, given = self.recorded[key], self.recorded[GIVEN.format(key)]
            values[:], given[:] = 0, False
            if key in info:
                numbers = self._numbers(key, info[key])
                np.logical_and(np.isfinite(numbers), info.get(f"_{key}", True), out=given)
                values[given] = numbers[given]

    def _numbers(self, key: str, values: Any) -> npt.NDArray[np.float32]:
        """What a vector has in its info under a key of `env.record`, a number for each row."""
        try:
            with np.errstate(over="ignore"):  # infinite, which counts as no value
                return np.asarray(values, np.float32).reshape(self.count)
        except (OverflowError, TypeError, ValueError) as error:
            raise UserError(
                f"env.record names {key}, and environment {self._name} has {values!r:.100} in the "
                f"info of {self.count} environments; return an array of a number for each, or "
                f"leave {key} out"
            ) from error

    def _only_resets(self) -> bool:
        """Whether the last step has reset all environments."""
        over = np.logical_or(*self._over)
        return bool((over if self.dropped is None else over | self.dropped).all())

    def _playing(self, info: Mapping[str, Any]) -> Flags | None:
        """The rows that play after a step or reset, as the environment says."""
        if PLAYING not in info:
            return None
        playing = np.asarray(info[PLAYING], np.bool_)
        if (playing & np.logical_or(*self._over)).any():
            raise UserError(
                f"environment {self._name} says in info[{PLAYING!r}] that a row plays whose "
                "episode has just ended; a row begins again in a later step, which only resets it"
            )
        return playing

    def _check_choices(self, actions: Array, error: Exception) -> None:
        """Raise UserError if an action that the vector refused is outside its space."""
        space = self.info.action_space
        if isinstance(space, Box):
            return
        counts = space.n if isinstance(space, Discrete) else space.nvec
        wrong = (actions < 0) | (actions >= counts)
        if wrong.any():
            raise UserError(
                f"environment {self._name} was given the action {actions[wrong][0]}, and there are "
                f"{counts} to choose from, counted from 0; correct the policy that chose it, and "
                f"use an {MASK} for actions that are not always legal"
            ) from error

    def _check_shut(self, error: Exception) -> None:
        """Raise UserError if the vector refused an action after an observation that no policy can
        answer: where its masks allowed nothing, or with a NaN, which makes the action one too."""
        if self._shown is None:
            return
        alive = np.broadcast_to(~np.logical_or(*self._over), (1, self.count))
        bad = find_bad_observation(self._shown[None], self.info.parts, alive, self.info.counts)
        if bad:
            raise UserError(
                f"environment {self._name} raised {type(error).__name__} after an observation with "
                f"{bad}; correct what it returns"
            ) from error

    def _check_allowed(self, actions: Array, error: Exception) -> None:
        """Raise UserError if the vector refused an action that its mask forbids. To another error
        that seems to be about an action, add a note about masks."""
        if not self.info.counts:
            return
        if self._mask is not None:
            begins = np.cumsum((0, *self.info.counts[:-1]))
            chosen = actions.reshape(self.count, -1)
            allowed = np.take_along_axis(self._mask, chosen + begins, 1).all(1)
            wrong = ~np.logical_or(allowed, np.logical_or(*self._over))
            if wrong.any():
                raise UserError(
                    f"environment {self._name} raised {type(error).__name__} at the action "
                    f"{chosen[wrong][0].tolist()}, which its {MASK} forbids; correct the "
                    "action_sampler that chose it"
                ) from error
        if not _ABOUT_ACTIONS.search(str(error)):
            return
        hint = (
            "If the action is illegal in this state: give the environment a Dict observation with "
            f"an entry {MASK}, a value for each choice, 0 where it is illegal. Penstock never "
            "takes such an action."
        )
        if self._mask is not None:
            hint = (
                f"If the action is illegal in this state, its {MASK} must forbid it: correct the "
                "mask."
            )
        elif self._mask_in_info:
            hint = f"The environment gives {MASK_IN_INFO}."
        error.add_note(hint)

    def _explain(self, error: Exception) -> None:
        """Raise UserError if observations that could not be stacked differ from their space, or if
        results are not those of `step` and `reset`."""
        if not isinstance(self._vector, SyncVectorEnv):
            return
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_code in TAKE_RESULTS and isinstance(error, TypeError | ValueError):
            raise UserError(
                f"environment {self._name} must return an observation, a number as reward, two "
                "flags and a dict from step, and an observation and a dict from reset, and what it "
                f"returned could not be read ({error}); correct it: penstock check-env shows what "
                "it is"
            ) from error
        space = self._vector.single_observation_space
        for shown in self._vector._env_obs:
            if shown is not None and (found := stacking_misfit(space, shown)):
                raise UserError(
                    f"environment {self._name} returned an observation{found}; correct its space, "
                    "or what it returns"
                ) from error


def as_number(key: str, value: Any) -> float:
    """Returns the value of an info as a number; NaN for None.

    Args:
        key: of `env.record`, under which the info has the value.
        value: a number, or an array of one.

    Raises:
        UserError: if the value is no number.
    """
    if value is None:
        return math.nan
    try:
        return float(value if isinstance(value, NUMBERS) else np.asarray(value, np.float64).item())
    except (OverflowError, TypeError, ValueError) as error:
        raise UserError(
            f"env.record names {key}, and the info of a step has {value!r:.100} there, which is no "
            f"number; leave {key} out, or set env.wrappers to a wrapper that makes a number of it"
        ) from error


def copied(observation: Any) -> Any:
    """Returns a copy of an observation, to whose arrays its environment may write again."""
    # One array is the usual case, and copied as fast as possible.
    if type(observation) is np.ndarray:
        return observation.copy()

    if type(observation) is dict:
        return {key: copied(part) for key, part in observation.items()}
    if type(observation) in (tuple, list):
        return type(observation)(map(copied, observation))
    return observation if isinstance(observation, CONSTANTS) else deepcopy(observation)


def own_reset(info: Mapping[str, Any], terminated: Any, truncated: Any) -> str:
    """Returns a sentence if the step that ended an episode has already begun the next one.

    Args:
        info: of a step of one environment, or of a vector of them, where `_key` marks the
            environments that have `key`.
        terminated: bool, or bool [count].
        truncated: bool, or bool [count].

    Returns:
        The sentence, which begins with "it" and says what to do; empty if there is no sign of such
        a reset.
    """
    for key in FINAL_KEYS:
        if key in info and np.any((terminated | truncated) & info.get(f"_{key}", True)):
            return (
                f"it resets itself within the step that ends an episode (info has {key}), so the "
                "final observation is lost; leave that wrapper out: Penstock resets where an "
                "episode has ended"
            )
    return ""


def action_map(space: Space[Any]) -> Callable[[Array], Array]:
    """Returns the map from a policy's actions to those of an environment.

    Args:
        space: the environment's own space of one action.

    Returns:
        A function of actions ``[count, *shape]``. A policy counts choices from 0, and gives each
        value of a Box from -1 to 1. The function returns a new array of the space's dtype, with
        choices that count from `start`, or values between the bounds.
    """
    dtype = space.dtype

    if isinstance(space, Discrete | MultiDiscrete) and np.any(space.start):
        start = space.start
        return lambda actions: (actions + start).astype(dtype)
    if not isinstance(space, Box):
        return lambda actions: actions.astype(dtype)

    # Twice a bound of float16 may be beyond its largest number.
    computed = np.promote_types(space.low.dtype, np.float32)
    low = space.low.astype(computed)
    high = space.high.astype(computed)
    half = high / 2 - low / 2

    def scaled(actions: Array) -> Array:
        # Clipped, since rounding must not leave the bounds, which environments check.
        env_actions: Array = np.multiply(actions + 1, half, dtype=computed)
        env_actions += low
        np.clip(env_actions, low, high, out=env_actions)
        return env_actions.astype(dtype, copy=False)

    return scaled


def counts_of(action: Space[Any]) -> tuple[int, ...]:
    """Returns the number of choices of each component of an action; empty for a Box."""
    match action:
        case Discrete(n=n):
            return (int(n),)
        case MultiDiscrete(nvec=nvec):
            return tuple(int(n) for n in nvec.flat)
        case MultiBinary():
            return (2,) * math.prod(action.shape)
    return ()


def checked_actions(name: str, action: Space[Any]) -> Actions:
    """Returns the action space that policies use for an environment.

    Args:
        name: of the environment, for messages.
        action: the environment's own space of one action.

    Returns:
        The space itself; for MultiBinary the same choices as MultiDiscrete.

    Raises:
        UserError: for a space that is not supported.
    """
    if isinstance(action, MultiBinary | Discrete | MultiDiscrete):
        choices = sum(counts_of(action))
        if not 0 < choices <= MOST_CHOICES:
            raise UserError(
                f"environment {name} has actions of {brief(action)}, {choices:,} choices, each of "
                f"which is an output of the network, and there must be 1 to {MOST_CHOICES:,}; set "
                "env.wrappers to a wrapper of yours that offers such actions"
            )
        return (
            MultiDiscrete(np.full(action.shape, 2)) if isinstance(action, MultiBinary) else action
        )
    if not isinstance(action, Box) or action.dtype.kind != "f":
        raise UserError(
            f"environment {name} has actions of {brief(action)}, and only Discrete, "
            "MultiDiscrete, MultiBinary and a Box of floats are supported; set env.wrappers to a "
            "wrapper of yours that offers one of these"
        )
    if not math.prod(action.shape):
        raise UserError(
            f"environment {name} has actions of {brief(action)}, which hold nothing; give its "
            "action space at least one number"
        )
    if not is_bounded(action) or not (action.low < action.high).all():
        raise UserError(
            f"environment {name} has actions of {brief(action)}, and a Box of actions must have "
            f"finite bounds, within ±{UNBOUNDED:g} and the lower below the upper; give its action "
            "space such bounds, or set env.wrappers to a wrapper of yours that does"
        )
    return action


def recorded_columns(name: str, metadata: Mapping[str, Any]) -> tuple[Column, ...]:
    """Returns the columns that an environment declares in its metadata (`RECORDED`).

    Args:
        name: of the environment, for messages.
        metadata: of the environment.

    Raises:
        UserError: if the declaration is not a dict of names and dtypes of numbers or flags.
    """
    declared = metadata.get(RECORDED, {})
    try:
        dtypes = {key: plain_dtype(dtype).newbyteorder("=") for key, dtype in declared.items()}
        if not all(dtype.kind in "biuf" for dtype in dtypes.values()):
            raise ValueError("its values must be numbers or flags")
    except (AttributeError, ValueError) as error:
        raise UserError(
            f"environment {name} has metadata[{RECORDED!r}] {declared!r:.200} ({error}); give it "
            'names and dtypes, as in {"opponent": "<u4"}'
        ) from error

    return tuple(Column(str(key), dtype.str) for key, dtype in dtypes.items())


def watched_columns(key: str) -> tuple[Column, ...]:
    """Returns the two columns of a key of `env.record`.

    The first has the key's numbers, 0 where a step gives none. The second marks where it gives one.
    """
    return Column(key, "<f4"), Column(GIVEN.format(key), "|b1")


def check_mask(name: str, parts: tuple[ObservationPart, ...], action: Actions) -> None:
    """Raise UserError if the observations have an action mask that does not fit the actions.

    Args:
        name: of the environment, for messages.
        parts: of a packed observation.
        action: the space of one action, as of `checked_actions`.
    """
    mask = next((part for part in parts if part.name == MASK), None)
    if mask is None:
        return

    if isinstance(action, Box):
        raise UserError(
            f"environment {name} shows an {MASK} and has actions of {brief(action)}, where there "
            "is nothing to choose from; leave it out of its observations"
        )
    choices = sum(counts_of(action))
    if mask.shape != (choices,):
        raise UserError(
            f"environment {name} shows an {MASK} of shape {[*mask.shape]}, and it must be "
            f"[{choices}], a value for each choice of {brief(action)}"
        )


def _check_autoreset(name: str, vector: VectorEnv) -> None:
    mode = (vector.metadata or {}).get("autoreset_mode")
    if mode is not AutoresetMode.NEXT_STEP:
        named = getattr(mode, "name", repr(mode))
        stated = f"autoreset mode is {named}" if mode else "metadata has no autoreset_mode"
        raise UserError(
            f"environment {name} is a vector environment whose {stated}, and it must be NEXT_STEP, "
            "where an episode's final observation is not lost; give it that mode, or set env.id to "
            "a module:function that returns a single gymnasium.Env"
        )
