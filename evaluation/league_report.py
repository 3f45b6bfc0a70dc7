"""What the members of a pool are worth: ratings, a table of win rates, and who exploits whom.

All of it comes from games between frozen members (`tournament`), never from training, in which one
of the two changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from penstock.configs.code_references import references
from penstock.configs.errors import UserError
from penstock.configs.league import opposing_lines
from penstock.configs.load import CONFIG_FILE, load_run
from penstock.configs.schema import Config
from penstock.core import used_names
from penstock.core.files import without_nan
from penstock.core.formatting import aligned, percent
from penstock.league.payoffs import Payoffs
from penstock.league.ratings import fit
from penstock.learner.pool import PolicyPool, PoolMember, pool_folder

EXPLOITS_ABOVE = 0.6
"""Win rate of a member that exploits another."""
MOST_SHOWN = 12
"""Members in the rows or columns of a table: the newest, and then the best of the others."""
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

    Returns: the "members", strongest first, with "rating", its "interval" and "games"; which
        lines each line "meets"; the "win_rates" and "mean_returns" of each member against each in
        the same order, None and 0 without a game; and "exploits", pairs with a "winner", a "loser",
        the "win_rate", the "games", and whether the winner "is_rated_lower".

    Raises:
        UserError: if the folder is no run or league, or if it cannot be played.
    """
    configs, pool = _open(folder)
    if not pool.members():
        raise UserError(
            f"{pool.folder} has no members; they are added while a run trains, the first at its "
            "beginning, if the game has several sides"
        )
    if rate:
        _play_missing(pool, configs, rate, say)

    # The run may have added some meanwhile. Two lines may have begun with the same weights.
    listed = pool.members()
    names = _names(listed)
    members = [*{member.id: member for member in reversed(listed)}.values()][::-1]

    payoffs = Payoffs(pool.folder)
    wins = payoffs.wins([member.id for member in members])
    games = wins + wins.T
    ratings = fit(wins)
    # Members without a rating come last.
    order = np.argsort(-np.nan_to_num(ratings.values, nan=-np.inf), kind="stable")
    with np.errstate(invalid="ignore"):
        win_rates = wins / games

    rows = [
        {
            "name": names[members[i].id],
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
    exploits: list[dict[str, Any]] = [
        {
            "winner": names[members[i].id],
            "loser": names[members[j].id],
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
        "meets": opposing_lines(config.league for config in configs.values()),
        "win_rates": win_rates[np.ix_(order, order)].tolist(),
        "mean_returns": payoffs.mean_returns([members[i].id for i in order]).tolist(),
        "exploits": exploits,
    }
    plain: dict[str, Any] = without_nan(data)
    return plain


def describe(report: dict[str, Any]) -> str:
    """Returns a `report` as text."""
    members = report["members"]
    meets = report["meets"]
    pairs = sum(
        other["line"] in meets.get(one["line"], ()) for one, other in combinations(members, 2)
    )
    has_games = any(member["games"] for member in members)
    lines = [f"{report['pool']}: {len(members)} members, {pairs} pairs that can meet", ""]
    lines += _ratings_text(members)
    if not has_games:
        next_step = f"no two members have played yet; penstock league {report['folder']} --rate 200"
        return "\n".join([*lines, "", next_step])

    for opposing in dict.fromkeys(map(tuple, meets.values())):
        own = [line for line in meets if tuple(meets[line]) == opposing]
        # Of two roles, one has the rows and the other the columns.
        if opposing and own[0] <= opposing[0]:
            lines += _table_text(report, own, opposing)

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
        configs = {config.league.name: config}
        # The other lines have the same game and network, and play their seats with its options.
        for name, line in config.league.lines.items():
            league = config.league.model_copy(update={"name": name, "seats": line.seats})
            configs[name] = config.model_copy(update={"league": league})
        return configs, PolicyPool(pool_folder(config, folder))

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
            names = _names(pool.members())  # a run that goes on adds some
            counts = tournament.payoffs.meeting(pair.row.id, pair.column.id).counts
            say(
                f"{names[pair.row.id]} against {names[pair.column.id]}: won {counts.wins}, drawn "
                f"{counts.draws}, lost {counts.losses}"
            )


def _names(members: Sequence[PoolMember]) -> dict[str, str]:
    """Returns a name for each member by its id: its line, and its number within it."""
    lines: dict[str, list[str]] = {}
    for member in members:
        lines.setdefault(member.line, []).append(member.id)

    names: dict[str, str] = {}
    for line, ids in lines.items():
        for number, member_id in enumerate(ids):
            names.setdefault(member_id, f"{line}:{number}")
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


def _table_text(report: dict[str, Any], own: Sequence[str], opposing: Sequence[str]) -> list[str]:
    """Returns a table of win rates with a heading, line by line.

    Its rows are members of the lines ``own``, its columns those of the lines ``opposing``.
    """
    members = report["members"]
    rows = _shown(members, own)
    columns = _shown(members, opposing)
    heading = "win rate of the row against the column"
    count = sum(member["line"] in {*own, *opposing} for member in members)
    shown = len({*rows, *columns})
    if shown < count:
        heading += f", for {shown} of the {count} members; --json has all"

    table = [["", *(members[column]["name"] for column in columns)]]
    for row in rows:
        win_rates = [percent(report["win_rates"][row][column]) for column in columns]
        table.append([members[row]["name"], *win_rates])
    return ["", heading, *aligned(table)]


def _shown(members: Sequence[dict[str, Any]], lines: Sequence[str]) -> list[int]:
    """Returns the places of those members of some lines that a table shows."""
    places = [place for place, member in enumerate(members) if member["line"] in lines]
    newest = sorted(places, key=lambda place: -members[place]["steps"])[:NEWEST_SHOWN]
    best = [place for place in places if place not in newest]
    return sorted([*newest, *best[: MOST_SHOWN - len(newest)]])
