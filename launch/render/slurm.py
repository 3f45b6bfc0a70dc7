"""A batch script that trains a target on the nodes of a SLURM job.

The script needs nothing but SLURM, bash and Penstock, and is made to be read and changed. With
engine "ray" it starts a Ray cluster on the nodes for as long as the job lasts; with "none" it
starts a learner and its actors on each node by `srun`. Before a job reaches its time limit, the run
saves, and the job is queued again and resumes it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.configs.errors import UserError
from penstock.configs.load import Resolved
from penstock.launch.render.command import AUTO, make_command

MARGIN_S = 30
"""Time between the end of run.grace_s and that of the job."""
TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
"""A time as sbatch --time takes it."""


@dataclass(frozen=True)
class Job:
    """Resources of a job, by the names of `sbatch`'s options; None leaves the cluster's default."""

    nodes: int
    cpus: int | None = None
    """Cores of each node; None: whole nodes."""
    gpus: int = 0
    """GPUs of each node."""
    time: str | None = None
    partition: str | None = None
    account: str | None = None


def render(
    target: str,
    overrides: Sequence[str],
    job: Job,
    engine: Literal["ray", "none"],
    grace_s: int,
    environment: str | None,
    working_dir: str | None = None,
) -> str:
    """Write the batch script of a run.

    Args:
        target: target as of `penstock train`.
        overrides: options of the run, each ``key=value``.
        job: resources of the job.
        engine: "ray" for a Ray cluster in the job, "none" for learners that meet at the first node.
        grace_s: seconds that the run has to save when the job is about to end.
        environment: folder with the programs of Penstock's Python environment on every node; None
            if they are found without it.
        working_dir: folder that becomes the current one of all processes, for code of the user's
            own; with engine "none" every node must have it.

    Returns: the text of the script.

    Raises:
        UserError: the target or an option is wrong, or does not go with this job.
    """
    if job.time is not None and not TIME.fullmatch(job.time):
        raise UserError(
            f"--time is {job.time!r}; it must be a time as sbatch takes it, such as 12:00:00 or "
            "2-00:00:00"
        )
    if working_dir is not None and not Path(working_dir).is_dir():
        raise UserError(f"--working-dir {working_dir} is not a folder; name one that exists")

    on_ray = engine == "ray"
    defaults = {"run.grace_s": str(grace_s), "actors.count": AUTO}
    if job.gpus:
        defaults["learner.device"] = "cuda"
        if on_ray:
            defaults["learner.count"] = str(job.nodes * job.gpus)

    resolved, arguments = make_command(
        target,
        overrides,
        defaults,
        learners=None if on_ray else job.nodes,
        one_learner="--nodes 1",
    )
    if not on_ray and job.gpus > 1:
        raise UserError(
            f"--gpus is {job.gpus}, and --engine none starts one learner on each node; set "
            "--gpus 1, or --engine ray"
        )

    # The part of the script that starts the run, in the user's folder if there is one.
    ship_folder = enter_folder = ""
    if working_dir is not None:
        folder = shlex.quote(str(Path(working_dir).absolute()))
        ship_folder = f" --working-dir {folder}"
        enter_folder = f"cd {folder}\n"
    start = (RAY if on_ray else LEARNERS).format(
        command=arguments,
        threads=resolved.config.learner.first_threads,
        ship=ship_folder,
        enter=enter_folder,
    )

    name = _name(resolved)
    run_dir = resolved.config.run.dir
    return TEMPLATE.format(
        name=name,
        nodes="1 node" if job.nodes == 1 else f"{job.nodes} nodes",
        how=ON_RAY if on_ray else BY_SRUN,
        resources=_resources(job, name, grace_s),
        run_dir=shlex.quote(run_dir) if run_dir else f"runs/{name}-$SLURM_JOB_ID",
        environment=_environment(environment),
        start=start,
    )


def _name(resolved: Resolved) -> str:
    """Returns the target's name in characters that SLURM and files allow."""
    return re.sub(r"[^\w.-]+", "-", resolved.name).strip("-.") or "run"


def _resources(job: Job, name: str, grace_s: int) -> str:
    """Returns the script's lines of options for `sbatch`.

    Args:
        job: resources of the job.
        name: name of the run.
        grace_s: seconds that the run has to save; the job gets its signal so long before its end.
    """
    options = [
        f"--job-name=penstock-{name}",
        f"--output=penstock-{name}-%j.log",
        "--open-mode=append",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        "--exclusive" if job.cpus is None else f"--cpus-per-task={job.cpus}",
    ]
    if job.gpus:
        options.append(f"--gpus-per-node={job.gpus}")
    if job.time:
        options.append(f"--time={job.time}")
    if job.partition:
        options.append(f"--partition={shlex.quote(job.partition)}")
    if job.account:
        options.append(f"--account={shlex.quote(job.account)}")

    # SLURM queues the job again after the signal, by which the run saves.
    options += ["--requeue", f"--signal=B:USR1@{grace_s + MARGIN_S}"]
    return "\n".join(f"#SBATCH {option}" for option in options)


