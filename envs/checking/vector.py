"""Checks of a vector environment: whether it behaves as it declares.

Of games of several seats the rows are seats (`penstock.envs.seats`); each then also acts, waits and
is out as the rules for seats say.

The decisive test is of NEXT_STEP: two copies play alike until an episode has ended, and are then
given different actions in the step that only resets. If they differ afterwards, that step was
played.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from penstock.configs.errors import UserError
from penstock.core.observations import MASK, open_choices, views
from penstock.core.place import brief_with_place
from penstock.envs.checking.checks import (
    SCALE,
    Checker,
    as_bytes,
    changed_variables,
    cost,
)
from penstock.envs.instances import SAME_INSTANCE, members_of, parts_of, share_instance
from penstock.envs.packing import find_bad_reward
from penstock.envs.seats import OUTCOME, PLAYING, seating_of
from penstock.envs.space_misfit import misfits
from penstock.envs.vector_env import (
    Actions,
    BatchedEnv,
    action_map,
    checked_actions,
    copy_observation,
    counts_of,
    own_reset,
)

Array = npt.NDArray[Any]
# Environments, or games, of each vector that is checked.
COUNT = 2
SEED = 7
# Copies must play at least as many steps alike.
REPEATED_STEPS = 300


def check_vector(
    checker: Checker,
    make: Callable[[int], VectorEnv],
    steps: int,
    seconds: float = 1e9,
    *,
    numbered: bool = False,
    of_games: bool = False,
) -> dict[str, Any]:
    """Play a vector of `COUNT` environments, and check it and copies of it.

    Args:
        checker: to which faults are added.
        make: makes a vector of a given number of environments.
        steps: the most steps to play.
        seconds: the most time that the first play takes.
        numbered: whether each environment has an index. They may differ then, and copies are not
            compared.
        of_games: whether the vector is one of games, whose seats are its rows.

    Returns:
        The figures of `cost` and "games", the number of environments; empty if the vector cannot be
        played. "resets_tested" says of copies that were compared whether an episode ended, so that
        the step after it could be tested.
    """
    vector = make(COUNT)
    try:
        is_vector = _check_face(checker, vector, of_games) and _check_mode(checker, vector)
        if is_vector and share_instance(members_of(vector)):
            checker.add("shared", SAME_INSTANCE)
            return {}
        if not (is_vector and checker.check_spaces("of the vector", vector, "single_")):
            return {}

        player = _Player(checker, vector)
        if not player.reset():
            return {}
        figures = {"games": COUNT, **cost(checker, player.play(steps, seconds), steps)}
    finally:
        if isinstance(vector, VectorEnv):
            checker.close(vector)
    if checker.problems or numbered:
        return figures

    # Copies play until the first episode's end after enough steps, or else until the last end. If
    # that comes too early, they are also compared over enough steps.
    least_steps = min(figures["steps"], REPEATED_STEPS)
    late_ends = (end for end in player.ends if end >= least_steps)
    last_end = max(player.ends, default=0)
    end = next(late_ends, last_end)
    if end < least_steps:
        _check_copies(checker, make, least_steps)
    resets_tested = bool(end) and _check_copies(checker, make, end)

    if not checker.problems:
        _check_repeated_reset(checker, make, least_steps)
    if not checker.problems:
        _check_members(checker, make, least_steps)
    if player.reset_sign and not checker.problems:
        checker.add("autoreset", player.reset_sign)
    return {**figures, "resets_tested": resets_tested}


def draw(
    space: Actions, count: int, rng: np.random.Generator, allowed: Array | None = None
) -> Array:
    """Draw random actions in a policy's form.

    Args:
        space: of one action, as a policy sees it.
        count: number of actions.
        rng: draws them.
        allowed: bool or 0 and 1 [count, choices], an action mask. If it allows nothing, any action
            may be drawn.

    Returns:
        [count, *shape], int32 or, for a Box, float32 in -1 ... 1.
    """
    if isinstance(space, spaces.Box):
        return rng.uniform(-1, 1, (count, *space.shape)).astype(np.float32)

    # Each component takes the choice with the largest random number. A mask adds 1 to those that it
    # allows, so that they are larger than all others.
    counts = counts_of(space)
    scores = rng.random((count, sum(counts)))
    if allowed is not None:
        scores += allowed
    component_scores = np.split(scores, np.cumsum(counts)[:-1], axis=1)
    choices = [scores_of_one.argmax(1) for scores_of_one in component_scores]
    actions = np.stack(choices, 1).astype(np.int32)
    return actions.reshape(count, *(space.shape or ()))


def draw_for(env: BatchedEnv, observations: Array, rng: np.random.Generator) -> Array:
    """Draw random actions that the masks in observations allow.

    Args:
        env: the environments.
        observations: their packed observations, ``[count, *shape]``.
        rng: draws the actions.

    Returns:
        The actions as of `draw`.
    """
    mask_parts = tuple(part for part in env.info.parts if part.name == MASK)
    allowed = views(mask_parts, observations)[MASK] if mask_parts else None
    return draw(env.info.action_space, env.count, rng, allowed=allowed)


class _StepResults(NamedTuple):
    """The results of a vector's step, as arrays that the vector does not write to again."""

    observations: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: Any

    def as_bytes(self) -> bytes:
        """Returns all results but the info, to be compared."""
        return as_bytes(self[:4])


