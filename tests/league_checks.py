"""What a killed league must still have: members, results, draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_history import newest_undamaged
from penstock.learner.pool import PolicyPool, member_id


def pool_ids(pool: Path) -> dict[str, list[str]]:
    """Returns the ids of the members of each line, the oldest first."""
    folder = PolicyPool(pool)
    return {line: [member.id for member in folder.members(line)] for line in folder.lines()}


def assert_pool_grew(before: dict[str, list[str]], pool: Path) -> None:
    """Asserts that all members of before are in their places, and that each file is whole."""
    now = pool_ids(pool)
    for line, ids in before.items():
        assert now[line][: len(ids)] == ids
    for ids in now.values():
        for each in ids:
            stored = checkpoint_format.load(pool / "members" / each)
            assert member_id(stored.weights) == each


def league_state(run_dir: Path) -> dict[str, Any] | None:
    """Returns the state of the league in the newest whole checkpoint of a run; None without any."""
    if not any((run_dir / "checkpoints").glob("*/checkpoint.safetensors")):
        return None
    _, checkpoint, _ = newest_undamaged(run_dir / "checkpoints" / "last")
    # As JSON, since that is what a resumed run reads.
    state: dict[str, Any] = json.loads(json.dumps(checkpoint.meta["league"]))
    return state


def assert_continued(
    saved: dict[str, Any], resumed: dict[str, Any], pool: Path, games: int
) -> None:
    """Asserts that a run which resumed from a state, and ended before its first batch, has the same
    results and opponents.

    A chair is drawn anew if it has had its ``games``. So is one with the latest weights of another
    line, which are no member, and gone once that line has shown newer ones often enough.
    """
    stays = [
        draw["games"] < games
        and (is_member(draw) or (pool / "members" / draw["member"]["id"]).exists())
        for draw in saved["draws"]
    ]
    # A member that was written before the kill, and its checkpoint not, stays in the pool.
    assert resumed["members"] >= saved["members"]

    names = ["results", "games"]
    if all(stays):
        names += ["random", "wins_enough"]
    for name in names:
        assert resumed[name] == saved[name], name

    for before, after, same in zip(saved["draws"], resumed["draws"], stays, strict=True):
        for name in ("opponent", "member", "games"):
            assert after[name] == before[name] or not same, name


def is_member(draw: dict[str, Any]) -> bool:
    """Whether the opponent on a chair is a member, not the latest weights of another line."""
    return not str(draw["opponent"]).endswith("/latest")


class DrawNumbers:
    """The draw numbers of all states of a run, each of which is of one draw."""

    def __init__(self) -> None:
        self._opponents: dict[int, str] = {}
        self._last_session = -1

    def add(self, state: dict[str, Any], *, new_process: bool) -> None:
        """Adds those of a state; ``new_process``: it is the first of another process."""
        if new_process:
            assert state["session"] > self._last_session
        self._last_session = state["session"]
        for number, opponent in state["opponents"]:
            assert self._opponents.setdefault(number, opponent) == opponent
