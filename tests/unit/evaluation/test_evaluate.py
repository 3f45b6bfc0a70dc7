"""Counting evaluation episodes fairly, and `penstock eval` on the folder of a run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from penstock.algos.samples import network_shape
from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.envs import BatchedEnv, probe
from penstock.envs.seats import ONE_SEAT
from penstock.evaluation.evaluate import (
    Episode,
    describe,
    describe_seeds,
    evaluate,
    evaluate_seeds,
    play,
    seed_runs,
    summary,
)
from penstock.evaluation.loaded_policy import load_policy
from penstock.learner.checkpoints import checkpoint_format, exported
from penstock.learner.checkpoints.checkpoint_format import Checkpoint

NEVER = -1
SEEDS = ("seed-2", "seed-10")


class Scripted:
    """Environment i's episodes last ``lengths[i]`` steps that pay ``pay``; a reset is a step."""

    life_lost = playing = outcome = None

    def __init__(
        self, lengths: list[int], bad_after: int = -1, pay: float = 1.0, drops: float = NEVER
    ) -> None:
        """``drops`` is a period: of each so many steps one fails in every environment."""
        self.count = len(lengths)
        self.game_of = np.arange(self.count)
        self.seat_of = np.zeros(self.count, np.int64)
        space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
        self.info = SimpleNamespace(
            observation_space=space, parts=(), counts=(4,), seating=ONE_SEAT
        )
        self._lengths = np.array(lengths)
        self._at = np.zeros(self.count, np.int64)
        self._bad_after = bad_after
        self._pay = pay
        self._drops, self._steps = drops, 0
        self.dropped: npt.NDArray[Any] | None = None
        self.seeds: list[int] = []

    def reset_into(self, seed: int, out: npt.NDArray[Any]) -> None:
        self.seeds.append(seed)
        self._at[:] = 0
        out[:] = seed

    def step_into(self, actions: npt.NDArray[Any], out: npt.NDArray[Any]) -> Any:
        assert actions.tolist() == [3] * self.count
        reset = self._at == self._lengths
        self._steps += 1
        failed = self._steps % self._drops == 0 if self._drops > 0 else False
        self.dropped = np.ones(self.count, np.bool_) if failed else None
        reset |= failed
        self._at = np.where(reset, 0, self._at + 1)
        ended = self._at == self._lengths
        self._bad_after -= 1
        out[:] = np.nan if self._bad_after == 0 else 0
        return np.where(reset, 0.0, self._pay), ended, np.zeros(self.count, np.bool_)


