"""Checks of a vector environment: whether it behaves as it declares.

The decisive test is of NEXT_STEP: two copies play alike until an episode has ended, and are then
given different actions in the step that only resets. If they differ afterwards, that step was
played.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

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
from penstock.envs.space_misfit import misfits
from penstock.envs.vector_env import (
    Actions,
    BatchedEnv,
    action_map,
    checked_actions,
    copied,
    counts_of,
    own_reset,
)

Array = npt.NDArray[Any]
COUNT = 2
SEED = 7
REPEATED_STEPS = 300  # least number of steps that copies must play alike


def check_vector(
    found: Checker,
    make: Callable[[int], VectorEnv],
    steps: int,
    seconds: float = 1e9,
    *,
    numbered: bool = False,
) -> dict[str, Any]:
    """Play a vector of `COUNT` environments, and check it and copies of it.

    Args:
        found: the checker to which faults are added.
        make: makes a vector of a given number of environments.
        steps: the most steps to play.
        seconds: the most time that the first play takes.
        numbered: whether each environment has an index. They may differ then, and copies are not
            compared.

    Returns:
        The figures of `cost` and "games", the number of environments; empty if the vector cannot be
        played. "resets_tested" says of copies that were compared whether an episode ended, so that
        the step after it could be tested.
    """
    vector = make(COUNT)
    try:
        sound = _check_face(found, vector) and _check_mode(found, vector)
        if sound and share_instance(members_of(vector)):
            found.add("shared", SAME_INSTANCE)
            return {}
        if not (sound and found.check_spaces("of the vector", vector, "single_")):
            return {}

        player = _Player(found, vector)
        if not player.reset():
            return {}
        figures = {"games": COUNT, **cost(found, player.play(steps, seconds), steps)}
    finally:
        if isinstance(vector, VectorEnv):
            found.close(vector)
    if found.problems or numbered:
        return figures

    alike = min(figures["steps"], REPEATED_STEPS)
    ended = next((end for end in player.ends if end >= alike), max(player.ends, default=0))
    if ended < alike:
        _check_copies(found, make, alike)
    tested = bool(ended) and _check_copies(found, make, ended)
    if not found.problems:
        _check_repeated_reset(found, make, alike)
    if not found.problems:
        _check_members(found, make, alike)
    if player.sign and not found.problems:
        found.add("autoreset", player.sign)
    return {**figures, "resets_tested": tested}


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
    counts = counts_of(space)
    liking = rng.random((count, sum(counts)))
    if allowed is not None:
        liking += allowed
    parts = np.split(liking, np.cumsum(counts)[:-1], axis=1)
    chosen = np.stack([part.argmax(1) for part in parts], 1).astype(np.int32)
    return chosen.reshape(count, *(space.shape or ()))


def draw_for(env: BatchedEnv, shown: Array, rng: np.random.Generator) -> Array:
    """Draw random actions that the masks in observations allow.

    Args:
        env: the environments.
        shown: their packed observations, ``[count, *shape]``.
        rng: draws the actions.

    Returns:
        The actions as of `draw`.
    """
    masks = tuple(part for part in env.info.parts if part.name == MASK)
    allowed = views(masks, shown)[MASK] if masks else None
    return draw(env.info.action_space, env.count, rng, allowed)


class _Player:
    """Drives a vector as an actor does, and checks all results."""

    def __init__(self, found: Checker, vector: VectorEnv) -> None:
        self.ends: list[int] = []  # numbers of steps that ended episodes, from 1
        self.over = np.zeros(COUNT, np.bool_)
        self.shown: Any = None
        # how an environment showed that it resets within the step that ends an episode
        self.sign = ""
        self._found, self._vector = found, vector
        self._space = checked_actions("of the vector", vector.single_action_space)
        self._to_game = action_map(vector.single_action_space)
        self._observations = batch_space(vector.single_observation_space, COUNT)
        self._rng = np.random.default_rng(SEED)

    def reset(self) -> bool:
        """Begin new episodes, and check the results; returns whether the vector can be played."""
        try:
            found = self._vector.reset(seed=SEED)
        except Exception as error:
            text = f"reset(seed={SEED}) raised {brief_with_place(error)}; correct it"
            self._found.add("reset", text, error=error)
            return False
        if not (isinstance(found, tuple) and len(found) == 2):
            self._found.add("reset", "reset did not return a tuple of observations and infos")
            return False
        self.shown = copied(found[0])
        return self._fits("reset")

    def play(self, steps: int, seconds: float = 1e9) -> Iterator[Any]:
        """Yield the results of each step with random actions.

        It ends early if the vector cannot be stepped on, or after ``seconds``.
        """
        totals, until = np.zeros(COUNT), time.perf_counter() + seconds
        for number in range(1, steps + 1):
            action = self.choose()
            if action is None or time.perf_counter() > until:
                return
            if number < 3 and isinstance(self._space, spaces.Box):  # policies often choose bounds
                action[...] = 1 if number == 1 else -1
            results = self.step(action)
            if results is None:
                return
            totals += results[1]
            if self.over.any():
                self.ends.append(number)
                self._found.returns += totals[self.over].tolist()
                totals[self.over] = 0
            yield results

    def choose(self) -> Array | None:
        """Draw actions that the masks allow; None if a mask allows none where one is chosen."""
        mask = self.shown.get(MASK) if isinstance(self.shown, dict) else None
        if mask is None:
            return draw(self._space, COUNT, self._rng)
        choices = open_choices(mask != 0, counts_of(self._space)).all(-1)
        if not (choices | self.over).all():
            self._found.add_closed()
            return None
        return draw(self._space, COUNT, self._rng, mask != 0)

    def step(self, action: Array) -> Any:
        """Step the vector, and check the results.

        Args:
            actions: in a policy's form, ``[count, *shape]``.

        Returns:
            None if it cannot be stepped on.
        """
        env_actions = self._to_game(action)
        since = time.perf_counter()
        try:
            results = self._vector.step(env_actions.copy())
        except Exception as error:
            self._found.add(
                "step",
                f"playing the vector raised {brief_with_place(error)}; correct it, or "
                "single_action_space or the mask if it is right to refuse the actions "
                f"{env_actions.tolist()}",
                error=error,
            )
            return None
        self._found.times_s.append(time.perf_counter() - since)
        if not _look(self._found, results, self.over):
            return None
        results = (*map(copied, results[:4]), results[4])  # it may write to the arrays again
        self.sign = self.sign or own_reset(results[4], results[2], results[3])
        # gymnasium marks by `_key` which environments have `key`.
        self._found.info_keys.update(key for key in map(str, results[4]) if key[:1] != "_")
        self.shown, self.over = results[0], np.logical_or(results[2], results[3])
        return results if self._fits("step") else None

    def _fits(self, call: str) -> bool:
        found = misfits(self._observations, self.shown)
        for fault, reason in found.items():
            self._found.add(
                "observation",
                f"{call} returned observations{reason}; correct single_observation_space, or what "
                "it returns",
                fault,
            )
        return not found


def _check_face(found: Checker, vector: VectorEnv) -> bool:
    """Returns whether it is a vector environment of `COUNT` environments."""
    if not isinstance(vector, VectorEnv):
        found.add(
            "vector",
            f"a function that takes num_envs returned a {type(vector).__name__}; return a "
            "gymnasium.vector.VectorEnv, or do not take num_envs and return a single environment",
        )
        return False

    count = getattr(vector, "num_envs", None)
    if count != COUNT:
        found.add("vector", f"num_envs={COUNT} made {count} environments; make exactly num_envs")
        return False
    return True


def _check_mode(found: Checker, vector: VectorEnv) -> bool:
    mode = (vector.metadata or {}).get("autoreset_mode")
    if mode is AutoresetMode.NEXT_STEP:
        return True
    named = getattr(mode, "name", repr(mode))
    stated = f"says autoreset mode {named}" if mode else "has no autoreset_mode in its metadata"
    found.add(
        "autoreset",
        f"the vector {stated}; an episode's final observation must not be lost, so reset in the "
        'step after its end and say metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}; a '
        "wrapper of the vector must pass the metadata on",
    )
    return False


def _look(found: Checker, results: Any, over: Array) -> bool:
    """Whether one step's results, except the observations, can be trained on."""
    if not (isinstance(results, tuple) and len(results) == 5):
        found.add(
            "step",
            "step did not return a tuple of five; return observations, rewards, terminated, "
            "truncated and infos",
        )
        return False
    _, reward, terminated, truncated, info = results
    try:
        rewards = np.asarray(reward, np.float64)
    except (TypeError, ValueError):
        rewards = np.full(COUNT, np.nan)
    if rewards.shape != (COUNT,) or not np.isfinite(rewards).all():
        text = f"step returned the rewards {reward!r}; return an array of {COUNT} finite numbers"
        found.add("reward", text)
        return False
    if bad := find_bad_reward(rewards):
        found.add("reward", f"step returned {bad}; {SCALE}")
        return False
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if getattr(flag, "shape", None) != (COUNT,) or flag.dtype != np.bool_:
            found.add("flags", f"step returned {name}={flag!r}; return an array of {COUNT} bools")
            return False
    if not isinstance(info, dict):
        found.add("info", f"step returned infos={info!r}; return a dict, which may be empty")
        return False
    if (rewards[over] != 0).any() or np.logical_or(terminated, truncated)[over].any():
        _add_autoreset(found, "it gave a reward or an end there")
    return True


