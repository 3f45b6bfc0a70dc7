"""Games against opponents: which rows learn, who plays the others, and what the learner sees."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from penstock.actors.matches import Matches, Plan, make_environments
from penstock.actors.opponent import BotPlayer, Chair, FrozenPlayer
from penstock.algos.acting import make_policy
from penstock.algos.samples import network_shape
from penstock.configs.errors import UserError
from penstock.configs.league import LeagueConfig
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.draws import BOT_DRAW, NO_DRAW, bot_draw, bot_index, draw_number
from penstock.core.observations import MASK, views
from penstock.core.params import Float32, Stamp
from penstock.core.state_bytes import from_bytes, to_bytes
from penstock.envs import BatchedEnv, make
from penstock.envs.seats import Seating
from penstock.models.acting.policy import Policy
from penstock.profiling.ledger import Part, TimeLedger

DUEL = Seating(2, (0, 1), ("random",))
YES, NO = True, False
Array = Any


class Boards:
    """Weights of chairs in memory, read as from a link."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.published: dict[int, tuple[Stamp, Float32]] = {}

    def publish(self, policy_id: int, number: int, weights: Float32 | None = None) -> None:
        if weights is None:
            weights = np.random.default_rng(number).normal(0, 2, self.size).astype(np.float32)
        self.published[policy_id] = Stamp(3, number), weights

    def read(self, out: Float32, newer_than: Stamp | None, policy_id: int = 0) -> Stamp | None:
        stamp, weights = self.published.get(policy_id, (None, None))
        if stamp is None or (newer_than is not None and stamp <= newer_than):
            return None
        out[...] = weights
        return stamp


class Watched(BatchedEnv):
    """Keeps what all rows did in the last step, and may hide who has won."""

    hides_outcome = False
    actions: Array
    rewards: Array

    def step_into(self, actions: Array, out: Array) -> Any:
        self.actions = actions.copy()
        results = super().step_into(actions, out)
        self.rewards = results[0].copy()
        if self.hides_outcome:
            self.outcome = None
        return results


class Played:
    """Environments in a loop, with random choices of the rows that learn."""

    def __init__(self, env: Any, choices: int, seed: int = 0) -> None:
        self.env = env
        self._rng = np.random.default_rng([seed, 9])
        self._choices = choices
        space = env.info.observation_space
        self.obs = np.zeros((env.count, *space.shape), space.dtype)

    def step(self) -> tuple[Array, Array, Array]:
        numbers = self._rng.random((self.env.count, self._choices))
        if self.env.info.parts:
            numbers *= masks_of(self.env, self.obs)[:, : self._choices]
        actions = numbers.argmax(1)
        results: tuple[Array, Array, Array] = self.env.step_into(actions, self.obs)
        return results


def masks_of(env: Any, obs: Array) -> Array:
    """Returns the action masks in packed observations, ``[rows, choices]``."""
    (part,) = (part for part in env.info.parts if part.name == MASK)
    return views((part,), obs)[MASK]


def config(game: str, *options: str) -> Config:
    return resolve(game, ["algo.name=impala", "env.kind=vector", "model.hidden=[8]", *options])


def matches_of(cfg: Config, actor: int = 0, chairs: int = 0) -> tuple[Matches, Boards]:
    """Returns the environments of an actor, with a first draw on each chair."""
    env = make_environments(cfg, actor, TimeLedger(), timed=False)
    assert isinstance(env, Matches)
    boards = Boards(network_shape(cfg, env.info).layout.size)
    for chair in range(1, chairs + 1):
        boards.publish(chair, chair)
    return env, boards


# --------------------------------------------------------------------------------------- plans


