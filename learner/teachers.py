"""The teachers of a run: what they would do in the states that the student plays, for its loss.

`Teachers` adds that to each batch as columns, once, before the first update. Only learners read and
compute teachers: actors play the student alone, and slots are those of any run. Which policies may
teach is in `stored_teachers`, which loads them.

A teacher with memory follows each stream of unrolls. It remembers nothing where an episode begins,
and also where it has missed an unroll of the stream: after a dropped slot, and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.algos.action_rule import ActionRule
from penstock.algos.dqn.losses import action_values, best_actions
from penstock.algos.ops.frame_stacks import observations
from penstock.algos.ops.teaching import OUTPUTS, VALUE, mean_outputs, policy_outputs
from penstock.algos.unrolled import memory_of
from penstock.core.observations import ObservationPart
from penstock.envs import EnvInfo
from penstock.models.actions import ActionSpec, Choices
from penstock.models.torch_general import GeneralActorCritic, GeneralHeadNet
from penstock.models.torch_heads import ActorCritic, PolicyNetwork

Columns = Mapping[str, Tensor]
"""The columns of a batch, ``[T, E, ...]``; observations are ``[T + 1, E, ...]``."""
Headers = npt.NDArray[np.void]
"""HEADER records of the slots of a batch, ``[slots]``; none for a batch without agent steps."""
Parts = Sequence[slice | Tensor]
"""The environments of a batch, divided into as many as are to be computed at once."""


class Judgement(NamedTuple):
    """What teachers make of some states, or of all states ``[T, E]`` of a batch."""

    outputs: Tensor
    """What they would do, as outputs of the student's network, ``[..., outputs]``."""
    values: Tensor
    """Their values of the states, ``[...]``; zeros where they estimate none."""

    @classmethod
    def zeros(cls, states: Sequence[int], outputs: int, device: torch.device) -> Judgement:
        """Returns zeros for as many states."""
        return cls(
            torch.zeros(*states, outputs, device=device), torch.zeros(*states, device=device)
        )

    def write(self, envs: slice | Tensor, judgement: Judgement) -> None:
        """Write the judgement ``[T * K]`` of all rows of K environments into that of a batch."""
        steps = len(self.values)
        self.outputs[:, envs] = judgement.outputs.unflatten(0, (steps, -1))
        self.values[:, envs] = judgement.values.unflatten(0, (steps, -1))


@dataclass(eq=False, kw_only=True)
class Teacher:
    """A trained policy on the learner's device."""

    net: PolicyNetwork
    rule: ActionRule
    """How the outputs of the network decide an action."""
    reader: PartReader | None
    """Reads its observations out of those of the student; None where they are the same."""
    q_temperature: float
    """What Q-values are divided by to be logits."""

    @property
    def has_values(self) -> bool:
        """Whether it estimates the values of states."""
        return self.rule.has_values or isinstance(self.net, ActorCritic)

    def judge(
        self, batch: Columns, headers: Headers, parts: Parts, rows: Tensor | None = None
    ) -> Judgement:
        """Judge all states of a batch, or at least those ``rows`` of it, bool ``[T, E]``."""
        result = self._zeros(batch["alive"].shape, batch["alive"].device)
        for envs in parts:
            obs = observations(batch, envs)[:-1].flatten(0, 1)
            if rows is None:
                result.write(envs, self._judge(obs))
            else:
                result.write(envs, self._judge_some(obs, rows[:, envs].flatten()))
        return result

    def _judge(self, obs: Tensor) -> Judgement:
        """Judge observations ``[B, *shape]`` of the student."""
        own_obs = self._read(obs)
        if isinstance(self.net, ActorCritic):
            return self._judgement(own_obs, *self.net(own_obs))
        return self._judgement(own_obs, self.net(own_obs), None)

    def _judge_some(self, obs: Tensor, chosen: Tensor) -> Judgement:
        """Judge those observations that ``chosen`` marks, bool ``[B]``; zeros stand for others."""
        result = self._zeros(chosen.shape, obs.device)
        index = chosen.nonzero()[:, 0]
        if len(index):
            judgement = self._judge(obs[index])
            result.outputs[index] = judgement.outputs
            result.values[index] = judgement.values
        return result

    def _read(self, obs: Tensor) -> Tensor:
        """Returns its own observations, given those of the student."""
        return obs if self.reader is None else self.reader(obs)

    def _judgement(self, own_obs: Tensor, outputs: Tensor, values: Tensor | None) -> Judgement:
        """Returns what its network's outputs ``[B, outputs]`` and values ``[B]`` mean."""
        mask = self.net.mask(own_obs)
        if isinstance(self.rule.actions, Choices) and self.rule.has_values:
            counts = self.rule.actions.counts
            best = best_actions(outputs, mask, counts)
            values = action_values(outputs, best, counts).mean(1)
        if values is None:
            values = outputs.new_zeros(len(outputs))
        return Judgement(policy_outputs(self.rule, outputs, mask, self.q_temperature), values)

    def _zeros(self, states: Sequence[int], device: torch.device) -> Judgement:
        return Judgement.zeros(states, self.rule.actions.outputs, device)