def _check_copies(found: Checker, make: Callable[[int], VectorEnv], steps: int) -> bool:
    """Check that two vectors with the same seed and actions play alike.

    If the last step ends an episode, they must also play alike after different actions in the next
    step, which only resets.

    Args:
        found: the checker to which faults are added.
        make: makes a vector of a given number of environments.
        steps: to play.

    Returns:
        Whether the step that only resets was tested.
    """
    vectors = make(COUNT), make(COUNT)
    one, other = (_Player(found, vector) for vector in vectors)
    try:
        if not parts_of(vectors[0]).keys().isdisjoint(parts_of(vectors[1])):
            found.add("shared", SAME_INSTANCE)
            return False
        if not (one.reset() and other.reset()):
            return False

        if reason := _difference(one, other, steps):
            if variables := changed_variables(vectors[0], one.play(steps)):
                found.add_shared(reason, variables)
            else:
                found.add(
                    "determinism",
                    "two vectors that were reset with the same seed and given the same actions "
                    f"differ {reason}; draw all chance from generators that reset(seed=...) seeds",
                )
        if found.problems:
            return False
        return bool(one.over.any()) and _check_reset_row(found, one, other)
    finally:
        for vector in vectors:
            found.close(vector)


def _difference(one: _Player, other: _Player, steps: int) -> str:
    """Returns where two vectors differ, stepped in turn, in words; empty if they do not."""
    if as_bytes(one.shown) != as_bytes(other.shown):
        return "in their first observations"
    pairs = zip(one.play(steps), other.play(steps), strict=False)
    for number, (ones, others) in enumerate(pairs, 1):
        if as_bytes(ones[:4]) != as_bytes(others[:4]):
            return f"in what step {number} returned"
    return ""


