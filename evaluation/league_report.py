"""What the members of a pool are worth: ratings, a table of win rates, and who exploits whom.

All of it comes from games between frozen members (`tournament`), never from training, in which one
of the two changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from penstock.configs.code_references import references
from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE, load_run
from penstock.configs.schema import Config
from penstock.core import used_names
from penstock.core.files import without_nan
from penstock.core.formatting import aligned
from penstock.league.payoffs import Payoffs
from penstock.league.ratings import fit
from penstock.learner.pool import PolicyPool, PoolMember, pool_folder

EXPLOITS_ABOVE = 0.6
"""Win rate of a member that exploits another."""
MOST_SHOWN = 12
"""Members in the table of win rates: the newest, and then the best of the others."""
NEWEST_SHOWN = 6
MOST_EXPLOITS = 10
"""Lines on who exploits whom."""
Z = 1.96
"""Standard errors in half of a 95 % interval."""


def report(folder: Path, rate: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the ratings and results of the members of a pool, as JSON.

    Args:
        folder: of a run, or of a league with a run for each line.
        rate: games that each pair should have; those that are missing are played first.
        say: receives lines on the progress.

    Returns: the "members", strongest first, with "rating", its "interval" and "games"; the
        "win_rates" and "mean_returns" of each against each in the same order, None and 0 without a
        game; and "exploits", pairs with a "winner", a "loser", the "win_rate", the "games", and
        whether the winner "is_rated_lower".

    Raises:
        UserError: if the folder is no run or league, or if it cannot be played.
    """
    configs, pool = _open(folder)
    if rate:
        _play_missing(pool, configs, rate, say)
    members = list({member.id: member for member in reversed(pool.members())}.values())[::-1]
    if not members:
        raise UserError(
            f"{pool.folder} has no members; they are added while a run trains, the first at its "
            "beginning, if the game has several sides"
        )

    payoffs = Payoffs(pool.folder)
    wins = payoffs.wins([member.id for member in members])
    games = wins + wins.T
    ratings = fit(wins)
    names = _names(members)
    # Members without a rating come last.
    order = np.argsort(-np.nan_to_num(ratings.values, nan=-np.inf), kind="stable")
    with np.errstate(invalid="ignore"):
        win_rates = wins / games

    rows = [
        {
            "name": names[i],
            **members[i]._asdict(),
            "rating": float(ratings.values[i]),
            "interval": [
                float(ratings.values[i] - Z * ratings.errors[i]),
                float(ratings.values[i] + Z * ratings.errors[i]),
            ],
            "games": int(games[i].sum()),
        }
        for i in order
    ]
    exploits = [
        {
            "winner": names[i],
            "loser": names[j],
            "win_rate": float(win_rates[i, j]),
            "games": int(games[i, j]),
            "is_rated_lower": bool(ratings.values[i] < ratings.values[j]),
        }
        for i, j in np.argwhere(win_rates > EXPLOITS_ABOVE)
    ]
    exploits.sort(key=lambda each: (not each["is_rated_lower"], -each["win_rate"]))

    data = {
        "folder": str(folder),
        "pool": str(pool.folder),
        "members": rows,
        "win_rates": win_rates[np.ix_(order, order)].tolist(),
        "mean_returns": payoffs.mean_returns([members[i].id for i in order]).tolist(),
        "exploits": exploits,
    }
    plain: dict[str, Any] = without_nan(data)
    return plain


def describe(report: dict[str, Any]) -> str:
    """Returns a `report` as text."""
    members = report["members"]
    pairs = len(members) * (len(members) - 1) // 2
    has_games = any(member["games"] for member in members)
    lines = [f"{report['pool']}: {len(members)} members, {pairs} pairs", ""]
    lines += _ratings_text(members)
    if not has_games:
        next_step = f"no two members have played yet; penstock league {report['folder']} --rate 200"
        return "\n".join([*lines, "", next_step])

    shown = _shown(members)
    heading = "win rate of the row against the column"
    if len(shown) < len(members):
        heading += f", for {len(shown)} of the members; --json has all"
    lines += ["", heading, *_table_text(report, shown)]

    exploits = report["exploits"]
    if exploits:
        heading = f"wins more than {EXPLOITS_ABOVE:.0%} of the games"
        if len(exploits) > MOST_EXPLOITS:
            heading += f": {MOST_EXPLOITS} of {len(exploits)} pairs; --json has all"
        lines += ["", heading]
    for each in exploits[:MOST_EXPLOITS]:
        note = ", although rated lower" if each["is_rated_lower"] else ""
        lines.append(
            f"{each['winner']} beats {each['loser']} in {each['win_rate']:.0%} of "
            f"{each['games']:,} games{note}"
        )
    return "\n".join(lines)