class _Player:
    """Drives a vector as an actor does, and checks all results."""

    def __init__(self, checker: Checker, vector: VectorEnv) -> None:
        """Prepare to drive ``vector``; faults are added to ``checker``."""
        count = vector.num_envs
        self.ends: list[int] = []
        """Numbers of the steps that ended episodes, counted from 1."""
        self.over = np.zeros(count, np.bool_)
        """The rows whose episode ended in the last step."""
        self.idle = self.over
        """The rows that do not play in the next step."""
        self.observations: Any = None
        """A copy of the last observations."""
        self.reset_sign = ""
        """How the vector showed that it resets within the step that ends an episode, in a sentence.
        """
        self._checker = checker
        self._vector = vector
        self._action_space = checked_actions("of the vector", vector.single_action_space)
        self._to_env_actions = action_map(vector.single_action_space)
        self._observation_space = batch_space(vector.single_observation_space, count)
        self._rng = np.random.default_rng(SEED)
        self._count = count
        self._seats = _Seats(checker, vector)

    def reset(self) -> bool:
        """Begin new episodes, and check the results; returns whether the vector can be played."""
        try:
            results = self._vector.reset(seed=SEED)
        except Exception as error:
            text = f"reset(seed={SEED}) raised {brief_with_place(error)}; correct it"
            self._checker.add("reset", text, error=error)
            return False

        if not (isinstance(results, tuple) and len(results) == 2):
            self._checker.add("reset", "reset did not return a tuple of observations and infos")
            return False
        self.observations = copy_observation(results[0])
        if not self._check_observations("reset"):
            return False
        self.idle = self._seats.begin(results[1])
        return not self._checker.problems

    def play(self, steps: int, seconds: float = 1e9) -> Iterator[_StepResults]:
        """Yield the results of each step with random actions.

        It ends early if the vector cannot be stepped on, or after ``seconds``.
        """
        returns = np.zeros(self._count)
        deadline_s = time.perf_counter() + seconds
        for number in range(1, steps + 1):
            actions = self.choose()
            if actions is None or time.perf_counter() > deadline_s:
                return

            # Policies often choose the bounds, and random actions never do.
            if number < 3 and isinstance(self._action_space, spaces.Box):
                actions[...] = 1 if number == 1 else -1
            results = self.step(actions)
            if results is None:
                return

            returns += results.reward
            if self.over.any():
                self.ends.append(number)
                self._checker.returns += returns[self.over].tolist()
                returns[self.over] = 0
            yield results

    def choose(self) -> Array | None:
        """Draw actions that the masks allow; None if a mask allows none where one is chosen."""
        masks = self.observations.get(MASK) if isinstance(self.observations, dict) else None
        if masks is None:
            return draw(self._action_space, self._count, self._rng)

        allowed = masks != 0
        can_act = open_choices(allowed, counts_of(self._action_space)).all(-1)
        if not (can_act | self.idle).all():
            self._checker.add_closed()
            return None
        return draw(self._action_space, self._count, self._rng, allowed=allowed)

    def step(self, actions: Array) -> _StepResults | None:
        """Step the vector, and check the results.

        Args:
            actions: in a policy's form, ``[count, *shape]``.

        Returns:
            None if it cannot be stepped on.
        """
        env_actions = self._to_env_actions(actions)
        started_s = time.perf_counter()
        try:
            results = self._vector.step(env_actions.copy())
        except Exception as error:
            self._checker.add(
                "step",
                f"playing the vector raised {brief_with_place(error)}; correct it, or "
                "single_action_space or the mask if it is right to refuse the actions "
                f"{env_actions.tolist()}",
                error=error,
            )
            return None
        self._checker.times_s.append(time.perf_counter() - started_s)

        if not _check_results(self._checker, results, self._count):
            return None
        # The vector may write to the arrays again.
        observations, reward, terminated, truncated, info = results
        copies = _StepResults(
            observations=copy_observation(observations),
            reward=copy_observation(reward),
            terminated=copy_observation(terminated),
            truncated=copy_observation(truncated),
            info=info,
        )
        sign = own_reset(copies.info, copies.terminated, copies.truncated)
        self.reset_sign = self.reset_sign or sign
        # gymnasium marks by `_key` which environments have `key`.
        keys = map(str, copies.info)
        self._checker.info_keys.update(key for key in keys if not key.startswith("_"))

        # A vector whose rows do more than reset there can still be stepped on.
        self.observations = copies.observations
        self.over = np.logical_or(copies.terminated, copies.truncated)
        rewards = np.asarray(copies.reward)
        if (rewards[self.idle] != 0).any() or self.over[self.idle].any():
            self._seats.add_active_row()
        self.idle = self._seats.advance(self.over, copies.info)
        return copies if self._check_observations("step") else None

    def _check_observations(self, call: str) -> bool:
        """Add the faults of the observations of ``call``; returns whether there are none."""
        faults = misfits(self._observation_space, self.observations)
        for fault, reason in faults.items():
            self._checker.add(
                "observation",
                f"{call} returned observations{reason}; correct single_observation_space, or what "
                "it returns",
                fault,
            )
        return not faults


