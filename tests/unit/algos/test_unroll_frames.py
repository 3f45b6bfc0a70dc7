"""Stacks that are made of single frames equal those that the actor saw, bit for bit."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gymnasium import spaces

from fake_inference import ScriptedInference, given
from penstock.actors.matches import make_environments
from penstock.actors.rollout import Rollout, check_shift
from penstock.algos.ops.frame_stacks import observations, some_observations, stacks
from penstock.algos.samples import network_shape, slot_spec
from penstock.algos.slots import BEGINS, OLDER, check, frames_of_unroll
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.params import Stamp
from penstock.core.specs import SlotSpec
from penstock.envs import probe
from penstock.profiling.ledger import TimeLedger

Array = npt.NDArray[Any]


def episodes(
    rng: np.random.Generator, rows: int, depth: int, frame: tuple[int, ...], dtype: str
) -> tuple[Array, Array, Array]:
    """Stacks ``[rows, depth, *frame]`` of one environment as it shows them, with a frame of its own
    at every step; whether each row is an episode's first, and whether zeros stand before it."""
    seen, first, zeros = [], np.zeros(rows, bool), np.zeros(rows, bool)
    stack: deque[Array] = deque(maxlen=depth)
    for row in range(rows):
        new = rng.integers(1, 200, frame).astype(dtype)
        if row == 0 or rng.random() < 0.25:
            first[row], zeros[row] = True, rng.random() < 0.5
            stack.extend([np.zeros_like(new) if zeros[row] else new] * depth)
        stack.append(new)
        seen.append(np.stack(stack))
    return np.stack(seen), first, zeros


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("depth", "unroll", "frame", "dtype"),
    [
        (4, 9, (4, 6), "|u1"),  # whole words
        (4, 9, (3, 5), "|u1"),
        (3, 1, (2,), "<f4"),  # an unroll shorter than a stack
        (6, 3, (7,), "<i2"),
        (2, 20, (1,), "<f4"),
    ],
)
def test_stacks_of_random_episodes_equal_those_of_the_actor(
    seed: int, depth: int, unroll: int, frame: tuple[int, ...], dtype: str
) -> None:
    rng, envs, before = np.random.default_rng(seed), 5, 8
    played = [episodes(rng, before + unroll + 1, depth, frame, dtype) for _ in range(envs)]
    seen = np.stack([stack[before:] for stack, _, _ in played], axis=1)  # [T + 1, E, K, *frame]
    begins = np.stack([first * (1 + zeros.astype(int)) for _, first, zeros in played], axis=1)
    batch = {
        "obs": torch.from_numpy(seen[:, :, -1].copy()),
        OLDER: torch.from_numpy(seen[0, :, :-1].copy()),
        BEGINS: torch.from_numpy(begins[before + 1 :].astype(np.uint8)),
    }
    found = observations(batch, slice(1, 4))
    assert found.dtype == batch["obs"].dtype
    np.testing.assert_array_equal(found.numpy(), seen[:, 1:4])
    np.testing.assert_array_equal(observations(batch, slice(2, 3)).numpy(), seen[:, 2:3])
    some = torch.tensor([4, 0, 2])
    np.testing.assert_array_equal(observations(batch, some).numpy(), seen[:, [4, 0, 2]])
    batch["alive"] = torch.from_numpy(rng.random((unroll, envs)) < 0.8)
    alone = {
        "obs": torch.from_numpy(seen),
        "alive": batch["alive"],
    }  # stacks that are written whole
    for columns in (batch, alone):
        torch.manual_seed(seed)
        rows = torch.randint(unroll * envs, (4,)).numpy()
        torch.manual_seed(seed)
        drawn, alive = some_observations(columns, 4)
        np.testing.assert_array_equal(drawn.numpy(), seen[:-1].reshape(-1, *seen.shape[2:])[rows])
        np.testing.assert_array_equal(alive.numpy(), batch["alive"].numpy().ravel()[rows])
    whole, alive = some_observations(batch, None)
    np.testing.assert_array_equal(whole.numpy(), seen)
    assert alive is batch["alive"]


@pytest.mark.gpu
def test_stacks_on_a_gpu_equal_those_on_a_cpu() -> None:
    rng = np.random.default_rng(0)
    newest, older = (torch.from_numpy(rng.integers(0, 256, shape, np.uint8)) for shape in
                     ((21, 64, 84, 84), (64, 3, 84, 84)))  # fmt: skip
    begins = torch.from_numpy(rng.choice(3, (20, 64), p=(0.9, 0.05, 0.05)).astype(np.uint8))
    there = stacks(*(tensor.to("cuda") for tensor in (newest, older, begins)))
    assert torch.equal(there.cpu(), stacks(newest, older, begins))


def play(config: Config, slots: int) -> list[dict[str, Array]]:
    """The columns of so many slots of one actor."""
    game = make_environments(config, 0, TimeLedger(), timed=False)
    spec = slot_spec(config, game.info)
    actions = int(game.info.action_space.n)  # type: ignore[union-attr]
    rng, logp = np.random.default_rng(3), np.full(game.count, -1, np.float32)
    chance = ScriptedInference(
        lambda _: rng.integers(0, actions, game.count, np.int32), behaviour_logp=logp
    )
    rollout, played = Rollout(game, chance, 5, TimeLedger()), []
    weights = np.zeros(network_shape(config, game.info).layout.size, np.float32)
    game.refresh(lambda out, newer_than, policy_id=0: given(weights, Stamp(0, 1))(out, newer_than))
    for index in range(slots):
        columns = spec.views(spec.zeros())
        rollout.fill(columns, index)
        check(columns)
        played.append(columns)
    game.close()
    return played


