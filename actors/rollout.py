"""Plays one unroll into a slot, step by step and in place.

Row t holds the decision at ``obs[t]`` and its outcome. Environments reset themselves on the step
*after* an episode's end (NEXT_STEP): that row is no decision and is not ``alive``. Its ``obs[t]``
is the final observation of the ended episode, and the policy's outputs for it are recorded too,
such as the value at the end of a truncated episode. After it the recurrent state is reset. A step
that failed, where such episodes are dropped, is a row of that kind too: it only resets, and the
steps before it are bootstrapped from its observation. In a game of several seats the environment
says which rows play, and the others are of that kind too (penstock.envs.seats). Rewards and returns
are raw here. Where Atari's lives are episodes, returns and lengths are those of games, and a length
of 0 marks the end of a life that does not end its game, and of a first episode that was shortened
(penstock.envs.first_episodes). A column ``core_state`` holds the recurrent state before ``obs[0]``,
a column ``state`` that before each row.

A slot may hold only the newest frame of each frame stack; the environments then play in memory of
their own. With a column ``older`` it also holds the rest of the first stack, and ``begins``
describes the padding before an episode's first frame (penstock.algos.ops.frame_stacks). With a
column ``pad``, that column describes the padding, and older frames are those of the slots before
(penstock.replay.frames).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.algos.recorded import ActiveRecorder
from penstock.algos.slots import BEGINS, CORE_STATE, OLDER, REPEATS, STATE
from penstock.configs.errors import UserError
from penstock.core.interfaces import Environments, Inference, Step
from penstock.core.params import Stamp
from penstock.envs import find_bad_observation, find_bad_reward
from penstock.profiling.ledger import Part, TimeLedger

Columns = dict[str, npt.NDArray[Any]]
Rows = tuple[npt.NDArray[Any], ...]
# The interval between two beats within an unroll.
BEAT_NS = 1_000_000_000


class StepRow(NamedTuple):
    """Views of row t of a slot's columns, each ``[E]`` or ``[E, *shape]`` for E environments."""

    action: npt.NDArray[Any]
    reward: npt.NDArray[Any]
    terminated: npt.NDArray[Any]
    truncated: npt.NDArray[Any]
    alive: npt.NDArray[Any]
    episode_return: npt.NDArray[Any]
    episode_length: npt.NDArray[Any]
    recorded: Rows
    """The columns of the inference, then those of the recorders."""
    state: npt.NDArray[np.float32] | None
    """The recurrent state before the row; None where it is not recorded."""


@dataclass
class _Unroll:
    """What an unroll knows of the steps that it has played."""

    versions: npt.NDArray[Any]
    """The slot's column of policy versions, uint32 ``[T, E]``."""
    beat: Callable[[], None]
    stamp: Stamp | None = None
    """The weights that chose the actions of the last row."""
    oldest: Stamp | None = None
    """The oldest weights that chose an action."""
    dropped_steps: int = 0
    """Agent steps that failed, and are not `alive` for that reason."""

    def note_version(self, t: int, stamp: Stamp) -> None:
        """Record the weights that chose row ``t``, for this row and those that follow."""
        self.versions[t:] = stamp.version
        self.oldest = stamp if self.oldest is None else min(stamp, self.oldest)
        self.stamp = stamp


def _no_beat() -> None:
    """Nobody waits for this actor."""


