"""How an opponent is drawn from the pool: a probability for each candidate, from the win rates
against it. Rules of a line are pure functions of its own results.

`pfsp` is prioritised fictitious self-play, and `main`, `main_exploiter` and `league_exploiter` are
the players of a league, both of AlphaStar (Vinyals et al. 2019, "Grandmaster level in StarCraft II
using multi-agent reinforcement learning", Methods and the supplementary pseudocode). `nash` is the
response to an equilibrium of PSRO (Lanctot et al. 2017, "A unified game-theoretic approach to
multiagent reinforcement learning").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.league.results import Results

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# Of AlphaStar's main player, half of the games are PFSP, 15 % verification and 35 % self-play. The
# last is `league.mirror` here, so the others share what it leaves.
VERIFICATION_SHARE = 0.15 / (0.5 + 0.15)
EXPLOITED_BELOW = 0.3
"""The main player verifies its exploiters if it wins less often than this against one of them."""
FORGOTTEN_BELOW = 0.7
"""It verifies its earlier selves if it wins less often than this against one that beats it more
often than a later one does."""
HOPELESS_BELOW = 0.1
"""Where it wins less often, a main exploiter learns from the main player's earlier selves."""


class Candidate(NamedTuple):
    """One who may be drawn."""

    id: str
    """By which results against it are counted."""
    line: str
    """The line that it is of."""
    order: int
    """Its age within the line; 0 is the oldest."""
    draw: str
    """The rule by which its line draws opponents, which tells an exploiter from a main player."""
    latest: bool = False
    """Whether it is the state of a line that still trains, not a snapshot in the pool."""


def probabilities(
    rule: str,
    candidates: Sequence[Candidate],
    results: Results,
    *,
    name: str,
    nash: Mapping[str, float] | None = None,
) -> Floats:
    """Returns with which probability each candidate is drawn, ``[candidates]``.

    Only `newest` and `main_exploiter` draw the latest state of another line; all others draw
    snapshots. Where there is none, all probabilities are 0.

    Args:
        rule: one of `league.draw`.
        candidates: all who may be drawn.
        results: of the policy that is trained, against them.
        name: the line that draws.
        nash: weights of snapshots by id, for `nash`; without them all are equally likely.
    """
    win_rates = np.array([results.win_rate(each.id) for each in candidates])
    snapshots = np.array([not each.latest for each in candidates], np.bool_)
    kind, _, argument = rule.partition(":")
    match kind:
        case "newest":
            return _shares(np.ones(len(candidates)), _newest(candidates))
        case "uniform":
            recent = _recent(candidates, int(argument)) if argument else snapshots
            return _shares(np.ones(len(candidates)), recent)
        case "pfsp":
            return _prioritized(argument, win_rates, snapshots)
        case "nash":
            weights = np.array([(nash or {}).get(each.id, 0.0) for each in candidates])
            return _shares(weights, snapshots)
        case "main":
            return _main(candidates, win_rates, snapshots, name)
        case "main_exploiter":
            return _main_exploiter(candidates, win_rates, snapshots, name)
        case "league_exploiter":
            return _prioritized("capped", win_rates, snapshots)
    raise AssertionError(rule)


def _main(candidates: Sequence[Candidate], win_rates: Floats, among: Flags, name: str) -> Floats:
    """A main player plays all snapshots, and more often those that it should beat and does not.

    AlphaStar verifies the earlier selves of any main player; here they are those of this line.
    """
    prioritized = _prioritized("squared", win_rates, among)
    suspects = among & [each.draw == "main_exploiter" for each in candidates]
    if not (win_rates[suspects] < EXPLOITED_BELOW).any():
        suspects = _forgotten(candidates, win_rates, among & _of_line(candidates, name))
        if not (win_rates[suspects] < FORGOTTEN_BELOW).any():
            return prioritized

    verified = _prioritized("squared", win_rates, suspects)
    return (1 - VERIFICATION_SHARE) * prioritized + VERIFICATION_SHARE * verified