class StreamMemory(NamedTuple):
    """What a teacher remembers of the environments of one actor."""

    incarnation: int
    sequence: int
    """Of the last unroll that it has seen."""
    state: Tensor
    """After that unroll, ``[envs, state_size]``; zeros where an episode begins then."""


@dataclass(eq=False, kw_only=True)
class TeacherWithMemory(Teacher):
    """A teacher whose network has a core."""

    net: GeneralActorCritic | GeneralHeadNet
    streams: dict[int, StreamMemory] = field(default_factory=dict)
    """By the actor's id."""

    def judge(
        self, batch: Columns, headers: Headers, parts: Parts, rows: Tensor | None = None
    ) -> Judgement:
        """Judge all states of a batch, slot after slot of each actor."""
        result = self._zeros(batch["alive"].shape, batch["alive"].device)
        all_envs = torch.arange(result.values.shape[1], device=result.values.device)
        envs_of_slot = all_envs.split(len(all_envs) // max(1, len(headers)))
        for slots in _rounds(headers):
            envs = torch.cat([envs_of_slot[slot] for slot in slots])
            result.write(envs, self._follow(batch, envs, headers[slots]))
        return result

    def _follow(self, batch: Columns, envs: Tensor, headers: Headers) -> Judgement:
        """Judge one unroll of each of several actors.

        Args:
            batch: the columns.
            envs: the environments of these actors, side by side.
            headers: of these unrolls.
        """
        net = self.net
        obs = self._read(observations(batch, envs)[:-1])
        envs_per_slot = len(envs) // len(headers)
        states = [self._state_before(header, envs_per_slot, obs.device) for header in headers]
        state, first, inputs = memory_of(net, batch, envs, torch.cat(states))

        # The row after the last one belongs to the next unroll, which may begin with an episode.
        own_first = first[:-1]
        own_inputs = None if inputs is None else inputs[:-1]
        values = None
        if isinstance(net, GeneralActorCritic):
            outputs, values, next_state = net.step(obs, state, own_first, own_inputs)
        else:
            features, next_state = net.features(obs, state, own_first, own_inputs)
            outputs = net.outputs_of(features[0])
        assert next_state is not None

        next_state = next_state.masked_fill(first[-1, :, None], 0.0)
        if inputs is not None:
            next_state[:, -inputs.shape[2] :] = inputs[-1]
        for header, actor_state in zip(headers, next_state.split(envs_per_slot), strict=True):
            incarnation, sequence = int(header["incarnation"]), int(header["sequence"])
            self.streams[int(header["actor"])] = StreamMemory(incarnation, sequence, actor_state)
        return self._judgement(obs, outputs, values)

    def _state_before(self, header: np.void, envs: int, device: torch.device) -> Tensor:
        """Returns what it remembers before an unroll, ``[envs, state_size]``."""
        memory = self.streams.get(int(header["actor"]))
        if memory is not None:
            follows = memory.sequence + 1 == int(header["sequence"])
            if follows and memory.incarnation == int(header["incarnation"]):
                return memory.state
        return torch.zeros(envs, self.net.state_size, device=device)


class PartReader:
    """Reads the observations of a teacher out of those of a student, which have the same parts in
    another order, or one more.

    Args:
        student: properties of the student's environment, whose observations have parts.
        teacher: those of the teacher's environment.
        extra: name of the part that the teacher does not have, if there is one.
        device: of the observations.
    """

    def __init__(
        self, student: EnvInfo, teacher: EnvInfo, extra: str | None, device: torch.device
    ) -> None:
        self._shape = tuple(teacher.observation_space.shape)
        """Of a teacher's observation."""
        self._dtype = torch.uint8
        places = {part.name: part for part in student.parts}

        # For each byte of a teacher's observation, its place in a student's.
        if teacher.parts:
            index = np.zeros(self._shape, np.int64)
            for part in teacher.parts:
                index[part.offset : part.offset + part.nbytes] = _bytes_of(places[part.name])
        else:
            [only_part] = [part for name, part in places.items() if name != extra]
            index = _bytes_of(only_part)
            self._dtype = torch.float32 if only_part.dtype == "<f4" else torch.uint8
        self._index = torch.from_numpy(index).to(device)

    def __call__(self, obs: Tensor) -> Tensor:
        """Returns the teacher's observations ``[..., *shape]``, given the student's rows of bytes
        ``[..., nbytes]``."""
        rows = obs.index_select(-1, self._index).view(self._dtype)
        return rows.reshape(*obs.shape[:-1], *self._shape)


class Teachers:
    """The teachers of a run.

    Args:
        teachers: each of them.
        actions: what the student's outputs decide.
        part: the part of an observation that chooses the teacher; None where all teach together.
    """

    def __init__(
        self, teachers: Sequence[Teacher], actions: ActionSpec, part: ObservationPart | None
    ) -> None:
        self._teachers = teachers
        self._actions = actions
        self._part = part

    @torch.no_grad()
    def __call__(self, batch: Columns, headers: Headers, parts: Parts) -> dict[str, Tensor]:
        """Returns the columns `OUTPUTS` and, if all teachers estimate values, `VALUE`."""
        if self._part is None:
            result = self._mean(
                [teacher.judge(batch, headers, parts) for teacher in self._teachers]
            )
        else:
            choice = _array(self._part, batch["obs"][:-1]).flatten(2).argmax(2)
            result = Judgement.zeros(choice.shape, self._actions.outputs, choice.device)
            for number, teacher in enumerate(self._teachers):
                rows = choice == number
                judgement = teacher.judge(batch, headers, parts, rows)
                result.outputs[rows] = judgement.outputs[rows]
                result.values[rows] = judgement.values[rows]

        columns = {OUTPUTS: result.outputs}
        if all(teacher.has_values for teacher in self._teachers):
            columns[VALUE] = result.values
        return columns

    def _mean(self, judgements: Sequence[Judgement]) -> Judgement:
        """Returns the means of the teachers' probabilities and of their values."""
        if len(judgements) == 1:
            return judgements[0]

        outputs = mean_outputs(
            self._actions, [judgement.outputs.flatten(0, 1) for judgement in judgements]
        )
        values = torch.stack([judgement.values for judgement in judgements]).mean(0)
        return Judgement(outputs.view_as(judgements[0].outputs), values)


def _bytes_of(part: ObservationPart) -> npt.NDArray[np.int64]:
    """Returns the places of a part's bytes in an observation."""
    return np.arange(part.offset, part.offset + part.nbytes)


def _array(part: ObservationPart, obs: Tensor) -> Tensor:
    """Returns the array of a part ``[T, E, size]`` in observations ``[T, E, nbytes]``."""
    values = obs[..., part.offset : part.offset + part.nbytes]
    return values.contiguous().view(torch.float32) if part.dtype == "<f4" else values


def _rounds(headers: Headers) -> Iterator[list[int]]:
    """Yields the slots of a batch so that each round has at most one of an actor, its oldest
    first."""
    waiting = [int(slot) for slot in np.argsort(headers["sequence"], kind="stable")]
    while waiting:
        slot_of_actor: dict[int, int] = {}
        for slot in waiting:
            slot_of_actor.setdefault(int(headers["actor"][slot]), slot)
        yield list(slot_of_actor.values())
        waiting = [slot for slot in waiting if slot not in slot_of_actor.values()]