def _check_repeated_reset(found: Checker, make: Callable[[int], VectorEnv], steps: int) -> None:
    """Check that a vector that has been played does the same after a reset as a new one."""
    vectors = make(COUNT), make(COUNT)
    try:
        used = _Player(found, vectors[0])
        if not used.reset():
            return
        list(used.play(steps))

        again, fresh = (_Player(found, vector) for vector in vectors)
        if again.reset() and fresh.reset() and (reason := _difference(again, fresh, steps)):
            found.add(
                "determinism",
                f"a vector that is reset with the same seed again differs {reason} from a new one; "
                "reset all of its state, also statistics that it has gathered",
            )
    finally:
        for vector in vectors:
            found.close(vector)


def _check_members(found: Checker, make: Callable[[int], VectorEnv], steps: int) -> None:
    """Check that the single environments of a vector, if it has such, are independent."""
    vector = make(COUNT)
    try:
        members = members_of(vector)
        if len(members) < COUNT:
            return

        # The vector reads the observations when all members have been reset.
        first, second = members[:COUNT]
        shown, _ = first.reset(seed=SEED)
        shown_bytes = as_bytes(shown)
        second.reset(seed=SEED + 1)
        if as_bytes(shown) != shown_bytes:
            found.add_shared("from each alone", ["the memory of their observations"])
            return
        found.independence(first, second, list(found.play(first, steps, SEED)))
    finally:
        found.close(vector)


def _check_reset_row(found: Checker, one: _Player, other: _Player) -> bool:
    """Check that two vectors play alike though the actions in a reset row differ.

    Args:
        found: the checker to which a fault is added.
        first: a player whose last step ended an episode.
        second: a player that has played alike.

    Returns:
        Whether different actions could be given.
    """
    over, action = one.over, one.choose()
    for _ in range(20):  # some of the ignored actions may be equal
        different = other.choose()
        if action is None or different is None:
            return False
        different[~over] = action[~over]
        if not np.array_equal(action, different):
            break
    else:
        return False
    after = one.step(action), other.step(different)
    if not found.problems and as_bytes(after[0][:4]) != as_bytes(after[1][:4]):
        _add_autoreset(found, "what followed depended on the action")
    return True


def _add_autoreset(found: Checker, sign: str) -> None:
    """Add the fault that a step that should only reset did more, by its ``sign``."""
    found.add(
        "autoreset",
        "the vector says NEXT_STEP, where the step after an episode's end only resets: its action "
        f"is ignored, its reward 0; but {sign}; reset there, or remove the wrapper that resets in "
        "the same step",
    )
