"""The teachers of a run: what they would do in the states that the student plays, for its loss.

`Teachers` adds that to each batch as columns, once, before the first update. Only learners read and
compute teachers: actors play the student alone, and slots are those of any run.

A teacher with memory follows each stream of unrolls. It remembers nothing where an episode begins,
and also where it has missed an unroll of the stream: after a dropped slot, and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor

from penstock.algos.action_rule import ActionRule, action_rule
from penstock.algos.core_inputs import unrolled_inputs
from penstock.algos.dqn.losses import action_values, best_actions
from penstock.algos.ops.frame_stacks import observations
from penstock.algos.ops.teaching import OUTPUTS, VALUE, mean_outputs, policy_outputs
from penstock.algos.samples import network_shape
from penstock.configs.algorithms import Teaching
from penstock.configs.code_references import references
from penstock.configs.errors import UserError
from penstock.configs.load import load_run
from penstock.configs.schema import Config
from penstock.core import used_names
from penstock.core.observations import ObservationPart
from penstock.core.params import Float32
from penstock.envs import EnvInfo
from penstock.envs.space_difference import difference
from penstock.learner.checkpoints import checkpoint_format, exported
from penstock.learner.checkpoints.checkpoint_history import checkpoint_folder
from penstock.learner.checkpoints.checkpoint_spaces import stored_spaces
from penstock.models.acting.policy import state_size_of
from penstock.models.actions import Choices, Numbers, action_spec
from penstock.models.torch_general import GeneralActorCritic, GeneralNet
from penstock.models.torch_heads import ActorCritic, PolicyNetwork
from penstock.models.torch_nets import filled_net

Headers = npt.NDArray[np.void]
"""HEADER records of the slots of a batch, ``[slots]``."""
Space = spaces.Space[Any]


class Judgement(NamedTuple):
    """What a teacher makes of B states."""

    outputs: Tensor
    """What it would do, as outputs of the student's network, ``[B, outputs]``."""
    values: Tensor | None
    """Its values of the states, ``[B]``; None if it estimates none."""


class JudgedBatch(NamedTuple):
    """What a teacher makes of all states of a batch."""

    outputs: Tensor
    """``[T, E, outputs]``"""
    values: Tensor
    """``[T, E]``; zeros of a teacher that estimates none."""

    def write(self, envs: slice | Tensor, judgement: Judgement) -> None:
        """Write the judgement of all rows of some environments."""
        self.outputs[:, envs] = judgement.outputs.unflatten(0, (len(self.outputs), -1))
        if judgement.values is not None:
            self.values[:, envs] = judgement.values.unflatten(0, (len(self.values), -1))


class StreamMemory(NamedTuple):
    """What a teacher remembers of the environments of one actor."""

    incarnation: int
    sequence: int
    """Of the last unroll that it has seen."""
    state: Tensor
    """After that unroll, ``[envs, state_size]``; zeros where an episode begins then."""