def _open(folder: Path) -> tuple[dict[str, Config], PolicyPool]:
    """Returns the configs of the lines in a folder by name, and their pool.

    Raises UserError if the folder has neither a run nor runs of a league.
    """
    if (folder / CONFIG_FILE).is_file():
        config = load_run(folder)
        return {config.league.name: config}, PolicyPool(pool_folder(config, folder))

    runs = [load_run(path.parent) for path in sorted(folder.glob(f"*/{CONFIG_FILE}"))]
    if not runs or not (folder / "pool").is_dir():
        raise UserError(
            f"{folder} has neither a {CONFIG_FILE} nor runs that share a pool; give the folder of "
            "a run, or of a league"
        )
    return {run.league.name: run for run in runs}, PolicyPool(folder / "pool")


def _play_missing(
    pool: PolicyPool, configs: dict[str, Config], rate: int, say: Callable[[str], None]
) -> None:
    """Play until each pair has ``rate`` games.

    Raises UserError if they cannot be played, or their results not be written.
    """
    from penstock.evaluation.tournament import GAMES_TOGETHER, Tournament

    for config in configs.values():
        used_names.check(references(config), (), str(pool.folder))
    with closing(Tournament(pool, configs)) as tournament:
        while pair := tournament.next_pair(rate):
            missing = rate - pair.games
            try:
                # An even number gives each side of two as many.
                tournament.play(pair, min(missing + missing % 2, GAMES_TOGETHER))
            except OSError as error:
                raise UserError(
                    f"results cannot be written to {pool.folder} ({error.strerror}); free some "
                    "space, or make the folder writable"
                ) from error
            counts = tournament.payoffs.meeting(pair.row.id, pair.column.id).counts
            members = pool.members()  # a run that goes on adds some
            names = dict(zip((member.id for member in members), _names(members), strict=True))
            say(
                f"{names[pair.row.id]} against {names[pair.column.id]}: won {counts.wins}, drawn "
                f"{counts.draws}, lost {counts.losses}"
            )


def _names(members: Sequence[PoolMember]) -> list[str]:
    """Returns a name for each member: its line, and its number within it."""
    numbers: dict[str, int] = {}
    names = []
    for member in members:
        number = numbers.get(member.line, -1) + 1
        numbers[member.line] = number
        names.append(f"{member.line}:{number}")
    return names


def _ratings_text(members: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the table of ratings, line by line."""
    rows = [["member", "steps", "rating", "95 %", "games", "folder"]]
    for member in members:
        rating = interval = "-"
        if member["rating"] is not None:
            rating = str(round(member["rating"]))
            low, high = member["interval"]
            interval = f"{round(low)} to {round(high)}" if high > low else "the zero point"
        steps = "before training" if member["initial"] else f"{member['steps']:,}"
        rows.append([member["name"], steps, rating, interval, f"{member['games']:,}", member["id"]])
    return aligned(rows)


def _shown(members: Sequence[dict[str, Any]]) -> list[int]:
    """Returns the places of the members whose win rates are shown."""
    by_age = sorted(range(len(members)), key=lambda place: -members[place]["steps"])
    newest = by_age[:NEWEST_SHOWN]
    best = [place for place in range(len(members)) if place not in newest]
    return sorted([*newest, *best[: MOST_SHOWN - len(newest)]])


def _table_text(report: dict[str, Any], shown: Sequence[int]) -> list[str]:
    """Returns the table of win rates of the members at these places, line by line."""
    names = [report["members"][place]["name"] for place in shown]
    rows = [["", *names]]
    for name, place in zip(names, shown, strict=True):
        win_rates = [report["win_rates"][place][column] for column in shown]
        rows.append([name, *("-" if rate is None else f"{rate:.0%}" for rate in win_rates)])
    return aligned(rows)