ATARI = (
    *("actors.envs=3", "actors.unroll=7", "learner.updates_per_batch=1"),
    *("env.kwargs.max_num_frames_per_episode=36", "env.kwargs.noop_max=0"),
)


MATCHES = (
    *("env.kind=vector", "algo.name=impala", "actors.envs=8", "actors.unroll=9"),
    *("league.mirror=0.5", "model.kind=mlp"),
)


def cartpole(padding: str) -> tuple[str, ...]:
    stacked = "gymnasium.wrappers:FrameStackObservation"
    how = f"{{'{stacked}': {{stack_size: 4, padding_type: {padding}}}}}"
    return f"env.wrappers=[{how}]", "actors.envs=4", "actors.unroll=9", "learner.device=cpu"


@pytest.mark.parametrize(
    ("target", "options", "slots", "kinds"),
    [
        ("pong", ATARI, 12, {0, 2}),
        ("cartpole", cartpole("reset"), 40, {0, 1}),
        ("cartpole", cartpole("zero"), 40, {0, 2}),
        ("seat_game:Rolling", MATCHES, 12, {0, 1}),
    ],
)
def test_stacks_of_real_games_equal_those_of_the_actor(
    target: str, options: tuple[str, ...], slots: int, kinds: set[int]
) -> None:
    if target == "pong":
        pytest.importorskip("ale_py")
    depth = 2 if target == "seat_game:Rolling" else 4
    whole = play(resolve(target, [*options, "transport.frame_stack=null"]), slots)
    frames = play(resolve(target, [*options, f"transport.frame_stack={depth}"]), slots)
    for known, written in zip(whole, frames, strict=True):
        batch = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in written.items()
                 if n in ("obs", OLDER, BEGINS)}  # fmt: skip
        made = observations(batch, slice(None)).numpy()
        assert made.dtype == known["obs"].dtype
        np.testing.assert_array_equal(made, known["obs"])
        for name in ("action", "reward", "alive", "terminated", "truncated", "episode_return"):
            np.testing.assert_array_equal(written[name], known[name])
    assert {int(kind) for slot in frames for kind in np.unique(slot[BEGINS])} == kinds
    assert sum(int((~slot["alive"]).sum()) for slot in whole) >= 8


def test_pong_slot_with_single_frames_has_little_more_than_a_quarter_of_the_bytes() -> None:
    pytest.importorskip("ale_py")
    config = resolve("pong", ["transport.frame_stack=4"])
    info = probe(config.env)
    whole = slot_spec(resolve("pong", ["transport.frame_stack=null"]), info)
    frames = slot_spec(config, info)
    row, rows = 84 * 84 * config.actor_envs, config.actors.unroll + 1
    assert whole.payload_nbytes - frames.payload_nbytes + config.actors.unroll * (
        config.actor_envs  # the column that tells where episodes begin
    ) == pytest.approx(row * (rows * 4 - rows - 3), rel=1e-3)


def test_frames_must_be_the_first_axis() -> None:
    config = resolve("synthetic", ["transport.frame_stack=4", "env.kwargs.obs_shape=[3,8,8]"])
    with pytest.raises(UserError, match=r"is 4 and observations have shape \[3, 8, 8\]"):
        slot_spec(config, probe(config.env))


def test_stacks_that_do_not_shift_by_one_frame_are_refused() -> None:
    options = ["transport.frame_stack=4", "env.kwargs.obs_shape=[4,8,8]", "actors.envs=4"]
    with pytest.raises(UserError, match=r"frame_stack=null"):
        play(resolve("synthetic", options), 1)


def test_a_shift_is_checked_only_within_an_episode() -> None:
    frames = np.arange(6 * 2, dtype=np.uint8).reshape(6, 2, 1)
    last = frames[-3:].swapaxes(0, 1).copy()
    begins = np.zeros((5, 2), np.uint8)
    check_shift(last, frames, begins)
    last[1, 0] += 1
    with pytest.raises(UserError, match="do not move on"):
        check_shift(last, frames, begins)
    begins[2, 1] = 1  # with row 3, the oldest of the stack
    with pytest.raises(UserError, match="do not move on"):
        check_shift(last, frames, begins)
    begins[3, 1] = 1
    check_shift(last, frames, begins)


def test_received_slot_with_an_unknown_kind_of_beginning_is_refused() -> None:
    from penstock.algos.impala import algorithm as impala

    space = spaces.Box(0, 255, (4, 8, 8), np.uint8)
    spec = SlotSpec(2, 2, frames_of_unroll(impala.columns(space, spaces.Discrete(2)), 4))
    columns = spec.views(spec.zeros())
    check(columns)
    columns[BEGINS][1, 1] = 3
    with pytest.raises(ValueError, match="column begins holds 3"):
        check(columns)
