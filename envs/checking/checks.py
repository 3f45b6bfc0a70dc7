"""Checks of an environment, made by playing it; each fault is a sentence with the next step.

The environment is driven as in training, and every property that training relies on is checked.
`Checker` is for single environments, `penstock.envs.checking.vector` for vectors. `cost` measures
time and memory.
"""

from __future__ import annotations

import pickle
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import numpy.typing as npt
import psutil
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import VectorEnv

from penstock.configs.errors import UserError
from penstock.core.observations import MASK
from penstock.core.place import brief_with_place, users_traceback
from penstock.envs.instances import SAME_INSTANCE, parts_of, share_instance
from penstock.envs.packing import Packer, find_bad_reward
from penstock.envs.space_misfit import misfit, misfits
from penstock.envs.vector_env import (
    MASK_IN_INFO,
    check_mask,
    checked_actions,
    copy_observation,
    counts_of,
    own_reset,
)

Single = gymnasium.Env[Any, Any]
# Packages whose classes are not the user's.
NOT_OF_USER = ("builtins", "gymnasium", "penstock", "typing")
# Spaces change as they draw, and environments that are shared are refused anyway.
NOT_STATE = (spaces.Space, gymnasium.Env, VectorEnv)
# Variables are compared after as many first steps of a play.
LOOKS = 10
# The memory is read as often during a play.
READINGS = 30
# Growth per step from which on memory counts as leaking: 1 GB in ten million steps.
LEAK_NBYTES = 100
# As many samples are drawn from a space, which must contain them.
SAMPLES = 20
# The next step in the sentence about a reward that is too large.
SCALE = "scale them in step, or set env.wrappers to a wrapper that does"


class Problem(NamedTuple):
    """A fault to correct."""

    kind: str
    """A word for programs."""
    text: str
    """A sentence for people."""
    traceback: str = ""
    """The frames of the user's code that raised an error, if one was raised."""


class PlayedStep(NamedTuple):
    """The result of one call of an environment, in comparable form."""

    observation: bytes
    reward: float
    terminated: bool
    truncated: bool

    @property
    def ends_episode(self) -> bool:
        return self.terminated or self.truncated


class _Transition(NamedTuple):
    """One step of a play, with what the next one needs."""

    step: PlayedStep
    observation: Any
    """A copy of the observation, which the environment does not change."""
    info: dict[str, Any]


