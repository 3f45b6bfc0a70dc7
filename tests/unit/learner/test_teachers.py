"""The teachers of a run: which policies may teach, and what they make of a batch, against the
policies as actors and programs play them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gymnasium import spaces
from safetensors import safe_open
from safetensors.numpy import save as to_bytes
from torch import Tensor

from penstock.algos.ops.teaching import OUTPUTS, VALUE
from penstock.algos.samples import network_shape
from penstock.configs.code_references import references, references_in_training
from penstock.configs.errors import UserError
from penstock.configs.for_actors import for_actors, read_for_actor
from penstock.configs.load import dump, resolve
from penstock.core import used_names
from penstock.core.observations import views
from penstock.core.specs import HEADER
from penstock.envs import EnvInfo, probe
from penstock.evaluation.loaded_policy import load_policy
from penstock.learner.checkpoints import checkpoint_format, exported
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_spaces import SPACES, spaces_as_json
from penstock.learner.stored_teachers import load_teachers
from penstock.learner.teachers import Teachers
from penstock.learner.trainer import Trainer
from small_trainer import batch as random_batch

Array = npt.NDArray[Any]
NAME = f"{__name__}:{{}}"
FOUR = spaces.Box(-3.0, 3.0, (4,), np.float32)
CPU = torch.device("cpu")


class Shown(gymnasium.Env[Any, Any]):
    """An environment of the spaces that it is given; nobody plays it."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation, action


def two() -> Shown:
    return Shown(FOUR, spaces.Discrete(2))


def three() -> Shown:
    return Shown(FOUR, spaces.Discrete(3))


def numbers() -> Shown:
    return Shown(FOUR, spaces.Box(-2, 2, (2,), np.float32))


def several() -> Shown:
    return Shown(FOUR, spaces.MultiDiscrete([2, 3]))


def heroes() -> Shown:
    entries: dict[str, spaces.Space[Any]] = {"hero": spaces.Discrete(2), "seen": FOUR}
    return Shown(spaces.Dict(entries), spaces.Discrete(3))


def masked() -> Shown:
    entries: dict[str, spaces.Space[Any]] = {
        "seen": FOUR,
        "action_mask": spaces.Box(0, 1, (3,), np.uint8),
    }
    return Shown(spaces.Dict(entries), spaces.Discrete(3))


def a_run(folder: Path, game: str, *options: str, seed: int = 0) -> str:
    """The folder of a run whose checkpoint holds random weights."""
    config = resolve(NAME.format(game), options)
    info = probe(config.env)
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(config))
    used_names.note(config)
    layout = network_shape(config, info).layout
    weights = 0.3 * np.random.default_rng(seed).standard_normal(layout.size, np.float32)
    for name, values in layout.views(weights).items():
        if name.startswith("normalizer."):
            np.abs(values, out=values)  # a variance below 0 gives no numbers
    stored = Checkpoint(layout, weights, meta={SPACES: spaces_as_json(info)})
    checkpoint_format.save(folder / "checkpoints" / "last", stored)
    return str(folder)


class Student(NamedTuple):
    info: EnvInfo
    teachers: Teachers


def student(game: str, *paths: str, options: Sequence[str] = ()) -> Student:
    """A student of the policies at ``paths``."""
    taught_by = f"algo.teachers=[{','.join(paths)}]"
    config = resolve(NAME.format(game), ["algo.name=distill", taught_by, *options])
    info = probe(config.env)
    teachers = load_teachers(config, info, CPU)
    assert teachers is not None
    return Student(info, teachers)


