"""Plays one unroll into a slot, step by step and in place.

Row t holds the decision at ``obs[t]`` and what it led to. Environments reset themselves on the step
*after* an episode's end (NEXT_STEP): that row was decided by nobody and is not ``alive``; its
``obs[t]`` is the final observation of the ended episode, and what the policy records of it is
recorded too: the value of a truncated episode's end. Rewards and returns are raw here.

A slot with a column ``pad`` stores of each frame stack the newest frame alone; ``pad`` says what
stood before an episode's first frame (penstock.replay.stacks).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.envs import VectorGame, find_bad_observation
from penstock.models.policy import Policy
from penstock.profiling.ledger import Part, TimeLedger

Columns = dict[str, npt.NDArray[Any]]
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


class Rollout:
    """One actor's environments between slots."""

    def __init__(
        self,
        game: VectorGame,
        policy: Policy,
        seed: int,
        ledger: TimeLedger,
    ) -> None:
        space = game.info.observation_space
        self._game = game
        self._policy = policy
        self._ledger = ledger
        self._last_obs = np.zeros((game.count, *(space.shape or ())), space.dtype)
        self._alive = np.ones(game.count, np.bool_)
        self._return = np.zeros(game.count, np.float32)
        self._length = np.zeros(game.count, np.int32)
        self._recorded = tuple(policy.recorded.values())
        self._rows: dict[int, list[tuple[Rows, Rows]]] = {}
        self._pad = np.zeros(game.count, np.int16)
        self._begun = np.ones(game.count, np.bool_)  # the first slot begins with first observations
        game.reset_into(seed, self._last_obs)

    def fill(self, columns: Columns, slot_index: int, version: int) -> int:
        """Write one unroll into a slot's ``columns``; returns its agent steps."""
        obs = columns["obs"]
        rows = self._rows_of(columns, slot_index)
        if "pad" in columns:
            self._play_newest(obs, columns["pad"], rows)
        else:
            np.copyto(obs[0], self._last_obs)
            for t, (row, recorded) in enumerate(rows):
                self._step(obs[t], obs[t + 1], recorded, *row)
            np.copyto(self._last_obs, obs[-1])
        columns["policy_version"][...] = version
        columns["seat"][...] = 0
        columns["policy_id"][...] = 0
        bad = find_bad_observation(obs)
        if bad:
            raise UserError(
                f"the environment gave an observation with {bad}; training on it would destroy "
                "the network: make the environment return finite numbers"
            )
        return int(np.count_nonzero(columns["alive"]))

    def forget_slots(self) -> None:
        """Other memory holds the slots from now on."""
        self._rows.clear()

    def _play_newest(
        self, frames: npt.NDArray[Any], pad: npt.NDArray[Any], rows: list[tuple[Rows, Rows]]
    ) -> None:
        """Play in memory of its own, and write the newest frame of each stack to the slot."""
        stacks = self._last_obs
        np.copyto(frames[0], stacks[:, -1])
        self._pad[:] = padding(stacks, self._begun, self._pad)
        for t, (row, recorded) in enumerate(rows):
            pad[t] = self._pad
            reset = ~self._alive
            self._step(stacks, stacks, recorded, *row)
            np.copyto(frames[t + 1], stacks[:, -1])
            if reset.any():
                self._pad[:] = padding(stacks, reset, self._pad)
        self._begun = np.zeros_like(self._begun)

    def _step(
        self,
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
    ) -> None:
        self._ledger.switch(Part.INFER)
        actions = self._policy.act(obs)
        self._ledger.switch(Part.STEP)
        rewards, terminations, truncations = self._game.step_into(actions, next_obs)
        self._ledger.switch(Part.WRITE)
        action[:] = actions
        for target, known in zip(recorded, self._recorded, strict=True):
            target[:] = known
        alive[:] = self._alive
        reward[:] = rewards
        terminated[:] = terminations
        truncated[:] = truncations
        self._return += rewards
        self._length += self._alive
        episode_return[:] = self._return
        episode_length[:] = self._length
        over = np.logical_or(terminations, truncations)
        np.logical_not(over, out=self._alive)
        if over.any():
            self._return[over] = 0.0
            self._length[over] = 0

    def _rows_of(self, columns: Columns, slot_index: int) -> list[tuple[Rows, Rows]]:
        """Views of each step's row, `PER_STEP` and what the policy records; made once a slot, since
        slots are fixed memory."""
        if slot_index not in self._rows:
            own = zip(*(columns[name] for name in PER_STEP), strict=True)
            known = [columns[name] for name in self._policy.recorded]
            recorded = (tuple(column[t] for column in known) for t in range(len(columns["action"])))
            self._rows[slot_index] = list(zip(own, recorded, strict=True))
        return self._rows[slot_index]


def padding(
    stacks: npt.NDArray[Any], first: npt.NDArray[np.bool_], before: npt.NDArray[np.int16]
) -> npt.NDArray[np.int16]:
    """``pad`` of each environment, int16 ``[E]``: ``before`` but for those whose ``stacks``
    ``[E, K, *frame]`` are the ``first`` of an episode. 0: its first frame stands K times; 1: after
    zeros. Raises UserError for any other stack."""
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
                "frames, and replay.frame_stack stores each frame once; set "
                "replay.frame_stack=null to store stacks whole"
            )
    return pads