def test_rows_are_divided_into_mirror_games_chairs_and_bots() -> None:
    league = LeagueConfig(mirror=0.5, bots={"random": 0.125})
    plan = Plan.of(league, DUEL, rows=64, actor=1, chairs=4)
    assert plan.mirror_games == 16
    assert plan.chairs == (3, 4)
    assert plan.bots == ("random",)
    assert plan.opponent_games == (12, 12, 8)
    assert plan.opponent_rows == (12, 12, 8)
    assert plan.rows == 64
    assert plan.games == 48


def test_actors_divide_the_chairs_among_them() -> None:
    league = LeagueConfig(mirror=0.0)
    chairs = [Plan.of(league, DUEL, 8, actor, 5).chairs for actor in range(5)]
    assert chairs == [(1, 2), (3, 4), (5, 1), (2, 3), (4, 5)]
    assert Plan.of(league.model_copy(update={"chairs": 1}), DUEL, 7, 3, 1).chairs == (1,)


def test_teams_learn_side_by_side_and_their_opponent_plays_as_many_rows() -> None:
    teams = Seating(4, (0, 1, 1, 0))
    plan = Plan.of(LeagueConfig(mirror=0.5), teams, rows=16, actor=0, chairs=2)
    assert plan.turns == ((0, 3), (1, 2))
    assert plan.mirror_games == 2
    assert plan.opponent_games == (2, 2)
    assert plan.opponent_rows == (4, 4)


def test_fixed_seats_learn_alone() -> None:
    hunt = Seating(4, (0, 0, 0, 1))
    plan = Plan.of(LeagueConfig(mirror=0.0, seats=[3]), hunt, rows=8, actor=0, chairs=4)
    assert plan.turns == ((3,),)
    assert plan.opponent_rows == (12, 12)
    assert Plan.against(hunt, 5, seats=[2, 0]).turns == ((0, 2),)


def test_sides_of_unlike_size_need_seats() -> None:
    with pytest.raises(UserError, match=r"sides of the game have 3 and 1 seats.*league\.seats=\[0"):
        Plan.against(Seating(4, (0, 0, 0, 1)), 2)


def test_draws_and_scripted_players_have_numbers_of_their_own() -> None:
    assert draw_number(Stamp(2, 5)) == (2 << 32) + 5
    assert bot_index(draw_number(Stamp(2**30 - 1, 2**32 - 1))) is None
    assert [bot_index(bot_draw(index)) for index in (0, 7)] == [0, 7]
    assert bot_draw(0) == BOT_DRAW


# ------------------------------------------------------------------------ against a reference


class Follower:
    """An opponent whose actions are a function of what it sees and of the row."""

    def __init__(self, rows: int) -> None:
        self.draws = np.full(rows, NO_DRAW, np.uint64)
        self.begun: list[tuple[list[bool], list[bool]]] = []

    def reset(self, seed: int) -> None:
        pass

    def begin(self, first: Array, new_games: Array) -> None:
        self.begun.append((first.tolist(), new_games.tolist()))

    def act(self, obs: Array, rows: Array) -> Array:
        return np.array([follow(o, row) for o, row in zip(obs, rows, strict=True)])

    def take_rewards(self, rewards: Array) -> None:
        pass

    def refresh(self, read: Any) -> bool:
        return True

    def forget(self) -> None:
        pass

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        pass


def follow(obs: Array, row: int) -> int:
    return int(obs.view(np.uint8).sum() + row) % 2


