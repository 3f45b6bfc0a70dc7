"""Plays one unroll into a slot, step by step and in place.

Row t holds the decision at ``obs[t]`` and its outcome. Environments reset themselves on the step
*after* an episode's end (NEXT_STEP): that row is no decision and is not ``alive``. Its ``obs[t]``
is the final observation of the ended episode, and the policy's outputs for it are recorded too,
such as the value at the end of a truncated episode. After it the recurrent state is reset. A step
that failed, where such episodes are dropped, is a row of that kind too: it only resets, and the
steps before it are bootstrapped from its observation. Rewards and returns are raw here. Where
Atari's lives are episodes, returns and lengths are those of games, and a length of 0 marks the end
of a life that does not end its game, and of a first episode that was shortened
(penstock.envs.first_episodes). A column ``core_state`` holds the state before ``obs[0]``.

A slot may hold only the newest frame of each frame stack; the environments then play in memory of
their own. With a column ``older`` it also holds the rest of the first stack, and ``begins``
describes the padding before an episode's first frame (penstock.algos.ops.frame_stacks). With a
column ``pad``, that column describes the padding, and older frames are those of the slots before
(penstock.replay.frames).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.algos.recorded import ActiveRecorder
from penstock.algos.slots import BEGINS, OLDER, REPEATS
from penstock.configs.errors import UserError
from penstock.core.interfaces import Environments, Inference, Step
from penstock.core.params import Stamp
from penstock.envs import find_bad_observation, find_bad_reward
from penstock.profiling.ledger import Part, TimeLedger

Columns = dict[str, npt.NDArray[Any]]
# The interval between two beats within an unroll.
BEAT_NS = 1_000_000_000
Rows = tuple[npt.NDArray[Any], ...]
PER_STEP = (
    "action",
    "reward",
    "terminated",
    "truncated",
    "alive",
    "episode_return",
    "episode_length",
)
BETWEEN_SLOTS = ("last_obs", "alive", "return", "length", "pad", "begun")


class Rollout:
    """An actor's environments between slots; call `fill` for each slot."""

    oldest: Stamp | None
    """Of the last unroll: the oldest weights that chose one of its actions."""
    dropped_steps = 0
    """Of the last unroll: agent steps that failed, and are not `alive` for that reason."""

    def __init__(
        self,
        game: Environments,
        inference: Inference,
        seed: int,
        ledger: TimeLedger,
        recorders: Sequence[ActiveRecorder] = (),
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the rollout.

        Args:
            game: the environments.
            inference: computes their actions.
            seed: of the first reset.
            ledger: the time ledger of the calling thread.
            recorders: fill further columns (`algos.recorded.make_recorders`).
            beat: called about every `BEAT_NS` while an unroll is played, between steps; after an
                exception that it raises, the next unroll continues from that step.
        """
        space = game.info.observation_space
        self._game = game
        self._inference = inference
        self._ledger = ledger
        dtype = np.float32 if space.dtype.kind == "f" else space.dtype  # as in slots
        self.beat = beat
        self._beat_at = 0
        self._last_obs = np.zeros((game.count, *(space.shape or ())), dtype)
        self._alive = np.ones(game.count, np.bool_)
        self._resets = False  # whether some environment's next step only resets
        self._return = np.zeros(game.count)
        self._length = np.zeros(game.count, np.int32)
        self._recorders = recorders
        further = (name for entry in recorders for name in entry.columns)
        self._recorded = (*inference.recorded, *further)
        self.oldest = None
        self._stamp: Stamp | None = None  # of the last row of this unroll
        self._versions = np.zeros((0, 0), np.uint32)  # the column of this unroll
        self._rows: dict[int, list[tuple[Rows, Rows]]] = {}
        self._pad = np.zeros(game.count, np.int16)
        self._begun = np.ones(game.count, np.bool_)  # the first slot begins with first observations
        game.reset_into(seed, self._last_obs)
        self._mark_playing()

    def fill(self, columns: Columns, slot_index: int) -> int:
        """Play one unroll into a slot's ``columns``; returns its agent steps."""
        obs = columns["obs"]
        rows = self._rows_of(columns, slot_index)
        self._stamp, self.oldest, self._versions = None, None, columns["policy_version"]
        self.dropped_steps = 0
        if "core_state" in columns:
            np.copyto(columns["core_state"], self._inference.state())
        writes_frames = OLDER in columns or "pad" in columns
        if writes_frames and self._game.playing is not None:
            raise UserError(
                "the environment says which rows play, and transport.frame_stack takes a row that "
                "waits for the begin of an episode; set transport.frame_stack=null to write stacks "
                "whole"
            )
        if OLDER in columns:
            self._play_frames(obs, columns[OLDER], columns[BEGINS], rows)
        elif "pad" in columns:
            self._play_newest(obs, columns["pad"], rows)
        else:
            np.copyto(obs[0], self._last_obs)
            for t, (row, recorded) in enumerate(rows):
                self._step(t, obs[t], obs[t + 1], recorded, *row)
            np.copyto(self._last_obs, obs[-1])
        columns["seat"][...] = 0
        columns["policy_id"][...] = 0
        info = self._game.info
        bad = find_bad_observation(obs, info.parts, columns["alive"], info.counts)
        if bad:
            raise UserError(
                f"the environment gave an observation with {bad}; training on it would destroy "
                "the network: correct what the environment returns"
            )
        if bad := find_bad_reward(columns["reward"]):
            raise UserError(
                f"the environment gave {bad}: correct what the environment returns, or set "
                "env.wrappers to a wrapper that scales its rewards"
            )
        return int(np.count_nonzero(columns["alive"]))

    def state_dict(self) -> dict[str, Any]:
        """Copies of the state between two slots, besides that of environments and inference."""
        state = {name: getattr(self, f"_{name}").copy() for name in BETWEEN_SLOTS}
        recorders = {entry.name: entry.recorder.state_dict() for entry in self._recorders}
        return state | {"resets": self._resets, "recorders": recorders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. Raises ValueError where it has another shape."""
        for name in BETWEEN_SLOTS:
            getattr(self, f"_{name}")[...] = state[name]
        self._resets = bool(state["resets"])
        recorders = state.get("recorders", state)  # 0.1 had them beside the others
        for entry in self._recorders:
            entry.recorder.load_state_dict(recorders[entry.name])

    def forget_slots(self) -> None:
        """Forget cached views: the slots lie in other memory from now on."""
        self._rows.clear()

    def _play_frames(
        self,
        frames: npt.NDArray[Any],
        older: npt.NDArray[Any],
        begins: npt.NDArray[np.uint8],
        rows: list[tuple[Rows, Rows]],
    ) -> None:
        """Write the first stack to the slot, then the newest frame of each step."""
        stacks = self._last_obs
        np.copyto(older, stacks[:, :-1])
        np.copyto(frames[0], stacks[:, -1])
        begins[...] = 0
        for t, (row, recorded) in enumerate(rows):
            reset = self._step(t, stacks, stacks, recorded, *row)
            np.copyto(frames[t + 1], stacks[:, -1])
            if reset is not None:
                begins[t, reset] = REPEATS + padding(stacks, reset, self._pad)[reset]
        check_shift(stacks, frames, begins)

    def _play_newest(
        self, frames: npt.NDArray[Any], pad: npt.NDArray[Any], rows: list[tuple[Rows, Rows]]
    ) -> None:
        """Play in separate memory, and write the newest frame of each stack to the slot."""
        stacks = self._last_obs
        np.copyto(frames[0], stacks[:, -1])
        self._pad[:] = padding(stacks, self._begun, self._pad)
        self._begun = np.zeros_like(self._begun)
        for t, (row, recorded) in enumerate(rows):
            pad[t] = self._pad
            reset = self._step(t, stacks, stacks, recorded, *row)
            np.copyto(frames[t + 1], stacks[:, -1])
            if reset is not None:
                self._pad[:] = padding(stacks, reset, self._pad)

    def _step(
        self,
        t: int,
        obs: npt.NDArray[Any],
        next_obs: npt.NDArray[Any],
        recorded: Rows,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        terminated: npt.NDArray[Any],
        truncated: npt.NDArray[Any],
        alive: npt.NDArray[Any],
        episode_return: npt.NDArray[Any],
        episode_length: npt.NDArray[Any],
    ) -> npt.NDArray[np.bool_] | None:
        """Play row ``t``; ``next_obs`` may be the memory of ``obs``. Returns the environments that
        it has only reset, or that do not play; None: there is none."""
        if self._ledger.since > self._beat_at:
            self._beat_at = self._ledger.since + BEAT_NS
            # Between two steps: where the learner is lost it raises, and the next unroll, for
            # another one, continues from here.
            np.copyto(self._last_obs, obs)
            self.beat()
        self._ledger.switch(Part.INFER)
        actions, known = self._inference.decide(obs)
        if self._inference.stamp is not self._stamp:
            self._note_version(t)
        self._ledger.switch(Part.STEP)
        rewards, terminations, truncations = self._game.step_into(actions, next_obs)
        self._ledger.switch(Part.WRITE)
        if self._resets and rewards[~self._alive].any():
            raise UserError(
                "the environment gave a reward in the step after an episode's end, which only "
                "resets (autoreset mode NEXT_STEP); a wrapper of the vector environment that "
                "resets in the same step does that; run `penstock check-env` for details"
            )
        over = np.logical_or(terminations, truncations)
        ended, dropped = over, self._game.dropped
        if dropped is not None:
            self.dropped_steps += int(np.count_nonzero(dropped & self._alive))
            self._alive &= ~dropped
            self._resets = True
            ended = over | dropped
        if self._recorders:
            step = Step(actions, next_obs, rewards, ended, self._alive)
            for entry in self._recorders:
                known = (*known, *entry.recorder.record(step))
        action[:] = actions
        for target, values in zip(recorded, known, strict=True):
            target[:] = values
        alive[:] = self._alive
        resets = ~self._alive if self._resets else None
        if resets is not None:
            self._inference.reset(resets)
        reward[:] = rewards
        terminated[:] = terminations
        truncated[:] = truncations
        self._return += rewards
        self._length += self._alive
        episode_return[:] = self._return
        episode_length[:] = self._length
        if dropped is not None:  # no result
            self._return[dropped] = 0.0
            self._length[dropped] = 0
        np.logical_not(over, out=self._alive)
        self._resets = ends = bool(over.any())
        if self._game.playing is not None:
            self._mark_playing()
        if ends:
            if self._game.life_lost is not None:  # returns and lengths are those of games
                episode_length[self._game.life_lost] = 0
                over &= ~self._game.life_lost
            if self._game.shortened is not None:  # no result
                episode_length[self._game.shortened] = 0
            self._return[over] = 0.0
            self._length[over] = 0
        return resets

    def _mark_playing(self) -> None:
        """Take over which rows play, where the environments say it."""
        if self._game.playing is not None:
            self._alive[:] = self._game.playing
            self._resets = not self._alive.all()

    def _note_version(self, t: int) -> None:
        """Record the weights that chose row ``t``, for this row and those that follow."""
        stamp = self._inference.stamp
        assert stamp is not None
        self._versions[t:] = stamp.version
        self.oldest = stamp if self.oldest is None else min(stamp, self.oldest)
        self._stamp = stamp

    def _rows_of(self, columns: Columns, slot_index: int) -> list[tuple[Rows, Rows]]:
        """Views of each step's row, for `PER_STEP` and the inference's columns.

        Made once per slot, since slots are fixed memory.
        """
        if slot_index not in self._rows:
            own = zip(*(columns[name] for name in PER_STEP), strict=True)
            known = [columns[name] for name in self._recorded]
            recorded = (tuple(column[t] for column in known) for t in range(len(columns["action"])))
            self._rows[slot_index] = list(zip(own, recorded, strict=True))
        return self._rows[slot_index]


def padding(
    stacks: npt.NDArray[Any], first: npt.NDArray[np.bool_], before: npt.NDArray[np.int16]
) -> npt.NDArray[np.int16]:
    """The ``pad`` of each environment, int16 ``[E]``.

    It stays ``before`` except for environments whose ``stacks`` ``[E, K, *frame]`` are the
    ``first`` of an episode. 0: the first frame stands K times; 1: after zeros. Raises UserError for
    any other stack.
    """
    pads = before.copy()
    for env in np.flatnonzero(first):
        older, newest = stacks[env, :-1], stacks[env, -1]
        if not older.any():
            pads[env] = 1
        elif (older == newest).all():
            pads[env] = 0
        else:
            raise UserError(
                f"the first observation of an episode of environment {env} is a stack of different "
                "frames, and transport.frame_stack writes each frame once; set "
                "transport.frame_stack=null to write stacks whole"
            )
    return pads


def check_shift(
    stacks: npt.NDArray[Any], frames: npt.NDArray[Any], begins: npt.NDArray[np.uint8]
) -> None:
    """Check that the environments' stacks advance by one frame per step.

    Raises UserError where the last ``stacks`` ``[E, K, *frame]`` of an unroll are not the last of
    its newest ``frames`` ``[T + 1, E, *frame]``, unless an episode began there.
    """
    depth = min(stacks.shape[1], len(frames))
    going_on = ~begins[len(begins) + 1 - depth :].any(axis=0)
    same = (stacks[:, -depth:] == frames[-depth:].swapaxes(0, 1)).reshape(len(stacks), -1)
    if (going_on & ~same.all(axis=1)).any():
        raise UserError(
            "observations are stacks that do not move on by one frame a step, and "
            "transport.frame_stack writes each frame once; set transport.frame_stack=null to write "
            "stacks whole"
        )
