"""Kills the service and the learner of `penstock serve-env` in turn, with 200 games connected.

After each kill the games must go on by themselves and the learner must train further; at the end
every step must be accounted for, and no game process may have ended. The table has the seconds from
a kill until the learner has trained on what was played after it.

    python benchmarks/games_killed.py [--kills 20] [--games 200] [--json] [--save]
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import finish, parser
from games_run import GamesRun, unaccounted
from penstock.core.run_dir import has_checkpoint

PERIOD_S = 0.1
ROLES = ("connector-0", "learner-0")
LIMITS = ("run.restarts=1000", "run.max_restarts=1000", "checkpoint.every_steps=10")
# A kill comes at any moment of the work between two.
BETWEEN_S = (0.2, 2.0)


def main() -> None:
    """Kill, wait and print."""
    made = parser(__doc__)
    made.add_argument("--kills", type=int, default=20, help="of each role")
    made.add_argument("--games", type=int, default=200)
    args = made.parse_args()

    seconds: dict[str, list[float]] = {role: [] for role in ROLES}
    with (
        tempfile.TemporaryDirectory() as folder,
        GamesRun(Path(folder) / "run", *LIMITS) as run,
    ):
        run.start_games(args.games, PERIOD_S, killed_per_minute=0.0)
        # A run whose learner dies before there is a checkpoint ends.
        while not has_checkpoint(run.folder):
            run.wait_for_training()
        for _ in range(args.kills):
            for role in ROLES:
                time.sleep(random.uniform(*BETWEEN_S))
                os.kill(run.process_of(role).pid, signal.SIGKILL)
                seconds[role].append(run.wait_for_training(more=3))
        connected = [run.next_report() for _ in range(3)][-1]["connected"]
        summary = run.end()

    accounting = summary["accounting"]
    assert summary["accounting_complete"], "the learner has ended without its final report"
    difference = unaccounted(accounting)
    rows: list[list[Any]] = [["killed", "times", "median s", "longest s"]]
    rows += [
        [role, len(times), statistics.median(times), max(times)] for role, times in seconds.items()
    ]
    rows.append(["games connected", connected, "difference", difference])
    result = {
        "games": args.games,
        "connected": connected,
        "seconds": seconds,
        "accounting": accounting,
        "difference": difference,
        "exit_reason": summary["exit_reason"],
    }
    finish("games_killed", result, rows, args)


if __name__ == "__main__":
    main()