class _Seats:
    """Follows which rows of a vector play, and checks that by the rules for seats.

    A row whose game has one seat plays until its episode ends, and again after the next step.
    """

    def __init__(self, checker: Checker, vector: VectorEnv) -> None:
        """Follow the rows of ``vector``; faults are added to ``checker``."""
        self._checker = checker
        self._seats = seating_of("of the vector", vector.metadata or {}).seats
        self._count = vector.num_envs
        self._idle = np.zeros(self._count, np.bool_)  # the rows that do not play in the next step
        self._ended = self._idle  # the rows whose episode in the present game has ended
        self._says_playing = False

    def begin(self, info: Mapping[str, Any]) -> Array:
        """Take the ``info`` of a reset; returns the rows that do not play in the next step."""
        no_rows = np.zeros(self._count, np.bool_)
        self._idle = no_rows
        self._ended = no_rows
        if self._seats > 1 and PLAYING in info:
            self._idle = ~self._playing(info)
        return self._idle

    def advance(self, over: Array, info: Mapping[str, Any]) -> Array:
        """Check the rows that play after a step.

        Args:
            over: bool ``[count]``, the rows whose episode the step has ended.
            info: of the step.

        Returns:
            The rows that do not play in the next step, bool ``[count]``.
        """
        previous = self._idle
        self._idle = over
        if self._seats == 1:
            return over

        self._check_outcome(over, info)
        if PLAYING in info:
            self._idle = ~self._playing(info)
            self._says_playing = True
        elif self._says_playing:
            self._add(f"info had {PLAYING} in earlier steps only; give it in each step")
        elif (over ^ self._of_games(over).any(1).repeat(self._seats)).any():
            self._add(
                f"seats of a game end apart, and info has no {PLAYING}; give in each step "
                f"info[{PLAYING!r}], bool [num_envs], which marks the rows within an episode",
            )
        self._check_changes(previous, over)
        return self._idle

    def add_active_row(self) -> None:
        """Add the fault that a row that does not play had a reward or an end."""
        if self._seats == 1:
            _add_autoreset(self._checker, "it gave a reward or an end there")
            return
        self._add(
            "a row that is out, or that a step only resets, had a reward or an end there; a seat "
            "whose later rewards matter must wait instead: it plays on, with one legal choice",
        )

    def _playing(self, info: Mapping[str, Any]) -> Array:
        """Returns the rows that play by ``info``; all, with a fault, if it cannot be read."""
        playing = info[PLAYING]
        if getattr(playing, "shape", None) != (self._count,) or playing.dtype != np.bool_:
            text = f"info has {PLAYING}={playing!r}; return an array of {self._count} bools"
            self._add(text)
            return np.ones(self._count, np.bool_)
        return np.array(playing)

    def _check_changes(self, previous: Array, over: Array) -> None:
        """Check which rows began to play in a step, and which ceased.

        Args:
            previous: the rows that did not play in it.
            over: the rows whose episode it has ended.
        """
        if (over & ~self._idle).any():
            self._add(
                f"info[{PLAYING!r}] says that a row plays whose episode has just ended; a row "
                "begins again in a later step",
            )
        if (~previous & self._idle & ~over).any():
            self._add(
                "a row ceased to play in a step that did not end its episode; mark it as "
                "terminated or truncated there",
            )

        # A game begins again in the step after its last seat has ended, for all of its seats.
        had_ended = self._of_games(previous).all(1)
        if (had_ended & self._of_games(self._idle).all(1)).any():
            self._add(
                "all seats of a game had ended, and the next step did not begin the game again; "
                "begin it there, as autoreset mode NEXT_STEP says",
            )
        ended = self._ended & ~had_ended.repeat(self._seats)
        if (ended & ~self._idle).any():
            self._add(
                "a seat whose episode had ended began another one before all seats of its game had "
                "ended; let it be out until the game begins again, or let it wait instead of "
                "ending",
            )
        self._ended = ended | over

    def _check_outcome(self, over: Array, info: Mapping[str, Any]) -> None:
        """Check the outcomes, which are optional, where episodes have ended."""
        if OUTCOME not in info:
            return

        try:
            outcome = np.asarray(info[OUTCOME], np.float64).reshape(self._count)
        except (TypeError, ValueError):
            outcome = np.full(self._count, np.nan)
        if not (np.abs(outcome[over]) <= 1).all():
            self._add(
                f"info has {OUTCOME}={info[OUTCOME]!r}; return an array of {self._count} numbers "
                "from -1 (lost) to 1 (won)",
            )

    def _of_games(self, rows: Array) -> Array:
        """Returns values of rows as ``[games, seats]``."""
        return rows.reshape(-1, self._seats)

    def _add(self, text: str) -> None:
        """Add a fault, unless there is one already: further ones may follow from it."""
        self._checker.add("seats", text)