def _environment(folder: str | None) -> str:
    """Returns the line that puts a folder of programs on the PATH, if there is one."""
    if folder is None:
        return ""
    return f"export PATH={shlex.quote(folder)}:$PATH  # Penstock, at the same path on every node\n"


ON_RAY = "on a Ray cluster that lasts as long as the job"
BY_SRUN = "with a learner and its actors on each of them"
TEMPLATE = """\
#!/bin/bash
# Trains {name} by Penstock on {nodes}, {how}.
# Submit it with sbatch. Before the job reaches its time limit, the run saves, the job is queued
# again, and the run resumes. `scancel --batch --signal=USR2 JOB` saves and ends the run; `scancel
# JOB` kills it, and leaves its newest checkpoint.
{resources}

set -euo pipefail

run_dir={run_dir}  # on a file system that all nodes share
{environment}mkdir -p "$run_dir"
run_dir=$(realpath "$run_dir")
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)  # this script runs there
addresses=$(hostname --ip-address)  # an address of IPv6 or of loopback may be the first
address=$(grep -m 1 -vE '^127[.]|:' <<< "${{addresses// /$'\\n'}}") || address=${{addresses%% *}}
port=$((6379 + SLURM_JOB_ID % 1000))  # another for each job
again=
{start}
# SLURM sends SIGUSR1 before the end of the job, by --signal above.
trap 'again=yes; stop' USR1
trap stop USR2
code=0
while kill -0 "$run" 2> /dev/null; do
    code=0
    wait "$run" || code=$?  # which a signal interrupts
done
kill $(jobs -p) 2> /dev/null || true
wait
if [ "$again" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
RAY = """
export RAY_AUTH_MODE=token  # only programs with ~/.ray/auth_token may use the cluster
[ -e ~/.ray/auth_token ] || ray get-auth-token --generate > /dev/null
cores=$SLURM_CPUS_ON_NODE
ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$cores" \\
    --include-dashboard=false --disable-usage-stats --block &
others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
    srun --overlap --nodes="$others" --ntasks="$others" --exclude="$first" \\
        ray start --address="$address:$port" --num-cpus="$cores" --block &
fi
for _ in $(seq 60); do  # until all nodes have joined
    joined=$(ray status --address="$address:$port" 2> /dev/null | grep -c '^ 1 node_') || true
    [ "${{joined:-0}}" -ge "$SLURM_JOB_NUM_NODES" ] && break
    sleep 1
done
if [ "${{joined:-0}}" -lt "$SLURM_JOB_NUM_NODES" ]; then
    echo "${{joined:-0}} of $SLURM_JOB_NUM_NODES nodes have joined Ray at $address:$port" >&2
fi

penstock train {command} run.dir="$run_dir" --resume auto \\
    --engine ray --address "$address:$port"{ship} &
run=$!
stop() {{ kill -TERM "$run" 2> /dev/null; }}
"""
LEARNERS = """
node() {{  # on each node: a learner, which meets the others at the first, and actors that join it
    local rank=$SLURM_PROCID own=$run_dir
    [ "$rank" = 0 ] || own=$run_dir/rank-$rank
    penstock learner {command} run.dir="$run_dir" --resume auto --trusted-network \\
        --rank "$rank" --world "$SLURM_NTASKS" --store "$address:$port" &
    local learner=$! count=$((SLURM_CPUS_ON_NODE - {threads}))
    penstock actor --connect "$own" --count "$((count > 0 ? count : 1))" \\
        --dir "$run_dir/actors-$rank" &
    local actors=$! code=0
    trap : TERM  # which all processes of the step get; this one waits until the learner has saved
    while kill -0 "$learner" 2> /dev/null; do
        code=0
        wait "$learner" || code=$?
    done
    kill -TERM "$actors" 2> /dev/null || true
    wait
    return "$code"
}}
export -f node
export run_dir address port
{enter}srun --kill-on-bad-exit=0 bash -c node &
run=$!
stop() {{ scancel --signal=TERM "$SLURM_JOB_ID.0"; }}  # all processes of srun's step
"""
