"""The batches and networks that ceilings and utilization are measured with."""

from __future__ import annotations

from gpu_stages.finding import Options

UNROLL = 20
BATCH = (
    "env.kwargs.obs_shape=[4,84,84]", "env.kwargs.obs_dtype=uint8", "stop.return=null",
    "transport.frame_stack=4", "learner.precision=bf16", "learner.prefetch=2",
)  # fmt: skip
LARGE = (f"actors.unroll={UNROLL}", "actors.envs=64", "learner.batch_slots=8", "transport.slots=3")
SMALL = ("actors.unroll=4", "actors.envs=2", "learner.batch_slots=1", "transport.slots=3")
PASSES = {"nature_cnn": 10752, "impala_cnn": 2688}  # rows that 80 GB of memory hold


def settings(network: str, options: Options) -> tuple[str, ...]:
    """The config's options for a network; on a GPU a batch has 512 unrolls of 20 steps."""
    rest = (f"model.kind={network}", f"learner.micro_batch={PASSES[network]}")
    return (*BATCH, *(SMALL if options.small else LARGE), *rest, f"learner.device={options.place}")
