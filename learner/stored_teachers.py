"""The policies that teach a run: read from exported files and folders of runs, if they fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from penstock.algos.action_rule import ActionRule, action_rule
from penstock.algos.samples import network_shape
from penstock.configs.algorithms import Teaching
from penstock.configs.code_references import references
from penstock.configs.errors import UserError
from penstock.configs.load import load_run
from penstock.configs.schema import Config
from penstock.core import used_names
from penstock.core.observations import ObservationPart
from penstock.envs import EnvInfo
from penstock.envs.space_difference import difference
from penstock.learner.checkpoints import checkpoint_format, exported
from penstock.learner.checkpoints.checkpoint_history import checkpoint_folder
from penstock.learner.checkpoints.checkpoint_spaces import stored_spaces
from penstock.learner.checkpoints.exported import Exported
from penstock.learner.teachers import PartReader, Teacher, Teachers, TeacherWithMemory
from penstock.models.actions import Numbers, action_spec
from penstock.models.torch_general import GeneralActorCritic, GeneralHeadNet
from penstock.models.torch_nets import filled_net

Space = spaces.Space[Any]


def load_teachers(config: Config, info: EnvInfo, device: torch.device) -> Teachers | None:
    """Load the teachers of a run; None if it has none.

    Args:
        config: of the run, whose `algo.teaching` names them.
        info: the properties of its environments.
        device: on which the learner computes.

    Raises:
        UserError: if there is no such policy, if it must not be loaded, or if it cannot teach this
            student.
    """
    teaching = config.algo.teaching
    if teaching is None:
        return None
    part = None if teaching.part is None else _choosing_part(teaching, info)
    teachers = [_load_teacher(path, teaching, config, info, device) for path in teaching.policies]
    return Teachers(teachers, action_spec(config, info), part)


def _load_teacher(
    path: str, teaching: Teaching, config: Config, info: EnvInfo, device: torch.device
) -> Teacher:
    """Load the teacher that is at ``path``; it raises as `load_teachers`."""
    stored = _stored_policy(path, teaching.option, config, info)
    name = f"{teaching.option} {path}"

    # It may have been trained without the part that chooses it.
    student_spaces = info.spaces
    extra = None
    if teaching.part is not None and teaching.part not in _keys(stored.spaces[0]):
        extra = teaching.part
        student_spaces = (_without(extra, info.spaces[0], stored.spaces[0]), info.spaces[1])
    if differs := difference(stored.spaces, student_spaces):
        raise UserError(
            f"{name} was trained with other observations or actions than {config.env.id} has: "
            f"{differs.column} {differs.trained} in its training, {differs.present} here; name a "
            "policy of an environment with the same spaces"
        )
    _check_packing(name, stored.config, config, info)
    rule = action_rule(stored.config, stored.info)
    _check_actions(name, stored.config, config, rule)
    _check_rewards(name, stored.config, config)

    net = filled_net(network_shape(stored.config, stored.info), stored.weights).to(device)
    reader = None
    if stored.info.parts != info.parts:
        reader = PartReader(info, stored.info, extra, device)
    if isinstance(net, GeneralActorCritic | GeneralHeadNet) and net.state_size:
        return TeacherWithMemory(
            net=net, rule=rule, reader=reader, q_temperature=teaching.q_temperature
        )
    return Teacher(net=net, rule=rule, reader=reader, q_temperature=teaching.q_temperature)


def _stored_policy(path: str, option: str, config: Config, info: EnvInfo) -> Exported:
    """Read an exported file, or the best checkpoint of a run, which ``option`` names.

    It may name the code that the run with ``config`` names too. A checkpoint of an earlier version
    has no spaces: it has those of ``info``.
    """
    allow = [reference.text for reference in references(config)]
    if Path(path).is_file():
        way = f"set {option} to the folder of the run of yours that it comes from"
        return exported.read(Path(path), allow, way=way)
    if not Path(path).exists():
        way = "set algo.teacher=null" if option == "algo.teacher" else "put it back"
        raise UserError(
            f"{option} names {path}, and there is no such file or folder; give a file that "
            f"penstock export wrote, the folder of a run, or {way}"
        )

    stored_config = load_run(path)
    way = "let a run of yours use it first"
    used_names.check(references(stored_config), allow, path, way)
    folder = checkpoint_folder(path, "best")
    file = folder / checkpoint_format.FILE
    checkpoint = checkpoint_format.load(folder)

    env = stored_config.env
    env_spaces = stored_spaces(file, checkpoint, info)
    stored_info = EnvInfo.of_spaces(env.id, env_spaces, 1, f"of {path}", env.embed_above)
    layout = network_shape(stored_config, stored_info).layout
    checkpoint_format.check_layout(file, checkpoint.layout, layout)
    return Exported(stored_config, env_spaces, stored_info, checkpoint.weights, play=None)


def _check_packing(name: str, stored: Config, config: Config, info: EnvInfo) -> None:
    """Raise UserError where a teacher reads choices one-hot and the student by number, or the other
    way round."""
    embed_above = stored.env.embed_above
    if embed_above == config.env.embed_above:
        return
    repacked = EnvInfo.of_spaces(config.env.id, info.spaces, 1, info.how, embed_above)
    if (repacked.parts, repacked.observation_space) != (info.parts, info.observation_space):
        raise UserError(
            f"{name} reads choices by env.embed_above {embed_above}, as in its training, and this "
            f"run has {config.env.embed_above}; set env.embed_above={embed_above}"
        )


def _check_actions(name: str, stored: Config, config: Config, rule: ActionRule) -> None:
    """Raise UserError where a teacher has no distribution of the student's kind."""
    if rule.deterministic:
        raise UserError(
            f"{name} is of algo.name {stored.algo.name}, which has no probabilities to learn; name "
            "a policy of sac, ppo or impala"
        )
    if not isinstance(rule.actions, Numbers):
        return

    way = "squashed" if rule.actions.squashed else "clipped"
    if way != config.model.gaussian:
        raise UserError(
            f"the numbers of {name} are {way}, and those of the student {config.model.gaussian}; "
            f"set model.gaussian={way}"
        )


def _check_rewards(name: str, stored: Config, config: Config) -> None:
    """Raise UserError where a teacher reads rewards that the student's run changes otherwise."""
    if "reward" not in stored.model.core_inputs:
        return
    for option in ("reward_clip", "reward_scale"):
        trained_value = getattr(stored.algo, option)
        value = getattr(config.algo, option)
        if value != trained_value:
            theirs = "null" if trained_value is None else f"{trained_value:g}"
            ours = "null" if value is None else f"{value:g}"
            raise UserError(
                f"{name} reads rewards by algo.{option} {theirs}, as in its training, and this run "
                f"has {ours}; set algo.{option}={theirs}"
            )


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


def _keys(observation_space: Space) -> tuple[str, ...]:
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