class Teacher:
    """A trained policy on the learner's device.

    Args:
        net: its network.
        rule: how the outputs of the network decide an action.
        reader: reads its observations out of those of the student; None where they are the same.
        q_temperature: what Q-values are divided by to be logits.
        state_size: number of float32 values that it remembers of an environment; 0 without memory.
    """

    def __init__(
        self,
        net: PolicyNetwork,
        rule: ActionRule,
        *,
        reader: PartReader | None,
        q_temperature: float,
        state_size: int,
    ) -> None:
        self._net = net
        self._device = next(net.parameters()).device
        self._rule = rule
        self._reader = reader
        self._q_temperature = q_temperature
        self.state_size = state_size
        self.has_values = rule.has_values or isinstance(net, ActorCritic)
        """Whether it estimates the values of states."""
        self._streams: dict[int, StreamMemory] = {}
        """By the actor's id."""

    def judge(self, obs: Tensor) -> Judgement:
        """Judge observations ``[B, *shape]`` of the student; only without memory."""
        rows = self._read(obs)
        if isinstance(self._net, ActorCritic):
            return self._judgement(rows, *self._net(rows))
        return self._judgement(rows, self._net(rows), None)

    def follow(self, batch: Mapping[str, Tensor], envs: Tensor, headers: Headers) -> Judgement:
        """Judge one unroll of each of several actors; only with memory.

        Args:
            batch: the columns ``[T, E, ...]``; observations are ``[T + 1, E, ...]``.
            envs: the environments of these actors, side by side.
            headers: of these unrolls.
        """
        net = self._net
        assert isinstance(net, GeneralNet), net
        obs = self._read(observations(batch, envs)[:-1])
        envs_per_slot = len(envs) // len(headers)
        state = torch.cat([self._state_before(header, envs_per_slot) for header in headers])

        # The row after the last one belongs to the next unroll, which may begin with an episode.
        alive = batch["alive"][:, envs]
        begins = torch.cat([torch.zeros_like(alive[:1]), ~alive])
        inputs = None
        if net.core_inputs is not None:
            inputs = unrolled_inputs(
                net.core_inputs,
                state,
                actions=batch["action"][:, envs],
                rewards=batch["reward"][:, envs],
                first=begins,
            )
        row_inputs = None if inputs is None else inputs[:-1]

        values = None
        if isinstance(net, GeneralActorCritic):
            outputs, values, next_state = net.step(obs, state, begins[:-1], row_inputs)
        else:
            features, next_state = net.features(obs, state, begins[:-1], row_inputs)
            outputs = net.outputs_of(features[0])
        assert next_state is not None

        next_state = next_state.masked_fill(begins[-1, :, None], 0.0)
        if inputs is not None:
            next_state[:, -inputs.shape[2] :] = inputs[-1]
        for header, actor_state in zip(headers, next_state.split(envs_per_slot), strict=True):
            incarnation, sequence = int(header["incarnation"]), int(header["sequence"])
            self._streams[int(header["actor"])] = StreamMemory(incarnation, sequence, actor_state)
        return self._judgement(obs, outputs, values)

    def _state_before(self, header: np.void, envs: int) -> Tensor:
        """Returns what it remembers before an unroll, ``[envs, state_size]``."""
        memory = self._streams.get(int(header["actor"]))
        if memory is not None:
            follows = memory.sequence + 1 == int(header["sequence"])
            if follows and memory.incarnation == int(header["incarnation"]):
                return memory.state
        return torch.zeros(envs, self.state_size, device=self._device)

    def _read(self, obs: Tensor) -> Tensor:
        return obs if self._reader is None else self._reader(obs)

    def _judgement(self, rows: Tensor, outputs: Tensor, values: Tensor | None) -> Judgement:
        mask = self._net.mask(rows)
        if isinstance(self._rule.actions, Choices) and self._rule.has_values:
            counts = self._rule.actions.counts
            best = best_actions(outputs, mask, counts)
            values = action_values(outputs, best, counts).mean(1)
        return Judgement(policy_outputs(self._rule, outputs, mask, self._q_temperature), values)


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
        config: of the run, whose `algo.teaching` names them.
        info: the properties of its environments.
        device: on which the learner computes.

    Raises:
        UserError: if there is no such policy, if it must not be loaded, or if it cannot teach this
            student.
    """

    def __init__(self, config: Config, info: EnvInfo, device: torch.device) -> None:
        teaching = config.algo.teaching
        assert teaching is not None, config.algo
        self._actions = action_spec(config, info)
        self._part = None if teaching.part is None else _choosing_part(teaching, info)
        """The part of an observation that chooses the teacher; None where all teach together."""
        self._teachers = [
            _teacher(path, teaching, config, info, device) for path in teaching.policies
        ]
        self._has_values = all(teacher.has_values for teacher in self._teachers)

    @torch.no_grad()
    def __call__(
        self, batch: Mapping[str, Tensor], headers: Headers, parts: Sequence[slice | Tensor]
    ) -> dict[str, Tensor]:
        """Returns the columns `OUTPUTS` and, if all teachers estimate values, `VALUE`.

        Args:
            batch: the columns ``[T, E, ...]``; observations are ``[T + 1, E, ...]``.
            headers: the HEADER records of its slots; none for a batch without agent steps.
            parts: the environments, divided into as many as are to be computed at once.
        """
        judge = partial(self._judged, batch, headers, parts)
        if self._part is None:
            result = self._mean([judge(teacher) for teacher in self._teachers])
        else:
            result = self._empty(batch)
            choice = _array(self._part, batch["obs"][:-1]).flatten(2).argmax(2)
            for number, teacher in enumerate(self._teachers):
                rows = choice == number
                judged = judge(teacher, rows)
                result.outputs[rows] = judged.outputs[rows]
                result.values[rows] = judged.values[rows]

        columns = {OUTPUTS: result.outputs}
        if self._has_values:
            columns[VALUE] = result.values
        return columns

    def _mean(self, judged: Sequence[JudgedBatch]) -> JudgedBatch:
        """Returns the means of the teachers' probabilities and of their values."""
        if len(judged) == 1:
            return judged[0]

        outputs = mean_outputs(self._actions, [batch.outputs.flatten(0, 1) for batch in judged])
        values = torch.stack([batch.values for batch in judged]).mean(0)
        return JudgedBatch(outputs.view_as(judged[0].outputs), values)

    def _judged(
        self,
        batch: Mapping[str, Tensor],
        headers: Headers,
        parts: Sequence[slice | Tensor],
        teacher: Teacher,
        rows: Tensor | None = None,
    ) -> JudgedBatch:
        """Returns what a teacher makes of a batch, or of those ``rows`` (bool ``[T, E]``) of it."""
        if teacher.state_size:
            return self._followed(batch, headers, teacher)  # it has to see all rows
        judged = self._empty(batch)
        for envs in parts:
            obs = observations(batch, envs)[:-1].flatten(0, 1)
            if rows is None:
                judged.write(envs, teacher.judge(obs))
            else:
                index = rows[:, envs].flatten().nonzero()[:, 0]
                judged.write(envs, self._judgement_of(teacher, obs, index))
        return judged

    def _followed(
        self, batch: Mapping[str, Tensor], headers: Headers, teacher: Teacher
    ) -> JudgedBatch:
        """Returns what a teacher with memory makes of a batch, slot after slot of each actor."""
        judged = self._empty(batch)
        alive = batch["alive"]
        envs_per_slot = alive.shape[1] // max(1, len(headers))
        envs_of_slot = torch.arange(alive.shape[1], device=alive.device).split(envs_per_slot)
        for slots in _rounds(headers):
            envs = torch.cat([envs_of_slot[slot] for slot in slots])
            judged.write(envs, teacher.follow(batch, envs, headers[slots]))
        return judged

    def _judgement_of(self, teacher: Teacher, obs: Tensor, index: Tensor) -> Judgement:
        """Returns the judgement of the observations at ``index``, with zeros for the others."""
        outputs = torch.zeros(len(obs), self._actions.outputs, device=obs.device)
        values = torch.zeros(len(obs), device=obs.device)
        if len(index):
            judgement = teacher.judge(obs[index])
            outputs[index] = judgement.outputs
            if judgement.values is not None:
                values[index] = judgement.values
        return Judgement(outputs, values)

    def _empty(self, batch: Mapping[str, Tensor]) -> JudgedBatch:
        alive = batch["alive"]
        outputs = torch.zeros(*alive.shape, self._actions.outputs, device=alive.device)
        return JudgedBatch(outputs, torch.zeros(alive.shape, device=alive.device))


