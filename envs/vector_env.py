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
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import gymnasium
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
from penstock.envs.seats import ONE_SEAT, OUTCOME, PLAYING, Seating, seating_of
from penstock.envs.space_difference import brief
from penstock.envs.space_misfit import stacking_misfit

if TYPE_CHECKING:
    from penstock.core.interfaces.inference import ReadPolicy

logger = note_logger(__name__)

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]

Actions = Discrete | MultiDiscrete | Box

# Keys of `info` by which vector environments and wrappers pass on a final observation.
FINAL_KEYS = ("final_obs", "final_observation", "terminal_observation")
# Key of an environment's metadata. Its value has the dtypes of the columns that the environment
# records, by their names.
RECORDED = "recorded"
# Key of the metadata of `SinglesVectorEnv`. Its value has the keys of `info` in `env.record`.
WATCHED = "watched"
# Keys of the infos of single environments that `SinglesVectorEnv` passes on.
READ = frozenset((SHORTENED, DROPPED, MASK, *FINAL_KEYS))
MASK_IN_INFO = (
    f"an {MASK} in its info, which no network sees; set "
    "'env.wrappers=[penstock.envs.masks:MaskFromInfo]', which puts it into the observation"
)
# Words in an environment's error that may be about the action it was given.
_ABOUT_ACTIONS = re.compile(r"\b(action|move|legal|illegal|invalid)s?\b", re.IGNORECASE)
# Types of observations, or of parts of one, that cannot change.
CONSTANTS = (int, float, np.generic, type(None))
# Types that `float` converts without a detour over numpy.
NUMBERS = (int, float, np.number, np.bool_)
# The functions of gymnasium that unpack what `step` and `reset` of a single environment return.
TAKE_RESULTS = SyncVectorEnv.step.__code__, SyncVectorEnv.reset.__code__
# Seeds are below this number: ale-py takes int32, and gives environment i of a vector seed + i.
SEEDS = 2**30


@dataclass(frozen=True)
class EnvInfo:
    """The properties of an environment for a policy, and how it is stepped."""

    observation_space: Box
    """The space of one packed observation."""
    action_space: Actions
    """The space of one action. It is MultiDiscrete if the environment has MultiBinary.

    Policies choose from 0 ... n - 1 even if `start` is not 0, and from -1 to 1 even if the bounds
    are others.
    """
    frames_per_step: int
    """Emulator frames in one agent step; 1 if there is no emulator."""
    how: str
    """A sentence to print: what steps the environments, and which faster way was not used and why.
    """
    parts: tuple[ObservationPart, ...] = ()
    """The parts of an observation that is packed into bytes; empty if it is one array."""
    own_spaces: tuple[Space[Any], Space[Any]] | None = None
    """The environment's own spaces of observations and of actions; None if they are those above."""
    recorded: tuple[Column, ...] = ()
    """Further columns of a slot, whose values the environment gives in the `info` of a step: those
    that it declares, then two for each key of `env.record` (`watched_columns`)."""
    seating: Seating = ONE_SEAT
    """The seats of a game, each of which is a row."""
    embed_above: int = MOST_CHOICES
    """The most choices of an observation that are one-hot (`env.embed_above`)."""

    @classmethod
    def of_spaces(
        cls,
        name: str,
        spaces: tuple[Space[Any], Space[Any]],
        frames_per_step: int,
        how: str,
        embed_above: int = MOST_CHOICES,
    ) -> EnvInfo:
        """Describe an environment by its own spaces.

        Args:
            name: of the environment, for messages.
            spaces: the environment's own spaces of observations and of actions.
            frames_per_step: emulator frames in one agent step.
            how: the sentence for the field ``how``.
            embed_above: the most choices of an observation that are one-hot.

        Raises:
            UserError: for spaces that Penstock cannot play.
        """
        observation_space, action_space = spaces
        actions = checked_actions(name, action_space)
        packer = Packer(name, observation_space, embed_above)
        check_mask(name, packer.parts, actions)

        return cls(
            observation_space=packer.space,
            action_space=actions,
            frames_per_step=frames_per_step,
            how=how,
            parts=packer.parts,
            own_spaces=spaces,
            embed_above=embed_above,
        )

    def packed_as(self, name: str, space: Space[Any]) -> EnvInfo:
        """Returns the same properties with the parts of observations in the order of ``space``.

        Args:
            name: of the environment, for messages.
            space: of observations, with the same parts.
        """
        parts = Packer(name, space, self.embed_above).parts
        if parts == self.parts:
            return self
        return replace(self, parts=parts, own_spaces=(space, self.spaces[1]))

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

    # Values of the class, as saved states of 0.1 have no such attributes.
    beat: Callable[[], object] | None = None
    """Reports progress after the reset of each environment, which may take long."""
    _resetting = False
    """Whether `reset` runs."""

    def __init__(
        self,
        makes: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        *,
        beat: Callable[[], object] | None = None,
    ) -> None:
        """Make the environments.

        Args:
            makes: the constructor of each environment.
            beat: called after the reset of each environment.
        """
        if beat is not None:
            self.beat = beat
        super().__init__(makes, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)

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
        """Add the info of environment ``env_num`` to those of the vector.

        gymnasium calls it after each environment's reset or step.
        """
        # The observations are stacked after the last environment, and until then another one may
        # write to the same memory.
        self._env_obs[env_num] = copy_observation(self._env_obs[env_num])

        if self.beat is not None and (self._resetting or self._autoreset_envs[env_num]):
            self.beat()

        # The metadata has these names, as a saved state of 0.1 has no attribute for them.
        recorded = self.metadata.get(RECORDED)
        watched = self.metadata.get(WATCHED)
        if READ.isdisjoint(env_info.keys()) and not recorded and not watched:
            return vector_infos

        entries = dict.fromkeys(READ & env_info.keys(), True)
        entries |= {name: env_info[name] for name in recorded or () if name in env_info}
        entries |= {key: as_number(key, env_info[key]) for key in watched or () if key in env_info}
        return super()._add_info(vector_infos, entries, env_num)


