"""The file of games between frozen members."""

import math
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.league.payoffs import FILE, NO_GAMES, Meeting, Payoffs
from penstock.league.results import GameCounts


def test_games_of_a_pair_add_up_from_both_sides(tmp_path: Path) -> None:
    payoffs = Payoffs(tmp_path)
    payoffs.append("a", "b", Meeting(GameCounts(3, 1, 2), 2.5))
    payoffs.append("b", "a", Meeting(GameCounts(4, 0, 1), 3.0))

    assert payoffs.meeting("a", "b") == Meeting(GameCounts(4, 1, 6), -0.5)
    assert payoffs.meeting("b", "a") == Meeting(GameCounts(6, 1, 4), 0.5)
    assert payoffs.meeting("a", "c") == NO_GAMES


def test_tables_have_means_of_returns_and_sums_of_wins(tmp_path: Path) -> None:
    payoffs = Payoffs(tmp_path)
    payoffs.append("a", "b", Meeting(GameCounts(3, 1, 2), 3.0))

    members = ["b", "c", "a"]
    assert payoffs.mean_returns(members).tolist() == [[0, 0, -0.5], [0, 0, 0], [0.5, 0, 0]]
    assert payoffs.wins(members).tolist() == [[0, 0, 2.5], [0, 0, 0], [3.5, 0, 0]]


def test_another_process_reads_what_was_appended(tmp_path: Path) -> None:
    writer, reader = Payoffs(tmp_path), Payoffs(tmp_path)
    writer.append("a", "b", Meeting(GameCounts(1, 0, 0), 1.0))
    assert reader.refresh()
    assert not reader.refresh()
    assert reader.meeting("a", "b") == writer.meeting("a", "b") != NO_GAMES


@pytest.mark.parametrize("cut", range(2, 40, 6))
def test_a_torn_last_line_loses_its_games_alone(tmp_path: Path, cut: int) -> None:
    first, last = Meeting(GameCounts(1, 0, 0), 1.0), Meeting(GameCounts(0, 0, 2), -2.0)
    payoffs = Payoffs(tmp_path)
    payoffs.append("a", "b", first)
    payoffs.append("a", "b", Meeting(GameCounts(500, 0, 0), 500.0))
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-cut])

    assert Payoffs(tmp_path).meeting("a", "b") == first
    Payoffs(tmp_path).append("a", "b", last)
    assert Payoffs(tmp_path).meeting("a", "b") == first.plus(last)


def test_writers_at_the_same_time_lose_no_line(tmp_path: Path) -> None:
    def append_lines() -> None:
        payoffs = Payoffs(tmp_path)
        for _ in range(200):
            payoffs.append("a", "b", Meeting(GameCounts(1, 1, 1), 0.5))

    threads = [threading.Thread(target=append_lines) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Payoffs(tmp_path).meeting("a", "b") == Meeting(GameCounts(800, 800, 800), 400.0)


def test_only_this_user_may_read_the_file(tmp_path: Path) -> None:
    Payoffs(tmp_path).append("a", "b", NO_GAMES)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_returns_keep_their_last_digit(tmp_path: Path) -> None:
    Payoffs(tmp_path).append("a", "b", Meeting(GameCounts(1, 0, 0), math.pi))
    assert Payoffs(tmp_path).mean_returns(["a", "b"])[0, 1] == math.pi
    np.testing.assert_array_equal(np.diag(Payoffs(tmp_path).wins(["a", "b"])), 0)


def test_a_line_of_other_values_has_no_games(tmp_path: Path) -> None:
    payoffs = Payoffs(tmp_path)
    payoffs.append("a", "b", Meeting(GameCounts(1, 0, 0), 1.0))
    good = (tmp_path / FILE).read_text()
    wrong = good.replace(": 1,", ': "1",') + good.replace('"a"', '["a"]')
    (tmp_path / FILE).write_text(wrong + good)

    assert Payoffs(tmp_path).meeting("a", "b").counts == GameCounts(1, 0, 0)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)  # opening it would wait for a writer

    with pytest.raises(UserError, match="it is no regular file"):
        Payoffs(tmp_path)
