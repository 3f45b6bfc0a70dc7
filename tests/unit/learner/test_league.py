"""The league of a run: draws, results, snapshots, and what a resumed run continues with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from full_disk import full_disk
from penstock.configs.errors import UserError
from penstock.configs.league import LeagueConfig, LineConfig
from penstock.configs.load import resolve
from penstock.core.draws import BOT_DRAW, draw_number
from penstock.core.params import ParamLayout
from penstock.envs import probe
from penstock.envs.seats import Seating
from penstock.league.results import GameCounts
from penstock.learner.chairs import playable_lines
from penstock.learner.checkpoints.checkpoint_format import FILE, Checkpoint
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.checkpoints.checkpoint_store import ReplacedError
from penstock.learner.league import League, make_league
from penstock.learner.pool import PolicyPool
from penstock.learner.state import set_weights, weights_of
from penstock.learner.trainer import Trainer

WON = GameCounts(wins=1, draws=0, losses=0)


class Run(NamedTuple):
    """A learner and its league."""

    trainer: Trainer
    league: League


def make(folder: Path, *options: str, events: list[str] | None = None) -> Run:
    """Makes a fresh run of Kuhn poker, half of whose rows play against the pool."""
    own_options = [
        *("league.mirror=0.5", "league.chairs=2", "league.games=10", "league.snapshot_steps=1000"),
        *("learner.device=cpu", "actors.envs=8", *options),
    ]
    config = resolve("kuhn", own_options)
    trainer = Trainer(config, probe(config.env))

    def on_event(kind: str, text: str, **fields: Any) -> None:
        if events is not None:
            events.append(text)

    league = make_league(trainer, folder, on_event, shared=False)
    assert league is not None
    return Run(trainer, league)


def numbers(run: Run) -> list[int]:
    """Returns the number of each chair's draw, as actors would record it."""
    stamps = [board.stamp for board in run.league.boards]
    return [draw_number(stamp) for stamp in stamps if stamp is not None]


def seated(run: Run, chair: int) -> npt.NDArray[np.float32]:
    """Returns the weights on a chair."""
    board = run.league.boards[chair - 1]
    weights = np.empty(board.size, np.float32)
    board.read(weights, policy_id=chair)
    return weights


def train(run: Run, steps: int, *, move: float = 0.01) -> None:
    """Pretends that the trainer has trained: its weights move, and the steps are counted."""
    set_weights(run.trainer, weights_of(run.trainer) + np.float32(move))
    run.trainer.progress.trained_steps += steps


def win(run: Run, games: int) -> None:
    """Counts so many games that were won against each chair, in a turn."""
    counts = GameCounts(wins=games, draws=0, losses=0)
    run.league.turn(dict.fromkeys(numbers(run), counts), now_s=0.0)


def pool_of(folder: Path) -> PolicyPool:
    """Returns the pool of a run as another process reads it."""
    return PolicyPool(folder / "pool")


def test_a_fresh_run_adds_its_initial_policy_and_seats_it(tmp_path: Path) -> None:
    run = make(tmp_path)
    initial = weights_of(run.trainer)

    run.league.open(1)

    (member,) = pool_of(tmp_path).members()
    assert (member.line, member.steps, member.initial) == ("main", 0, True)
    np.testing.assert_array_equal(seated(run, 1), initial)
    np.testing.assert_array_equal(seated(run, 2), initial)


def test_a_game_of_one_side_has_no_league(tmp_path: Path) -> None:
    config = resolve("cartpole", ["learner.device=cpu"])
    trainer = Trainer(config, probe(config.env))

    assert make_league(trainer, tmp_path, lambda kind, text: None) is None


def test_a_run_of_mirror_games_fills_its_pool_and_has_no_chairs(tmp_path: Path) -> None:
    run = make(tmp_path, "league.mirror=null")
    run.league.open(1)
    train(run, 1000)
    run.league.snapshot()

    assert run.league.boards == []
    assert [member.steps for member in pool_of(tmp_path).members()] == [0, 1000]
    assert run.league.figures() == {"league_members": 2}


