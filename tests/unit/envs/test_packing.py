"""Dict and tuple observations and multi-discrete actions, against the environments' own spaces."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from broken_envs import Masked, ResetsItself, Sound
from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.core.observations import (
    ObservationPart,
    laid_out,
    row_nbytes,
    views,
)
from penstock.envs import BatchedEnv, EnvInfo, find_bad_observation, make
from penstock.envs.checking.vector import draw
from penstock.envs.packing import Packer
from penstock.envs.vector_env import action_map

Array = npt.NDArray[Any]
COUNT = 3


class Everything(gymnasium.Env[Any, Any]):
    """Shows a sample of a space of every kind, and remembers what it was told to do."""

    observation_space = spaces.Dict(
        pixels=spaces.Box(0, 255, (2, 3), np.uint8),
        place=spaces.Box(-9, 9, (3,), np.float64),
        ammo=spaces.Box(0, 50, (), np.int64),
        lit=spaces.Box(0, 1, (5,), np.bool_),
        weapon=spaces.Discrete(4, start=2),
        action_mask=spaces.MultiBinary(7),
        body=spaces.Dict(
            limbs=spaces.MultiDiscrete(np.array([[2, 3], [4, 2]])),
            pair=spaces.Tuple([spaces.MultiBinary(2), spaces.Discrete(2)]),
        ),
    )
    action_space = spaces.MultiDiscrete([3, 4], start=[1, 0])

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.told: list[Any] = []
        self.rng = np.random.default_rng(0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.observation_space = spaces.Dict(type(self).observation_space.spaces)
        self.observation_space.seed(seed)
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.told.append(action.copy())
        return self._show(), 0.0, False, False, {}

    def _show(self) -> Any:
        self.shown.append(self.observation_space.sample())
        return self.shown[-1]


def everything() -> tuple[BatchedEnv, list[Any]]:
    vector = SyncVectorEnv([Everything] * COUNT, autoreset_mode=AutoresetMode.NEXT_STEP)
    return BatchedEnv("everything", vector, 1, "how"), [env.unwrapped for env in vector.envs]


def first(game: BatchedEnv, seed: int = 0) -> Array:
    space = game.info.observation_space
    out = np.full((game.count, *space.shape), 77, space.dtype)
    game.reset_into(seed, out)
    return out


def expected(shown: Any) -> dict[str, Array]:
    """The parts of one observation of `Everything`, written down by hand."""
    limbs = [
        np.eye(n)[v] for n, v in zip([2, 3, 4, 2], shown["body"]["limbs"].ravel(), strict=True)
    ]
    return {
        "pixels": shown["pixels"],
        "place": shown["place"].astype(np.float32),
        "ammo": np.float32(shown["ammo"]),
        "lit": shown["lit"] * np.uint8(255),
        "weapon": np.eye(4, dtype=np.float32)[shown["weapon"] - 2],
        "action_mask": shown["action_mask"].astype(np.uint8),
        "body.limbs": np.concatenate(limbs),
        "body.pair.0": shown["body"]["pair"][0].astype(np.float32),
        "body.pair.1": np.eye(2, dtype=np.float32)[shown["body"]["pair"][1]],
    }


def test_dict_of_every_kind_of_space_is_restored_from_its_bytes() -> None:
    game, envs = everything()
    parts, packed = game.info.parts, first(game)
    assert game.info.observation_space == spaces.Box(0, 255, (row_nbytes(parts),), np.uint8)
    assert all(part.offset % 8 == 0 for part in parts)
    for _ in range(20):
        arrays = views(parts, packed)
        for i, env in enumerate(envs):
            wanted = expected(env.shown[-1])
            assert arrays.keys() == wanted.keys()
            for name, value in wanted.items():
                np.testing.assert_array_equal(arrays[name][i], value, err_msg=name)
        game.step_into(np.zeros((COUNT, 2), np.int32), packed)
    assert {part.dtype for part in parts} == {"<f4", "|u1"}


def test_parts_of_a_row_lie_at_their_offsets() -> None:
    parts = laid_out([("a", (3,), "|u1"), ("b", (2,), "<f4"), ("c", (), "<f4")])
    assert parts == (
        ObservationPart("a", (3,), "|u1", 0),
        ObservationPart("b", (2,), "<f4", 8),
        ObservationPart("c", (), "<f4", 16),
    )
    assert row_nbytes(parts) == 24
    packed = np.zeros((2, 5, 24), np.uint8)
    packed[1, 4, 8:16] = np.array([1.5, -2], "<f4").view(np.uint8)
    found = views(parts, packed)
    assert [found[name].shape for name in "abc"] == [(2, 5, 3), (2, 5, 2), (2, 5)]
    assert found["b"][1, 4].tolist() == [1.5, -2]
    found["c"][0, 0] = 1
    assert packed[0, 0, 16:20].tolist() == [0, 0, 128, 63]  # a view: 1.0 in IEEE 754


@pytest.mark.parametrize(("env_id", "size"), [("FrozenLake-v1", 16), ("Taxi-v4", 500)])
def test_a_choice_as_an_observation_is_one_hot(env_id: str, size: int) -> None:
    game, env = make(EnvConfig(id=env_id), 1), gymnasium.make(env_id)
    assert game.info.observation_space == spaces.Box(0, 1, (size,), np.float32)
    assert game.info.parts == ()
    out, (shown, _) = first(game, 5), env.reset(seed=5)
    for action in [1, 2, 0, 1, 2, 0]:
        np.testing.assert_array_equal(out[0], np.eye(size)[shown])
        shown, _, over, _, _ = env.step(action)
        game.step_into(np.array([action]), out)
        if over:
            break


def test_blackjack_shows_three_choices() -> None:
    game, env = make(EnvConfig(id="Blackjack-v1"), 1), gymnasium.make("Blackjack-v1")
    out, (shown, _) = first(game, 9), env.reset(seed=9)
    found = views(game.info.parts, out)
    assert [part.name for part in game.info.parts] == ["0", "1", "2"]
    for name, size, value in zip("012", (32, 11, 2), shown, strict=True):
        np.testing.assert_array_equal(found[name][0], np.eye(size)[value])


def test_multi_discrete_actions_are_shifted_to_the_space_of_the_environment() -> None:
    game, envs = everything()
    out = first(game)
    assert game.info.action_space == spaces.MultiDiscrete([3, 4], start=[1, 0])
    for pair in itertools.product(range(3), range(4)):
        game.step_into(np.tile(np.array(pair, np.int32), (COUNT, 1)), out)
        assert envs[1].told[-1].tolist() == [pair[0] + 1, pair[1]]


def test_multi_binary_actions_are_choices_of_two() -> None:
    class Switches(Everything):
        action_space = spaces.MultiBinary(4)  # type: ignore[assignment]

    def make_masked() -> Any:
        return gymnasium.wrappers.TransformObservation(
            Switches(), lambda shown: shown["place"], Everything.observation_space["place"]
        )

    vector = SyncVectorEnv([make_masked] * 2)
    game = BatchedEnv("switches", vector, 1, "how")
    assert game.info.action_space == spaces.MultiDiscrete([2, 2, 2, 2])
    out = first(game)
    game.step_into(np.array([[0, 1, 1, 0], [1, 1, 0, 0]], np.int32), out)
    told = [getattr(env.unwrapped, "told")[-1] for env in vector.envs]  # noqa: B009
    assert np.array(told).tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
    assert told[0].dtype == np.int8


def test_bad_observations_are_nonfinite_floats_or_masks_that_allow_no_action() -> None:
    parts = laid_out([("seen", (2,), "|u1"), ("felt", (3,), "<f4"), ("action_mask", (2,), "|u1")])
    rows = np.full((4, 2, row_nbytes(parts)), 255, np.uint8)  # as floats, these bytes are NaN
    found = views(parts, rows)
    found["felt"][:] = 0
    assert find_bad_observation(rows, parts) is None
    found["action_mask"][2, 1] = 0
    sentence = "no action allowed by environment 1's action_mask in row 2"
    assert find_bad_observation(rows, parts) == sentence
    alive = np.ones((3, 2), np.bool_)
    assert find_bad_observation(rows, parts, alive) == sentence
    alive[2, 1] = False
    found["action_mask"][3, 0] = 0  # what follows the last decision
    assert find_bad_observation(rows, parts, alive) is None
    found["felt"][3, 0, 1] = np.inf
    assert find_bad_observation(rows, parts, alive) == (
        "inf at [1] of environment 0's observation felt in row 3"
    )


def test_mask_must_allow_an_action_for_each_choice() -> None:
    counts = EnvInfo(spaces.Box(0, 1), spaces.MultiDiscrete([2, 3, 1]), 1, "").counts
    assert counts == (2, 3, 1)
    parts = laid_out([("action_mask", (6,), "|u1")])
    rows = np.zeros((2, 2, row_nbytes(parts)), np.uint8)
    rows[..., :6] = 1
    assert find_bad_observation(rows, parts, None, counts) is None
    rows[1, 0, :6] = [0, 1, 0, 0, 0, 1]
    assert find_bad_observation(rows, parts, None, counts) == (
        "no action allowed for choice 1 of 3, counted from 0, by environment 0's action_mask in "
        "row 1"
    )
    alive = np.array([[True, True], [False, True]])
    assert find_bad_observation(rows, parts, alive, counts) is None


class Growing(Everything):
    """Its third observation is longer."""

    def _show(self) -> Any:
        shown = super()._show()
        if len(self.shown) == 3:
            shown["place"] = np.zeros(4)
        return shown


class Growth(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)
    shown = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.shown += 1
        return np.zeros(2 + (self.shown > 1), np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("kind", "actions", "sentence"),
    [
        (
            Growing,
            np.zeros((2, 2), np.int32),
            r"observation, in place, of shape \[4\] where .*\[3\]",
        ),
        (Growth, np.zeros(2, np.int32), r"observation of shape \[3\] where its space says \[2\]"),
    ],
)
def test_observation_that_changes_shape_is_refused_in_one_sentence(
    kind: Any, actions: Array, sentence: str
) -> None:
    game = BatchedEnv("growing", SyncVectorEnv([kind] * 2), 1, "how")
    out = first(game)
    game.step_into(actions, out)
    with pytest.raises(UserError, match=f"^environment growing returned an {sentence}"):
        game.step_into(actions, out)


class Doubles(Sound):
    observation_space: Any = spaces.Box(0, 255, (2,), np.uint8)

    def show(self) -> Any:
        return np.full(2, float(self.age))


class InADict(Doubles):
    observation_space = spaces.Dict(pixels=Doubles.observation_space)

    def show(self) -> Any:
        return {"pixels": super().show()}


@pytest.mark.parametrize(("kind", "where"), [(Doubles, ""), (InADict, ", in pixels,")])
def test_observation_of_another_dtype_is_refused_in_one_sentence(kind: Any, where: str) -> None:
    game = BatchedEnv("doubles", SyncVectorEnv([kind] * 2), 1, "how")
    sentence = f"^environment doubles returned an observation{where} of dtype float64 where its "
    with pytest.raises(UserError, match=f"{sentence}space says uint8; correct"):
        first(game)


def test_errors_of_an_environment_with_list_observations_pass_unchanged() -> None:
    """Neither was wrong with its observations."""

    class Fails(Sound):
        def show(self) -> Any:
            return [0.5, float(self.age)]

        def step(self, action: Any) -> Any:
            if self.age == 2:
                raise TypeError("of its own")
            return super().step(action)

    class FailsInDoubles(Fails):
        def show(self) -> Any:
            return np.array(super().show())

    for kind in (Fails, FailsInDoubles):
        game = BatchedEnv("it", SyncVectorEnv([kind] * 2), 1, "how")
        out = first(game)
        for _ in range(2):
            game.step_into(np.zeros(2, np.int32), out)
        assert out.tolist() == [[0.5, 2]] * 2
        with pytest.raises(TypeError, match="of its own"):
            game.step_into(np.zeros(2, np.int32), out)


class Beyond(Sound):
    """Its choices count too far in the third step."""

    observation_space: Any = spaces.Discrete(3, start=4)

    def show(self) -> Any:
        return 4 + self.age


class BeyondInATuple(Beyond):
    observation_space = spaces.Tuple([spaces.MultiDiscrete([9, 7])])

    def show(self) -> Any:
        return (np.array([4 + self.age, 4 + self.age]),)


@pytest.mark.parametrize(("kind", "where"), [(Beyond, ""), (BeyondInATuple, "in 0 ")])
def test_discrete_observation_outside_its_space_is_refused_in_one_sentence(
    kind: Any, where: str
) -> None:
    """Of its one-hot form nothing would be left."""
    game = BatchedEnv("beyond", SyncVectorEnv([kind] * 2), 1, "how")
    out = first(game)
    for _ in range(2):
        game.step_into(np.zeros(2, np.int32), out)
    sentence = (
        f"^environment beyond returned observations {where}with 7, which is not in .*Discrete"
    )
    with pytest.raises(UserError, match=sentence):
        game.step_into(np.zeros(2, np.int32), out)


def test_observations_of_another_byte_order_are_converted() -> None:
    class Swapped(Sound):
        observation_space = spaces.Box(-9, 900, (2,), np.dtype(">i4"))

        def show(self) -> Any:
            return np.array([self.age, 258], ">i4")

    game = BatchedEnv("swapped", SyncVectorEnv([Swapped] * 2), 1, "how")
    out = first(game)
    assert out.dtype.isnative
    game.step_into(np.zeros(2, np.int32), out)
    assert out.tolist() == [[1, 258]] * 2


@pytest.mark.parametrize(
    ("kind", "one", "other", "note"),
    [
        (np.int64, 2**24, 2**24 + 1, "16777216 and 16777217 at [1]"),
        (np.uint32, 2**31, 2**31 + 3, "2147483648 and 2147483651 at [1]"),
        (np.float64, 1.7e9, 1.7e9 + 0.01, "1700000000.0 and 1700000000.01 at [1]"),
        (np.int64, 2**24, 2**24 + 2, ""),
        (np.float64, 0.5, 0.5 + 1e-12, ""),  # a simulation at rest
    ],
)
def test_numbers_that_float32_merges_are_noted_once(
    kind: type, one: float, other: float, note: str, notes: list[str]
) -> None:
    """Also where they differ between environments, as numbers of their own do."""
    box = spaces.Box(0, 2e9, (2,), kind)
    for steps in ([[one, one], [other, other], [one, one]], [[one, other], [one, other]]):
        packer = Packer("ids", spaces.Dict(id=box))
        packer.watch_precision(10)
        for row in steps:
            seen: Any = np.array([[0, number] for number in row], kind)
            packer.write({"id": seen}, np.zeros((2, 8), np.uint8))
        found = [text for text in notes if f"{note} of its observations in id," in text]
        assert len(found) == len(notes) == bool(note)
        notes.clear()


def test_integer_beyond_float32_precision_is_noted(
    notes: list[str],
) -> None:
    packer = Packer("ids", spaces.Dict(id=spaces.Box(0, 2**31 - 1, (1,), np.int64)))
    packer.watch_precision(1)

    packer.write({"id": np.array([[2**30 + 1], [5]])}, np.zeros((2, 8), np.uint8))

    assert len(notes) == 1
    assert "1073741825" in notes[0]


def test_discrete_observation_with_a_large_start_is_one_hot(notes: list[str]) -> None:
    packer = Packer("ids", spaces.Dict(id=spaces.Discrete(2, start=2**40)))
    packer.watch_precision(2)

    for number in (2**40, 2**40 + 1):
        packer.write({"id": np.array([number])}, np.zeros((1, 8), np.uint8))

    assert notes == []


def test_actions_within_wide_bounds_of_float16_stay_in_proportion() -> None:
    scaled = action_map(spaces.Box(-40_000, 40_000, (1,), np.float16))

    actions = scaled(np.array([[0.7]], np.float32))

    assert actions.dtype == np.float16
    assert float(actions[0, 0]) == pytest.approx(28_000, rel=1e-3)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.Discrete(3, dtype=np.int8),
        spaces.Discrete(3, start=10, dtype=np.uint8),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiDiscrete([3, 4], start=[1, 0], dtype=np.int16),
        spaces.MultiBinary(2),
        spaces.Box(-3, 5, (2,), np.float64),
        spaces.Box(-3, 5, (2,), np.float16),
    ],
    ids=str,
)
def test_actions_have_the_type_and_dtype_of_space_samples(space: spaces.Space[Any]) -> None:
    class Told(Sound):
        action_space = space

        def step(self, action: Any) -> Any:
            assert space.contains(action)
            assert type(action) is type(space.sample())
            assert action.dtype == space.dtype
            return super().step(np.int64(0))

    vector = SyncVectorEnv([Told] * COUNT, autoreset_mode=AutoresetMode.NEXT_STEP)
    game = BatchedEnv("told", vector, 1, "how")
    out = first(game)
    game.step_into(draw(game.info.action_space, COUNT, np.random.default_rng(0)), out)


def test_action_outside_the_space_is_reported_in_one_sentence() -> None:
    env = EnvConfig(id="CartPole-v1", wrappers=["gymnasium.wrappers:OrderEnforcing"])
    game = make(env, 2)
    out = first(game)
    game.step_into(np.array([1, 0]), out)
    with pytest.raises(UserError, match=r"given the action 2, and there are 2 .* action_mask for"):
        game.step_into(np.array([1, 2]), out)


def refusal(kind: Any, action: Array, text: str) -> Exception:
    """What a step raises where the environment raises ValueError(text)."""

    class Refuses(kind):  # type: ignore[misc]
        def step(self, action: Any) -> Any:
            raise ValueError(text)

    game = BatchedEnv("falls", SyncVectorEnv([Refuses]), 1, "how")
    out = first(game)
    with pytest.raises((UserError, ValueError)) as caught:
        game.step_into(action, out)
    return caught.value


def test_errors_of_the_environment_itself_pass_unchanged() -> None:
    for text in ("the rope broke", "deactivation removed"):
        error = refusal(Sound, np.zeros(1, np.int32), text)
        assert str(error) == text
        assert isinstance(error, ValueError)
        assert not hasattr(error, "__notes__")


def test_an_illegal_action_is_explained_by_the_mask() -> None:
    unmasked = refusal(Sound, np.zeros(1, np.int32), "Illegal move 0")
    assert isinstance(unmasked, ValueError)
    assert "an entry action_mask, a value for each choice" in unmasked.__notes__[0]
    forbidden = refusal(Masked, np.array([[0, 0]], np.int32), "no")
    assert isinstance(forbidden, UserError)
    assert str(forbidden) == (
        "environment falls raised ValueError at the action [0, 0], which its action_mask forbids; "
        "correct the action_sampler that chose it"
    )
    allowed = refusal(Masked, np.array([[0, 1]], np.int32), "invalid action")
    assert isinstance(allowed, ValueError)
    assert "its action_mask must forbid it: correct the mask" in allowed.__notes__[0]


def test_mask_is_remembered_after_its_memory_was_reused() -> None:
    """As that of a slot after an unroll."""
    game = BatchedEnv("it", SyncVectorEnv([Masked]), 1, "how")
    out = first(game)
    later = out.copy()
    views(game.info.parts, out)["action_mask"][...] = 1
    with pytest.raises(UserError, match="which its action_mask forbids"):
        game.step_into(np.zeros((1, 2), np.int32), later)


def test_packing_writes_into_the_given_rows() -> None:
    game, _ = everything()
    out = first(game)
    before = out.ctypes.data
    game.step_into(np.zeros((COUNT, 2), np.int32), out)
    assert out.ctypes.data == before
    slot = np.zeros((5, COUNT, out.shape[1]), np.uint8)
    game.step_into(np.zeros((COUNT, 2), np.int32), slot[2])
    assert slot[2].any()
    assert not slot[[0, 1, 3, 4]].any()


def test_error_after_a_mask_without_allowed_actions_names_the_mask() -> None:
    class Shuts(Masked):
        def allowed(self) -> Any:
            return [1, 1, self.age != 3, 0, 0]

    for kind, action, steps, told in (
        (Shuts, 0, 3, (UserError, "it raised ValueError after .* choice 1 of 2, .* in row 0")),
        (Masked, 1, 5, (UserError, "at the action .0, 0., which its action_mask forbids")),
        # where one episode is over, and its mask allows nothing
    ):
        vector = SyncVectorEnv([kind] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
        vector.envs[1].unwrapped.last = 9  # type: ignore[attr-defined]
        game = BatchedEnv("it", vector, 1, "how")
        out = first(game)
        for _ in range(steps):
            game.step_into(np.full((2, 2), [0, action], np.int32), out)
        with pytest.raises(told[0], match=told[1]):
            game.step_into(np.zeros((2, 2), np.int32), out)


def test_error_after_a_nan_observation_names_the_observation() -> None:
    """A policy answers NaN by NaN, and what the game says of such an action would mislead."""

    class Broken(Sound):
        action_space = spaces.Box(-1, 1, (1,), np.float32)

        def step(self, action: Any) -> Any:
            assert np.isfinite(action).all(), "a strange action"
            self.age += 1
            return np.full(2, np.nan, np.float32), 0.0, False, False, {}

    game = BatchedEnv("it", SyncVectorEnv([Broken]), 1, "how")
    out = first(game)
    game.step_into(np.zeros((1, 1), np.float32), out)
    with pytest.raises(UserError, match="it raised AssertionError after an observation with nan"):
        game.step_into(np.full((1, 1), np.nan, np.float32), out)


def test_rewards_and_flags_may_be_lists() -> None:
    class Lists(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            shown, *results, info = super().step(actions)
            return (shown, *(array.tolist() for array in results), info)

    game = BatchedEnv("it", Lists([Sound] * 2), 1, "how")
    out = first(game)
    for result in game.step_into(np.zeros(2, np.int32), out):
        assert isinstance(result, np.ndarray)


def test_error_in_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Clings(Sound):
        def close(self) -> None:
            raise OSError("still busy")

    with caplog.at_level("INFO", "penstock"):
        BatchedEnv("it", SyncVectorEnv([Clings]), 1, "how").close()
    assert "it raised OSError: still busy in close(); correct it" in caplog.text


def test_a_game_that_resets_itself_is_refused_where_an_episode_ends() -> None:
    class Knowing(Sound):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], {"final_obs": "none yet"} if self.age < 5 else {})

    for kind, steps in ((ResetsItself, 5), (Knowing, 20), (Sound, 20)):
        vector = SyncVectorEnv([kind] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
        game = BatchedEnv("it", vector, 1, "how")
        out = first(game)
        for _ in range(steps - 1):
            game.step_into(np.zeros(2, np.int32), out)
        if kind is ResetsItself:
            with pytest.raises(UserError, match=r"it: it resets itself within .*terminal_observa"):
                game.step_into(np.zeros(2, np.int32), out)
