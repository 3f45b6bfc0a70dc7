"""Games between members of a pool whose strength is known, and the report on them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock.algos.samples import network_shape
from penstock.cli.app import main
from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE, dump, resolve
from penstock.configs.schema import Config
from penstock.envs import make
from penstock.evaluation.evaluate import Episode
from penstock.evaluation.evaluator import Evaluator
from penstock.evaluation.league_report import describe, report
from penstock.evaluation.tournament import GAMES_TOGETHER, Tournament, meeting_of
from penstock.league import payoffs
from penstock.league.payoffs import Meeting, Payoffs
from penstock.league.results import GameCounts
from penstock.learner.checkpoints.checkpoint_format import FILE, Checkpoint
from penstock.learner.checkpoints.checkpoint_history import ENV
from penstock.learner.checkpoints.checkpoint_spaces import SPACES, spaces_as_json
from penstock.learner.pool import PolicyPool, PoolMember
from transport_world import context

ROCK = [50.0, 0.0, 0.0]
PAPER = [0.0, 50.0, 0.0]
SCISSORS = [0.0, 0.0, 50.0]
ANY = [0.0, 0.0, 0.0]
ROUNDS = 10


def config_of(*options: str, target: str = "rock_paper_scissors") -> Config:
    return resolve(target, options)


def add(
    pool: PolicyPool,
    logits: Sequence[float] | npt.NDArray[np.float64],
    *,
    steps: int,
    line: str = "main",
    config: Config | None = None,
) -> PoolMember:
    """Add a member whose choices have these logits whatever it sees."""
    config = config or config_of()
    env = make(config.env, 1, whole_games=True)
    env.close()
    layout = network_shape(config, env.info).layout
    weights = np.zeros(layout.size, np.float32)
    layout.views(weights)["policy.bias"][:] = logits
    meta = {ENV: config.env.identity(), SPACES: spaces_as_json(env.info)}
    checkpoint = Checkpoint(layout, weights, meta=meta)
    return pool.add(line, checkpoint, steps=steps, time_s=0.0, initial=steps == 0)


@pytest.fixture
def pool(tmp_path: Path) -> PolicyPool:
    return PolicyPool(tmp_path / "pool")


@pytest.fixture
def tournaments() -> Iterator[list[Tournament]]:
    made: list[Tournament] = []
    yield made
    for tournament in made:
        tournament.close()


def play_all(tournament: Tournament, games: int) -> list[tuple[str, str]]:
    """Play until all pairs have ``games``, and return the pairs in order."""
    pairs = []
    while pair := tournament.next_pair(games):
        pairs.append((pair.row.id, pair.column.id))
        tournament.play(pair, games)
    return pairs


def test_members_win_as_their_strategies_say(
    pool: PolicyPool, tournaments: list[Tournament]
) -> None:
    rock = add(pool, ROCK, steps=0)
    paper = add(pool, PAPER, steps=1)
    anything = add(pool, ANY, steps=2)
    tournaments.append(Tournament(pool, {"main": config_of()}))
    play_all(tournaments[0], 300)

    meeting = tournaments[0].payoffs.meeting(paper.id, rock.id)
    assert meeting.counts == (300, 0, 0)
    assert meeting.returns == 300 * ROUNDS
    # A round against any choice gains 0, with variance 2/3.
    meeting = tournaments[0].payoffs.meeting(paper.id, anything.id)
    assert meeting.counts.games == 300
    assert meeting.counts.draws > 10
    assert abs(meeting.returns) < 4 * np.sqrt(300 * ROUNDS * 2 / 3)


def test_a_new_member_plays_against_all_others_and_nobody_plays_again(
    pool: PolicyPool, tournaments: list[Tournament]
) -> None:
    rock = add(pool, ROCK, steps=0)
    paper = add(pool, PAPER, steps=1)
    tournaments.append(Tournament(pool, {"main": config_of()}))
    assert play_all(tournaments[0], 20) == [(paper.id, rock.id)]

    scissors = add(pool, SCISSORS, steps=2)
    assert play_all(tournaments[0], 20) == [(scissors.id, paper.id), (scissors.id, rock.id)]
    assert tournaments[0].next_pair(20) is None


def test_another_tournament_goes_on_where_one_has_stopped(
    pool: PolicyPool, tournaments: list[Tournament]
) -> None:
    for steps, logits in enumerate((ROCK, PAPER, SCISSORS)):
        add(pool, logits, steps=steps)
    tournaments += [Tournament(pool, {"main": config_of()}) for _ in range(2)]
    first = tournaments[0].next_pair(20)
    assert first is not None
    tournaments[0].play(first, 20)

    pairs = play_all(tournaments[1], 20)
    assert len(pairs) == 2
    assert (first.row.id, first.column.id) not in pairs


def test_the_pair_with_the_fewest_games_is_next(
    pool: PolicyPool, tournaments: list[Tournament]
) -> None:
    for steps, logits in enumerate((ROCK, PAPER, SCISSORS)):
        add(pool, logits, steps=steps)
    tournaments.append(Tournament(pool, {"main": config_of()}))
    for games in (8, 4, 2):
        pair = tournaments[0].next_pair(100)
        assert pair is not None
        assert pair.games == 0
        tournaments[0].play(pair, games)
    pair = tournaments[0].next_pair(100)
    assert pair is not None
    assert pair.games == 2


def test_a_damaged_member_is_left_out_with_one_note(
    pool: PolicyPool, tournaments: list[Tournament], notes: list[str]
) -> None:
    members = [add(pool, each, steps=n) for n, each in enumerate((ROCK, PAPER, SCISSORS))]
    path = pool.checkpoint_folder(members[1]) / FILE
    path.write_bytes(path.read_bytes()[:-1])
    tournaments.append(Tournament(pool, {"main": config_of()}))

    play_all(tournaments[0], 10)
    assert tournaments[0].payoffs.meeting(members[0].id, members[2].id).counts.games == 10
    assert tournaments[0].payoffs.meeting(members[0].id, members[1].id).counts.games == 0
    assert [note for note in notes if members[1].id in note] == notes
    assert len(notes) == 1


def test_a_pair_whose_games_do_not_end_is_left_out(
    pool: PolicyPool, tournaments: list[Tournament]
) -> None:
    add(pool, ROCK, steps=0)
    add(pool, PAPER, steps=1)
    config = config_of(f"eval.max_episode_steps={ROUNDS - 1}")
    tournaments.append(Tournament(pool, {"main": config}))
    assert len(play_all(tournaments[0], 10)) == 1


def test_a_pair_of_two_lines_is_played_by_the_first_of_them(
    pool: PolicyPool, tournaments: list[Tournament]
) -> None:
    rock = add(pool, ROCK, steps=0, line="a")
    paper = add(pool, PAPER, steps=0, line="b")
    scissors = add(pool, SCISSORS, steps=1, line="b")
    first = config_of("league.name=a", "league.lines.b={}")
    second = config_of("league.name=b", "league.lines.a={}")
    tournaments += [Tournament(pool, {"a": first}), Tournament(pool, {"b": second})]

    assert play_all(tournaments[0], 4) == [(rock.id, scissors.id), (rock.id, paper.id)]
    assert play_all(tournaments[1], 4) == [(scissors.id, paper.id)]


def test_lines_of_unlike_sides_play_only_against_each_other(
    pool: PolicyPool, tournaments: list[Tournament]
) -> None:
    target = "penstock/PredatorPrey-v0"
    others: Mapping[str, str] = {"hunters": "prey", "prey": "hunters"}
    seats = {"hunters": [0, 1], "prey": [2, 3]}
    configs = {
        name: config_of(
            "algo.name=ppo",
            f"league.name={name}",
            f"league.seats={seats[name]}",
            "league.mirror=0",
            f"league.lines.{other}.seats={seats[other]}",
            target=target,
        )
        for name, other in others.items()
    }
    # All of them choose at random; their logits differ, and so do their ids.
    members = [
        add(pool, np.full(9, float(number)), steps=number, line=line, config=configs[line])
        for number, line in enumerate(("hunters", "hunters", "prey", "prey"))
    ]
    tournaments.append(Tournament(pool, configs))
    pairs = play_all(tournaments[0], 4)
    hunters, prey = members[:2], members[2:]
    assert {*pairs} == {(one.id, other.id) for one in hunters for other in prey}


def test_a_line_without_opponents_in_the_pool_plays_no_games(
    pool: PolicyPool, tournaments: list[Tournament]
) -> None:
    options = ("algo.name=ppo", "league.seats=[0, 1]", "league.mirror=0", "league.bots.random=1")
    config = config_of(*options, target="penstock/PredatorPrey-v0")
    for steps in range(2):
        add(pool, np.full(9, float(steps)), steps=steps, config=config)
    tournaments.append(Tournament(pool, {"main": config}))
    assert tournaments[0].next_pair(4) is None


def test_a_game_that_was_cut_has_no_result() -> None:
    cut = Episode(episode_return=3.0, length=9, cut=True, number=0)
    won = Episode(episode_return=2.0, length=5, outcome=1.0, number=1)
    assert meeting_of([cut, won]) == Meeting(GameCounts(1, 0, 0), returns=2.0)


def make_run(folder: Path, *options: str) -> PolicyPool:
    """Write a folder as of a run, and return its pool."""
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(dump(config_of(*options)))
    return PolicyPool(folder / "pool")


def test_the_report_plays_missing_games_and_rates_the_members(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pool = make_run(run)
    # Paper beats rock; the last member plays all choices alike.
    members = [add(pool, each, steps=n) for n, each in enumerate((ROCK, PAPER, ANY))]
    said: list[str] = []
    result = report(run, 300, said.append)

    assert len(said) == 3
    assert [each["id"] for each in result["members"]] == [members[i].id for i in (1, 2, 0)]
    assert result["members"][2]["rating"] == 0
    assert result["members"][2]["interval"] == [0, 0]
    assert {each["games"] for each in result["members"]} == {600}
    assert result["win_rates"][0][2] == 1
    assert result["win_rates"][2][0] == 0
    assert result["win_rates"][0][0] is None
    assert [(each["winner"], each["loser"]) for each in result["exploits"]] == [
        ("main:1", "main:0")
    ]
    json.dumps(result, allow_nan=False)

    text = describe(result)
    assert "main:1 beats main:0 in 100% of 300 games" in text
    assert "before training" in text
    # No game is missing now.
    assert report(run, 300, said.append) == result
    assert len(said) == 3


def test_the_command_notes_a_member_that_cannot_be_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = make_run(tmp_path / "run")
    damaged = add(pool, ROCK, steps=0)
    add(pool, PAPER, steps=1)
    (pool.checkpoint_folder(damaged) / FILE).write_bytes(b"")
    monkeypatch.setattr("sys.argv", ["penstock", "league", str(tmp_path / "run"), "--rate", "2"])
    with suppress(SystemExit):
        main()
    assert f"member {damaged.id} of line main plays no games" in capsys.readouterr().err


def test_a_member_that_is_added_while_games_are_played_is_in_the_report(tmp_path: Path) -> None:
    pool = make_run(tmp_path / "run")
    add(pool, ROCK, steps=0)
    add(pool, PAPER, steps=1)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 1:
            add(PolicyPool(pool.folder), SCISSORS, steps=2)

    result = report(tmp_path / "run", 4, say)

    assert len(said) == 3
    assert {each["name"] for each in result["members"]} == {"main:0", "main:1", "main:2"}


def test_the_report_names_a_member_that_beats_a_stronger_one_first(tmp_path: Path) -> None:
    pool = make_run(tmp_path / "run")
    # Scissors beat all but rock, which loses to all the others.
    for steps, logits in enumerate((ROCK, PAPER, SCISSORS, [0.0, 50.0, 1.0], [0.0, 50.0, 2.0])):
        add(pool, logits, steps=steps)
    first = report(tmp_path / "run", 40, lambda line: None)["exploits"][0]
    assert first["winner"] == "main:0"
    assert first["loser"] == "main:2"
    assert first["is_rated_lower"]


def test_a_report_of_a_league_rates_all_lines(tmp_path: Path) -> None:
    league = tmp_path / "league"
    pool = PolicyPool(league / "pool")
    league.mkdir()
    make_run(league / "a", "league.name=a", "league.lines.b={}")
    make_run(league / "b", "league.name=b", "league.lines.a={}")
    add(pool, ROCK, steps=0, line="a")
    add(pool, PAPER, steps=0, line="b")

    result = report(league, 20, lambda line: None)
    assert [each["name"] for each in result["members"]] == ["b:0", "a:0"]
    assert result["win_rates"][0][1] == 1


def test_a_member_that_a_run_adds_meanwhile_is_played_and_rated(tmp_path: Path) -> None:
    pool = make_run(tmp_path / "run")
    add(pool, ROCK, steps=0)
    add(pool, PAPER, steps=1)
    said: list[str] = []

    def say(text: str) -> None:
        if not said:
            add(pool, SCISSORS, steps=2)
        said.append(text)

    result = report(tmp_path / "run", 2, say)
    assert len(said) == 3
    assert {each["games"] for each in result["members"]} == {4}


def test_a_member_of_two_lines_has_the_name_that_the_first_gives_it(tmp_path: Path) -> None:
    pool = make_run(tmp_path / "run", "league.name=a", "league.lines.b={}")
    add(pool, ROCK, steps=0, line="a")
    add(pool, ROCK, steps=0, line="b")
    add(pool, PAPER, steps=1, line="b")
    said: list[str] = []
    result = report(tmp_path / "run", 2, said.append)
    assert [each["name"] for each in result["members"]] == ["b:1", "a:0"]
    assert said == ["a:0 against b:1: won 0, drawn 0, lost 2"]


def test_the_table_of_unlike_roles_has_one_in_its_rows_and_the_other_in_its_columns(
    tmp_path: Path,
) -> None:
    roles = {"hunters": "[0, 1]", "prey": "[2, 3]"}
    pool = PolicyPool(tmp_path / "pool")
    ids: list[str] = []
    for name, other in (("hunters", "prey"), ("prey", "hunters")):
        options = (f"league.name={name}", f"league.seats={roles[name]}", "league.mirror=0")
        make_run(tmp_path / name, *options, f"league.lines.{other}.seats={roles[other]}")
        for steps in range(2):
            ids.append(add(pool, [0.0, float(steps), float(len(ids))], steps=steps, line=name).id)
    hunters, prey = ids[:2], ids[2:]
    Payoffs(pool.folder).append(hunters[1], prey[0], Meeting(GameCounts(3, 0, 1), returns=2.0))

    text = describe(report(tmp_path, 0, lambda line: None))
    assert "4 members, 4 pairs that can meet" in text
    table = text.split("against the column\n")[1].splitlines()
    assert table[0].split() == ["prey:0", "prey:1"]
    assert sorted(line.split() for line in table[1:3]) == [
        ["hunters:0", "-", "-"],
        ["hunters:1", "75%", "-"],
    ]


def test_a_report_of_one_line_plays_all_pairs_of_the_league(tmp_path: Path) -> None:
    pool = make_run(tmp_path / "run", "league.name=b", "league.lines.a={}")
    add(pool, ROCK, steps=0, line="a")
    add(pool, PAPER, steps=1, line="a")
    add(pool, SCISSORS, steps=0, line="b")
    result = report(tmp_path / "run", 2, lambda line: None)
    assert {each["games"] for each in result["members"]} == {4}


def test_a_report_without_games_says_how_to_play_some(tmp_path: Path) -> None:
    pool = make_run(tmp_path / "run")
    add(pool, ROCK, steps=0)
    add(pool, PAPER, steps=1)
    text = describe(report(tmp_path / "run", 0, lambda line: None))
    assert f"penstock league {tmp_path / 'run'} --rate 200" in text


def test_the_table_of_a_large_pool_shows_the_newest_and_the_best(tmp_path: Path) -> None:
    pool = make_run(tmp_path / "run")
    for steps in range(20):
        add(pool, [0.0, float(steps), 0.0], steps=steps)
    result = report(tmp_path / "run", 2, lambda line: None)
    heading, table = (
        describe(result).split("win rate of the row against the column")[1].split("\n", 1)
    )
    assert "12 of the 20 members" in heading
    columns = table.splitlines()[0].split()
    assert len(columns) == 12
    assert {f"main:{number}" for number in range(14, 20)} <= {*columns}


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nothing", "has neither a config.yaml nor runs"), ("run", "has no members")],
)
def test_a_folder_without_members_is_refused(tmp_path: Path, folder: str, message: str) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        report(tmp_path / folder, 10, lambda line: None)


def evaluator_of(run: Path, *options: str) -> Evaluator:
    """Returns the evaluator of a run in a folder, which reports to nobody."""
    config = config_of("eval.video=false", *options)
    return Evaluator(context(run, "evaluator", config=config), config)


def test_an_evaluator_without_a_pool_makes_none(tmp_path: Path) -> None:
    evaluator_of(tmp_path).play_members()
    assert not (tmp_path / "pool").exists()


@pytest.mark.parametrize(
    ("options", "together"),
    [(["eval.share=0.001"], 1), (["eval.share=null"], 3)],
)
def test_an_evaluator_plays_members_as_far_as_its_share_goes(
    tmp_path: Path, options: list[str], together: int
) -> None:
    pool = PolicyPool(tmp_path / "pool")
    rock, paper = (add(pool, each, steps=n) for n, each in enumerate((ROCK, PAPER)))
    evaluator = evaluator_of(tmp_path, *options)
    for _ in range(3):
        evaluator.play_members()
    evaluator.close_envs()
    meeting = Payoffs(pool.folder).meeting(paper.id, rock.id)
    assert meeting.counts == (together * GAMES_TOGETHER, 0, 0)


def test_an_evaluator_that_cannot_write_results_goes_on(tmp_path: Path, notes: list[str]) -> None:
    pool = PolicyPool(tmp_path / "pool")
    for steps, logits in enumerate((ROCK, PAPER)):
        add(pool, logits, steps=steps)
    (pool.folder / payoffs.FILE).mkdir()
    evaluator = evaluator_of(tmp_path)
    for _ in range(2):
        evaluator.play_members()
    evaluator.close_envs()
    assert len(notes) == 1
    assert "members of the pool do not play for 600 s" in notes[0]
