"""A learner beside live writers: how much of its time it computes, and of its ceiling.

Figures are those of `penstock profile`: utilization is the share of the time in which the learner's
stream was in a pass, kernels that in which a kernel ran. Batches come from the host's memory, which
other processes write meanwhile: no game and policy on the host's cores would feed a GPU. Each frame
is written, gathered and sent to the GPU once, and stacked there.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_stages.batches import PASSES, settings
from gpu_stages.finding import Finding, Options
from penstock.cli import profile
from penstock.configs.schema import Config
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch import topology
from penstock.profiling.report.files import DATA

MODES = {"prefetch": (), "no prefetch": ("learner.prefetch=0",)}
FEW = 2  # cores that the learner's threads have for themselves
BENCHMARKS = Path(__file__).parents[1]


def run(options: Options) -> Iterator[Finding]:
    cases = [(network, mode) for network in PASSES for mode in MODES]
    for network, mode in cases[:1] if options.small else cases:
        found = one((*settings(network, options), *MODES[mode]), options)
        name = f"{network}, {mode}"
        yield Finding(f"{name}: utilization", found["utilization"], data=found)
        yield Finding(f"{name}: kernels", found["gpu_kernel_busy"])
        yield Finding(f"{name}: achieved / ceiling", found["achieved_over_ceiling"])
        yield Finding(f"{name}: exposed copies", found["ledger"]["h2d_exposed"])
        yield Finding(f"{name}: steps/s", found["steps_per_s"], found["verdict"]["finding"])


def one(settings: tuple[str, ...], options: Options) -> dict[str, Any]:
    """The learner of a profile, its flow and its verdict."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    writers = 1 if options.small else max(1, len(os.sched_getaffinity(0)) - FEW)
    with tempfile.TemporaryDirectory(prefix="bench-penstock-") as folder:
        run_dir = Path(folder) / "run"
        overrides = [*settings, f"actors.count={writers}", f"run.dir={run_dir}"]
        code = profile.main(
            "synthetic",
            overrides,
            seconds=options.seconds,
            with_torch=False,
            as_json=False,
            make_specs=with_writers,
        )
        if code:
            raise RuntimeError(f"the run failed with {code}; its output stands above")
        found: dict[str, Any] = json.loads((run_dir / DATA).read_text())
    return {**found["learner"][0], "flow": found["flow"], "verdict": found["verdict"]}


def with_writers(config: Config, runtime_dir: Path) -> list[RoleSpec]:
    """The processes of a run, in which actors write made-up unrolls instead of playing."""
    return [
        replace(spec, main="writers:run") if spec.stage is Stage.ACTORS else spec
        for spec in topology.train_roles(config, runtime_dir)
    ]