def test_numbers_of_draws_differ_between_chairs_and_sessions(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.league.open(7)
    first = numbers(run)
    run.league.close()

    resumed = make(tmp_path)
    resumed.league.load_state_dict(run.league.state_dict())
    resumed.league.open(7)  # a clock that stands still

    assert len({*first, *numbers(resumed)}) == 4


def test_learners_of_one_run_have_different_numbers(tmp_path: Path) -> None:
    options = ("league.mirror=0", "learner.count=2", "actors.count=2", "learner.device=cpu")
    config = resolve("kuhn", options)
    seen: list[int] = []
    for rank in range(2):
        trainer = Trainer(config, probe(config.env))
        pool = PolicyPool(tmp_path)
        league = League(trainer, pool, rank=rank, shared=False)
        league.open(1)
        seen += numbers(Run(trainer, league))

    assert len(seen) == len({*seen}) == 8


def test_learners_of_a_resumed_run_draw_unlike_opponents(tmp_path: Path) -> None:
    options = ("league.mirror=0", "league.draw=uniform", "learner.count=2", "actors.count=2")
    run = make(tmp_path, *options)
    run.league.open(1)
    for _ in range(9):
        train(run, 1000)
        run.league.snapshot()
    run.league.close()
    state = run.league.state_dict()

    opponents: list[list[str]] = []
    for rank in range(2):
        league = League(run.trainer, PolicyPool(tmp_path / "pool"), rank=rank, shared=False)
        league.load_state_dict(state)
        league.open(2)
        resumed = Run(run.trainer, league)
        for _ in range(20):
            win(resumed, 10)
        opponents.append([opponent for _, opponent in league.state_dict()["opponents"][-20:]])

    assert opponents[0] != opponents[1]


def test_a_chair_is_drawn_anew_after_its_games_and_only_one_in_a_turn(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.league.open(1)
    first, second = numbers(run)
    win(run, 9)
    assert numbers(run) == [first, second]

    win(run, 1)
    assert numbers(run)[1] == second
    assert numbers(run)[0] != first
    run.league.turn({}, 0.0)
    assert numbers(run)[1] != second


def test_results_of_the_draw_before_are_counted_and_do_not_end_the_next_one(
    tmp_path: Path,
) -> None:
    run = make(tmp_path)
    run.league.open(1)
    former = numbers(run)[0]
    run.league.turn({former: GameCounts(10, 0, 0)}, 0.0)
    present = numbers(run)

    run.league.turn({former: GameCounts(10, 0, 0)}, 0.0)

    assert run.league.figures()["league_games"] == 20
    assert numbers(run) == present


def test_results_of_unknown_draws_are_ignored(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.league.open(1)

    run.league.turn({999: WON, BOT_DRAW + 77: WON}, 0.0)

    figures = run.league.figures()
    assert figures["league_games"] == 0
    assert figures["win_rate"] is None


def test_figures_are_those_of_a_count_by_hand(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.league.open(1)
    number, _ = numbers(run)

    run.league.turn({number: GameCounts(wins=1, draws=0, losses=0)}, 0.0)
    run.league.turn({number: GameCounts(wins=0, draws=1, losses=0)}, 0.0)
    figures = run.league.figures()

    # One win, which counts 0.99 after the draw, and a draw; two games are assumed, one of them won.
    assert figures["win_rate_worst"] == pytest.approx((0.99 + 0.5 + 1) / (1.99 + 2))
    assert figures["win_rate"] == 0.75
    assert (figures["league_members"], figures["league_games"]) == (1, 2)
    assert figures["opponent_age_s"] >= 0.0
    assert run.league.figures()["win_rate"] is None


def test_games_against_a_bot_have_a_win_rate_of_their_own(tmp_path: Path) -> None:
    config = resolve("connect_four", ["league.bots={random: 0.5}", "learner.device=cpu"])
    trainer = Trainer(config, probe(config.env))
    league = make_league(trainer, tmp_path, lambda kind, text: None, shared=False)
    assert league is not None
    league.open(1)
    index = trainer.info.seating.bots.index("random")

    league.turn({BOT_DRAW + index: GameCounts(wins=2, draws=0, losses=0)}, 0.0)

    figures = league.figures()
    assert figures["bot_win_rates"] == {"random": pytest.approx((1.99 + 1) / (1.99 + 2))}
    assert figures["league_games"] == 2
    assert figures["win_rate"] is None


def test_a_snapshot_is_due_after_its_steps_and_becomes_a_member(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.league.open(1)
    train(run, 999)
    assert not run.league.snapshot_is_due()

    train(run, 1)
    assert run.league.snapshot_is_due()
    run.league.snapshot()

    assert not run.league.snapshot_is_due()
    member = pool_of(tmp_path).members()[-1]
    weights = pool_of(tmp_path).weights(member, run.trainer.layout)
    np.testing.assert_array_equal(weights, weights_of(run.trainer))
    assert (member.steps, member.initial) == (1000, False)


def test_a_save_before_a_snapshot_is_due_adds_nothing(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.league.open(1)
    train(run, 500)

    run.league.snapshot()

    assert len(pool_of(tmp_path).members()) == 1


def test_a_policy_that_beats_each_member_is_added_after_a_tenth_of_the_steps(
    tmp_path: Path,
) -> None:
    run = make(tmp_path, "league.snapshot_win_rate=0.8")
    run.league.open(1)
    win(run, 10)
    assert not run.league.snapshot_is_due()
    train(run, 99)
    assert not run.league.snapshot_is_due()

    train(run, 1)
    assert run.league.snapshot_is_due()

    # The new member has not been beaten yet.
    run.league.snapshot()
    train(run, 500)
    win(run, 10)
    run.league.turn({}, 0.0)
    assert not run.league.snapshot_is_due()


def test_a_save_that_fails_before_its_snapshot_leaves_it_to_the_next_one(tmp_path: Path) -> None:
    run = make(tmp_path)
    checkpoints = CheckpointManager(tmp_path, run.trainer, league=run.league)
    run.league.open(1)
    run.trainer.progress.generation = 2
    checkpoints.save()
    train(run, 1000)
    run.trainer.progress.generation = 1
    assert checkpoints.is_due(by_time=False)

    with pytest.raises(ReplacedError) as failure:
        checkpoints.save()
    checkpoints.postpone(str(failure.value))
    assert not checkpoints.is_due(by_time=False)
    assert len(pool_of(tmp_path).members()) == 1

    run.trainer.progress.generation = 2
    checkpoints.save()
    assert len(pool_of(tmp_path).members()) == 2


def test_without_a_win_rate_only_steps_count(tmp_path: Path) -> None:
    run = make(tmp_path, "league.snapshot_win_rate=null")
    run.league.open(1)
    win(run, 10)
    train(run, 999)

    assert not run.league.snapshot_is_due()


def test_the_newest_member_is_drawn_with_the_rule_newest(tmp_path: Path) -> None:
    run = make(tmp_path, "league.draw=newest")
    run.league.open(1)
    train(run, 1000)
    run.league.snapshot()
    newest = weights_of(run.trainer)
    train(run, 10)

    win(run, 10)
    run.league.turn({}, 0.0)

    np.testing.assert_array_equal(seated(run, 1), newest)
    np.testing.assert_array_equal(seated(run, 2), newest)


def test_a_damaged_member_is_left_out_with_one_event(tmp_path: Path) -> None:
    events: list[str] = []
    run = make(tmp_path, "league.draw=newest", events=events)
    run.league.open(1)
    initial = weights_of(run.trainer)
    train(run, 1000)
    run.league.snapshot()
    pool = pool_of(tmp_path)
    (pool.checkpoint_folder(pool.members()[-1]) / FILE).write_bytes(b"nothing")
    events.clear()

    for _ in range(3):
        win(run, 10)
        run.league.turn({}, 0.0)

    np.testing.assert_array_equal(seated(run, 1), initial)
    assert len(events) == 1
    assert "is left out" in events[0]


def test_a_damaged_list_keeps_the_opponents_with_one_event(tmp_path: Path) -> None:
    events: list[str] = []
    run = make(tmp_path, events=events)
    run.league.open(1)
    present = numbers(run)
    (tmp_path / "pool/main.json").write_text("[")

    for _ in range(3):
        win(run, 10)

    assert numbers(run) == present
    assert len(events) == 1
    assert "is no list of members" in events[0]


def test_each_damage_of_a_list_is_an_event(tmp_path: Path) -> None:
    events: list[str] = []
    run = make(tmp_path, events=events)
    run.league.open(1)
    path = tmp_path / "pool/main.json"
    whole = path.read_text()

    for text in ("[", whole, "["):
        path.write_text(text)
        win(run, 10)

    assert len(events) == 2


def test_a_line_whose_members_are_lost_is_not_played_by_its_latest_weights_alone(
    tmp_path: Path,
) -> None:
    shared = f"league.pool={tmp_path / 'shared'}"
    pool = PolicyPool(tmp_path / "shared")
    other = make(tmp_path / "a", shared, "league.name=other", "run.seed=3")
    other.league.open(1)
    run = make(tmp_path / "b", shared, "league.lines={other: {}}", "league.draw=newest")
    run.league.open(1)
    (tmp_path / "shared/other.json").unlink()
    lost = Checkpoint(run.trainer.layout, weights_of(run.trainer) + np.float32(1))
    pool.set_latest("other", lost, steps=10, time_s=1.0)

    for _ in range(4):
        win(run, 10)

    for chair in (1, 2):
        np.testing.assert_array_equal(seated(run, chair), weights_of(run.trainer))


def test_latest_weights_alone_are_no_opponents_for_a_rule_that_draws_members(
    tmp_path: Path,
) -> None:
    options = ("league.mirror=0", f"league.pool={tmp_path / 'pool'}")
    other_line = "league.lines={other: {draw: newest, seats: [1]}}"
    own_line = "league.lines={main: {draw: newest, seats: [0]}}"
    run = make(tmp_path, *options, "league.seats=[0]", other_line)
    other = make(tmp_path, *options, "league.name=other", "league.seats=[1]", own_line)
    run.league.open(1, stopping=lambda: True)
    other.league.open(1)
    train(other, 10)
    other.league.turn({}, 100.0)
    pool = pool_of(tmp_path)
    assert pool.latest("other") is not None
    (pool.checkpoint_folder(pool.members("other")[0]) / FILE).unlink()

    run.league.close()
    fresh = make(tmp_path, *options, "league.seats=[0]", other_line, "run.seed=5")
    with pytest.raises(UserError, match="none of the members"):
        fresh.league.open(2)


def test_a_full_disk_keeps_the_pool_and_a_later_save_tries_again(tmp_path: Path) -> None:
    events: list[str] = []
    run = make(tmp_path, events=events)
    run.league.open(1)
    train(run, 1000)

    with full_disk():
        run.league.snapshot()
    assert len(events) == 1
    assert "could not be written" in events[0]
    assert not run.league.snapshot_is_due()  # only with the next checkpoint

    run.league.snapshot()
    assert [member.steps for member in pool_of(tmp_path).members()] == [0, 1000]


def test_a_full_disk_at_the_start_still_seats_the_initial_policy(tmp_path: Path) -> None:
    events: list[str] = []
    run = make(tmp_path, events=events)
    with full_disk():
        run.league.open(1)

    np.testing.assert_array_equal(seated(run, 1), weights_of(run.trainer))
    assert len(events) == 1
    run.league.snapshot()
    assert [member.initial for member in pool_of(tmp_path).members()] == [True]


def test_a_pool_of_another_network_is_refused_before_anything_is_added(tmp_path: Path) -> None:
    other = ParamLayout((("policy.weight", (3, 5)),))
    checkpoint = Checkpoint(other, np.zeros(other.size, np.float32))
    pool_of(tmp_path).add("main", checkpoint, steps=5, time_s=1.0)
    run = make(tmp_path)

    with pytest.raises(UserError, match="is of another network"):
        run.league.open(1)

    assert len(pool_of(tmp_path).members()) == 1


def test_a_pool_of_another_game_is_refused_but_by_a_resumed_run(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.league.open(1)
    train(run, 1000)
    run.league.snapshot()
    run.league.close()

    other = make(tmp_path, "env.id=penstock.envs.games.kuhn:KuhnPoker")
    with pytest.raises(UserError, match="has played another game"):
        other.league.open(2)
    other.league.close()

    resumed = make(tmp_path, "env.id=penstock.envs.games.kuhn:KuhnPoker")
    resumed.trainer.progress.trained_steps = 1000
    resumed.league.open(2)


def test_a_second_run_of_the_same_line_is_refused(tmp_path: Path) -> None:
    pool = f"league.pool={tmp_path / 'shared'}"
    make(tmp_path / "a", pool).league.open(1)

    with pytest.raises(UserError, match="is trained by another run"):
        make(tmp_path / "b", pool).league.open(1)


def test_a_fresh_run_in_a_pool_of_a_longer_one_takes_snapshots_by_its_own_steps(
    tmp_path: Path,
) -> None:
    pool = f"league.pool={tmp_path / 'shared'}"
    longer = make(tmp_path / "a", pool)
    longer.league.open(1)
    train(longer, 5000)
    longer.league.snapshot()
    longer.league.close()

    fresh = make(tmp_path / "b", pool, "run.seed=1")
    fresh.league.open(1)
    train(fresh, 1000)
    assert fresh.league.snapshot_is_due()
    fresh.league.snapshot()
    fresh.league.close()

    resumed = make(tmp_path / "b", pool)
    resumed.trainer.progress.trained_steps = 1000
    resumed.league.load_state_dict(fresh.league.state_dict())
    resumed.league.open(2)
    train(resumed, 999)
    assert not resumed.league.snapshot_is_due()
    train(resumed, 1)
    assert resumed.league.snapshot_is_due()


def test_a_run_that_begins_again_replaces_the_initial_policy_of_before(tmp_path: Path) -> None:
    other = ParamLayout((("policy.weight", (3, 5)),))
    checkpoint = Checkpoint(other, np.zeros(other.size, np.float32))
    pool_of(tmp_path).add("main", checkpoint, steps=0, time_s=0.0, initial=True)

    run = make(tmp_path)
    run.league.open(1)

    (member,) = pool_of(tmp_path).members()
    assert member.initial
    weights = pool_of(tmp_path).weights(member, run.trainer.layout)
    np.testing.assert_array_equal(weights, weights_of(run.trainer))


def test_the_state_is_json_and_continues_equally(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.league.open()
    for _ in range(3):  # members to choose among
        train(run, 1000)
        run.league.snapshot()
    win(run, 10)
    state = json.loads(json.dumps(run.league.state_dict()))

    shutil.copytree(tmp_path / "pool", tmp_path / "copy/pool")
    resumed = make(tmp_path / "copy")
    resumed.trainer.progress.generation = 1
    resumed.trainer.progress.trained_steps = 3000
    resumed.league.load_state_dict(state)
    resumed.league.open()
    assert resumed.league.state_dict() == state

    for _ in range(20):
        for each in (run, resumed):
            win(each, 10)
        assert numbers(run) == numbers(resumed)
        np.testing.assert_array_equal(seated(run, 1), seated(resumed, 1))
    assert run.league.state_dict() == resumed.league.state_dict()


def test_a_resumed_run_keeps_its_opponents_under_new_numbers(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.league.open(1)
    train(run, 1000)
    run.league.snapshot()
    for _ in range(4):
        win(run, 10)
    former = numbers(run)
    former_weights = [seated(run, 1), seated(run, 2)]
    run.league.close()

    resumed = make(tmp_path)
    resumed.trainer.progress.generation = 1
    resumed.league.load_state_dict(run.league.state_dict())
    resumed.league.open(2)

    for chair, weights in enumerate(former_weights, start=1):
        np.testing.assert_array_equal(seated(resumed, chair), weights)
    resumed.league.turn({former[0]: WON, numbers(resumed)[0]: WON}, 0.0)
    assert resumed.league.figures()["league_games"] == run.league.figures()["league_games"] + 2


def test_a_run_with_more_chairs_than_before_draws_for_the_new_ones(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.league.open(1)
    run.league.close()
    resumed = make(tmp_path, "league.chairs=3")
    resumed.trainer.progress.generation = 1
    resumed.league.load_state_dict(run.league.state_dict())

    resumed.league.open(2)

    assert len(numbers(resumed)) == 3


def test_a_run_continues_without_chairs_and_again_with_them(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.league.open(1)
    win(run, 3)
    run.league.close()
    mirror = make(tmp_path, "league.mirror=null")
    mirror.trainer.progress.generation = 1
    mirror.league.load_state_dict(run.league.state_dict())
    mirror.league.open(2)
    assert mirror.league.boards == []
    mirror.league.close()

    again = make(tmp_path)
    again.trainer.progress.generation = 2
    again.league.load_state_dict(mirror.league.state_dict())
    again.league.open(3)
    assert len(numbers(again)) == 2
    assert again.league.figures()["league_games"] == 6


def test_a_reset_returns_to_the_initial_weights_and_makes_old_unrolls_too_old(
    tmp_path: Path,
) -> None:
    run = make(tmp_path, "league.reset=true", "transport.max_policy_lag=40")
    run.league.open(1)
    initial = weights_of(run.trainer)
    optimizer = {name: each.copy() for name, each in run.trainer.state_dict().items()}
    train(run, 1000)
    version = run.trainer.progress.version

    run.league.snapshot()

    np.testing.assert_array_equal(weights_of(run.trainer), initial)
    for name, array in run.trainer.state_dict().items():
        np.testing.assert_array_equal(array, optimizer[name])
    assert run.trainer.progress.version == version + 41
    assert run.trainer.progress.trained_steps == 1000
    assert run.league.take_reset()
    assert not run.league.take_reset()


def test_a_kill_between_a_snapshot_and_its_checkpoint_does_not_lose_the_reset(
    tmp_path: Path,
) -> None:
    run = make(tmp_path, "league.reset=true")
    run.league.open(1)
    initial = weights_of(run.trainer)
    train(run, 900)
    state = run.league.state_dict()
    weights = weights_of(run.trainer)
    train(run, 100)
    run.league.snapshot()
    run.league.close()

    resumed = make(tmp_path, "league.reset=true")
    set_weights(resumed.trainer, weights)
    resumed.trainer.progress.generation = 1
    resumed.league.load_state_dict(state)
    resumed.league.open(2)

    np.testing.assert_array_equal(weights_of(resumed.trainer), initial)


def test_lines_of_a_league_play_against_members_of_all(tmp_path: Path) -> None:
    other = make(tmp_path, "league.name=other", f"league.pool={tmp_path / 'pool'}", "run.seed=5")
    other.league.open(1)
    lines = "league.lines={other: {draw: main}}"
    run = make(tmp_path, lines, "league.draw=uniform")
    run.league.open(1)

    members = {each.line for each in pool_of(tmp_path).members()}
    assert members == {"main", "other"}
    drawn = set()
    for _ in range(40):
        win(run, 10)
        drawn.add(seated(run, 1).tobytes())
    assert len(drawn) == 2
    assert run.league.figures()["league_members"] == 2


def test_a_line_waits_for_the_first_member_of_another_one(tmp_path: Path) -> None:
    run = make(tmp_path, "league.lines={other: {}}")
    other = make(tmp_path, "league.name=other", "run.seed=5")
    beats: list[int] = []

    def beat() -> None:
        beats.append(1)
        if len(beats) == 2:
            other.league.open(1)

    run.league.open(1, beat=beat)

    assert len(beats) == 2
    assert len(numbers(run)) == 2


def test_a_wait_ends_when_the_run_is_stopped(tmp_path: Path) -> None:
    run = make(tmp_path, "league.lines={other: {}}")

    run.league.open(1, stopping=lambda: True)

    assert numbers(run) == []


@pytest.mark.parametrize(("rule", "shows"), [("newest", True), ("pfsp:squared", False)])
def test_the_latest_weights_are_shown_to_lines_that_play_against_them(
    tmp_path: Path, rule: str, shows: bool
) -> None:
    run = make(tmp_path, f"league.lines={{other: {{draw: {rule}}}}}", "league.mirror=null")
    run.league.open(1)
    train(run, 10)
    run.league.turn({}, 100.0)
    train(run, 10)
    run.league.turn({}, 129.0)
    assert (pool_of(tmp_path).latest("main") is not None) == shows
    if not shows:
        return

    first = pool_of(tmp_path).latest("main")
    assert first is not None
    assert first.steps == 10
    run.league.turn({}, 130.0)
    second = pool_of(tmp_path).latest("main")
    assert second is not None
    assert second.steps == 20


SEATING = Seating(seats=3, sides=(0, 0, 1))


@pytest.mark.parametrize(
    ("own_seats", "lines", "playable"),
    [
        (None, {}, {"main"}),
        (None, {"a": None, "b": [0]}, {"main", "a"}),
        ([0, 1], {"a": [2], "b": [0, 1]}, {"a"}),
        ([0, 1], {"a": None}, {"a"}),
        ([2], {"a": [0, 1], "b": [0]}, {"a"}),
    ],
)
def test_a_line_plays_against_those_that_have_the_other_seats(
    own_seats: Any, lines: dict[str, Any], playable: set[str]
) -> None:
    configs = {name: LineConfig(seats=seats) for name, seats in lines.items()}
    league = LeagueConfig(seats=own_seats, lines=configs)

    assert {*playable_lines(league, SEATING)} == playable


def test_a_line_whose_opponents_nobody_plays_is_refused() -> None:
    league = LeagueConfig(seats=[0, 1])

    with pytest.raises(UserError, match=r"no line of league.lines plays the seats \[2\]"):
        playable_lines(league, SEATING)