def run_play(game: Scripted, episodes: int, max_steps: int = 100) -> list[Episode]:
    def threes(obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.full(game.count, 3)

    return play(cast(BatchedEnv, game), threes, episodes, 0, max_steps)


def results(episodes: list[Episode]) -> list[tuple[float, int, bool]]:
    """Return, length and whether it was cut, of each episode."""
    return [(each.episode_return, each.length, each.cut) for each in episodes]


def test_episode_that_failed_is_no_result_and_another_is_played() -> None:
    episodes = run_play(Scripted([3], drops=6), 4)  # fails in the second step of each second one
    assert [(episode.length, episode.episode_return) for episode in episodes] == [(3, 3.0)] * 4


def test_evaluation_of_an_environment_that_always_fails_ends() -> None:
    with pytest.raises(UserError, match=r"31 episodes failed while 0 of 3 ended"):
        run_play(Scripted([3], drops=2), 3)


def test_each_environment_plays_its_share_of_episodes() -> None:
    episodes = run_play(Scripted([1, 10, 3]), 8)
    assert [episode.length for episode in episodes] == [1, 1, 1, 10, 10, 10, 3, 3]


def test_policy_is_informed_of_the_first_step_of_each_episode() -> None:
    """A step decided by nobody lies between an episode's last and the next one's first."""
    game = Scripted([2, 4])
    told: list[tuple[int, list[bool]]] = []
    steps: list[int] = []

    def choose(obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        steps.append(len(steps))
        return np.full(2, 3)

    def begin(first: npt.NDArray[np.bool_]) -> None:
        told.append((len(steps), first.tolist()))

    play(cast(BatchedEnv, game), choose, 6, 0, 100, begin)
    both, one, other = [True, True], [True, False], [False, True]
    assert told == [(0, both), (3, one), (5, other), (6, one), (9, one), (10, other), (12, one)]


def test_steps_that_only_reset_do_not_count() -> None:
    assert results(run_play(Scripted([4], pay=-2.5), 3)) == [(-10.0, 4, False)] * 3


def test_summary_matches_figures_by_hand() -> None:
    """Squares of the deviations: 4, 1 and 9."""
    found = {"mean": 3.0, "median": 2.0, "std": (14 / 3) ** 0.5, "min": 1.0, "max": 6.0}
    assert summary((1.0, 6.0, 2.0)) == pytest.approx(found)


def test_only_episodes_longer_than_the_limit_are_cut() -> None:
    """The second waits for the first, whose share is the same as ever; then both begin anew."""
    game = Scripted([3, NEVER])
    episodes = run_play(game, 6, max_steps=3)
    assert results(episodes) == [(3.0, 3, False)] * 3 + [(3.0, 3, True)] * 3
    assert game.seeds == [0, 2, 4]
    assert results(run_play(Scripted([4]), 2, max_steps=3)) == [(3.0, 3, True)] * 2


class NumbersForFlags(CartPoleVectorEnv):
    """Its flags are the numbers 0 and 1."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated.astype(np.int64), truncated.astype(np.int8), info


def test_end_flags_may_be_numbers() -> None:
    played = []
    for kind in (CartPoleVectorEnv, NumbersForFlags):
        game = BatchedEnv("flags", kind(3, max_episode_steps=9), 1, "")
        played.append(play(game, lambda obs: np.zeros(3, np.int32), 6, 0, 100))
        game.close()
    assert played[0] == played[1]


def test_cut_environment_that_ends_later_resets_by_itself() -> None:
    """The first's two are cut after steps 4 and 10, between which it ends and resets; then only the
    second is waited for, which was cut after step 4 and goes on."""
    game = Scripted([5, 30])
    assert results(run_play(game, 4, max_steps=4)) == [(4.0, 4, True)] * 4
    assert game.seeds == [0, 2]


def test_policy_is_informed_of_resets_after_cut_episodes() -> None:
    told: list[list[bool]] = []
    game = cast(BatchedEnv, Scripted([NEVER, NEVER]))
    play(game, lambda obs: np.full(2, 3), 4, 0, 3, lambda first: told.append(first.tolist()))
    assert told == [[True, True]] * 2


def test_a_bad_observation_is_named() -> None:
    with pytest.raises(UserError, match=r"nan at .* of environment 0's observation"):
        run_play(Scripted([5, 5], bad_after=2), 4)


@pytest.mark.parametrize("pay", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_named(pay: float) -> None:
    with pytest.raises(UserError, match=f"the environment gave a reward of {pay}; correct what"):
        run_play(Scripted([5, 5], pay=pay), 2)


def make_cartpole_run(folder: Path) -> Path:
    """A run whose checkpoint `last` pushes left, always."""
    config = resolve("cartpole")
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump(config))
    info = probe(config.env)
    layout = network_shape(config, info).layout
    weights = np.zeros(layout.size, np.float32)
    layout.views(weights)["policy.bias"][0] = 1.0
    checkpoint_format.save(folder / "checkpoints" / "last", Checkpoint(layout, weights))
    return folder


@pytest.fixture
def cartpole_run(tmp_path: Path) -> Path:
    return make_cartpole_run(tmp_path)


def test_a_run_is_evaluated_the_same_way_twice(cartpole_run: Path) -> None:
    first, again = (evaluate(str(cartpole_run), 20, "best", False, 7, None) for _ in range(2))
    assert first == again
    assert first["checkpoint"] == "last"  # there is no better one yet
    assert (first["episodes"], len(first["returns"]), len(first["lengths"])) == (20, 20, 20)
    assert first["returns"] == first["lengths"]  # CartPole pays 1 a step
    assert 8 <= first["return"]["min"] <= first["return"]["mean"] <= first["return"]["max"] <= 11
    sampled = evaluate(str(cartpole_run), 20, "last", True, 7, None)
    assert sampled["return"]["mean"] > first["return"]["mean"]
    assert describe(sampled).splitlines()[0] == (
        f"{cartpole_run}, checkpoint last: 20 episodes, sampled actions, seed 7"
    )


def test_folder_without_a_run_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run"):
        evaluate(str(tmp_path), 20, "best", False, 0, None)


def plays(folder: Path, way: str) -> None:
    """Note in the run's checkpoint that it is to be played so."""
    last = folder / "checkpoints" / "last"
    stored = checkpoint_format.load(last)
    checkpoint_format.save(last, replace(stored, meta={**stored.meta, "play": {"way": way}}))


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_evaluation_plays_in_the_way_that_the_run_found_better(
    cartpole_run: Path, way: str
) -> None:
    options = (str(cartpole_run), 20, "last")
    likeliest, sampled = (evaluate(*options, sample, 7, None) for sample in (False, True))
    assert sampled["returns"] != likeliest["returns"]
    assert evaluate(*options, None, 7, None) == likeliest  # as in an older version
    plays(cartpole_run, way)
    assert evaluate(*options, None, 7, None) == (sampled if way == "sampled" else likeliest)
    assert evaluate(*options, False, 7, None) == likeliest
    assert f"{way} actions" in describe(evaluate(*options, None, 7, None))


def test_an_exported_file_is_evaluated_as_its_run(cartpole_run: Path, tmp_path: Path) -> None:
    plays(cartpole_run, "sampled")
    file = tmp_path / "agent.safetensors"
    load_policy(cartpole_run, "last").save(file)
    of_run = evaluate(str(cartpole_run), 6, "last", None, 7, None)
    of_file = evaluate(str(file), 6, "best", None, 7, None)
    assert of_file["returns"] == of_run["returns"]
    assert (of_file["checkpoint"], of_file["sample"]) == ("file", True)
    assert of_file["max_episode_steps"] == of_run["max_episode_steps"]
    assert describe(of_file).startswith(f"{file}: 6 episodes, sampled actions")


AGENTS = sorted((Path(__file__).parents[3] / "docs" / "agents").glob("*.safetensors"))


@pytest.mark.parametrize("file", AGENTS, ids=lambda file: file.stem)
def test_documented_agents_can_be_evaluated(file: Path) -> None:
    page = (file.parents[1] / "agents.md").read_text(encoding="utf-8")
    assert f"| `{file.stem}` |" in page
    found = evaluate(str(file), 1, "best", None, 0, 50)
    assert len(found["returns"]) == 1


def test_an_exported_file_for_other_observations_is_refused(
    cartpole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, file = load_policy(cartpole_run, "last"), tmp_path / "agent.safetensors"
    policy.save(file)
    found = exported.read(file)
    other = found.config.env.model_copy(update={"id": "Acrobot-v1"})
    changed = found._replace(config=found.config.model_copy(update={"env": other}))
    monkeypatch.setattr(exported, "read", lambda *_, **__: changed)
    with pytest.raises(UserError, match="with other observations or actions"):
        evaluate(str(file), 2, "best", None, 7, None)


def test_neighbouring_seeds_play_different_episodes() -> None:
    seeds = []
    for seed in range(3):
        game = Scripted([4, 4])
        play(cast(BatchedEnv, game), lambda obs: np.full(2, 3), 8, seed, 3)  # each is cut
        seeds.append({first + i for first in game.seeds for i in range(game.count)})
    assert [len(each) for each in seeds] == [8, 8, 8]
    assert len(set.union(*seeds)) == 24


def test_runs_of_several_seeds_are_evaluated_into_one_table(tmp_path: Path) -> None:
    for seed in (2, 10):
        make_cartpole_run(tmp_path / f"seed-{seed}")
    (tmp_path / "seed-11").mkdir()  # without a config it is not a run
    result = evaluate_seeds(str(tmp_path), 4, "best", False, 7, None)
    each = [evaluate(str(tmp_path / name), 4, "best", False, 7, None) for name in SEEDS]
    assert result["runs"] == each
    mean = (each[0]["return"]["mean"] + each[1]["return"]["mean"]) / 2
    assert result["return"]["mean"] == mean
    title, head, first, second, last, spread = describe_seeds(result).splitlines()
    assert title == f"{tmp_path}: 2 runs"
    columns = ["run", "checkpoint", "actions", "episodes", "return", "std", "length"]
    assert head.split() == columns
    assert [first.split()[0], second.split()[0]] == list(SEEDS)
    assert last.split()[:3] == ["mean", "8", f"{mean:.4g}"]
    between = abs(each[0]["return"]["mean"] - each[1]["return"]["mean"]) / 2**0.5
    assert spread == f"standard deviation between the runs: {between:.4g}"


def test_seed_without_a_checkpoint_is_reported_and_the_others_evaluated(tmp_path: Path) -> None:
    for name in SEEDS:
        make_cartpole_run(tmp_path / name)
    shutil.rmtree(tmp_path / "seed-10" / "checkpoints")
    result = evaluate_seeds(str(tmp_path), 4, "best", False, 7, None)
    [run] = result["runs"]
    assert run["run_dir"] == str(tmp_path / "seed-2")
    assert "seed-10 was not evaluated: " in describe_seeds(result).splitlines()[-1]
    shutil.rmtree(tmp_path / "seed-2" / "checkpoints")
    with pytest.raises(UserError, match="seed-2"):
        evaluate_seeds(str(tmp_path), 4, "best", False, 7, None)


def test_folder_of_a_run_is_not_a_folder_of_seeds(cartpole_run: Path) -> None:
    make_cartpole_run(cartpole_run / "seed-1")
    assert seed_runs(str(cartpole_run)) == []