def _main_exploiter(
    candidates: Sequence[Candidate], win_rates: Floats, among: Flags, name: str
) -> Floats:
    """A main exploiter plays the newest weights of a main player, or its earlier selves while the
    newest are too strong for it. Several main players are equally likely.
    """
    lines = _main_lines(candidates, name)
    newest = _newest(candidates)
    total = np.zeros(len(candidates))
    for line in lines:
        of_line = _of_line(candidates, line)
        current = newest & of_line
        if win_rates[current].item() >= HOPELESS_BELOW:
            total += current / len(lines)
        else:
            total += _prioritized("variance", win_rates, among & of_line) / len(lines)
    return total


def _main_lines(candidates: Sequence[Candidate], name: str) -> list[str]:
    """Returns the lines of main players.

    They are the lines with that rule; or if none has it, the other lines that exploit nobody; or
    if there is none, all.
    """
    mains = {each.line for each in candidates if each.draw == "main"}
    others = {
        each.line
        for each in candidates
        if each.line != name and not each.draw.endswith("exploiter")
    }
    return sorted(mains or others or {each.line for each in candidates})


def _forgotten(candidates: Sequence[Candidate], win_rates: Floats, among: Flags) -> Flags:
    """Returns the snapshots of a line that its newest weights may have forgotten how to beat.

    A later snapshot should be harder to beat than an earlier one. So from the newest on backwards
    snapshots are left out for as long as that holds. If it holds for all, there is none.
    """
    by_age = sorted(np.flatnonzero(among).tolist(), key=lambda index: candidates[index].order)
    easier = np.flatnonzero(np.diff(win_rates[by_age]) > 0)
    forgotten = np.zeros(len(candidates), np.bool_)
    if len(easier):
        forgotten[by_age[: easier[-1] + 2]] = True
    return forgotten


def _of_line(candidates: Sequence[Candidate], line: str) -> Flags:
    return np.array([each.line == line for each in candidates], np.bool_)


def _newest(candidates: Sequence[Candidate]) -> Flags:
    """Returns the newest of each line: its latest state, or else its last snapshot."""
    last: dict[str, Candidate] = {}
    for each in sorted(candidates, key=lambda each: (each.latest, each.order)):
        last[each.line] = each
    return np.array([each is last[each.line] for each in candidates], np.bool_)


def _recent(candidates: Sequence[Candidate], count: int) -> Flags:
    """Returns the newest ``count`` snapshots of each line."""
    orders: dict[str, list[int]] = {}
    for each in candidates:
        if not each.latest:
            orders.setdefault(each.line, []).append(each.order)
    oldest = {line: sorted(values)[-count:][0] for line, values in orders.items()}
    return np.array(
        [not each.latest and each.order >= oldest[each.line] for each in candidates], np.bool_
    )


def _prioritized(weighting: str, win_rates: Floats, among: Flags) -> Floats:
    """Returns PFSP's probabilities among some candidates.

    They are proportional to f(x), where x is the win rate against a candidate. `squared` and
    `linear` prefer the hardest opponents, `capped` takes all that win at least half of the games
    alike, and `variance` prefers those of equal strength.
    """
    match weighting:
        case "squared":
            weights = (1 - win_rates) ** 2
        case "linear":
            weights = 1 - win_rates
        case "capped":
            weights = np.minimum(0.5, 1 - win_rates)
        case "variance":
            weights = win_rates * (1 - win_rates)
        case _:
            raise AssertionError(weighting)
    return _shares(weights, among)


def _shares(weights: Floats, among: Flags) -> Floats:
    """Returns the weights of some candidates as probabilities, equal ones if all weights are 0;
    among nobody 0."""
    shares = np.where(among, weights, 0.0)
    if shares.sum() <= 0:
        shares = among.astype(np.float64)
    total = shares.sum()
    return shares / total if total else shares