def reference(cfg: Config, plan: Plan, steps: int, seed: int) -> list[tuple[Any, ...]]:
    """Plays the plan game by game in plain Python.

    Returns: of each step and learning row: its observation, choice, reward, flags, whether it
        plays next, and its seat.
    """
    seats = plan.seating.seats
    env = make(cfg.env, plan.games * seats)
    space = env.info.observation_space
    obs = np.zeros((env.count, *space.shape), space.dtype)
    env.reset_into(seed, obs)
    turn = {game: game % len(plan.turns) for game in range(plan.mirror_games, plan.games)}
    playing = [True] * env.count if env.playing is None else env.playing.tolist()
    lines = []
    for t in range(steps):
        actions = np.zeros(env.count, np.int32)
        learning = []
        for row in range(env.count):
            game, seat = divmod(row, seats)
            if game < plan.mirror_games or seat in plan.turns[turn[game]]:
                learning.append(row)
                actions[row] = (t + len(learning)) % 2
            else:
                actions[row] = follow(obs[row], row)
        seen = [obs[row].copy() for row in learning]
        rewards, terminated, truncated = env.step_into(actions, obs)
        over = (terminated | truncated).tolist()
        plays = [not o for o in over] if env.playing is None else env.playing.tolist()
        for row, o in zip(learning, seen, strict=True):
            flags = bool(terminated[row]), bool(truncated[row])
            lines.append((t, row // seats, row % seats, o.tobytes(), float(rewards[row]), *flags))
        for game in range(plan.mirror_games, plan.games):
            rows = range(game * seats, (game + 1) * seats)
            if not any(playing[row] for row in rows) and any(plays[row] for row in rows):
                turn[game] = (turn[game] + 1) % len(plan.turns)
        playing = plays
    env.close()
    return lines


APART: Any = [
    {"playing": [YES, YES], "reward": [1, -1]},
    {"playing": [NO, YES], "ended": [YES, NO], "reward": [3, 4]},
    {"playing": [NO, YES], "reward": [0, 5]},
    {"playing": [NO, NO], "ended": [NO, YES], "reward": [0, 5]},
    {"playing": [YES, NO]},  # the second seat joins in mid-game
    {"playing": [YES, YES]},
]


@pytest.mark.parametrize(
    ("game", "kwargs", "seats"),
    [
        ("penstock/SyntheticGames-v0", {"rivals": True, "episode_steps": 3, "n_actions": 2}, None),
        ("penstock/SyntheticGames-v0", {"rivals": True, "turns": True, "seats": 3}, None),
        ("penstock/Kuhn-v0", {}, None),
        ("penstock/PredatorPrey-v0", {"hunters": 2, "prey": 2, "steps": 40}, None),
        ("penstock/PredatorPrey-v0", {"steps": 40}, [0, 1]),
        ("seat_game:Script", {"script": APART}, None),
    ],
)
def test_learning_rows_equal_those_of_a_plain_loop_over_all_rows(
    game: str, kwargs: dict[str, Any], seats: list[int] | None
) -> None:
    cfg = config(game)
    cfg.env.kwargs.update(kwargs)
    probe = make(cfg.env, 1, whole_games=True)
    seating = probe.info.seating
    probe.close()
    plan = Plan.against(seating, 5, seats)._replace(mirror_games=2, opponent_games=(3, 2))
    expected = reference(cfg, plan, 200, 4)

    env = make(cfg.env, plan.games * seating.seats)
    matches = Matches(env, plan, [Follower(rows) for rows in plan.opponent_rows])
    space = matches.info.observation_space
    obs = np.zeros((matches.count, *space.shape), space.dtype)
    matches.reset_into(4, obs)
    lines = []
    for t in range(200):
        actions = np.array([(t + 1 + i) % 2 for i in range(matches.count)])
        seen, seat_of = obs.copy(), matches.seat_of.copy()
        rewards, terminated, truncated = matches.step_into(actions, obs)
        for i, (game_of, seat) in enumerate(zip(matches.game_of, seat_of, strict=True)):
            flags = bool(terminated[i]), bool(truncated[i])
            lines.append((t, int(game_of), int(seat), seen[i].tobytes(), float(rewards[i]), *flags))
        if env.playing is not None:
            rows = matches.game_of * seating.seats + matches.seat_of
            assert matches.playing is not None
            assert matches.playing.tolist() == env.playing[rows].tolist()
    matches.close()
    assert lines == expected
    assert sum(line[-2] or line[-1] for line in lines) > 10


def test_an_opponent_forgets_where_an_episode_begins_and_hears_of_new_games() -> None:
    cfg = config("seat_game:Script")
    cfg.env.kwargs.update(script=APART)
    plan = Plan.against(DUEL, 1)
    follower = Follower(1)
    matches = Matches(make(cfg.env, 2), plan, [follower])
    played = Played(matches, 2)
    matches.reset_into(0, played.obs)
    seats = []
    for _ in range(12):
        played.step()
        seats.append(int(matches.seat_of[0]))
    # Seat 0 learns first, then seat 1: its game begins a step before its episode.
    assert seats == [0] * 4 + [1] * 6 + [0] * 2
    assert follower.begun == [
        ([YES], [YES]),
        ([YES], [YES]),  # seat 0 is the opponent now, and begins with the game
        ([NO], [YES]),  # seat 1 is the opponent: the game begins, its own episode does not yet
        ([YES], [NO]),
    ]


# ------------------------------------------------------------------------------------ results


@pytest.mark.parametrize("hides_outcome", [False, True])
def test_results_equal_a_count_by_hand(hides_outcome: bool) -> None:
    """By the rewards of all rows; the environment says the outcomes, or leaves it to returns."""
    cfg = config("penstock/ConnectFour-v0", "actors.envs=12", "league.bots={random: 0.5}")
    matches, _ = matches_of(cfg)
    matches.env.__class__ = Watched
    watched: Any = matches.env
    watched.hides_outcome = hides_outcome
    played = Played(matches, 7)
    matches.reset_into(2, played.obs)
    counts: Counter[tuple[int, int]] = Counter()
    by_hand: Counter[tuple[int, int]] = Counter()
    for _ in range(1500):
        seat_of = matches.seat_of.copy()
        _, terminated, _ = played.step()
        for i in np.flatnonzero(terminated):
            counts[int(matches.recorded["opponent"][i]), int(matches.outcome[i])] += 1
            game, seat = matches.game_of[i], seat_of[i]
            last = watched.rewards.reshape(-1, 2)[game]
            opponent = NO_DRAW if game < 3 else BOT_DRAW
            if not last.any():
                by_hand[opponent, 0] += 1
            else:
                by_hand[opponent, 1 if last.argmax() == seat else -1] += 1
    matches.close()
    assert counts == by_hand
    assert counts[NO_DRAW, 1] == counts[NO_DRAW, -1] > 50
    assert counts[BOT_DRAW, 1] > 50


def test_a_team_counts_once() -> None:
    cfg = config("penstock/PredatorPrey-v0", "actors.envs=8", "league.mirror=0")
    cfg.env.kwargs.update({"hunters": 2, "prey": 2, "steps": 20})
    matches, boards = matches_of(cfg, chairs=4)
    played = Played(matches, 5)
    matches.reset_into(0, played.obs)
    assert matches.refresh(boards.read)
    first, second = draw_number(Stamp(3, 1)), draw_number(Stamp(3, 2))
    expected = [first, NO_DRAW, first, NO_DRAW, second, NO_DRAW, second, NO_DRAW]
    assert matches.recorded["opponent"].tolist() == expected
    matches.close()


def test_an_unknown_result_is_no_number() -> None:
    cfg = config("seat_game:Script")
    cfg.env.kwargs.update(script=APART)
    matches = Matches(make(cfg.env, 2), Plan.against(DUEL, 1), [Follower(1)])
    played = Played(matches, 2)
    matches.reset_into(0, played.obs)
    outcomes = []
    for _ in range(4):
        played.step()
        outcomes.append(matches.outcome[0])
    assert np.isnan(outcomes).tolist() == [NO, YES, NO, NO]
    matches.close()


# -------------------------------------------------------------------------------------- chairs


def test_each_of_100_000_episodes_is_played_by_one_draw_and_sides_rotate() -> None:
    """Each draw always bets or always passes, so the actions say which weights have played."""
    cfg = config("penstock/Kuhn-v0", "actors.envs=128", "league.mirror=0.25", "league.chairs=3")
    matches, boards = matches_of(cfg, actor=1)
    matches.env.__class__ = Watched
    watched: Any = matches.env
    layout = network_shape(cfg, matches.info).layout
    rng = np.random.default_rng(8)
    numbers = iter(range(1, 1 << 30))

    def publish(chair: int) -> None:
        number = next(numbers)
        weights = np.zeros(layout.size, np.float32)
        layout.views(weights)["policy.bias"][number % 2] = 100.0
        boards.publish(chair, number, weights)

    for chair in (1, 2, 3):
        publish(chair)
    played = Played(matches, 2)
    matches.reset_into(5, played.obs)
    assert matches.refresh(boards.read)

    first_row = 32  # those before are in mirror games
    draws: list[set[int]] = [set() for _ in range(matches.count)]
    sides: list[list[int]] = [[] for _ in range(matches.count)]
    seen_draws: set[int] = set()
    changes_in_mid_unroll = 0
    episodes = choices = 0
    resets = np.zeros(matches.count, np.bool_)
    for t in range(4500):
        if t % 20 == 0:
            for chair in (1, 2, 3):
                if rng.random() < 0.3:
                    publish(chair)
            assert matches.refresh(boards.read)
        seat_of = matches.seat_of.copy()
        has_choice = masks_of(matches, matches._obs).all(1)
        _, terminated, _ = played.step()
        recorded = matches.recorded["opponent"]
        for i in range(first_row, matches.count):
            if resets[i]:
                continue
            draw = int(recorded[i])
            # The opponent acted as this draw does, where it had a choice.
            row = 2 * matches.game_of[i] + 1 - seat_of[i]
            if has_choice[row]:
                assert watched.actions[row] == draw % 2
                choices += 1
            draws[i].add(draw)
            if terminated[i]:
                assert len(draws[i]) == 1
                changes_in_mid_unroll += draw not in seen_draws and t % 20 > 0
                seen_draws |= draws[i]
                sides[i].append(int(seat_of[i]))
                draws[i] = set()
                episodes += 1
        assert not recorded[:first_row].any()
        resets = terminated
    matches.close()

    assert episodes > 100_000
    assert choices > 100_000
    assert len(seen_draws) > 100
    assert changes_in_mid_unroll > 100
    for i in range(first_row, matches.count):
        begin = int(matches.game_of[i]) % 2
        assert sides[i] == [(begin + n) % 2 for n in range(len(sides[i]))]
    begins = Counter(of_row[0] for of_row in sides[first_row:])
    assert begins[0] == begins[1]


def chair_over(rows: int, choices: list[int]) -> tuple[Chair, Boards]:
    """Returns a chair whose draw n always takes the choice ``choices[n]``."""
    cfg = config("penstock/RockPaperScissors-v0", f"actors.envs={rows}")
    env = make(cfg.env, 2)
    env.close()
    layout = network_shape(cfg, env.info).layout
    boards = Boards(layout.size)
    for number, choice in enumerate(choices):
        weights = np.zeros(layout.size, np.float32)
        layout.views(weights)["policy.bias"][choice] = 100.0
        boards.publish(number, number, weights)
    return Chair(1, rows, layout.size, lambda seed: make_policy(cfg, env.info, seed)), boards


def test_a_chair_reads_a_further_draw_only_when_all_games_have_gone_over() -> None:
    chair, boards = chair_over(3, [0, 0, 1, 2])
    obs, rows = np.ones((3, 1), np.float32), np.arange(3)
    chair.reset(0)

    def publish(number: int) -> None:
        boards.published[1] = Stamp(3, number), boards.published[number][1]

    publish(1)
    assert chair.refresh(boards.read)
    assert chair.act(obs, rows).tolist() == [0, 0, 0]
    publish(2)
    chair.refresh(boards.read)
    assert chair.act(obs, rows).tolist() == [0, 0, 0]
    chair.begin(np.array([NO, YES, NO]), np.array([NO, YES, NO]))
    assert chair.act(obs, rows).tolist() == [0, 1, 0]
    publish(3)
    chair.refresh(boards.read)
    chair.begin(np.array([YES, NO, YES]), np.array([YES, NO, YES]))
    assert chair.act(obs, rows).tolist() == [1, 1, 1]
    chair.begin(np.array([YES, NO, NO]), np.array([YES, NO, NO]))
    assert chair.act(obs, rows).tolist() == [1, 1, 1]
    chair.refresh(boards.read)
    chair.begin(np.array([NO, NO, YES]), np.array([NO, NO, YES]))
    assert chair.act(obs, rows).tolist() == [1, 1, 2]


def test_a_game_goes_over_as_a_whole_though_a_seat_joins_it_later() -> None:
    chair, boards = chair_over(2, [0, 0, 1])
    chair.reset(0)
    chair.refresh(boards.read)
    boards.published[1] = Stamp(3, 2), boards.published[2][1]
    chair.refresh(boards.read)
    chair.begin(np.array([YES, NO]), np.array([YES, YES]))
    assert chair.act(np.ones((2, 1), np.float32), np.arange(2)).tolist() == [1, 1]
    assert chair.draws.tolist() == [draw_number(Stamp(3, 2))] * 2


def test_an_opponent_with_memory_plays_each_episode_as_if_alone() -> None:
    """Its choices equal those of a policy that has seen this episode of this seat only."""
    core = ["model.core=lstm", "model.core_size=8"]
    cfg = config("penstock/Leduc-v0", "actors.envs=12", "league.mirror=0.5", *core)
    matches, boards = matches_of(cfg, chairs=0)
    matches.env.__class__ = Watched
    watched: Any = matches.env
    layout = network_shape(cfg, matches.info).layout
    members: dict[int, Policy] = {}

    def publish(chair: int, number: int) -> None:
        # The outputs are so large that drawn choices are the best ones.
        weights = np.random.default_rng(number).normal(0, 0.5, layout.size).astype(np.float32)
        layout.views(weights)["policy.weight"][...] *= 1e5
        boards.publish(chair, number, weights)
        actors = cfg.actors.model_copy(update={"envs": 1})
        alone = make_policy(cfg.model_copy(update={"actors": actors}), matches.info, 0)
        alone.load(weights)
        members[draw_number(Stamp(3, number))] = alone

    publish(1, 1)
    publish(2, 2)
    played = Played(matches, 3)
    matches.reset_into(0, played.obs)
    matches.refresh(boards.read)
    memory = dict.fromkeys(range(6, 12), None)
    resets = np.zeros(matches.count, np.bool_)
    choices = 0
    seen: set[int] = set()
    for t in range(400):
        if t % 20 == 10:
            publish(1 + t // 20 % 2, t)
            matches.refresh(boards.read)
        obs, has_choice = matches._obs.copy(), masks_of(matches, matches._obs).sum(1) > 1
        rows = 2 * matches.game_of + 1 - matches.seat_of
        draws = matches.recorded["opponent"].tolist()
        _, terminated, _ = played.step()
        for i in range(6, 12):
            alone = members[draws[i]]
            alone.state[...] = 0 if memory[i] is None else memory[i]
            row = int(rows[i])
            action = int(alone.greedy(obs[row : row + 1])[0])
            memory[i] = None if resets[i] else alone.state.copy()
            if has_choice[row] and not resets[i]:
                assert watched.actions[row] == action
                choices += 1
                seen.add(draws[i])
        resets = terminated
    matches.close()
    assert choices > 400
    assert len(seen) > 10


def test_a_chair_without_weights_is_not_ready() -> None:
    chair, boards = chair_over(2, [0, 0])
    chair.reset(0)
    del boards.published[1]
    assert not chair.refresh(boards.read)
    boards.publish(1, 1)
    assert chair.refresh(boards.read)


def test_after_another_learner_was_joined_a_chair_takes_its_older_draw() -> None:
    chair, boards = chair_over(1, [0, 1, 2])
    chair.reset(0)
    boards.published[1] = Stamp(3, 9), boards.published[2][1]
    chair.refresh(boards.read)
    assert int(chair.draws[0]) == draw_number(Stamp(3, 9))
    boards.published[1] = Stamp(3, 4), boards.published[0][1]
    chair.refresh(boards.read)
    begins = np.array([YES])
    chair.begin(begins, begins)
    assert int(chair.draws[0]) == draw_number(Stamp(3, 9))
    chair.forget()
    chair.refresh(boards.read)
    chair.begin(begins, begins)
    assert int(chair.draws[0]) == draw_number(Stamp(3, 4))


# --------------------------------------------------------------------------------------- state


@pytest.mark.parametrize(
    ("game", "choices", "options"),
    [
        ("penstock/Kuhn-v0", 2, ["league.bots={random: 0.25}"]),
        ("penstock/Leduc-v0", 3, ["model.core=lstm", "model.core_size=8"]),
        ("penstock/PredatorPrey-v0", 5, ["env.kwargs={hunters: 2, prey: 2, steps: 20}"]),
    ],
)
def test_a_saved_state_continues_bit_for_bit(game: str, choices: int, options: list[str]) -> None:
    """Also while a chair changes, and into environments that were seeded otherwise."""
    cfg = config(game, "actors.envs=16", "league.mirror=0.5", *options)

    def traces(played: Played, boards: Boards, steps: int) -> list[bytes]:
        lines = []
        for t in range(steps):
            if t % 10 == 5:
                boards.publish(1, 100 + t)
                played.env.refresh(boards.read)
            results = played.step()
            arrays = (played.obs, *results, *played.env.recorded.values())
            lines.append(b"".join(array.tobytes() for array in arrays))
        return lines

    matches, boards = matches_of(cfg, chairs=4)
    played = Played(matches, choices)
    matches.reset_into(1, played.obs)
    matches.refresh(boards.read)
    traces(played, boards, 27)
    boards.publish(2, 50)
    matches.refresh(boards.read)
    stored = to_bytes({"env": matches.state_dict()})
    obs, chance = played.obs.copy(), played._rng.bit_generator.state
    expected = traces(played, boards, 60)
    matches.close()

    restored, other_boards = matches_of(cfg, chairs=4)
    other_boards.publish(1, 25)
    other_boards.publish(2, 50)
    resumed = Played(restored, choices, seed=77)
    restored.reset_into(12, resumed.obs)
    restored.refresh(other_boards.read)
    for _ in range(9):
        resumed.step()
    restored.load_state_dict(from_bytes(stored)["env"])
    resumed.obs[...] = obs
    resumed._rng.bit_generator.state = chance
    assert traces(resumed, other_boards, 60) == expected
    restored.close()


def test_the_same_seed_gives_the_same_episodes() -> None:
    cfg = config("penstock/Kuhn-v0", "actors.envs=8", "league.mirror=0")
    traces = []
    for seed in (3, 3, 4):
        matches, boards = matches_of(cfg, chairs=4)
        played = Played(matches, 2)
        matches.reset_into(seed, played.obs)
        matches.refresh(boards.read)
        traces.append([played.step()[0].tolist() for _ in range(50)])
        matches.close()
    assert traces[0] == traces[1] != traces[2]


# ------------------------------------------------------------------------------------ the rest


def test_runs_of_mirror_games_have_plain_environments() -> None:
    for options in ([], ["league.mirror=1"]):
        env = make_environments(
            config("penstock/Kuhn-v0", "actors.envs=8", *options), 0, TimeLedger()
        )
        assert type(env) is BatchedEnv
        env.close()


def test_opponents_infer_and_environments_step_in_the_ledger() -> None:
    cfg = config("penstock/Kuhn-v0", "actors.envs=8", "league.mirror=0")
    ledger = TimeLedger()
    parts: list[Part] = []
    matches = make_environments(cfg, 0, ledger, timed=False)
    assert isinstance(matches, Matches)
    boards = Boards(network_shape(cfg, matches.info).layout.size)
    boards.publish(1, 1)
    boards.publish(2, 2)
    played = Played(matches, 2)
    matches.reset_into(0, played.obs)
    matches.refresh(boards.read)
    ledger.follow(parts.append)
    played.step()
    assert parts == [Part.INFER, Part.STEP]
    matches.close()


def test_a_frozen_policy_plays_greedily_if_it_is_to() -> None:
    """Two equal deterministic policies in rock-paper-scissors always draw."""
    cfg = config("penstock/RockPaperScissors-v0", "actors.envs=4")
    plan = Plan.against(DUEL, 4)
    env = make(cfg.env, 8)
    learner, opponent = (make_policy(cfg, env.info, seed) for seed in (1, 2))
    weights = np.random.default_rng(0).normal(size=network_shape(cfg, env.info).layout.size)
    for policy in (learner, opponent):
        policy.load(weights.astype(np.float32))
    matches = Matches(env, plan, [FrozenPlayer(opponent, sample=False)])
    played = Played(matches, 3)
    matches.reset_into(0, played.obs)
    for _ in range(30):
        rewards, _, _ = matches.step_into(learner.greedy(played.obs), played.obs)
        assert not rewards.any()
    matches.close()


def test_a_bot_acts_as_the_environment_wants_and_is_told_so_otherwise() -> None:
    from gymnasium.spaces import Box, Discrete

    from seat_game import BotGame

    for space, chosen, expected in (
        (Discrete(3, start=5), [7, 5], [2, 0]),
        (
            Box(np.array([0.0, -4.0]), np.array([2.0, 4.0]), dtype=np.float64),
            [[2, -4], [1, 2]],
            [[1, -1], [0, 0.5]],
        ),
        (Discrete(3), [1, 2], [1, 2]),
    ):
        env = BatchedEnv("bots", BotGame(1, space, chosen), 1, "in a test")
        player = BotPlayer(env, "scripted", 2)
        np.testing.assert_allclose(player.act(np.zeros(0), np.arange(2)), np.array(expected))
        with pytest.raises(
            UserError, match=r"shape \[2.*for its scripted player scripted in 1 row"
        ):
            player.act(np.zeros(0), np.arange(1))
        env.close()


def test_a_scripted_player_without_a_method_is_refused() -> None:
    from gymnasium.spaces import Discrete

    from seat_game import BotGame

    vector = BotGame(1, Discrete(2), [])
    vector.bot = None  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"names scripted players.*has no method bot\(name, rows"):
        BatchedEnv("bots", vector, 1, "in a test")


def test_results_that_nobody_knows_end_a_run_of_matches_in_one_sentence() -> None:
    from penstock.algos.recorded import make_recorders
    from penstock.core.interfaces import Step

    cfg = config("seat_game:Script", "actors.envs=2", "league.mirror=0", "league.chairs=1")
    cfg.env.kwargs.update(script=APART)
    matches, boards = matches_of(cfg, chairs=1)
    (entry,) = make_recorders(cfg, matches)
    assert entry.columns == ("opponent", "outcome")
    played = Played(matches, 2)
    matches.reset_into(0, played.obs)
    matches.refresh(boards.read)
    played.step()
    nothing = np.zeros(2, np.bool_)
    step = Step(nothing, nothing, nothing, nothing, nothing)
    assert entry.recorder.record(step)[1].tolist() == [0, 0]
    played.step()
    with pytest.raises(UserError, match=r"ends the seats of a game apart.*info\[\"outcome\"\]"):
        entry.recorder.record(step)
    matches.close()
