"""Groups of learners in real processes equal a single learner, and survive a killed member."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from group_member import make_slot, make_trainer, stage

MEMBER = Path(__file__).parent.parent / "group_member.py"
PLAIN = ("learner.optimizer=sgd", "learner.lr=0.1", "learner.grad_clip=null")


def run(where: Path, world: int, *words: str) -> list[int]:
    """Exit codes of the members; none of them outlives this call."""
    members = [
        subprocess.Popen([sys.executable, str(MEMBER), str(where), str(rank), str(world), *words])
        for rank in range(world)
    ]
    try:
        return [member.wait(110) for member in members]
    finally:
        for member in members:
            member.kill()
            member.wait()


def load(where: Path, name: str, ranks: range | list[int]) -> list[np.ndarray]:
    return [np.load(where / f"{name}-{rank}.npy") for rank in ranks]


PPO = (
    *("algo.name=ppo", "algo.epochs=2", "algo.target_kl=10", "algo.value_clip=0.1"),
    *("learner.updates_per_batch=1", "learner.momentum=0", "learner.lr=1e-3"),
)


@pytest.mark.system
@pytest.mark.parametrize(
    "algo",
    [
        ("algo.normalize_advantages=true",),
        pytest.param(("algo.normalize_advantages=false",), marks=pytest.mark.slow),
        (*PPO, "algo.normalize_advantages=minibatch"),
        pytest.param((*PPO, "algo.normalize_advantages=batch"), marks=pytest.mark.slow),
        (
            *(*PPO, "algo.minibatches=steps", "algo.epochs=1", "algo.target_kl=null"),
            "learner.lr={from: 1e-3, to: 0, steps: 500}",
        ),
    ],
)
def test_four_learners_compute_the_gradient_of_one_with_four_times_the_batch(
    tmp_path: Path, algo: tuple[str, ...]
) -> None:
    options = (*PLAIN, *algo)
    assert run(tmp_path, 4, "equal", *options) == [0] * 4
    alone = make_trainer(*options, "learner.batch_slots=4", "actors.count=4")
    three = make_trainer(*options, "learner.batch_slots=3", "actors.count=4")
    for number in range(3):
        ranks = [0, 2, 3] if number == 1 else range(4)  # rank 1 has nothing in the second step
        trainer = three if number == 1 else alone
        before = load(tmp_path, f"values{number}", [0])[0]
        trainer.optimizer.values.copy_(torch.from_numpy(before))
        trainer.step(stage(trainer, [make_slot(trainer, 10 * number + rank) for rank in ranks]))
        expected = trainer.optimizer.grads.numpy()  # a mean: the step has divided it
        for grads in load(tmp_path, f"grads{number}", range(4)):
            error = np.linalg.norm(grads - expected) / np.linalg.norm(expected)
            assert error < 1e-5
    first, *others = load(tmp_path, "values", range(4))
    for other in others:
        np.testing.assert_array_equal(other, first)
    steps = load(tmp_path, "steps", range(4))
    assert len(set(map(int, steps))) == 1


def test_dgc_clips_each_learners_gradient_and_not_the_sum(tmp_path: Path) -> None:
    plain = ("learner.optimizer=sgd", "learner.lr=1", "algo.normalize_advantages=false")
    dgc = ("codec=dgc", "dgc_density=1", "warmup_updates=0", "bucket_mb=1")
    options = (*plain, "learner.grad_clip=0.01", *(f"learner.reduce.{text}" for text in dgc))
    assert run(tmp_path, 2, "equal", *options) == [0] * 2
    before, after = (load(tmp_path, f"values{number}", [0])[0] for number in (0, 1))
    expected = np.zeros_like(before)
    for rank in range(2):
        alone = make_trainer(*plain, "learner.grad_clip=null")
        alone.optimizer.values.copy_(torch.from_numpy(before))
        alone.step(stage(alone, [make_slot(alone, rank)]))
        grads = alone.optimizer.grads.numpy()
        expected += 0.01 / np.sqrt(2) * grads / np.linalg.norm(grads)
    assert np.linalg.norm(expected) > 0.011  # were the sum clipped, it would be 0.01
    np.testing.assert_allclose(before - after, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.system
def test_parameters_are_equal_on_ranks_that_compute_in_different_forms(tmp_path: Path) -> None:
    forms = ("1:learner.precision=bf16", "1:learner.micro_batch=14")
    assert run(tmp_path, 2, "equal", *PPO, *forms) == [0] * 2
    before = load(tmp_path, "values0", [0])[0]
    first, other = load(tmp_path, "values", range(2))
    np.testing.assert_array_equal(first, other)
    assert not np.array_equal(before, first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlap", "accumulate"), [("true", "1"), ("false", "1"), ("false", "2"), ("true", "2")]
)
def test_parameters_are_equal_on_all_ranks_bit_for_bit(
    tmp_path: Path, overlap: str, accumulate: str
) -> None:
    options = (f"learner.reduce.overlap={overlap}", f"learner.accumulate={accumulate}")
    assert run(tmp_path, 3, "equal", *options) == [0] * 3
    first, *others = load(tmp_path, "values", range(3))
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("control", marks=pytest.mark.slow),
        "collective",
        pytest.param("optimizer", marks=pytest.mark.slow),
        pytest.param("optimizer@0", marks=pytest.mark.slow),
    ],
)
def test_remaining_learners_continue_when_one_is_killed(tmp_path: Path, when: str) -> None:
    codes = run(tmp_path, 3, "killed", when)
    gone = int(when.partition("@")[2] or 2)
    assert [code for rank, code in enumerate(codes) if rank != gone] == [0, 0]
    assert codes[gone] == -9
    first, second = load(tmp_path, "values", [rank for rank in range(3) if rank != gone])
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first).all()


@pytest.mark.parametrize(
    "name", ["normalizer.mean", pytest.param("rewards", marks=pytest.mark.slow)]
)
def test_diverged_statistics_are_reported_with_their_name_and_rank(
    tmp_path: Path, name: str
) -> None:
    rewards = ("algo.normalize_rewards=true", "algo.reward_scale=1")
    both = ("model.normalize_observations=true", *rewards)
    assert run(tmp_path, 2, "statistics_apart", name, *both) == [0, 0]
    for said in load(tmp_path, "said", range(2)):
        before, _, after = str(said).partition(" | ")
        assert before == "equal"
        assert f"{name} of rank 1 differs from that of rank 0" in after


def test_diverged_learners_are_reported_with_the_parameter_that_differs(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "apart") == [0, 0]
    name = make_trainer().optimizer.parts[2].name
    for said in load(tmp_path, "said", range(2)):
        assert f"model.{name} of rank 1 differs from that of rank 0" in str(said)