class Rollout:
    """An actor's environments between slots; call `fill` for each slot."""

    def __init__(
        self,
        env: Environments,
        inference: Inference,
        seed: int,
        ledger: TimeLedger,
        recorders: Sequence[ActiveRecorder] = (),
    ) -> None:
        """Reset the environments.

        Args:
            env: the environments.
            inference: computes their actions.
            seed: of the first reset.
            ledger: the time ledger of the calling thread.
            recorders: fill further columns (`algos.recorded.make_recorders`).
        """
        self._env = env
        self._inference = inference
        self._ledger = ledger
        self._recorders = recorders
        recorder_columns = (name for entry in recorders for name in entry.columns)
        self._recorded = (*inference.recorded, *recorder_columns)
        self._rows: dict[int, list[StepRow]] = {}  # by slot index
        self._unroll = _Unroll(np.zeros((0, 0), np.uint32), _no_beat)
        self._next_beat_ns = 0
        self._writes_frames = False  # whether each frame of a stack is written once

        # The state between two slots, of each environment.
        count = env.count
        space = env.info.observation_space
        dtype = np.float32 if space.dtype.kind == "f" else space.dtype  # the dtype of slots
        self._last_obs = np.zeros((count, *(space.shape or ())), dtype)
        self._alive = np.ones(count, np.bool_)  # whether the next row is a decision
        self._resets = False  # whether some environment's next step only resets
        # Return and length of the episode so far.
        self._return = np.zeros(count)
        self._length = np.zeros(count, np.int32)
        self._pad = np.zeros(count, np.int16)  # how the frame stack is padded, see `padding`
        # Whether the last observation is the first of an episode, as those of the first slot are.
        self._begun = np.ones(count, np.bool_)

        env.reset_into(seed, self._last_obs)
        self._mark_playing()

    @property
    def oldest(self) -> Stamp | None:
        """The oldest weights that chose an action of the last unroll."""
        return self._unroll.oldest

    @property
    def dropped_steps(self) -> int:
        """Agent steps of the last unroll that failed, and are not `alive` for that reason."""
        return self._unroll.dropped_steps

    def fill(self, columns: Columns, slot_index: int, beat: Callable[[], None] = _no_beat) -> int:
        """Play one unroll into a slot.

        Args:
            columns: of the slot.
            slot_index: of the slot; its columns lie in the same memory whenever it is filled.
            beat: called about every `BEAT_NS`, between steps. After an exception that it raises,
                the next unroll continues from that step.

        Returns:
            The agent steps of the unroll.

        Raises:
            UserError: the environment gave values that training must not get.
        """
        obs = columns["obs"]
        rows = self._rows_of(columns, slot_index)
        self._unroll = _Unroll(columns["policy_version"], beat)
        if CORE_STATE in columns:
            np.copyto(columns[CORE_STATE], self._inference.state())

        self._writes_frames = OLDER in columns or "pad" in columns
        self._refuse_frames()
        if OLDER in columns:
            self._play_frames(obs, columns[OLDER], columns[BEGINS], rows)
        elif "pad" in columns:
            self._play_newest(obs, columns["pad"], rows)
        else:
            self._play_whole(obs, rows)
        columns["seat"][...] = 0
        columns["policy_id"][...] = 0

        self._check_values(obs, columns["alive"], columns["reward"])
        return int(np.count_nonzero(columns["alive"]))

    def state_dict(self) -> dict[str, Any]:
        """Copies of the state between two slots, besides that of environments and inference."""
        state = {name: array.copy() for name, array in self._state_arrays().items()}
        recorders = {entry.name: entry.recorder.state_dict() for entry in self._recorders}
        return state | {"resets": self._resets, "recorders": recorders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. Raises ValueError where it has another shape."""
        for name, array in self._state_arrays().items():
            array[...] = state[name]
        self._resets = bool(state["resets"])
        recorders = state.get("recorders", state)  # 0.1 had them beside the others
        for entry in self._recorders:
            entry.recorder.load_state_dict(recorders[entry.name])

    def forget_slots(self) -> None:
        """Forget cached views: the slots lie in other memory from now on."""
        self._rows.clear()

    def _state_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays of the state between two slots, by their names in a checkpoint."""
        return {
            "last_obs": self._last_obs,
            "alive": self._alive,
            "return": self._return,
            "length": self._length,
            "pad": self._pad,
            "begun": self._begun,
        }

    # ---------------------------------------------------------------------------- one unroll

    def _play_whole(self, obs: npt.NDArray[Any], rows: list[StepRow]) -> None:
        """Play in the slot's memory: environments write their observations there."""
        np.copyto(obs[0], self._last_obs)
        for t, row in enumerate(rows):
            self._step(t, obs[t], obs[t + 1], row)
        np.copyto(self._last_obs, obs[-1])

    def _play_frames(
        self,
        frames: npt.NDArray[Any],
        older: npt.NDArray[Any],
        begins: npt.NDArray[np.uint8],
        rows: list[StepRow],
    ) -> None:
        """Write the first stack to the slot, then the newest frame of each step."""
        stacks = self._last_obs
        np.copyto(older, stacks[:, :-1])
        np.copyto(frames[0], stacks[:, -1])
        begins[...] = 0

        for t, row in enumerate(rows):
            reset = self._step(t, stacks, stacks, row)
            np.copyto(frames[t + 1], stacks[:, -1])
            if reset is not None:
                begins[t, reset] = REPEATS + padding(stacks, reset, self._pad)[reset]
        check_shift(stacks, frames, begins)

    def _play_newest(
        self, frames: npt.NDArray[Any], pad: npt.NDArray[Any], rows: list[StepRow]
    ) -> None:
        """Play in separate memory, and write the newest frame of each stack to the slot."""
        stacks = self._last_obs
        np.copyto(frames[0], stacks[:, -1])
        self._pad[:] = padding(stacks, self._begun, self._pad)
        self._begun = np.zeros_like(self._begun)

        for t, row in enumerate(rows):
            pad[t] = self._pad
            reset = self._step(t, stacks, stacks, row)
            np.copyto(frames[t + 1], stacks[:, -1])
            if reset is not None:
                self._pad[:] = padding(stacks, reset, self._pad)

    def _check_values(
        self, obs: npt.NDArray[Any], alive: npt.NDArray[Any], rewards: npt.NDArray[Any]
    ) -> None:
        """Raise UserError for an observation or a reward that would spoil the training."""
        info = self._env.info
        observation_fault = find_bad_observation(obs, info.parts, alive, info.counts)
        if observation_fault:
            raise UserError(
                f"the environment gave an observation with {observation_fault}; training on it "
                "would destroy the network: correct what the environment returns"
            )

        reward_fault = find_bad_reward(rewards)
        if reward_fault:
            raise UserError(
                f"the environment gave {reward_fault}: correct what the environment returns, or "
                "set env.wrappers to a wrapper that scales its rewards"
            )

    # ------------------------------------------------------------------------------ one step

    def _step(
        self, t: int, obs: npt.NDArray[Any], next_obs: npt.NDArray[Any], row: StepRow
    ) -> npt.NDArray[np.bool_] | None:
        """Play row ``t``.

        Args:
            t: the number of the row.
            obs: the observations ``[E, *shape]`` on which is decided.
            next_obs: gets the observations that follow; it may be the memory of ``obs``.
            row: gets the decision and its outcome.

        Returns:
            The environments that this row has only reset, or that do not play, bool ``[E]``; None:
            there is none.
        """
        if self._ledger.since > self._next_beat_ns:
            self._beat(obs)
        unroll = self._unroll
        env = self._env

        # Decide and step.
        self._ledger.switch(Part.INFER)
        if row.state is not None:
            np.copyto(row.state, self._inference.state())
        actions, recorded = self._inference.decide(obs)
        stamp = self._inference.stamp
        if stamp is not unroll.stamp:
            assert stamp is not None
            unroll.note_version(t, stamp)
        self._ledger.switch(Part.STEP)
        rewards, terminations, truncations = env.step_into(actions, next_obs)
        self._inference.take_rewards(rewards)

        # An episode is over by its own end. One that failed is not, but ends here too.
        self._ledger.switch(Part.WRITE)
        if self._resets and rewards[~self._alive].any():
            raise _reward_in_reset() if env.playing is None else _reward_of_absent()
        over = np.logical_or(terminations, truncations)
        ends = over
        dropped = env.dropped
        if dropped is not None:
            unroll.dropped_steps += int(np.count_nonzero(dropped & self._alive))
            self._alive &= ~dropped
            self._resets = True
            ends = over | dropped

        # Write the row.
        if self._recorders:
            step = Step(actions, next_obs, rewards, ends, self._alive)
            for entry in self._recorders:
                recorded = (*recorded, *entry.recorder.record(step))
        row.action[:] = actions
        for target, values in zip(row.recorded, recorded, strict=True):
            target[:] = values
        row.alive[:] = self._alive
        reset = ~self._alive if self._resets else None
        if reset is not None:
            self._inference.reset(reset)
        row.reward[:] = rewards
        row.terminated[:] = terminations
        row.truncated[:] = truncations
        self._return += rewards
        self._length += self._alive
        row.episode_return[:] = self._return
        row.episode_length[:] = self._length

        self._prepare_next_row(over, dropped, row.episode_length)
        return reset

    def _beat(self, obs: npt.NDArray[Any]) -> None:
        """Show that this actor lives, before the decision on ``obs``.

        Where the learner is lost this raises, and the next unroll, for another learner, continues
        from here.
        """
        self._next_beat_ns = self._ledger.since + BEAT_NS
        np.copyto(self._last_obs, obs)
        self._unroll.beat()

    def _prepare_next_row(
        self,
        over: npt.NDArray[np.bool_],
        dropped: npt.NDArray[np.bool_] | None,
        episode_length: npt.NDArray[Any],
    ) -> None:
        """Find which environments only reset next, and begin returns and lengths anew.

        Args:
            over: the environments whose episode is over, bool ``[E]``; it is changed.
            dropped: those whose episode failed; None where such episodes are not dropped.
            episode_length: of the row that was written. A length of 0 marks an end without a
                result.
        """
        env = self._env
        if dropped is not None:
            self._return[dropped] = 0.0
            self._length[dropped] = 0
        np.logical_not(over, out=self._alive)
        any_over = bool(over.any())
        self._resets = any_over
        if env.playing is not None:
            self._mark_playing()
        if not any_over:
            return

        # Where lives are episodes, returns and lengths are those of games.
        if env.life_lost is not None:
            episode_length[env.life_lost] = 0
            over &= ~env.life_lost
        if env.shortened is not None:
            episode_length[env.shortened] = 0
        self._return[over] = 0.0
        self._length[over] = 0

    def _mark_playing(self) -> None:
        """Take over which rows play, where the environments say it."""
        if self._env.playing is not None:
            self._refuse_frames()
            self._alive[:] = self._env.playing
            self._resets = not self._alive.all()

    def _refuse_frames(self) -> None:
        """Raise UserError if frames are written once, and the environments say which rows play."""
        if self._writes_frames and self._env.playing is not None:
            raise UserError(
                "the environment says which rows play, and transport.frame_stack takes a row that "
                "waits for the begin of an episode; set transport.frame_stack=null to write stacks "
                "whole"
            )

    def _rows_of(self, columns: Columns, slot_index: int) -> list[StepRow]:
        """Return views of each step's row, made once per slot, since slots are fixed memory."""
        if slot_index not in self._rows:
            recorded_columns = [columns[name] for name in self._recorded]
            states = columns.get(STATE)
            self._rows[slot_index] = [
                StepRow(
                    action=columns["action"][t],
                    reward=columns["reward"][t],
                    terminated=columns["terminated"][t],
                    truncated=columns["truncated"][t],
                    alive=columns["alive"][t],
                    episode_return=columns["episode_return"][t],
                    episode_length=columns["episode_length"][t],
                    recorded=tuple(column[t] for column in recorded_columns),
                    state=None if states is None else states[t],
                )
                for t in range(len(columns["action"]))
            ]
        return self._rows[slot_index]


def _reward_in_reset() -> UserError:
    """Return the error for a reward in a row that only resets."""
    return UserError(
        "the environment gave a reward in the step after an episode's end, which only "
        "resets (autoreset mode NEXT_STEP); a wrapper of the vector environment that "
        "resets in the same step does that; run `penstock check-env` for details"
    )


def _reward_of_absent() -> UserError:
    """Return the error for a reward in a row whose seat does not play."""
    return UserError(
        "the environment gave a reward to a seat that does not play; let a seat whose later "
        "rewards matter wait, playing with one legal choice, instead of ending its episode"
    )


def padding(
    stacks: npt.NDArray[Any], first: npt.NDArray[np.bool_], previous: npt.NDArray[np.int16]
) -> npt.NDArray[np.int16]:
    """Find how the first frame stacks of episodes are padded.

    Args:
        stacks: the observations ``[E, K, *frame]``.
        first: the environments whose stack is the first of an episode, bool ``[E]``.
        previous: the result for the previous stacks.

    Returns:
        The ``pad`` of each environment, int16 ``[E]``. 0: the first frame stands K times; 1: it
        stands after zeros. Where no episode begins, it stays as it was.

    Raises:
        UserError: a first stack is padded in another way.
    """
    pads = previous.copy()

    for env in np.flatnonzero(first):
        older = stacks[env, :-1]
        newest = stacks[env, -1]
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

    Args:
        stacks: the last ones of an unroll, ``[E, K, *frame]``.
        frames: the newest frame of each step, ``[T + 1, E, *frame]``.
        begins: not 0 where an episode has begun, uint8 ``[T, E]``.

    Raises:
        UserError: the last stack of an environment is not that of its last frames, and no episode
            has begun there.
    """
    depth = min(stacks.shape[1], len(frames))
    same_episode = ~begins[len(begins) + 1 - depth :].any(axis=0)

    equal = stacks[:, -depth:] == frames[-depth:].swapaxes(0, 1)
    same_frames = equal.reshape(len(stacks), -1).all(axis=1)
    if (same_episode & ~same_frames).any():
        raise UserError(
            "observations are stacks that do not move on by one frame a step, and "
            "transport.frame_stack writes each frame once; set transport.frame_stack=null to write "
            "stacks whole"
        )