class Checker:
    """Plays an environment with random actions, and collects its faults, the first of each kind."""

    def __init__(self) -> None:
        # What was found.
        self.problems: list[Problem] = []
        self._known_faults: set[tuple[str, str]] = set()  # kind and fault of each problem

        # What was measured in all plays. The times are no list, whose growth would look like a
        # leak.
        self.returns: list[float] = []
        self.info_keys: set[str] = set()
        self.times_s = array("d")

        # First and last observations of episodes by their hash, as stored observations would look
        # like a leak; and whether other observations occurred.
        self._first_hashes: set[int] = set()
        self._last_hashes: list[int] = []
        self._has_changed = False

        # Whether the last reset gave an action mask where networks do not see it.
        self._has_mask_in_info = False
        # Whether an episode has begun and not ended, by the `id` of the environment.
        self._is_in_episode: dict[int, bool] = {}

    def add(
        self, kind: str, text: str, fault: str = "", error: BaseException | None = None
    ) -> None:
        """Add a problem, unless there is one of its kind and fault.

        Args:
            kind: a word for programs.
            text: a sentence for people.
            fault: which fault it is, of a kind that has several.
            error: the error that the environment raised, if it did.
        """
        if (kind, fault) not in self._known_faults:
            self._known_faults.add((kind, fault))
            frames = "" if error is None else users_traceback(error)
            self.problems.append(Problem(kind, text, frames))

    def add_closed(self) -> None:
        """Add the fault that a mask allows nothing."""
        self.add(
            "mask",
            f"{MASK} allows no action where one must be chosen; let it allow at least one (of each "
            "choice, where there are several; for a seat that waits, exactly one), or end the "
            "episode",
        )

    def check_spaces(self, name: str, env: Single | VectorEnv, prefix: str = "") -> bool:
        """Check the spaces of observations and of actions.

        Args:
            name: of the environment, for messages.
            env: the environment.
            prefix: of the spaces' names, "single_" for a vector.

        Returns:
            Whether training can use them.
        """
        for space_name in (f"{prefix}observation_space", f"{prefix}action_space"):
            space = getattr(env, space_name, None)
            if not isinstance(space, spaces.Space):
                self.add("space", f"{space_name} is {space!r}; set it to a gymnasium space")
                return False

            for _ in range(SAMPLES):
                if reason := misfit(space, space.sample()):
                    text = f"{space_name} draws a sample{reason}; correct its bounds or dtype"
                    self.add("space", text)
                    break

        try:
            parts = Packer(name, getattr(env, f"{prefix}observation_space")).parts
            check_mask(name, parts, checked_actions(name, getattr(env, f"{prefix}action_space")))
        except UserError as error:
            self.add("space", str(error))
            return False
        return True

    def play(
        self, env: Single, steps: int, seed: int, seconds: float = 1e9
    ) -> Iterator[PlayedStep]:
        """Play and check an environment over as many episodes as needed.

        It ends early if the environment cannot be stepped on.

        Args:
            env: the environment, which is reset first.
            steps: the most steps to play.
            seed: of the environment and of the actions.
            seconds: the most time that it takes.

        Yields:
            The results of each step.
        """
        # Several environments may have the same space, whose generator is seeded.
        rng = np.random.default_rng(seed)
        space = deepcopy(env.action_space)
        space.seed(seed)
        # Policies often choose the bounds, and random actions never do, so they come first.
        bounds = _bounds(space)

        observation = self._reset(env, seed)
        episode_return = 0.0
        deadline_s = time.perf_counter() + seconds
        while observation is not None and steps > 0 and time.perf_counter() < deadline_s:
            steps -= 1
            action = bounds.pop() if bounds else choose(space, observation, rng)
            transition = self._step(env, action)
            if transition is None:
                return
            step = transition.step
            self._is_in_episode[id(env)] = not step.ends_episode
            yield step

            observation = transition.observation
            episode_return += step.reward
            if step.ends_episode:
                self.returns.append(episode_return)
                episode_return = 0.0
                self._last_hashes = [*self._last_hashes[-99:], hash(step.observation)]
                self._check_final_info(transition.info)
                observation = self._reset(env, seed=None)
            elif not self._has_changed:
                self._has_changed = hash(step.observation) not in self._first_hashes

    @property
    def ends_where_it_begins(self) -> bool:
        """Whether every episode's last observation was a first one, though others occurred."""
        has_enough = self._has_changed and len(self._last_hashes) > 3
        return has_enough and self._first_hashes.issuperset(self._last_hashes)

    def determinism(
        self, make: Callable[[], Single], steps: int, seconds: float, *, numbered: bool = False
    ) -> None:
        """Check that environments with the same seed play alike.

        Two environments are compared, and one of them with itself after another reset. Then both
        are played in turn.

        Args:
            make: makes an environment.
            steps: the most steps to play.
            seconds: the most time that the first play takes.
            numbered: whether each environment has an index, so that they may differ.
        """
        first, second = make(), make()
        try:
            if share_instance((first, second)):
                self.add("shared", SAME_INSTANCE)
                return

            first_steps = list(self.play(first, steps, seed=7, seconds=seconds))
            second_steps = list(self.play(second, len(first_steps), seed=7))
            repeated_steps = list(self.play(first, len(first_steps), seed=7))
            if self.problems:  # one has ended a play early
                return

            if not numbered and (reason := difference(first_steps, second_steps)):
                self._add_difference(first, reason, len(first_steps))
            elif reason := difference(first_steps, repeated_steps):
                self.add(
                    "determinism",
                    f"an environment that is reset with the same seed again differs {reason}; "
                    "reset all of its state, and its random generator where seed is given",
                )
            else:
                self.independence(first, second, first_steps)
        finally:
            self.close(first)
            self.close(second)

    def independence(self, first: Single, second: Single, played: list[PlayedStep]) -> None:
        """Check that two environments play in turn as each does alone.

        Args:
            first: an environment.
            second: another one, which is seeded otherwise.
            played: the steps that ``first`` has played alone, with seed 7.
        """
        steps = len(played)
        second_alone = list(self.play(second, steps, seed=8))
        turns = list(
            zip(self.play(first, steps, seed=7), self.play(second, steps, seed=8), strict=False)
        )
        first_in_turn = [first_step for first_step, _ in turns]
        second_in_turn = [second_step for _, second_step in turns]

        # The shorter play ends the turns.
        for alone, in_turn in ((played, first_in_turn), (second_alone, second_in_turn)):
            if reason := difference(alone[: len(turns)], in_turn):
                variables = changed_variables(first, self.play(first, steps, seed=9))
                self.add_shared(reason, variables)

    def add_shared(self, reason: str, variables: Sequence[str]) -> None:
        """Add the fault that environments share variables.

        Args:
            reason: where they differ, in words.
            variables: names of the variables; empty if they are not known.
        """
        what = ", ".join(variables) or "state of a class, a module or a library"
        self.add(
            "shared",
            f"two environments share {what}, and differ {reason} where both are played; make it an "
            "attribute of self, in __init__ or reset",
        )

    def _add_difference(self, env: Single, reason: str, steps: int) -> None:
        """Add the fault that two environments with one seed differ, by its probable cause.

        Args:
            env: one of them, which is played again.
            reason: where they differ, in words.
            steps: that were played.
        """
        if variables := changed_variables(env, self.play(env, steps, seed=9)):
            self.add_shared(reason, variables)
            return
        self.add(
            "determinism",
            f"two environments that were reset with the same seed and given the same actions "
            f"differ {reason}; draw all chance from self.np_random, after "
            "super().reset(seed=seed)",
        )

    def close(self, env: Single | VectorEnv) -> None:
        """Close a played environment."""
        self._is_in_episode.pop(id(env), None)
        try:
            env.close()
        except Exception as error:
            text = f"close() raised {brief_with_place(error)}; correct it"
            self.add("close", text, error=error)

    def pickling(self, constructor: Any) -> None:
        """Check that a new process can find the environment's constructor by name."""
        try:
            pickle.loads(pickle.dumps(constructor))
        except Exception as error:
            self.add(
                "pickling",
                f"its constructor cannot be pickled ({type(error).__name__}: {error}); define it "
                "at the top level of its module, not as a lambda or in a function, so that a new "
                "process can import it",
            )

    def _reset(self, env: Single, seed: int | None) -> Any:
        """Reset, and check the results.

        Returns:
            A copy of the first observation; None on failure.
        """
        call = f"reset(seed={seed})"
        try:
            results = env.reset(seed=seed)
        except Exception as error:
            rule = "correct it"
            if self._is_in_episode.get(id(env)):
                call += " before an episode's end"
                rule = "let it begin a new episode at any time, as evaluations do not end each one"
            self.add("reset", f"{call} raised {brief_with_place(error)}; {rule}", error=error)
            return None
        self._is_in_episode[id(env)] = True

        is_pair = isinstance(results, tuple) and len(results) == 2
        if not (is_pair and isinstance(results[1], dict)):
            self.add(
                "reset",
                f"{call} returned {_kind(results)}; it must return a tuple of an observation and a "
                "dict, which may be empty",
            )
            return None

        observation, info = results
        self._check_observation(env.observation_space, observation, call)
        parts = getattr(env.observation_space, "spaces", ())
        self._has_mask_in_info = MASK in info and MASK not in parts
        if len(self._first_hashes) < 100:
            self._first_hashes.add(hash(as_bytes(observation)))
        return copy_observation(observation)

    def _step(self, env: Single, action: Any) -> _Transition | None:
        """Step, and check the results.

        Args:
            env: the environment.
            action: in the environment's own form; None if its mask allows no action.

        Returns:
            None if it cannot be stepped on.
        """
        if action is None:
            self.add_closed()
            return None

        # A copy, as the environment may write to it, and a message shows the action.
        argument = action.copy() if isinstance(action, np.ndarray) else action
        started_s = time.perf_counter()
        try:
            results = env.step(argument)
        except Exception as error:
            mask_hint = f"; it gives {MASK_IN_INFO}" if self._has_mask_in_info else ""
            self.add(
                "step",
                f"step raised {brief_with_place(error)}; correct it, or action_space if it is "
                f"right to refuse the action {action!r}, which is in there{mask_hint}",
                error=error,
            )
            return None
        self.times_s.append(time.perf_counter() - started_s)

        if not (isinstance(results, tuple) and len(results) == 5):
            self.add(
                "step",
                f"step returned {_kind(results)}; it must return a tuple of observation, reward, "
                "terminated, truncated and info",
            )
            return None

        observation, reward, terminated, truncated, info = results
        self._check_outcome(reward, terminated, truncated, info)
        self._check_observation(env.observation_space, observation, "step")
        if not isinstance(info, dict):
            info = {}
        self.info_keys.update(map(str, info))

        step = PlayedStep(
            observation=as_bytes(observation),
            reward=_number(reward),
            terminated=bool(np.any(terminated)),
            truncated=bool(np.any(truncated)),
        )
        return _Transition(step, copy_observation(observation), info)

    def _check_outcome(self, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        """Check the types and values of a step's results, except the observation."""
        value = _number(reward)
        if not np.isfinite(value):
            self.add("reward", f"step returned the reward {reward!r}; return a finite number")
        elif bad := find_bad_reward(np.array([value])):
            self.add("reward", f"step returned {bad}; {SCALE}")

        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                self.add("flags", f"step returned {name} as {_kind(flag)}; return a bool")

        if not isinstance(info, dict):
            self.add("info", f"step returned info as {_kind(info)}; return a dict, maybe empty")

    def _check_observation(self, space: spaces.Space[Any], observation: Any, call: str) -> None:
        """Check that an observation of ``call`` fits its space."""
        for fault, reason in misfits(space, observation).items():
            self.add(
                "observation",
                f"{call} returned an observation{reason}; correct observation_space, or what it "
                "returns",
                fault,
            )

    def _check_final_info(self, info: dict[str, Any]) -> None:
        """Check the info of a step that ended an episode for signs of a reset within it."""
        if sign := own_reset(info, True, False):
            self.add("autoreset", sign)


def refused_by_gymnasium(make: Callable[[], Single]) -> str | None:
    """Find the first fault that gymnasium's own checker sees in an environment.

    gymnasium checks one reset and one step, and stops at the first fault. `Checker` plays episodes,
    finds the faults of any step, and says what to do about them. So this is for an environment in
    which `Checker` finds nothing, and shows what gymnasium asks for beyond that. gymnasium's
    checker knows no masks, so an environment that has one is not given to it.

    Returns:
        The error and its place, in words; None if there is no fault.
    """
    env = make()
    try:
        if MASK in getattr(env.observation_space, "spaces", ()):
            return None

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_env(env, skip_render_check=True, skip_close_check=True)
    except Exception as error:
        return brief_with_place(error)
    finally:
        # An error of `close` is a fault that `Checker.close` adds.
        with suppress(Exception):
            env.close()
    return None


def choose(space: spaces.Space[Any], observation: Any, rng: np.random.Generator) -> Any:
    """Draw a random action that the mask in an observation allows.

    Args:
        space: the environment's own space of actions, whose generator draws if there is no mask.
        observation: the observation.
        rng: draws if there is a mask.

    Returns:
        The action in the environment's own form; None if the mask allows none.
    """
    mask = observation.get(MASK) if isinstance(observation, dict) else None
    counts = counts_of(space)
    if mask is None or not counts:
        return space.sample()

    component_masks = np.split(np.ravel(mask) != 0, np.cumsum(counts)[:-1])
    if not all(component_mask.any() for component_mask in component_masks):
        return None

    choices = [rng.choice(np.flatnonzero(component_mask)) for component_mask in component_masks]
    action = np.array(choices, space.dtype).reshape(space.shape or ())
    return action + getattr(space, "start", np.zeros_like(action))


def _bounds(space: spaces.Space[Any]) -> list[npt.NDArray[Any]]:
    """Returns the extreme actions of a Box; an empty list for another space."""
    return [space.high.copy(), space.low.copy()] if isinstance(space, spaces.Box) else []


def difference(one: list[PlayedStep], other: list[PlayedStep]) -> str:
    """Returns where two plays differ, in words; empty if they do not."""
    for number, (step, other_step) in enumerate(zip(one, other, strict=False), 1):
        for field in PlayedStep._fields:
            if getattr(step, field) != getattr(other_step, field):
                return f"in the {field} of step {number}"
    return "in how long they last" if len(one) != len(other) else ""


def changed_variables(env: Any, play: Iterable[object]) -> list[str]:
    """Find the variables of an environment's classes, and of their modules, that a play changes.

    Args:
        env: the environment.
        play: plays it, one step for each item.

    Returns:
        Their names, sorted.
    """
    first_values = _variables(env)
    changed: set[str] = set()
    for step, _ in enumerate(play):
        # Not only at the end, where a variable may have its first value again.
        if step < LOOKS:
            values = _variables(env)
            changed.update(name for name in values if values[name] != first_values.get(name))
    return sorted(changed)


def _variables(env: Any) -> dict[str, bytes]:
    """Returns the variables of an environment's classes and of their modules, by their names.

    Each is pickled; those that cannot be pickled are left out.
    """
    all_classes = {cls for part in parts_of(env).values() for cls in type(part).__mro__}
    classes = {cls for cls in all_classes if cls.__module__.partition(".")[0] not in NOT_OF_USER}
    modules = {cls.__module__ for cls in classes} & sys.modules.keys()
    owners: list[type | ModuleType] = [*classes, *(sys.modules[name] for name in modules)]

    pickled: dict[str, bytes] = {}
    for owner in owners:
        for name, value in vars(owner).items():
            if not name.startswith("__") and not isinstance(value, NOT_STATE):
                with suppress(Exception):
                    pickled[f"{owner.__name__}.{name}"] = pickle.dumps(value)
    return pickled


def as_bytes(observation: Any) -> bytes:
    """Returns the bytes by which observations are compared."""
    if isinstance(observation, dict):
        return b"".join(as_bytes(observation[key]) for key in sorted(observation, key=str))
    if isinstance(observation, tuple):
        return b"".join(map(as_bytes, observation))
    try:
        return np.asarray(observation).tobytes()
    except ValueError:  # lists of different lengths
        return repr(observation).encode()


def _number(value: Any) -> float:
    """Returns the value as a float; NaN if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _kind(value: Any) -> str:
    """Returns what a wrong result is, for a sentence."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{value!r}, a {type(value).__name__}"[:80]


def cost(checker: Checker, played: Iterator[object], steps: int) -> dict[str, Any]:
    """Exhaust a play, and measure its time and memory.

    Args:
        checker: plays the environment. A fault is added to it if memory grows.
        played: plays one step for each item.
        steps: the most steps of the play.

    Returns:
        "steps", "episodes", "step_ms" with percentiles of the time of a step in milliseconds, and
        "grown_nbytes", the growth of memory in bytes per step.
    """
    # The memory is read at equal distances of steps.
    distance = max(steps // READINGS, 1)
    sizes_nbytes: list[int] = []
    step_count = 0
    while played_steps := sum(1 for _ in islice(played, distance)):
        step_count += played_steps
        sizes_nbytes.append(memory_nbytes())

    grown_nbytes = 0.0
    if len(sizes_nbytes) > READINGS // 2:
        grown_nbytes = growth_nbytes(sizes_nbytes, step_count)
    if grown_nbytes > LEAK_NBYTES:
        checker.add(
            "memory",
            f"memory grows by {grown_nbytes:,.0f} bytes a step, {grown_nbytes * 1e7 / 1e9:,.0f} GB "
            "in ten million steps; do not keep what a step made, and let go of it in reset",
        )

    times_ms = np.array(checker.times_s or [0.0]) * 1e3
    return {
        "steps": step_count,
        "episodes": len(checker.returns),
        "step_ms": {
            "p50": float(np.percentile(times_ms, 50)),
            "p99": float(np.percentile(times_ms, 99)),
            "max": float(times_ms.max()),
        },
        "grown_nbytes": grown_nbytes,
    }


def memory_nbytes() -> int:
    """Returns the bytes of memory that this process holds.

    On Linux that is without pages of mapped files. A library's pages become resident when they are
    first used, which is not a leak.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        kilobytes = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
        return sum(1024 * int(kilobytes[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    except (OSError, LookupError):
        return int(psutil.Process().memory_info().rss)


def growth_nbytes(resident_nbytes: list[int], steps: int) -> float:
    """Estimate the bytes by which a process grows per step.

    The first third of the readings does not count, as memory always grows at the start.

    Args:
        resident_nbytes: the memory at equal distances over all steps.
        steps: number of all steps.

    Returns:
        The mean growth; 0 if memory does not grow nearly all the time, as when a cache fills.
    """
    sizes: npt.NDArray[np.int64] = np.array(resident_nbytes[len(resident_nbytes) // 3 :])
    growths = np.diff(sizes)
    if len(growths) < 4 or (growths > 0).mean() < 0.8:
        return 0.0

    counted_steps = steps * len(growths) / (len(resident_nbytes) - 1)
    return float(sizes[-1] - sizes[0]) / counted_steps