def _check_face(checker: Checker, vector: VectorEnv, of_games: bool) -> bool:
    """Returns whether it is a vector environment of `COUNT` environments, or games."""
    parameter = "num_games" if of_games else "num_envs"
    if not isinstance(vector, VectorEnv):
        checker.add(
            "vector",
            f"a function that takes {parameter} returned a {type(vector).__name__}; return a "
            f"gymnasium.vector.VectorEnv, or do not take {parameter} and return a single "
            "environment",
        )
        return False

    seats = 1
    if of_games:
        try:
            seats = seating_of("of the vector", vector.metadata or {}).seats
        except UserError as error:
            checker.add("seats", str(error))
            return False

    count = getattr(vector, "num_envs", None)
    if count != COUNT * seats:
        rows = f", and a game has {seats} seats" if of_games else ""
        checker.add(
            "vector",
            f"{parameter}={COUNT} made {count} environments{rows}; make exactly "
            f"{f'{parameter} times the seats' if of_games else parameter}",
        )
        return False
    return True


def _check_mode(checker: Checker, vector: VectorEnv) -> bool:
    """Returns whether the vector says that its autoreset mode is NEXT_STEP."""
    mode = (vector.metadata or {}).get("autoreset_mode")
    if mode is AutoresetMode.NEXT_STEP:
        return True

    mode_name = getattr(mode, "name", repr(mode))
    stated = f"says autoreset mode {mode_name}" if mode else "has no autoreset_mode in its metadata"
    checker.add(
        "autoreset",
        f"the vector {stated}; an episode's final observation must not be lost, so reset in the "
        'step after its end and say metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}; a '
        "wrapper of the vector must pass the metadata on",
    )
    return False


def _check_results(checker: Checker, results: Any, count: int) -> bool:
    """Check the results of a step, except the observations.

    Args:
        checker: to which the first fault is added.
        results: what `step` of the vector returned.
        count: the number of rows.

    Returns:
        Whether they can be trained on.
    """
    if not (isinstance(results, tuple) and len(results) == 5):
        checker.add(
            "step",
            "step did not return a tuple of five; return observations, rewards, terminated, "
            "truncated and infos",
        )
        return False
    _, reward, terminated, truncated, info = results

    try:
        rewards = np.asarray(reward, np.float64)
    except (TypeError, ValueError):
        rewards = np.full(count, np.nan)
    if rewards.shape != (count,) or not np.isfinite(rewards).all():
        text = f"step returned the rewards {reward!r}; return an array of {count} finite numbers"
        checker.add("reward", text)
        return False
    if bad := find_bad_reward(rewards):
        checker.add("reward", f"step returned {bad}; {SCALE}")
        return False

    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if getattr(flag, "shape", None) != (count,) or flag.dtype != np.bool_:
            checker.add("flags", f"step returned {name}={flag!r}; return an array of {count} bools")
            return False
    if not isinstance(info, dict):
        checker.add("info", f"step returned infos={info!r}; return a dict, which may be empty")
        return False
    return True


