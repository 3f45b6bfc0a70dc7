"""A learner on a GPU beside live writers: how much of its time it computes, and of its ceiling.

Convolutional networks train in bf16 on batches of 512 unrolls of 20 steps that come from the host's
memory, written meanwhile by processes that copy made-up frames, since no game and policy on the
host's cores would feed a GPU. Each frame is written, gathered and sent to the GPU once, and stacked
there; several threads gather. Figures are those of `penstock profile`: utilization is the share of
the time in which the learner's stream was in a pass, kernels that in which a kernel ran. The limit
beside the Nature CNN's ceiling is the same network in plain torch, with its batch on the GPU. Then
come all tests that need a GPU.

    python benchmarks/gpu.py [--seconds 20] [--only impala_cnn] [--writers 8] [--no-tests]
                             [--gather-threads N] [--json] [--save]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common import finish, parser
from penstock.cli import profile
from penstock.configs.schema import Config
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch import topology
from penstock.learner.sources.staging import gather_threads
from penstock.profiling.report.files import DATA

HERE = Path(__file__).parent
BATCH = (
    "env.kwargs.obs_shape=[4,84,84]", "env.kwargs.obs_dtype=uint8", "stop.return=null",
    "actors.envs=64", "actors.unroll=20", "learner.batch_slots=8", "learner.prefetch=2",
    "learner.precision=bf16", "learner.device=cuda", "transport.slots=3",
    "transport.frame_stack=4",
)  # fmt: skip
NETWORKS = {  # as much in one pass as 80 GB of memory hold
    "nature_cnn": ("model.kind=nature_cnn", "learner.micro_batch=10752"),
    "impala_cnn": ("model.kind=impala_cnn", "learner.micro_batch=2688"),
}
MODES = {"prefetch": (), "no prefetch": ("learner.prefetch=0",)}
ASKED = {"utilization": 0.9, "aim": 0.99, "achieved_over_ceiling": 0.98}
PLAIN_ROWS = 10752  # as many as the Nature CNN has in one pass
FEW = 2  # cores that the learner's threads have for themselves
TESTS_S = 1800.0
USERS_MISTAKE = 2


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=20.0, help="of each window")
    made.add_argument("--only", choices=NETWORKS, help="this network alone")
    made.add_argument("--writers", type=int, default=max(1, len(os.sched_getaffinity(0)) - FEW))
    made.add_argument("--gather-threads", type=int, help="by default what a learner takes")
    made.add_argument("--no-tests", action="store_true")
    args = made.parse_args()
    if not torch.cuda.is_available():
        print("gpu.py: torch finds no CUDA device here; run it on a machine with one, with a torch "
              "that is built for CUDA", file=sys.stderr)  # fmt: skip
        sys.exit(USERS_MISTAKE)
    threads = args.gather_threads or gather_threads(None, torch.device("cuda"))
    runs = {}
    for network in [args.only] if args.only else NETWORKS:
        for mode, settings in MODES.items():
            options = (*BATCH, f"learner.gather_threads={threads}", *NETWORKS[network], *settings)
            runs[f"{network}, {mode}"] = one(options, args.writers, args.seconds)
    limit = None if args.only == "impala_cnn" else plain_torch(args.seconds)
    tests = None if args.no_tests else run_tests()
    result = {
        "gpu": torch.cuda.get_device_name(),
        "writers": args.writers,
        "threads": threads,
        "runs": runs,
        "plain_torch_steps_per_s": limit,
        "tests": tests,
        "asked": ASKED,
    }
    finish("gpu", result, table(runs), args)
    if limit is not None:
        ceiling = runs["nature_cnn, prefetch"]["ceiling_steps_per_s"]
        known = "" if ceiling is None else f"; the learner's ceiling is {ceiling / limit:.2f} of it"
        print(f"plain torch, the Nature CNN forward and backward: {limit:,.0f} steps/s{known}")
    if tests is not None:
        print(f"tests that need a GPU: {tests}")


def one(settings: Sequence[str], writers: int, seconds: float) -> dict[str, Any]:
    """The learner of a profile with so many writers, and its verdict."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="bench-penstock-") as folder:
        run_dir = Path(folder) / "run"
        options = [*settings, f"actors.count={writers}", f"run.dir={run_dir}"]
        code = profile.main("synthetic", options, seconds, False, False, with_writers)
        if code:
            raise RuntimeError(f"the run failed with {code}; what it said stands above")
        found: dict[str, Any] = json.loads((run_dir / DATA).read_text())
    return {**found["learner"][0], "flow": found["flow"], "verdict": found["verdict"]}


def with_writers(config: Config, runtime_dir: Path) -> list[RoleSpec]:
    """The processes of a run, of which those that should play write."""
    return [
        replace(spec, main="writers:run") if spec.stage is Stage.ACTORS else spec
        for spec in topology.train(config, runtime_dir)
    ]


def table(runs: dict[str, Any]) -> list[list[Any]]:
    heading = ["run", "utilization", "kernels", "of ceiling", "steps/s", "ceiling", "waits", "h2d",
               "p95 ms", "verdict"]  # fmt: skip
    rows: list[list[Any]] = [heading]
    for name, run in runs.items():
        ledger, latency = run["ledger"], run["flow"]["latency_s"]["p95"]
        rows.append(
            [
                name,
                run["utilization"],
                _known(run["gpu_kernel_busy"]),
                _known(run["achieved_over_ceiling"]),
                run["steps_per_s"],
                _known(run["ceiling_steps_per_s"]),
                ledger["wait_data"],
                ledger["h2d_exposed"],
                "-" if latency is None else latency * 1e3,
                run["verdict"]["kind"],
            ]
        )
    return rows


def plain_torch(seconds: float) -> float:
    """Steps a second of the Nature CNN with 6 actions and a value: forward, backward and Adam, in
    bf16 and channels_last, on one batch of uint8 frames that lies on the GPU; the better of eager
    and compiled."""
    net = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        nn.Linear(512, 7),
    ).cuda()  # fmt: skip
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    frames = torch.randint(256, (PLAIN_ROWS, 4, 84, 84), dtype=torch.uint8, device="cuda")

    def loss() -> torch.Tensor:
        images = frames.to(torch.bfloat16, memory_format=torch.channels_last) / 255
        with torch.autocast("cuda", torch.bfloat16):
            outputs: torch.Tensor = net(images)
        return outputs.float().square().mean()

    torch.backends.cudnn.benchmark = True
    best = 0.0
    for form in (loss, torch.compile(loss)):
        for warm_up in (True, False):
            steps, begun = 0, time.perf_counter()
            while steps < 5 or (not warm_up and time.perf_counter() < begun + seconds / 2):
                optimizer.zero_grad()
                form().backward()
                optimizer.step()
                torch.cuda.synchronize()
                steps += 1
            rate = steps * PLAIN_ROWS / (time.perf_counter() - begun)
        best = max(best, rate)
    return best


def run_tests() -> str:
    """The last line of pytest: how many tests passed, were skipped, or failed."""
    # A machine with a GPU may lack a package of the dev extra that another test needs.
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "tests",
               "--continue-on-collection-errors"]  # fmt: skip
    done = subprocess.run(
        command, cwd=HERE.parent, capture_output=True, text=True, timeout=TESTS_S, check=False
    )
    if done.returncode:
        print(done.stdout[-20_000:], file=sys.stderr)
    return (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]


def _known(figure: float | None) -> Any:
    return "-" if figure is None else figure


if __name__ == "__main__":
    main()