class _RecordedValues:
    """The values that the environments give in the `info` of a step to be recorded."""

    columns: tuple[Column, ...]
    """The columns that the environment declares, then two for each key of `env.record`."""
    values: dict[str, Array]
    """The values of the last step by the name of their column, each ``[count]``. Every step writes
    to the same arrays."""

    def __init__(self, name: str, vector: VectorEnv, keys: Sequence[str]) -> None:
        """Plan the columns of a vector environment.

        Args:
            name: of the environment, for messages.
            vector: the environments. A `SinglesVectorEnv` is told the keys to pass on.
            keys: the keys of `env.record`.

        Raises:
            UserError: if the environment's metadata does not have the form that `RECORDED` needs.
        """
        declared = recorded_columns(name, vector.metadata)
        self._name = name
        self._count = vector.num_envs
        self._declared = tuple(column.name for column in declared)
        self._watched = tuple(key for key in keys if key not in self._declared)

        if self._watched and isinstance(vector, SinglesVectorEnv):
            vector.metadata = {**vector.metadata, WATCHED: self._watched}

        watched = (column for key in self._watched for column in watched_columns(key))
        self.columns = (*declared, *watched)
        self.values = {column.name: np.zeros(self._count, column.dtype) for column in self.columns}

    def take(self, info: Mapping[str, Any], last: _LastStep, dropped: Flags | None) -> None:
        """Copy the values of a step out of its ``info``.

        Args:
            info: of the step.
            last: the step before, which tells the rows that this one has only reset.
            dropped: the rows that failed in this step, and were reset too.

        Raises:
            UserError: if a declared column is missing, or a value of `env.record` is no number.
        """
        for name in self._declared:
            if name in info:
                self.values[name][:] = info[name]
            elif self._only_resets(last, dropped):
                self.values[name][:] = 0
            else:
                raise UserError(
                    f"environment {self._name} records {name} by its metadata[{RECORDED!r}], and "
                    "the info of a step has no such key; return a value in each step"
                )

        for key in self._watched:
            values = self.values[key]
            is_given = self.values[GIVEN.format(key)]
            values[:] = 0
            is_given[:] = False
            if key in info:
                numbers = self._numbers(key, info[key])
                np.logical_and(np.isfinite(numbers), info.get(f"_{key}", True), out=is_given)
                values[is_given] = numbers[is_given]

    @staticmethod
    def _only_resets(last: _LastStep, dropped: Flags | None) -> bool:
        """Returns whether a step after ``last`` has reset all environments."""
        resets = last.over()
        if dropped is not None:
            resets = resets | dropped
        return bool(resets.all())

    def _numbers(self, key: str, values: Any) -> npt.NDArray[np.float32]:
        """Returns the values of a key of `env.record` as a number for each environment."""
        try:
            # A number that float32 cannot hold becomes infinite, which counts as no value.
            with np.errstate(over="ignore"):
                return np.asarray(values, np.float32).reshape(self._count)
        except (OverflowError, TypeError, ValueError) as error:
            raise UserError(
                f"env.record names {key}, and environment {self._name} has {values!r:.100} in the "
                f"info of {self._count} environments; return an array of a number for each, or "
                f"leave {key} out"
            ) from error