def _check_copies(checker: Checker, make: Callable[[int], VectorEnv], steps: int) -> bool:
    """Check that two vectors with the same seed and actions play alike.

    If the last step ends an episode, they must also play alike after different actions in the next
    step, which only resets.

    Args:
        checker: to which faults are added.
        make: makes a vector of a given number of environments.
        steps: to play.

    Returns:
        Whether the step that only resets was tested.
    """
    first_vector, second_vector = make(COUNT), make(COUNT)
    first = _Player(checker, first_vector)
    second = _Player(checker, second_vector)
    try:
        if not parts_of(first_vector).keys().isdisjoint(parts_of(second_vector)):
            checker.add("shared", SAME_INSTANCE)
            return False
        if not (first.reset() and second.reset()):
            return False

        if reason := _difference(first, second, steps):
            if variables := changed_variables(first_vector, first.play(steps)):
                checker.add_shared(reason, variables)
            else:
                checker.add(
                    "determinism",
                    "two vectors that were reset with the same seed and given the same actions "
                    f"differ {reason}; draw all chance from generators that reset(seed=...) seeds",
                )
        if checker.problems:
            return False
        return bool(first.over.any()) and _check_reset_row(checker, first, second)
    finally:
        checker.close(first_vector)
        checker.close(second_vector)


def _difference(first: _Player, second: _Player, steps: int) -> str:
    """Returns where two vectors differ, stepped in turn, in words; empty if they do not."""
    if as_bytes(first.observations) != as_bytes(second.observations):
        return "in their first observations"

    pairs = zip(first.play(steps), second.play(steps), strict=False)
    for number, (first_results, second_results) in enumerate(pairs, 1):
        if first_results.as_bytes() != second_results.as_bytes():
            return f"in what step {number} returned"
    return ""


def _check_repeated_reset(checker: Checker, make: Callable[[int], VectorEnv], steps: int) -> None:
    """Check that a vector that has been played does the same after a reset as a new one."""
    used_vector, new_vector = make(COUNT), make(COUNT)
    try:
        first_play = _Player(checker, used_vector)
        if not first_play.reset():
            return
        list(first_play.play(steps))

        used = _Player(checker, used_vector)
        new = _Player(checker, new_vector)
        if used.reset() and new.reset() and (reason := _difference(used, new, steps)):
            checker.add(
                "determinism",
                f"a vector that is reset with the same seed again differs {reason} from a new one; "
                "reset all of its state, also statistics that it has gathered",
            )
    finally:
        checker.close(used_vector)
        checker.close(new_vector)


def _check_members(checker: Checker, make: Callable[[int], VectorEnv], steps: int) -> None:
    """Check that the single environments of a vector, if it has such, are independent."""
    vector = make(COUNT)
    try:
        members = members_of(vector)
        if len(members) < COUNT:
            return

        # The vector reads the observations when all members have been reset.
        first, second = members[:COUNT]
        observation, _ = first.reset(seed=SEED)
        observation_bytes = as_bytes(observation)
        second.reset(seed=SEED + 1)
        if as_bytes(observation) != observation_bytes:
            checker.add_shared("from each alone", ["the memory of their observations"])
            return

        first_steps = list(checker.play(first, steps, seed=SEED))
        checker.independence(first, second, first_steps)
    finally:
        checker.close(vector)


def _check_reset_row(checker: Checker, first: _Player, second: _Player) -> bool:
    """Check that two vectors play alike though the actions in a reset row differ.

    Args:
        checker: to which a fault is added.
        first: a player whose last step ended an episode.
        second: a player that has played alike.

    Returns:
        Whether different actions could be given.
    """
    # Some of the drawn actions may be equal in the rows that only reset.
    actions = first.choose()
    for _ in range(20):
        other_actions = second.choose()
        if actions is None or other_actions is None:
            return False
        alive = ~first.idle
        other_actions[alive] = actions[alive]
        if not np.array_equal(actions, other_actions):
            break
    else:
        return False

    results = first.step(actions)
    other_results = second.step(other_actions)
    if checker.problems:
        return True
    assert results is not None
    assert other_results is not None
    if results.as_bytes() != other_results.as_bytes():
        _add_autoreset(checker, "what followed depended on the action")
    return True


def _add_autoreset(checker: Checker, sign: str) -> None:
    """Add the fault that a step that should only reset did more, by its ``sign``."""
    checker.add(
        "autoreset",
        "the vector says NEXT_STEP, where the step after an episode's end only resets: its action "
        f"is ignored, its reward 0; but {sign}; reset there, or remove the wrapper that resets in "
        "the same step",
    )