class _StoredPolicy(NamedTuple):
    """A policy as an exported file or a run's checkpoint holds it."""

    config: Config
    spaces: tuple[Space, Space]
    """Of observations and of actions, as its environment had them."""
    weights: Float32
    """Flat vector of the network's parameters."""


def _teacher(
    path: str, teaching: Teaching, config: Config, info: EnvInfo, device: torch.device
) -> Teacher:
    """Load a teacher of a run with ``config``; raises as `Teachers`."""
    stored = _stored_policy(path, teaching, config, info)
    student_spaces = info.spaces
    extra = None
    if teaching.part is not None and teaching.part not in _names(stored.spaces[0]):
        extra = teaching.part
        student_spaces = (_without(extra, info.spaces[0], stored.spaces[0]), info.spaces[1])

    if differs := difference(stored.spaces, student_spaces):
        raise UserError(
            f"{teaching.option} {path} was trained with other observations or actions than "
            f"{config.env.id} has: {differs.column} {differs.trained} in its training, "
            f"{differs.present} here; name a policy of an environment with the same spaces"
        )

    _check_packing(path, teaching, stored.config, config, info)
    teacher_info = _info_of(path, stored.config, stored.spaces)
    rule = action_rule(stored.config, teacher_info)
    _check_actions(path, teaching, stored.config, config, rule)
    _check_rewards(path, teaching, stored.config, config)
    shape = network_shape(stored.config, teacher_info)
    reads_alike = teacher_info.parts == info.parts
    return Teacher(
        filled_net(shape, stored.weights).to(device),
        rule,
        reader=None if reads_alike else PartReader(info, teacher_info, extra, device),
        q_temperature=teaching.q_temperature,
        state_size=state_size_of(shape),
    )


def _check_actions(
    path: str, teaching: Teaching, trained: Config, config: Config, rule: ActionRule
) -> None:
    """Raise UserError where a teacher has no distribution of the student's kind."""
    if rule.deterministic:
        raise UserError(
            f"{teaching.option} {path} is of algo.name {trained.algo.name}, which has no "
            "probabilities to learn; name a policy of sac, ppo or impala"
        )
    if not isinstance(rule.actions, Numbers):
        return

    way = "squashed" if rule.actions.squashed else "clipped"
    if way != config.model.gaussian:
        raise UserError(
            f"the numbers of {teaching.option} {path} are {way}, and those of the student "
            f"{config.model.gaussian}; set model.gaussian={way}"
        )


