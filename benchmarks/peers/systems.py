"""Other systems on the same games, in turns with this one, each in a Python environment of its own.

`penstock bench --peers` runs it, in a checkout.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.bench import whole
from penstock.bench.whole import run
from penstock.configs.errors import UserError

PROGRAMS = Path(__file__).parent
GAMES = {"cartpole": ("cartpole", "cartpole-475"), "pong": ("pong",), "pong_impala": ("pong",)}


class Peer(NamedTuple):
    """How a system is run, and on what."""

    program: str
    venv: str
    """The environment that `make peers` installs it into."""
    cases: Mapping[str, Sequence[str]] = GAMES
    """Its names of the cases of each target, in the order of `GAMES`."""


PEERS = {
    "sample_factory": Peer("run_sample_factory.py", ".venv-sf"),
    # The same numpy CartPole that Penstock steps, instead of single ones in Python.
    "sample_factory_vector": Peer(
        "run_sample_factory.py",
        ".venv-sf",
        {"cartpole": ("cartpole-vector", "cartpole-vector-475")},
    ),
    "sb3": Peer("run_sb3.py", ".venv-peers"),
}
OURS = "penstock"
ROUNDS = 3
LONGER = 20  # than a stage
START_S = 180.0
SOLVE_S = 60.0

Run = dict[str, Any]
Say = Callable[[str], None]


def find(target: str, folder: Path) -> dict[str, tuple[Path, Path]]:
    """Python and program of each peer that is installed below ``folder``. Raises UserError where
    there is none, and for a target that they are not measured on."""
    if target not in GAMES:
        raise UserError(f"--peers measures {', '.join(GAMES)}, not {target}; leave it out")
    found = {
        name: (folder / peer.venv / "bin/python", PROGRAMS / peer.program)
        for name, peer in PEERS.items()
        if target in peer.cases
        and (folder / peer.venv / "bin/python").exists()
        and (PROGRAMS / peer.program).exists()
    }
    if not found:
        raise UserError(
            f"--peers: no peer is installed in {folder}; run `make peers` in a checkout of Penstock"
        )
    return found


def measure(
    target: str, peers: Mapping[str, tuple[Path, Path]], seconds: float, say: Say
) -> dict[str, Any]:
    """Agent steps per second, and for CartPole seconds to a mean return of 475, of all of them and
    of Penstock; ``seconds`` as of a stage."""
    runs: dict[str, list[Run]] = {name: [] for name in (OURS, *peers)}
    for _ in range(ROUNDS):
        for number, case in enumerate(GAMES[target]):
            length = SOLVE_S if case.endswith("475") else LONGER * seconds
            for name, of in runs.items():
                if name == OURS:
                    found = _ours(target, case, length)
                else:
                    theirs = PEERS[name].cases[target][number]
                    found = _theirs(*peers[name], theirs, length)
                of.append({"case": case, **found})
                say(f"{name:22}{_said(of[-1])}")
    result = {name: summary(of) for name, of in runs.items()}
    for name in peers:
        result[name] |= over(result[OURS], result[name])
        say(f"{name:22}{_ratios(result[name])}")
    return result


def summary(runs: list[Run]) -> dict[str, Any]:
    """Medians over the runs of one system: rates of those that were not to solve the game, and the
    time to solve it of those that were, null where most of them did not."""
    rates = [r["steps_per_s"] for r in runs if not _solving(r) and r.get("steps_per_s")]
    times = [r.get("solved_at_s") or float("inf") for r in runs if _solving(r) and "error" not in r]
    median_s = statistics.median(times) if times else float("inf")
    return {
        "steps_per_s": statistics.median(rates) if rates else None,
        "solved_at_s": median_s if median_s < float("inf") else None,
        "runs": runs,
    }


def over(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """How many times as fast we are, and what share of their time to solve the game we take."""
    found = {}
    if ours["steps_per_s"] and theirs["steps_per_s"]:
        found["rate_ratio"] = ours["steps_per_s"] / theirs["steps_per_s"]
    if ours["solved_at_s"] and theirs["solved_at_s"]:
        found["time_ratio"] = ours["solved_at_s"] / theirs["solved_at_s"]
    return found


def _solving(found: Run) -> bool:
    return bool(found["case"].endswith("475"))


def _ours(target: str, case: str, seconds: float) -> Run:
    if case.endswith("475"):
        # By the return in training, as the peers measure it.
        limits = (f"stop.minutes={seconds / 60}", "stop.confirm_episodes=0")
        return {"solved_at_s": whole.train(target, *limits)["solved_at_s"]}
    return {"steps_per_s": whole.median_rate(whole.rates(target, seconds, 1))}


def _theirs(python: Path, program: Path, case: str, seconds: float) -> Run:
    """A run of a peer; with an ``error`` where it failed."""
    command = [str(python), str(program), case, "--seconds", str(seconds)]
    try:
        done = run(command, timeout_s=START_S + seconds, keep_errors=True)
    except subprocess.TimeoutExpired:
        return {"error": f"it had not ended {START_S:g} s after it should have"}
    if done.returncode or not done.stdout:
        return {"error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    told: Run = json.loads(done.stdout.splitlines()[-1])
    return told


def _said(found: Run) -> str:
    if "error" in found:
        return f"failed: {found['error']}"
    if _solving(found):
        at_s = found["solved_at_s"]
        return "475 not reached" if at_s is None else f"475 after {at_s:.3g} s"
    return f"{found['steps_per_s'] or 0:,.0f} agent steps/s"


def _ratios(result: Mapping[str, Any]) -> str:
    texts = []
    if "rate_ratio" in result:
        texts.append(f"{OURS} makes {result['rate_ratio']:.3g} times as many steps")
    if "time_ratio" in result:
        texts.append(f"takes {result['time_ratio']:.2g} of the time to 475")
    return ", and ".join(texts) or "has nothing to compare with"