class _MaskCopy:
    """A copy of the action masks in the observations of the last step or reset.

    The observations may lie in a slot, which the caller may have passed on since.
    """

    columns: slice
    """The bytes of a packed observation that hold its mask."""
    masks: npt.NDArray[np.uint8]
    """The masks, 0 or 1, ``[count, choices]``."""

    def __init__(self, part: ObservationPart, count: int) -> None:
        self.columns = slice(part.offset, part.offset + part.nbytes)
        self.masks = np.ones((count, part.nbytes), np.uint8)


class _LastStep:
    """The observations and ends of the last step or reset, from which the next step begins."""

    observations: Array | None
    """The packed observations that the policy acts on, ``[count, *shape]``; None before a reset."""
    terminated: Flags
    """The rows whose episode terminated, bool ``[count]``."""
    truncated: Flags
    """The rows whose episode was truncated, bool ``[count]``; a row may have both."""

    def __init__(self, count: int) -> None:
        self._no_rows = np.zeros(count, np.bool_)
        self.observations = None
        self.terminated = self._no_rows
        self.truncated = self._no_rows

    def begin(self, observations: Array) -> None:
        """Take the first observations of new episodes in all rows."""
        self.observations = observations
        self.terminated = self._no_rows
        self.truncated = self._no_rows

    def over(self) -> Flags:
        """Returns the rows that the next step only resets, bool ``[count]``."""
        return np.logical_or(self.terminated, self.truncated)