def _check_packing(
    path: str, teaching: Teaching, trained: Config, config: Config, info: EnvInfo
) -> None:
    """Raise UserError where a teacher reads choices one-hot and the student by number, or the other
    way round."""
    embed_above = trained.env.embed_above
    if embed_above == config.env.embed_above:
        return
    repacked = EnvInfo.of_spaces(config.env.id, info.spaces, 1, info.how, embed_above)
    if (repacked.parts, repacked.observation_space) != (info.parts, info.observation_space):
        raise UserError(
            f"{teaching.option} {path} reads choices by env.embed_above {embed_above}, as in its "
            f"training, and this run has {config.env.embed_above}; set "
            f"env.embed_above={embed_above}"
        )


def _check_rewards(path: str, teaching: Teaching, trained: Config, config: Config) -> None:
    """Raise UserError where a teacher reads rewards that the student's run changes otherwise."""
    if "reward" not in trained.model.core_inputs:
        return
    for name in ("reward_clip", "reward_scale"):
        values = (getattr(trained.algo, name), getattr(config.algo, name))
        if values[0] != values[1]:
            theirs, ours = ("null" if value is None else f"{value:g}" for value in values)
            raise UserError(
                f"{teaching.option} {path} reads rewards by algo.{name} {theirs}, as in its "
                f"training, and this run has {ours}; set algo.{name}={theirs}"
            )


def _info_of(path: str, config: Config, env_spaces: tuple[Space, Space]) -> EnvInfo:
    """Returns the properties of the environment of a policy, as it was packed in training."""
    env = config.env
    return EnvInfo.of_spaces(env.id, env_spaces, 1, f"of {path}", env.embed_above)


def _stored_policy(path: str, teaching: Teaching, config: Config, info: EnvInfo) -> _StoredPolicy:
    """Read an exported file, or the best checkpoint of a run.

    It may name the code that the run with ``config`` names too.
    """
    allow = [reference.text for reference in references(config)]
    if Path(path).is_file():
        way = f"set {teaching.option} to the folder of the run of yours that it comes from"
        policy = exported.read(Path(path), allow, way=way)
        return _StoredPolicy(policy.config, policy.spaces, policy.weights)
    if not Path(path).exists():
        way = "set algo.teacher=null" if teaching.option == "algo.teacher" else "put it back"
        raise UserError(
            f"{teaching.option} names {path}, and there is no such file or folder; give a file "
            f"that penstock export wrote, the folder of a run, or {way}"
        )

    teacher_config = load_run(path)
    way = "let a run of yours use it first"
    used_names.check(references(teacher_config), allow, path, way)
    folder = checkpoint_folder(path, "best")
    checkpoint = checkpoint_format.load(folder)
    env_spaces = stored_spaces(folder / checkpoint_format.FILE, checkpoint, info)
    layout = network_shape(teacher_config, _info_of(path, teacher_config, env_spaces)).layout
    checkpoint_format.check_layout(folder / checkpoint_format.FILE, checkpoint.layout, layout)
    return _StoredPolicy(teacher_config, env_spaces, checkpoint.weights)


def _choosing_part(teaching: Teaching, info: EnvInfo) -> ObservationPart:
    """Returns the part of an observation that chooses the teacher.

    Raises:
        UserError: if there is no such part, or it has another size than the number of teachers.
    """
    count = len(teaching.policies)
    part = next((part for part in info.parts if part.name == teaching.part), None)
    if part is None:
        names = ", ".join(part.name for part in info.parts) or "none, as they are one array"
        raise UserError(
            f"algo.part {teaching.part} is no part of the observations, whose parts are {names}; "
            "name one of them, or set algo.part=null for the mean of all teachers"
        )

    size = int(np.prod(part.shape))
    if size != count:
        raise UserError(
            f"algo.part {teaching.part} has {size} choices, and {teaching.option} {count} "
            "policies; name one for each choice, in their order"
        )
    return part


def _names(observation_space: Space) -> tuple[str, ...]:
    """Returns the keys of a Dict, and nothing for another space."""
    return tuple(observation_space) if isinstance(observation_space, spaces.Dict) else ()


def _without(name: str, observation_space: Space, trained_space: Space) -> Space:
    """Returns a Dict without an entry.

    If it has only one other, and ``trained_space`` is no Dict, it is the space of that entry.
    """
    if not isinstance(observation_space, spaces.Dict):
        return observation_space
    entries = {key: space for key, space in observation_space.items() if key != name}
    if len(entries) == 1 and not isinstance(trained_space, spaces.Dict):
        [only_space] = entries.values()
        return only_space
    return spaces.Dict(entries)


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