def unrolls(info: EnvInfo, steps: int = 5, envs: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """Columns of random unrolls, some of which an episode's end divides."""
    rng = np.random.default_rng(seed)
    space = info.observation_space
    obs = rng.normal(size=(steps + 1, envs, *space.shape)).astype(np.float32)
    if info.parts:
        obs = np.zeros((steps + 1, envs, *space.shape), np.uint8)
        for part in info.parts:
            values: Array = rng.normal(size=(*obs.shape[:2], *part.shape)).astype(np.float32)
            if part.name == "hero":
                values = np.eye(2, dtype=np.float32)[rng.integers(0, 2, obs.shape[:2])]
            if part.name == "action_mask":
                values = rng.random((*obs.shape[:2], *part.shape)) < 0.6
                values[..., 0] = True
            raw = np.ascontiguousarray(values.astype(part.dtype)).view(np.uint8)
            obs[..., part.offset : part.offset + part.nbytes] = raw.reshape(*obs.shape[:2], -1)
    alive = rng.random((steps, envs)) < 0.8
    return {"obs": torch.from_numpy(obs), "alive": torch.from_numpy(alive)}


def headers(*slots: tuple[int, int]) -> npt.NDArray[np.void]:
    """HEADER records by actor and sequence."""
    records = np.zeros(len(slots), HEADER)
    records["actor"], records["sequence"] = np.array(slots).T
    return records


def loaded(path: str) -> Any:
    """The policy of a run, whose details are known to be there."""
    return load_policy(path)


def taught(
    teachers: Teachers, batch: dict[str, Tensor], *slots: tuple[int, int]
) -> dict[str, Array]:
    """The columns that teachers add to a batch, of one slot by default."""
    envs = batch["alive"].shape[1]
    parts = [slice(0, 1), slice(1, envs)]
    columns = teachers(batch, headers(*slots) if slots else headers((0, 0)), parts)
    return {name: column.numpy() for name, column in columns.items()}


class Comparison(NamedTuple):
    """What teachers make of a random batch, beside what the policy of the first one does."""

    outputs: Array
    """``[B, outputs]``"""
    values: Any
    """``[B]``, or None where a teacher estimates none."""
    details: Any


def compared(game: str, *paths: str, options: Sequence[str] = ()) -> Comparison:
    info, teachers = student(game, *paths, options=options)
    batch = unrolls(info)
    shown: Any = batch["obs"][:-1].flatten(0, 1).numpy()
    if info.parts:
        shown = views(info.parts, shown)
    columns = taught(teachers, batch)
    assert all(np.isfinite(column).all() for column in columns.values())
    outputs = columns[OUTPUTS]
    values = columns.get(VALUE)
    return Comparison(
        outputs.reshape(-1, outputs.shape[2]),
        None if values is None else values.reshape(-1),
        loaded(paths[0]).details(shown),
    )


@pytest.mark.parametrize("form", ["run", "file"])
@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_a_teacher_says_what_the_loaded_policy_does(tmp_path: Path, form: str, algo: str) -> None:
    options = [f"algo.name={algo}", "model.normalize_observations=true", "model.hidden=[16]"]
    path = a_run(tmp_path / "run", "three", *options)
    if form == "file":
        policy = loaded(path)
        path = str(tmp_path / "policy.safetensors")
        policy.save(path)

    outputs, values, details = compared("three", path)
    np.testing.assert_allclose(outputs, details.logits, atol=1e-5)
    np.testing.assert_allclose(values, details.value, atol=1e-5)


def test_a_q_network_teaches_by_its_values(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run", "three", "algo.name=dqn")
    outputs, values, details = compared("three", path, options=["algo.q_temperature=0.5"])
    np.testing.assert_allclose(outputs, details.q / 0.5, atol=1e-5)
    np.testing.assert_allclose(values, details.q.max(1), atol=1e-5)


def test_the_value_of_several_choices_is_the_mean_of_the_best_of_each(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run", "several", "algo.name=dqn")
    outputs, values, details = compared("several", path, options=["algo.q_temperature=1"])
    np.testing.assert_allclose(outputs, details.q, atol=1e-5)
    best = (details.q[:, :2].max(1) + details.q[:, 2:].max(1)) / 2
    np.testing.assert_allclose(values, best, atol=1e-5)


def test_sac_teaches_squashed_numbers_without_values(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run", "numbers", "algo.name=sac", "algo.log_std_max=-0.1")
    outputs, values, details = compared("numbers", path, options=["model.gaussian=squashed"])
    mean, log_std = np.split(outputs, 2, axis=1)
    np.testing.assert_allclose(mean, details.mean, atol=1e-5)
    np.testing.assert_allclose(np.exp(log_std), details.std, atol=1e-5)
    assert values is None


def test_forbidden_actions_have_probability_zero_for_a_teacher(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run", "masked", "algo.name=ppo")
    outputs, _, details = compared("masked", path)
    is_forbidden = details.probabilities == 0
    probabilities = torch.from_numpy(outputs).softmax(-1).numpy()
    assert (probabilities[is_forbidden] == 0).all()
    assert is_forbidden.any()


@pytest.mark.parametrize("lacks", [True, False])
def test_the_teacher_of_a_row_is_the_one_that_its_part_names(tmp_path: Path, lacks: bool) -> None:
    """Also where teachers were trained in an environment without that part."""
    game = "three" if lacks else "heroes"
    paths = [a_run(tmp_path / str(i), game, "algo.name=ppo", seed=i) for i in range(2)]
    info, teachers = student("heroes", *paths, options=["algo.part=hero"])
    batch = unrolls(info)
    columns = taught(teachers, batch)

    arrays = views(info.parts, batch["obs"][:-1].flatten(0, 1).numpy())
    hero = arrays["hero"].argmax(1)
    assert set(hero.tolist()) == {0, 1}
    for number, path in enumerate(paths):
        shown = arrays["seen"] if lacks else {"hero": hero, "seen": arrays["seen"]}
        details = loaded(path).details(shown)
        rows = hero == number
        outputs = columns[OUTPUTS].reshape(-1, 3)
        np.testing.assert_allclose(outputs[rows], details.logits[rows], atol=1e-5)
        np.testing.assert_allclose(columns[VALUE].reshape(-1)[rows], details.value[rows], atol=1e-5)


def test_several_teachers_together_are_the_means_of_their_probabilities_and_values(
    tmp_path: Path,
) -> None:
    paths = [a_run(tmp_path / str(i), "three", "algo.name=ppo", seed=i) for i in range(3)]
    info, teachers = student("three", *paths)
    batch = unrolls(info)
    columns = taught(teachers, batch)
    each = [loaded(path).details(batch["obs"][:-1].flatten(0, 1).numpy()) for path in paths]
    np.testing.assert_allclose(
        torch.from_numpy(columns[OUTPUTS]).softmax(-1).reshape(-1, 3),
        np.mean([details.probabilities for details in each], axis=0),
        atol=1e-6,
    )
    values = np.mean([details.value for details in each], axis=0)
    np.testing.assert_allclose(columns[VALUE].reshape(-1), values, atol=1e-5)


def test_a_student_learns_from_several_teachers_in_minibatches_of_steps(tmp_path: Path) -> None:
    """Of two choices: the outputs of a step have the size of a word, by which steps are copied."""
    paths = [a_run(tmp_path / str(i), "two", "algo.name=ppo", seed=i) for i in range(2)]
    teachers = f"algo.teachers=[{','.join(paths)}]"
    small = ("actors.count=1", "actors.envs=8", "actors.unroll=6", "learner.updates_per_batch=2")
    config = resolve(NAME.format("two"), ["algo.name=distill", teachers, *small])
    trainer = Trainer(config, probe(config.env))
    trainer.step(random_batch(trainer))
    assert trainer.statistics()["teacher_kl"] > 0


def test_a_teacher_with_memory_follows_each_environment_through_its_unrolls(
    tmp_path: Path,
) -> None:
    """Two unrolls of an actor in one batch, the later one first; then the next; then a gap. The
    loaded policy steps through the same observations one by one."""
    options = ("algo.name=ppo", "model.core=lstm", "model.core_size=8")
    path = a_run(tmp_path / "run", "three", *options)
    info, teachers = student("three", path)
    policy = loaded(path)
    first, second, third, late = (unrolls(info, envs=2, seed=seed) for seed in range(4))

    state: Any = None

    def stepped(unroll: dict[str, Tensor]) -> Array:
        """Logits ``[T, E, 3]`` of an unroll that follows the one before."""
        nonlocal state
        logits = []
        for t in range(len(unroll["alive"])):
            details = policy.details(unroll["obs"][t].numpy(), state)
            logits.append(details.logits)
            state = details.state * unroll["alive"][t, :, None].numpy()
        return np.stack(logits)

    together = {name: torch.cat([second[name], first[name]], 1) for name in first}
    outputs = taught(teachers, together, (7, 1), (7, 0))[OUTPUTS]
    np.testing.assert_allclose(outputs[:, 2:], stepped(first), atol=1e-5)
    np.testing.assert_allclose(outputs[:, :2], stepped(second), atol=1e-5)
    outputs = taught(teachers, third, (7, 2))[OUTPUTS]
    np.testing.assert_allclose(outputs, stepped(third), atol=1e-5)

    state = None  # the unroll before was lost
    np.testing.assert_allclose(taught(teachers, late, (7, 4))[OUTPUTS], stepped(late), atol=1e-5)


def test_a_teacher_reads_its_last_action_and_reward_out_of_the_unrolls(tmp_path: Path) -> None:
    """Also those of the last row of the unroll before; where an episode begins there are none."""
    options = ("algo.name=ppo", "model.core=gru", "model.core_inputs=[action,reward]")
    path = a_run(tmp_path / "run", "three", *options, "algo.reward_clip=0.5")
    info, teachers = student("three", path, options=["algo.reward_clip=0.5"])
    policy = loaded(path)

    state: Any = None
    reward: Any = None
    for sequence in range(2):
        rng = np.random.default_rng(sequence)
        unroll = unrolls(info, envs=2, seed=sequence)
        rewards = rng.normal(size=unroll["alive"].shape).astype(np.float32)
        actions = rng.integers(0, 3, rewards.shape)
        unroll["action"] = torch.from_numpy(actions.astype(np.int32))
        unroll["reward"] = torch.from_numpy(rewards.clip(-0.5, 0.5))

        # The policy writes the last reward itself; the last action is one-hot before it.
        logits = []
        for t, alive in enumerate(unroll["alive"].numpy()):
            details = policy.details(unroll["obs"][t].numpy(), state, reward)
            logits.append(details.logits)
            state = details.state.copy()
            state[:, -4:-1] = np.eye(3)[actions[t]]
            state *= alive[:, None]
            reward = rewards[t]
        outputs = taught(teachers, unroll, (7, sequence))[OUTPUTS]
        np.testing.assert_allclose(outputs, np.stack(logits), atol=1e-5)

    with pytest.raises(UserError, match=r"and this run has null; set algo\.reward_clip=0\.5"):
        student("three", path)


@pytest.mark.parametrize("algo", ["pqn", "r2d2"])
def test_other_networks_of_values_teach_too(tmp_path: Path, algo: str) -> None:
    """That of R2D2 has memory."""
    options = (f"algo.name={algo}", *(("model.core=gru",) if algo == "r2d2" else ()))
    path = a_run(tmp_path / "run", "three", *options)
    info, teachers = student("three", path, options=["algo.q_temperature=1"])
    batch = unrolls(info)
    batch["alive"][:] = True
    outputs = taught(teachers, batch)[OUTPUTS]
    policy = loaded(path)
    state: Any = None
    for t, obs in enumerate(batch["obs"][:-1].numpy()):
        details = policy.details(obs, state)
        state = details.state
        np.testing.assert_allclose(outputs[t], details.q, atol=1e-5)


@pytest.mark.parametrize(
    ("game", "teacher", "options", "message"),
    [
        ("two", ("three",), (), r"other observations or actions than .*: actions Discrete\(3\)"),
        ("numbers", ("numbers", "algo.name=td3"), (), r"td3, which has no probabilities to learn"),
        ("numbers", ("numbers", "algo.name=sac"), (), r"are squashed.*set model\.gaussian=squash"),
        ("heroes", ("heroes",), ("algo.part=villain",), r"whose parts are hero, seen; name one"),
        ("heroes", ("heroes",), ("algo.part=seen",), r"has 4 choices, and algo\.teachers 2 pol"),
        ("three", ("three",), ("algo.part=hero",), r"whose parts are none, as they are one array"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_in_one_sentence(
    tmp_path: Path, game: str, teacher: tuple[str, ...], options: tuple[str, ...], message: str
) -> None:
    algo = () if len(teacher) > 1 else ("algo.name=ppo",)
    path = a_run(tmp_path / "run", *teacher, *algo)
    paths = [path, path] if options else [path]
    with pytest.raises(UserError, match=message):
        student(game, *paths, options=options)


def test_a_missing_teacher_is_named_with_the_next_step(tmp_path: Path) -> None:
    config = resolve(NAME.format("three"), ["algo.name=ppo", f"algo.teacher={tmp_path}/gone"])
    with pytest.raises(UserError, match=r"gone, and there is no such.* set algo\.teacher=null"):
        load_teachers(config, probe(config.env), CPU)


def test_a_hostile_policy_file_is_refused_as_a_teacher(tmp_path: Path) -> None:
    """Its network would be code of its author."""
    file = tmp_path / "policy.safetensors"
    loaded(a_run(tmp_path / "run", "three", "algo.name=ppo")).save(file)
    with safe_open(file, framework="numpy") as stored:
        about = json.loads(stored.metadata()[exported.KEY])
        tensors = {name: stored.get_tensor(name) for name in list(stored.keys())}
    about["config"]["model"]["entry"] = "os:system"
    file.write_bytes(to_bytes(tensors, {exported.KEY: json.dumps(about)}))

    with pytest.raises(
        UserError, match=r"model\.entry 'os:system'.* set algo\.teachers to the fol"
    ):
        student("three", str(file))


@pytest.mark.parametrize(
    "options",
    [("algo.name=distill", "algo.teachers=[a/b]"), ("algo.name=ppo", "algo.teacher=a/b")],
)
def test_only_learners_hear_of_teachers(options: tuple[str, ...]) -> None:
    """Neither actors nor those who play the student's policy later are asked to allow a path."""
    config = resolve("CartPole-v1", options)
    received = read_for_actor(for_actors(config))
    assert "a/b" not in dump(received)
    assert references(config) == []
    assert [reference.text for reference in references_in_training(config)] == ["a/b"]


def test_a_kick_start_ends_with_its_schedule(tmp_path: Path) -> None:
    """While it lasts the divergence is reported; then the teacher is not computed."""
    path = a_run(tmp_path / "run", "two", "algo.name=ppo")
    config = resolve(
        NAME.format("two"),
        [
            *("algo.name=ppo", f"algo.teacher={path}", "actors.count=1", "actors.envs=8"),
            *("algo.teacher_cost={from: 1, to: 0, steps: 40}", "actors.unroll=6"),
            *("learner.device=cpu", "learner.updates_per_batch=2"),
        ],
    )
    trainer = Trainer(config, probe(config.env))
    divergences = []
    for _ in range(3):
        staged = random_batch(trainer)
        trainer.step(staged)
        growth = trainer.progress.growth()
        trainer.progress.commit(growth, growth)
        divergences.append(trainer.statistics()["teacher_kl"])
    assert divergences[0] > 0
    assert divergences[-1] == 0
