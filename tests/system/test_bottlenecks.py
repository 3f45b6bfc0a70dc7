"""`penstock profile` names the bottleneck of runs that are made to have exactly one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from train_command import Penstock

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

# A module of a user's, in the folder where the run is started.
GAMES = '''
import sys

import numpy as np
from penstock.envs.games.synthetic import SyntheticVectorEnv


def uneven(num_envs, slow_step_time_s=0.0, **options):
    """The games of actor-1 take longer than those of the others."""
    if "actor-1" in sys.argv:
        options["step_time_s"] = slow_step_time_s
    return SyntheticVectorEnv(num_envs, **options)


class Noise(SyntheticVectorEnv):
    """Shows what is hard to compress, and easy to make."""

    def __init__(self, num_envs, **options):
        super().__init__(num_envs, **options)
        shape = (4, num_envs, *self.single_observation_space.shape)
        self._noise = np.random.default_rng(0).integers(0, 8, shape).astype(np.float32) / 8

    def _observe(self):
        return self._noise[self._calls % 4]


def noise(num_envs, **options):
    return Noise(num_envs, **options)
'''
SMALL = ("actors.envs=8", "actors.unroll=8")
SLOW_TRAINING = (  # a pass for each of 32 games
    "actors.envs=32", "actors.unroll=8", "learner.micro_batch=1", "algo.normalize_advantages=false",
)  # fmt: skip


def verdict_on(penstock: Penstock, folder: Path, *options: str) -> dict[str, Any]:
    """The verdict, or the next one where it is that programs beside the run crowd the cores."""
    (folder / "bottleneck_games.py").write_text(GAMES)
    arguments = ("--seconds", "3", "--json", "run.dir=run", "run.interval_s=0.2")
    code, profile, err = penstock("profile", "synthetic", *arguments, *options).end()
    assert code == 0, err
    print(*err.splitlines()[-40:], sep="\n")  # shown where the test fails
    found: list[dict[str, Any]] = [profile["verdict"], *profile["also"]]
    return next((verdict for verdict in found if not by_others(verdict)), found[0])


def by_others(verdict: dict[str, Any]) -> bool:
    """Of a run that does not fill the cores itself: no finding on it, but on this machine."""
    return verdict["kind"] == "crowded" and "see what else runs" in verdict["next_step"]


SINGLE = "env.wrappers=[gymnasium.wrappers:FlattenObservation]"  # turns its vector form off


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kind", "advice"),
    [
        (["env.kwargs.busy=true"], "slow_environment", "more actor"),
        ([], "waiting_environment", "actors.env_threads does nothing for its own vector form"),
        ([SINGLE], "waiting_environment", "side by side: actors.env_threads="),
    ],
    ids=["computes", "waits", "waits, single"],
)
def test_slow_environment_is_the_verdict(
    options: list[str], kind: str, advice: str, penstock: Penstock, tmp_path: Path
) -> None:
    options = [*SMALL, "actors.count=1", "env.kwargs.step_time_s=0.002", *options]
    verdict = verdict_on(penstock, tmp_path, *options)
    assert verdict["kind"] == kind
    assert advice in verdict["next_step"]


@pytest.mark.slow
def test_slow_learner_is_the_verdict(penstock: Penstock, tmp_path: Path) -> None:
    assert verdict_on(penstock, tmp_path, *SLOW_TRAINING)["kind"] == "slow_learner"


@pytest.mark.slow
def test_slow_inference_is_the_verdict(penstock: Penstock, tmp_path: Path) -> None:
    # One game at a time pays for every layer's call; the learner shares that among 512 samples.
    options = (
        "actors.envs=1", "actors.unroll=128", "actors.inference=torch", "transport.slots=4",
        "learner.batch_slots=4", "learner.micro_batch=512", f"model.hidden={[32] * 16}",
    )  # fmt: skip
    assert verdict_on(penstock, tmp_path, *options)["kind"] == "slow_inference"


@pytest.mark.slow
def test_slow_wire_is_the_verdict(penstock: Penstock, tmp_path: Path) -> None:
    # One in ten of the samples that arrive is trained on, so nothing but the wire is at work.
    options = (
        "env.id=bottleneck_games:noise", "env.kwargs={obs_shape: [50000]}", "model.hidden=[1]",
        "model.kind=mlp", "actors.inference=numpy", *SMALL, "transport.kind=zmq",
        "transport.codec=snappy", "algo={name: dqn}", "replay.samples_per_insert=0.1",
        "replay.capacity=1000", "replay.min_size=300", "replay.batch_size=16",
    )  # fmt: skip
    assert verdict_on(penstock, tmp_path, *options)["kind"] == "slow_wire"


@pytest.mark.slow
def test_slow_gather_is_the_verdict(penstock: Penstock, tmp_path: Path) -> None:
    # Large samples, drawn again and again between the steps of a small network.
    options = (
        "env.kwargs={obs_shape: [20000]}", "model.hidden=[1]", *SMALL, "algo={name: dqn}",
        "replay.samples_per_insert=null", "replay.capacity=2000", "replay.min_size=300",
        "learner.prefetch=0",  # a thread draws about as fast as the network learns
    )  # fmt: skip
    assert verdict_on(penstock, tmp_path, *options)["kind"] == "slow_gather"


@pytest.mark.slow
def test_exposed_reduction_is_the_verdict(penstock: Penstock, tmp_path: Path) -> None:
    # Two learners exchange a million gradients for each eight samples, 40 times a batch.
    options = (
        "learner.count=2", "algo={name: ppo, epochs: 10}", "learner.updates_per_batch=4",
        "actors.count=2", "actors.envs=4", "actors.unroll=8", "model.hidden=[1024,1024]",
    )  # fmt: skip
    verdict = verdict_on(penstock, tmp_path, *options)
    assert verdict["kind"] == "reduction"


@pytest.mark.slow
def test_big_lag_is_the_verdict(penstock: Penstock, tmp_path: Path) -> None:
    options = (*SLOW_TRAINING, "transport.slots=16")
    assert verdict_on(penstock, tmp_path, *options)["kind"] == "big_lag"


@pytest.mark.slow
def test_single_slow_actor_is_named_as_straggler(penstock: Penstock, tmp_path: Path) -> None:
    times = "step_time_s: 0.0003, slow_step_time_s: 0.01"
    options = (
        "env.id=bottleneck_games:uneven", f"env.kwargs={{{times}}}", *SMALL, "actors.count=2"
    )  # fmt: skip
    verdict = verdict_on(penstock, tmp_path, *options)
    assert verdict["kind"] == "straggler"
    assert verdict["finding"].startswith("actor-1 is slow")
