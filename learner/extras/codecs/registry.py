"""The lossy codecs, for the config: what it needs of each.

Imports no torch, so that configs can be validated with it.
"""

from __future__ import annotations

from penstock.configs.reduce import CODECS, CodecSpec, ReduceConfig
from penstock.configs.registry import ExtraOptions
from penstock.configs.value_types import Count, Natural, Positive, Share, Switch


class WarmupOptions(ExtraOptions):
    """Of codecs that begin with float32."""

    warmup_updates: Natural = 100
    """Optimizer steps in fp32 before `onebit`, `onebit_adam`, `onebit_lamb` and `powersgd` begin;
    for `dgc`, optimizer steps of each stage in which its density decreases. Larger values delay the
    saving of bytes, and make the start more stable. `onebit_lamb` divides by the variance of these
    steps only, as does `onebit_adam` without `learner.reduce.variance_interval`; their authors use
    15 to 20 % of a run."""


class BlockOptions(ExtraOptions):
    """Of codecs that send signs in blocks."""

    onebit_block: Count = 4096
    """Number of successive values that share a pair of means in `onebit`, `onebit_adam`,
    `onebit_lamb` and `zeroone_adam`. Smaller blocks are more precise and send more bytes."""


class VarianceOptions(ExtraOptions):
    """Of the codecs of Adam."""

    variance_interval: Count | None = 512
    """Most optimizer steps between two updates of a value's variance: in `zeroone_adam` by a step
    in fp32, and after the warm-up of `onebit_adam` by the squares of each learner's own gradients,
    a part of them in every 16th step (or all of them after each interval, if that is shorter). A
    smaller value follows changing gradients sooner and sends more bytes; 1 sends more than fp32.
    null: as in the papers, the intervals of `zeroone_adam` double without end, and the variance of
    `onebit_adam` is constant."""


class OneBitOptions(BlockOptions, WarmupOptions):
    """Of `onebit`, `onebit_adam` and `onebit_lamb`."""


class OneBitAdamOptions(OneBitOptions, VarianceOptions):
    """Of `onebit_adam`."""


class ZeroOneAdamOptions(BlockOptions, VarianceOptions):
    """Of `zeroone_adam`."""

    variance_doubling: Count = 16
    """Number of variance updates after which `zeroone_adam` doubles the interval between them,
    which begins at 1. Each is an optimizer step in fp32. Larger values delay the saving of bytes,
    and make the start more stable."""


class TernGradOptions(ExtraOptions):
    """Of `terngrad`."""

    reternarize: Switch = False
    """Whether `terngrad` reduces the sums to -1, 0, 1 again before they are sent back: a third
    fewer bytes, and more variance. If false, they are sent exactly."""


class DroppingOptions(ExtraOptions):
    """Of `dropping`."""

    density: Share = 0.01
    """Fraction of the values that `dropping` sends, the largest ones. Smaller values send fewer
    bytes and delay more of the gradient."""


class DgcOptions(WarmupOptions):
    """Of `dgc`."""

    dgc_density: Share = 0.001
    """Fraction of the values that `dgc` sends after its warm-up, the largest ones. Smaller values
    send fewer bytes and delay more of the gradient."""
    dgc_clip: Positive | None = None
    """Bound on the norm of each learner's gradient in `dgc`, divided by the root of
    `learner.count`; null: `learner.grad_clip`, which otherwise has no effect with `dgc`."""


class PowerSgdOptions(WarmupOptions):
    """Of `powersgd`."""

    powersgd_rank: Count = 2
    """Rank of the matrix products in `powersgd`. Larger values are more precise and send more
    bytes."""


def is_adam_warmup(cfg: ReduceConfig, update: int) -> bool:
    """Whether `onebit_adam` and `onebit_lamb` still sum gradients in ``update`` (from 0)."""
    return update < OneBitOptions.of(cfg).warmup_updates


def is_variance_update(cfg: ReduceConfig, update: int) -> bool:
    """Whether `zeroone_adam` sums gradients and updates the variance in ``update`` (from 0).

    The interval after the j-th variance update (from 0) is ``2 ** (j // variance_doubling)``, up to
    ``variance_interval``: the schedule T_v of 0/1 Adam (Lu et al. 2022), with a bound.
    """
    options = ZeroOneAdamOptions.of(cfg)
    start, interval = 0, 1
    while options.variance_interval is None or interval < options.variance_interval:
        stop = start + options.variance_doubling * interval
        if update < stop:
            return (update - start) % interval == 0
        start, interval = stop, 2 * interval
    return (update - start) % options.variance_interval == 0


_ROOM = "penstock.learner.extras.codecs"
for _spec in (
    CodecSpec(
        "onebit",
        "as signs with error feedback",
        f"{_ROOM}.onebit:OneBit",
        ruins_variance="signs with one size",
        options=OneBitOptions,
    ),
    CodecSpec(
        "onebit_adam",
        "as signs of Adam's momentum with error feedback",
        f"{_ROOM}.onebit_adam:OneBitAdam",
        long_name="1-bit Adam",
        own_momentum=True,
        reduces_gradients=is_adam_warmup,
        options=OneBitAdamOptions,
    ),
    CodecSpec(
        "zeroone_adam",
        "as signs of Adam's momentum with error feedback",
        f"{_ROOM}.onebit_adam:OneBitMomentum",
        long_name="0/1 Adam",
        own_momentum=True,
        reduces_gradients=is_variance_update,
        options=ZeroOneAdamOptions,
    ),
    CodecSpec(
        "onebit_lamb",
        "as signs of LAMB's momentum with error feedback",
        f"{_ROOM}.onebit_adam:OneBitMomentum",
        long_name="1-bit LAMB",
        own_momentum=True,
        reduces_gradients=is_adam_warmup,
        scales_layers=True,
        options=OneBitOptions,
    ),
    CodecSpec(
        "terngrad",
        "as -1, 0, 1 times a scale",
        f"{_ROOM}.terngrad:TernGrad",
        ruins_variance="-1, 0 or 1 times one size",
        options=TernGradOptions,
    ),
    CodecSpec(
        "dropping",
        "the largest few",
        f"{_ROOM}.gradient_dropping:Dropping",
        ruins_variance="zeros for most values",
        options=DroppingOptions,
    ),
    CodecSpec(
        "dgc",
        "the largest few",
        f"{_ROOM}.dgc:Dgc",
        long_name="deep gradient compression",
        ruins_variance="zeros for nearly all values",
        own_momentum=True,
        options=DgcOptions,
    ),
    CodecSpec(
        "powersgd", "as low-rank products", f"{_ROOM}.powersgd:PowerSgd", options=PowerSgdOptions
    ),
):
    CODECS.register(_spec)