class BatchedEnv:
    """Steps `count` environments together; the module says what a step means.

    The observations go to an array of the caller, such as a slot:

        env = penstock.envs.make(config.env, count=8)
        space = env.info.observation_space
        observations = np.zeros((8, *space.shape), space.dtype)
        env.reset_into(seed, observations)
        reward, terminated, truncated = env.step_into(actions, observations)
    """

    info: EnvInfo
    """The properties of one environment."""
    count: int
    """The number of environments, which are the rows of all arrays."""
    life_lost: Flags | None = None
    """The episodes of the last step that ended with a life, while their game continues."""
    shortened: Flags | None = None
    """The first episodes that the last step truncated before their time limit."""
    dropped: Flags | None = None
    """The environments that failed in the last step, and have begun another episode."""
    playing: Flags | None = None
    """The rows whose next step is a decision, where the environment says it in the last step or
    reset; None: all rows but those whose episode has just ended."""
    outcome: Array | None = None
    """The result of each row's episode in the last step, -1 to 1, read where an episode has ended;
    None if the environment does not say it."""
    recorded: Mapping[str, Array]
    """Values of the last step for `info.recorded`, each ``[count]``, in the same arrays always."""
    game_of: Array
    """The game of each row, int64 ``[count]``: the number of the row itself in games of one."""
    seat_of: Array
    """The seat of each row in its game, int64 ``[count]``."""

    def __init__(
        self,
        name: str,
        vector: VectorEnv,
        frames_per_step: int,
        how: str,
        record: Sequence[str] = (),
        embed_above: int = MOST_CHOICES,
    ) -> None:
        """Take over a vector environment.

        Args:
            name: of the environment, for messages.
            vector: the environments, which `close` closes.
            frames_per_step: emulator frames in one agent step.
            how: the sentence for `EnvInfo.how`.
            record: the keys of `env.record`.
            embed_above: as of `EnvInfo.of_spaces`.

        Raises:
            UserError: if Penstock cannot play the environments.
        """
        _check_autoreset(name, vector)
        own_spaces = vector.single_observation_space, vector.single_action_space
        info = EnvInfo.of_spaces(name, own_spaces, frames_per_step, how, embed_above)

        # What the vector is.
        self._name = name
        self._vector = vector
        self._is_of_singles = isinstance(vector, SyncVectorEnv)
        seating = seating_of(name, vector.metadata)
        self._has_seats = seating.seats > 1  # rows of one game may pause and end apart
        if seating.bots and not callable(getattr(vector, "bot", None)):
            raise UserError(
                f"environment {name} names scripted players in its metadata, "
                f"{', '.join(seating.bots)}, and has no method bot(name, rows) that returns their "
                "actions; give it one, or leave them out"
            )
        self.count = vector.num_envs
        self.game_of, self.seat_of = np.divmod(np.arange(self.count), seating.seats)

        # What translates between the policy and the vector.
        self._to_env_actions = action_map(vector.single_action_space)
        self._of_env_actions = inverse_action_map(vector.single_action_space)
        self._recorded = _RecordedValues(name, vector, record)
        self.info = replace(info, recorded=self._recorded.columns, seating=seating)
        self.recorded = self._recorded.values
        self._pack_by(Packer(name, own_spaces[0], embed_above))

        # What the next step needs of the last one. The user's code has the state of the process in
        # the first step after a reset, and as long as it wants another state than the role.
        self._last = _LastStep(self.count)
        self._on_users_side = True
        self._has_mask_in_info = False

    def function(self, name: str) -> Callable[..., Any] | None:
        """Returns a function of the first environment, or of its vector form, or None."""
        if isinstance(self._vector, SyncVectorEnv):
            env = self._vector.envs[0]
            return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None
        return getattr(self._vector, name, None)

    def pack_as(self, space: Space[Any]) -> None:
        """Pack observations in the order of the parts of ``space``, which has the same parts.

        Call it before `reset_into`. A policy reads the parts where they were in training.
        """
        info = self.info.packed_as(self._name, space)
        if info.parts != self.info.parts:
            self.info = info
            self._pack_by(Packer(self._name, space, info.embed_above))

    def _pack_by(self, packer: Packer) -> None:
        """Take the packer of observations, and find the action mask among its parts."""
        mask_part = next((part for part in packer.parts if part.name == MASK), None)
        self._packer = packer
        self._mask = None if mask_part is None else _MaskCopy(mask_part, self.count)

    @property
    def vector(self) -> VectorEnv:
        """The vector environment that it steps."""
        return self._vector

    def watch_precision(self, writes: int = 1000) -> None:
        """Look for what networks will not see, and note it for the user.

        Of the next ``writes`` observations these are numbers that float32 does not tell apart; of
        the next reset it is an action mask in the `info`.
        """
        self._packer.watch_precision(writes)

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
            self._failed_call(error).explain_results()
            raise

        has_choices = bool(self.info.counts)
        self._has_mask_in_info = MASK in info and self._mask is None and has_choices
        if self._has_mask_in_info and self._packer.is_watching:
            logger.info("environment %s gives %s", self._name, MASK_IN_INFO)

        self._packer.write(observations, out)
        self._last.begin(out)
        if self._has_seats:
            self.playing = self._playing_rows(info)
        if self._mask is not None:
            np.copyto(self._mask.masks, out[:, self._mask.columns])

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
        env_actions = self._to_env_actions(actions)
        try:
            observations, reward, terminated, truncated, info = self._step(env_actions)
        except SystemExit as error:
            raise exit_refused(f"environment {self._name}", error) from error
        except Exception as error:
            failed_call = self._failed_call(error)
            failed_call.explain_choices(actions)
            failed_call.explain_observations()
            failed_call.explain_results()
            failed_call.explain_masks(actions)
            raise

        # Some vector environments return flags as the integers 0 and 1, which ~ does not negate.
        terminated = np.asarray(terminated, np.bool_)
        truncated = np.asarray(truncated, np.bool_)
        reward = np.asarray(reward)
        self.life_lost = info.get(LIFE_LOST)
        self.shortened = info.get(SHORTENED)
        self.dropped = info.get(DROPPED)
        if info and self._is_of_singles and (sign := own_reset(info, terminated, truncated)):
            raise UserError(f"environment {self._name}: {sign}")
        if self.recorded:
            self._recorded.take(info, self._last, self.dropped)

        self._packer.write(observations, out)
        last = self._last
        last.observations = out
        last.terminated = terminated
        last.truncated = truncated
        if self._has_seats:
            self.playing = self._playing_rows(info)
            self.outcome = info.get(OUTCOME)
        if self._mask is not None:
            np.copyto(self._mask.masks, out[:, self._mask.columns])
        return reward, terminated, truncated & ~terminated

    def bot(self, name: str, rows: npt.NDArray[np.int64]) -> Array:
        """Returns the actions of a scripted player, as a policy gives them.

        Args:
            name: of the player, one of `EnvInfo.seating`.
            rows: those that it plays, ``[n]``.

        Returns: ``[n, *shape]`` of the action space.

        Raises:
            UserError: if the environment returns something else.
            Exception: any error of the environment.
        """
        try:
            with users_side() if self._on_users_side else nullcontext():
                actions = np.asarray(self._vector.bot(name, rows))  # type: ignore[attr-defined]
        except SystemExit as error:
            raise exit_refused(f"environment {self._name}", error) from error

        shape = (len(rows), *(self.info.action_space.shape or ()))
        if actions.shape != shape:
            raise UserError(
                f"environment {self._name} returned actions of shape {[*actions.shape]} for its "
                f"scripted player {name} in {len(rows)} rows, and it must be {[*shape]}, an action "
                "for each row; correct its method bot"
            )
        return self._of_env_actions(actions)

    def refresh(self, read: ReadPolicy) -> bool:
        """Returns True: no other policy plays in these environments."""
        return True

    def forget(self) -> None:
        """Do nothing: no weights are read."""

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
        choices = self.info.counts
        count = sum(choices) if choices else math.prod(self.info.action_space.shape or ())
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

    def _playing_rows(self, info: Mapping[str, Any]) -> Flags | None:
        """Returns the rows that play after a step or reset, or None if ``info`` does not say."""
        if PLAYING not in info:
            return None

        playing = np.asarray(info[PLAYING], np.bool_)
        if (playing & self._last.over()).any():
            raise UserError(
                f"environment {self._name} says in info[{PLAYING!r}] that a row plays whose "
                "episode has just ended; a row begins again in a later step, which only resets it"
            )
        return playing

    def _failed_call(self, error: Exception) -> _FailedCall:
        return _FailedCall(
            error=error,
            name=self._name,
            vector=self._vector,
            info=self.info,
            last=self._last,
            masks=None if self._mask is None else self._mask.masks,
            has_mask_in_info=self._has_mask_in_info,
        )


