"""The lines of a league: how a file describes them, and what is refused before any starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.cli.app import main
from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.core import used_names
from penstock.core.run_dir import run_folder
from penstock.launch import league
from penstock.launch.league import layouts_of, read_file, read_folder, train_league
from penstock.launch.run_group import RunEnd

EXAMPLES = Path(__file__).parents[3] / "examples" / "leagues"
EXPLOITED = """
base: rock_paper_scissors
actors: {envs: 8}
league: {mirror: 0.5}
run: {seed: 7}
stop: {minutes: 1}
lines:
  main:
    league: {draw: main}
  exploiter:
    league: {draw: main_exploiter, mirror: 0}
    learner: {lr: 5e-3}
"""
ROLES = """
env: {id: penstock/PredatorPrey-v0}
algo: {name: ppo}
actors: {envs: 24}
league: {mirror: 0}
lines:
  hunters: {league: {seats: [0, 1]}}
  prey: {league: {seats: [2, 3]}}
"""


def written(folder: Path, text: str) -> str:
    path = folder / "league.yaml"
    path.write_text(text)
    return str(path)


def test_a_line_is_the_files_config_with_its_own_sections_over_it(tmp_path: Path) -> None:
    found = read_file(written(tmp_path, EXPLOITED), [f"run.dir={tmp_path / 'L'}"], "no")
    main, exploiter = found.lines.values()
    assert [*found.lines] == ["main", "exploiter"]
    assert (main.league.draw, main.league.mirror, main.learner.lr) == ("main", 0.5, 3e-3)
    assert (exploiter.league.draw, exploiter.league.mirror) == ("main_exploiter", 0)
    assert exploiter.learner.lr == 5e-3
    assert exploiter.actors.envs == main.actors.envs == 8


def test_a_line_knows_its_folder_the_pool_and_the_other_lines(tmp_path: Path) -> None:
    found = read_file(written(tmp_path, EXPLOITED), [f"run.dir={tmp_path / 'L'}"], "no")
    main, exploiter = found.lines.values()
    assert main.run.dir == str(tmp_path / "L" / "main")
    assert main.league.pool == exploiter.league.pool == str(tmp_path / "L" / "pool")
    assert (main.league.name, exploiter.league.name) == ("main", "exploiter")
    assert {name: line.draw for name, line in main.league.lines.items()} == {
        "exploiter": "main_exploiter"
    }
    assert {name: line.draw for name, line in exploiter.league.lines.items()} == {"main": "main"}


def test_lines_begin_with_seeds_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path, EXPLOITED)
    seeds = [line.run.seed for line in read_file(path, [], "no").lines.values()]
    assert seeds == [7, 8]

    text = EXPLOITED.replace(
        "main_exploiter, mirror: 0}", "main_exploiter, mirror: 0}\n    run: {seed: 3}"
    )
    seeds = [line.run.seed for line in read_file(written(tmp_path, text), [], "no").lines.values()]
    assert seeds == [7, 3]


def test_an_option_of_the_command_line_is_of_all_lines(tmp_path: Path) -> None:
    found = read_file(written(tmp_path, EXPLOITED), ["learner.lr=1e-4"], "no")
    assert [line.learner.lr for line in found.lines.values()] == [1e-4, 1e-4]


def test_a_line_keeps_the_numbers_of_actors_and_threads_with_which_it_starts(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, EXPLOITED)
    found = read_file(path, ["actors.count=auto", "learner.threads=auto"], "no")
    for line in found.lines.values():
        assert isinstance(line.actors.count, int)
        assert isinstance(line.learner.threads, int)


def test_a_mistake_in_a_line_is_named_with_its_line_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, EXPLOITED.replace("lr: 5e-3", "lr: fast"))
    with pytest.raises(UserError, match=rf"^{re.escape(path)}:12: learner.lr is 'fast'"):
        read_file(path, [], "no")


def test_lines_are_refused_by_commands_of_one_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"league.yaml:7: .* start all lines with penstock league"):
        resolve(written(tmp_path, EXPLOITED))


# Each mistake: a part of the file, what takes its place, and the sentence.
MISTAKES = {
    "one line": (EXPLOITED, "  exploiter:\n    league: {draw: main_exploiter, mirror: 0}\n"
                 "    learner: {lr: 5e-3}\n", "", "a league has at least 2 lines, and .* has 1"),
    "no lines": (EXPLOITED, EXPLOITED[EXPLOITED.index("lines:"):], "", "has no map `lines`"),
    "no sections": (EXPLOITED, "    league: {draw: main}\n", "    draw\n", "line main is 'draw'"),
    "unknown rule": (EXPLOITED, "draw: main}", "draw: best}", "league.draw is 'best'"),
    "path as name": (EXPLOITED, "  exploiter:", "  ../exploiter:", "cannot be the name of a line"),
    "pool as name": (EXPLOITED, "  exploiter:", "  pool:", "cannot be the name of a line"),
    "own pool": (EXPLOITED, "draw: main}", "draw: main, pool: x}", "line main has league.pool"),
    "own name": (EXPLOITED, "draw: main}", "draw: main, name: x}", "line main has league.name"),
    "two folders": (EXPLOITED, "    learner: {lr: 5e-3}", "    run: {dir: x}", "run.dir is"),
    "other game": (EXPLOITED, "    learner: {lr: 5e-3}", "    env: {id: penstock/Kuhn-v0}",
                   "main and exploiter differ in the section env"),
    "nobody drawn": (EXPLOITED, "main_exploiter, mirror: 0", "main_exploiter, mirror: 1",
                     "line exploiter has league.draw main_exploiter, and draws nobody"),
    "mirror only": (ROLES, "mirror: 0}", "mirror: 1}", "no line plays against members"),
    "some seats": (ROLES, "prey: {league: {seats: [2, 3]}}", "prey: {}",
                   "line hunters has league.seats and line prey has not"),
    "one port": (EXPLOITED, "run: {seed: 7}", "run: {metrics_port: 9000}", "metrics_port=9000"),
    "other network": (EXPLOITED, "learner: {lr: 5e-3}", "model: {hidden: [8]}",
                      "main and exploiter have different networks"),
    "one side": (ROLES, "penstock/PredatorPrey-v0", "CartPole-v1", "CartPole-v1 has no opponents"),
    "seat in two roles": (ROLES, "[0, 1]", "[0, 1, 2]", "which its opponents need"),
    "seat in no role": (ROLES, "seats: [2, 3]", "seats: [2]", "which its opponents need"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_lines_that_do_not_go_together_are_refused_before_any_starts(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, wrong, replacement, sentence = MISTAKES[mistake]
    assert wrong in text
    path = written(tmp_path, text.replace(wrong, replacement))
    with pytest.raises(UserError, match=sentence) as refusal:
        train_league(path, [], "no", as_json=True)
    assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["league.yaml"]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_lines_of_an_example_go_together(example: Path) -> None:
    found = read_file(str(example), [], "no")
    league.check_lines(found.lines)
    league.check_networks(layouts_of(found.lines))


@pytest.mark.parametrize("earlier", ["pool/main.json", "main/metrics.jsonl"])
def test_a_folder_with_an_earlier_league_is_refused(earlier: str, tmp_path: Path) -> None:
    path = tmp_path / "L" / earlier
    path.parent.mkdir(parents=True)
    path.write_text("{}\n")
    with pytest.raises(UserError, match="resume it with --resume auto"):
        train_league(
            written(tmp_path, EXPLOITED), [f"run.dir={tmp_path / 'L'}"], "no", as_json=True
        )
    assert not (tmp_path / "L" / "lines").exists()


def test_a_league_that_trains_keeps_its_configs(tmp_path: Path) -> None:
    folder = tmp_path / "L"
    trained = read_file(written(tmp_path, EXPLOITED), [f"run.dir={folder}"], "no")
    write_lines(folder, trained.lines)
    config = folder / "lines/main.yaml"
    before = config.read_text()

    refused = pytest.raises(UserError, match="is in use by a run that has not ended")
    with run_folder(folder / "main", "auto"), refused:
        train_league(str(folder), ["learner.lr=0.5"], "auto", as_json=True)

    assert config.read_text() == before


def test_lines_of_unlike_roles_have_one_network(tmp_path: Path) -> None:
    found = read_file(written(tmp_path, ROLES), [], "no")
    layouts = layouts_of(found.lines)
    assert [*layouts] == ["hunters", "prey"]
    assert len({*layouts.values()}) == 1


def test_several_lines_may_play_the_same_role(tmp_path: Path) -> None:
    text = ROLES + "  quick_prey: {league: {seats: [2, 3]}, learner: {lr: 3e-3}}\n"
    assert len(layouts_of(read_file(written(tmp_path, text), [], "no").lines)) == 3


def test_a_league_in_its_folder_is_the_one_that_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "L"
    league_before = read_file(written(tmp_path, EXPLOITED), [f"run.dir={folder}"], "no")
    write_lines(folder, league_before.lines)
    assert read_folder(folder, []).lines == league_before.lines
    found = read_folder(folder, ["stop.minutes=3"])
    assert {line.stop.minutes for line in found.lines.values()} == {3}


def test_a_league_that_was_moved_has_its_pool_where_it_is_now(tmp_path: Path) -> None:
    league_before = read_file(written(tmp_path, EXPLOITED), [f"run.dir={tmp_path / 'L'}"], "no")
    write_lines(tmp_path / "moved", league_before.lines)
    main = read_folder(tmp_path / "moved", []).lines["main"]
    assert main.league.pool == str(tmp_path / "moved" / "pool")
    assert main.run.dir == str(tmp_path / "moved" / "main")


def test_code_of_a_folder_from_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = {
        name: resolve("their_game:make", [f"league.name={name}"]) for name in ("main", "other")
    }
    write_lines(tmp_path / "L", lines)
    with pytest.raises(UserError, match="their_game:make"):
        read_folder(tmp_path / "L", [])
    used_names.note(lines["main"])
    assert [*read_folder(tmp_path / "L", []).lines] == ["main", "other"]


def write_lines(folder: Path, lines: Mapping[str, object]) -> None:
    (folder / "lines").mkdir(parents=True)
    for name, config in lines.items():
        (folder / "lines" / f"{name}.yaml").write_text(dump(config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([1, 143], 1),
        ([2, 143], 2),
        ([130, 130], 130),
        ([0, 143], 143),
        ([0], 130),  # a signal kept the second from starting
    ],
)
def test_exit_code_of_a_league_is_that_of_the_failure_before_that_of_a_signal(
    codes: list[int], code: int
) -> None:
    ends = {str(number): RunEnd(each, {}) for number, each in enumerate(codes)}
    assert league._exit_code(ends, 2) == code


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["FOLDER", "learner.lr=1e-3"], "learner.lr=1e-3 is an option of training"),
        (["FOLDER", "--resume", "auto"], "so it is no league"),
        (["FOLDER", "--resume", "auto", "--rate", "9"], "--rate plays games of the members"),
        (["league.yaml", "--rate", "9"], "--rate plays games of the members"),
        (["missing.yaml"], "missing.yaml cannot be read: No such file or directory"),
    ],
)
def test_a_folder_is_shown_and_a_file_trained(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").mkdir()
    written(tmp_path, EXPLOITED)
    monkeypatch.setattr("sys.argv", ["penstock", "league", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert sentence in capsys.readouterr().err
