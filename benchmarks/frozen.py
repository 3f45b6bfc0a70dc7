"""Whether this version learns bit for bit what another one does: runs in lockstep, compared.

Each case is trained for some updates by both, `transport.kind=inproc`, on this machine: floating
point differs between processors, so there are no stored results. Compared is all of the last
checkpoint: weights, the optimizer's and normalisers' state, counters. Times and the form of passes,
which older versions do not write, are left out, and so is
the state of environments and actors, in which versions name their own classes.

    git worktree add /tmp/before COMMIT
    python benchmarks/frozen.py /tmp/before [CASE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

HERE = Path(__file__).resolve().parents[1]
CHECKPOINT = Path("checkpoints/last/checkpoint.safetensors")
IGNORED = re.compile(r"time_s$|solved_at_s$|checksums|team/lockstep$|meta\.form$")
LOCKSTEP = (
    "transport.kind=inproc", "learner.device=cpu", "stop.return=null", "stop.minutes=10",
    "learner.precision=fp32", "actors.precision=fp32",
)  # fmt: skip


class Case(NamedTuple):
    """A preset with options, trained for so many updates; ``resumed``: the second half of them from
    a checkpoint that the other version wrote."""

    target: str
    updates: int
    options: tuple[str, ...] = ()
    resumed: bool = False


CASES = {
    "impala": Case("cartpole", 100),
    "ppo": Case("cartpole_ppo", 160),
    "ppo-continuous": Case("halfcheetah", 64),
    "dqn": Case("cartpole_dqn", 300),
    "sac": Case("pendulum_sac", 300),
    "lstm": Case("memory", 60),
    "gru": Case("memory", 60, ("model.core=gru",)),
    "cells": Case("minatar_breakout", 32),
    "pixels": Case("pong_impala", 12, ("actors.envs=4",)),
    "pixels-normalised": Case("pong", 32),
    "pixels-replay": Case("pong_apex", 20, ("actors.envs=2", "replay.min_size=200")),
    "impala-resumed": Case("cartpole", 80, resumed=True),
    "lstm-resumed": Case("memory", 40, resumed=True),
    "dqn-resumed": Case("cartpole_dqn", 200, ("replay.checkpoint=true",), resumed=True),
    "sac-resumed": Case("pendulum_sac", 200, resumed=True),
    "accumulate": Case("cartpole", 50, ("learner.accumulate=2", "learner.updates_per_batch=1")),
}


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("before", type=Path, help="a checkout of the other version")
    made.add_argument("case", nargs="*", choices=[[], *CASES], help="only these")
    args = made.parse_args()
    if not (args.before / "penstock").is_dir():
        made.error(f"{args.before}: no checkout of Penstock; make one with git worktree add")
    differ = []
    for name in args.case or CASES:
        found = list(differences(CASES[name], args.before.resolve()))
        print(f"{name:20}{'equal' if not found else '; '.join(found[:3])}", flush=True)
        if found:
            differ.append(name)
    sys.exit(bool(differ))


def differences(case: Case, before: Path) -> Iterator[str]:
    """What is not the same in the two last checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        old, new = (
            checkpoint(case, before, tree, Path(folder) / name)
            for name, tree in (("old", before), ("new", HERE))
        )
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            yield f"{name} is in the {'new' if name in new else 'old'} one alone"
        elif old[name] != new[name]:
            yield f"{name} differs"


def checkpoint(case: Case, before: Path, tree: Path, run_dir: Path) -> dict[str, Any]:
    """Train by the version in ``tree``; bytes of every array, and the metadata, by name."""
    if case.resumed:
        train(before, case.target, case.updates // 2, case.options, run_dir)
        train(tree, str(run_dir), case.updates, ("--resume", "must"), run_dir)
    else:
        train(tree, case.target, case.updates, case.options, run_dir)
    found: dict[str, Any] = {}
    with safe_open(run_dir / CHECKPOINT, "numpy") as file:
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            array = file.get_tensor(name)
            found[name] = (str(array.dtype), array.shape, array.tobytes())
        found |= flat("meta", json.loads(file.metadata()["penstock"]))
    return {name: value for name, value in found.items() if not IGNORED.search(name)}


def train(tree: Path, target: str, updates: int, options: Sequence[str], run_dir: Path) -> None:
    """Train by the version in ``tree``, up to so many updates; ``target`` may be ``run_dir``."""
    command = [sys.executable, "-m", "penstock", "train", target, f"stop.learner_steps={updates}"]
    fresh = () if target == str(run_dir) else (*LOCKSTEP, f"run.dir={run_dir}")
    done = subprocess.run(
        [*command, *fresh, *options],
        cwd=run_dir.parent,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"the version in {tree} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def flat(name: str, value: Any) -> dict[str, Any]:
    """The values of nested JSON objects, by the path of their names."""
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, inner in value.items() for k, v in flat(f"{name}.{key}", inner).items()}


if __name__ == "__main__":
    main()