@dataclass(frozen=True)
class _FailedCall:
    """A `reset` or `step` of a vector environment that raised, and what may explain it.

    Each method looks for one cause. It raises a UserError that names the cause, and returns if that
    is not what happened.
    """

    error: Exception
    name: str
    """Name of the environment, for messages."""
    vector: VectorEnv
    info: EnvInfo
    last: _LastStep
    """The step or reset before this call."""
    masks: npt.NDArray[np.uint8] | None
    """The action masks of that step, ``[count, choices]``; None if observations have none."""
    has_mask_in_info: bool
    """Whether the environment gives an action mask where networks do not see it."""

    def explain_choices(self, actions: Array) -> None:
        """Raise UserError if an action is outside its space.

        Args:
            actions: of the policy, as for `BatchedEnv.step_into`.
        """
        space = self.info.action_space
        if isinstance(space, Box):
            return

        counts = space.n if isinstance(space, Discrete) else space.nvec
        outside = (actions < 0) | (actions >= counts)
        if outside.any():
            raise UserError(
                f"environment {self.name} was given the action {actions[outside][0]}, and there "
                f"are {counts} to choose from, counted from 0; correct the policy that chose it, "
                f"and use an {MASK} for actions that are not always legal"
            ) from self.error

    def explain_observations(self) -> None:
        """Raise UserError if no policy could answer the last observation.

        Its masks allowed nothing, or it has a NaN, which makes the action a NaN too.
        """
        if self.last.observations is None:
            return

        alive = ~self.last.over()
        bad = find_bad_observation(
            self.last.observations[None],
            parts=self.info.parts,
            alive=alive[None],
            counts=self.info.counts,
        )
        if bad:
            raise UserError(
                f"environment {self.name} raised {type(self.error).__name__} after an observation "
                f"with {bad}; correct what it returns"
            ) from self.error

    def explain_results(self) -> None:
        """Raise UserError if the call returned something that gymnasium could not use.

        The results were not those of `step` or `reset`, or the observations could not be stacked,
        as they differ from their space.
        """
        if not isinstance(self.vector, SyncVectorEnv):
            return

        *_, (innermost_frame, _) = traceback.walk_tb(self.error.__traceback__)
        is_in_gymnasium = innermost_frame.f_code in TAKE_RESULTS
        if is_in_gymnasium and isinstance(self.error, TypeError | ValueError):
            raise UserError(
                f"environment {self.name} must return an observation, a number as reward, two "
                "flags and a dict from step, and an observation and a dict from reset, and what it "
                f"returned could not be read ({self.error}); correct it: penstock check-env shows "
                "what it is"
            ) from self.error

        space = self.vector.single_observation_space
        for observation in self.vector._env_obs:
            if observation is None:
                continue
            if reason := stacking_misfit(space, observation):
                raise UserError(
                    f"environment {self.name} returned an observation{reason}; correct its space, "
                    "or what it returns"
                ) from self.error

    def explain_masks(self, actions: Array) -> None:
        """Raise UserError if the call refused an action that its mask forbids.

        If another error seems to be about an action, add a note about masks to it.

        Args:
            actions: of the policy, as for `BatchedEnv.step_into`.
        """
        counts = self.info.counts
        if not counts:
            return

        if self.masks is not None:
            first_choices = np.cumsum((0, *counts[:-1]))
            chosen = actions.reshape(len(self.masks), -1)
            is_allowed = np.take_along_axis(self.masks, chosen + first_choices, 1).all(1)
            is_forbidden = ~np.logical_or(is_allowed, self.last.over())
            if is_forbidden.any():
                raise UserError(
                    f"environment {self.name} raised {type(self.error).__name__} at the action "
                    f"{chosen[is_forbidden][0].tolist()}, which its {MASK} forbids; correct the "
                    "action_sampler that chose it"
                ) from self.error

        if _ABOUT_ACTIONS.search(str(self.error)):
            self.error.add_note(self._hint_about_masks())

    def _hint_about_masks(self) -> str:
        if self.masks is not None:
            return (
                f"If the action is illegal in this state, its {MASK} must forbid it: correct the "
                "mask."
            )
        if self.has_mask_in_info:
            return f"The environment gives {MASK_IN_INFO}."
        return (
            "If the action is illegal in this state: give the environment a Dict observation with "
            f"an entry {MASK}, a value for each choice, 0 where it is illegal. Penstock never "
            "takes such an action."
        )


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


def copy_observation(observation: Any) -> Any:
    """Returns a copy of an observation, to whose arrays its environment may write again."""
    # One array is the usual case, and copied as fast as possible.
    if type(observation) is np.ndarray:
        return observation.copy()

    if type(observation) is dict:
        return {key: copy_observation(part) for key, part in observation.items()}
    if type(observation) in (tuple, list):
        return type(observation)(map(copy_observation, observation))
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
    over = terminated | truncated
    for key in FINAL_KEYS:
        if key in info and np.any(over & info.get(f"_{key}", True)):
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
    computed_dtype = np.promote_types(space.low.dtype, np.float32)
    low = space.low.astype(computed_dtype)
    high = space.high.astype(computed_dtype)
    half_range = high / 2 - low / 2

    def scaled(actions: Array) -> Array:
        env_actions: Array = np.multiply(actions + 1, half_range, dtype=computed_dtype)
        env_actions += low
        # Rounding must not leave the bounds, which environments check.
        np.clip(env_actions, low, high, out=env_actions)
        return env_actions.astype(dtype, copy=False)

    return scaled


def inverse_action_map(space: Space[Any]) -> Callable[[Array], Array]:
    """Returns the map from an environment's actions to those of a policy.

    Args:
        space: the environment's own space of one action.

    Returns:
        The inverse of `action_map`, which may return its argument.
    """
    if isinstance(space, Discrete | MultiDiscrete) and np.any(space.start):
        start = space.start
        return lambda actions: actions - start
    if not isinstance(space, Box):
        return lambda actions: actions

    low = space.low.astype(np.float64)
    half_range = space.high / 2.0 - space.low / 2.0
    return lambda actions: ((actions - low) / half_range - 1.0).astype(np.float32)


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
        if isinstance(action, MultiBinary):
            return MultiDiscrete(np.full(action.shape, 2))
        return action

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
    """Raise UserError unless the vector says that its autoreset mode is NEXT_STEP."""
    mode = (vector.metadata or {}).get("autoreset_mode")
    if mode is AutoresetMode.NEXT_STEP:
        return

    mode_name = getattr(mode, "name", repr(mode))
    stated = f"autoreset mode is {mode_name}" if mode else "metadata has no autoreset_mode"
    raise UserError(
        f"environment {name} is a vector environment whose {stated}, and it must be NEXT_STEP, "
        "where an episode's final observation is not lost; give it that mode, or set env.id to "
        "a module:function that returns a single gymnasium.Env"
    )
