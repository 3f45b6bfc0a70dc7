"""The lossy codecs, for the config: what it needs of each.

Imports no torch, so that configs can be validated with it.
"""

from __future__ import annotations

from penstock.configs.reduce import CODECS, CodecSpec, ReduceConfig


def is_adam_warmup(cfg: ReduceConfig, update: int) -> bool:
    """Whether `onebit_adam` and `onebit_lamb` still sum gradients in ``update`` (from 0)."""
    return update < cfg.warmup_updates


def is_variance_update(cfg: ReduceConfig, update: int) -> bool:
    """Whether `zeroone_adam` sums gradients and updates the variance in ``update`` (from 0).

    The interval after the j-th variance update (from 0) is ``2 ** (j // variance_doubling)``, up to
    ``variance_interval``: the schedule T_v of 0/1 Adam (Lu et al. 2022), with a bound.
    """
    # Find the stage of the schedule that contains the update. A stage is the updates from `start`
    # on that have the same interval.
    start = 0
    interval = 1
    while cfg.variance_interval is None or interval < cfg.variance_interval:
        stop = start + cfg.variance_doubling * interval
        if update < stop:
            return (update - start) % interval == 0
        start = stop
        interval *= 2

    # The last stage has no end.
    return (update - start) % cfg.variance_interval == 0


_ROOM = "penstock.learner.extras.codecs"
for _spec in (
    CodecSpec(
        "onebit",
        "as signs with error feedback",
        f"{_ROOM}.onebit:OneBit",
        ruins_variance="signs with one size",
    ),
    CodecSpec(
        "onebit_adam",
        "as signs of Adam's momentum with error feedback",
        f"{_ROOM}.onebit_adam:OneBitAdam",
        long_name="1-bit Adam",
        own_momentum=True,
        reduces_gradients=is_adam_warmup,
    ),
    CodecSpec(
        "zeroone_adam",
        "as signs of Adam's momentum with error feedback",
        f"{_ROOM}.onebit_adam:OneBitMomentum",
        long_name="0/1 Adam",
        own_momentum=True,
        reduces_gradients=is_variance_update,
    ),
    CodecSpec(
        "onebit_lamb",
        "as signs of LAMB's momentum with error feedback",
        f"{_ROOM}.onebit_adam:OneBitMomentum",
        long_name="1-bit LAMB",
        own_momentum=True,
        reduces_gradients=is_adam_warmup,
        scales_layers=True,
    ),
    CodecSpec(
        "terngrad",
        "as -1, 0, 1 times a scale",
        f"{_ROOM}.terngrad:TernGrad",
        ruins_variance="-1, 0 or 1 times one size",
    ),
    CodecSpec(
        "dropping",
        "the largest few",
        f"{_ROOM}.gradient_dropping:Dropping",
        ruins_variance="zeros for most values",
    ),
    CodecSpec(
        "dgc",
        "the largest few",
        f"{_ROOM}.dgc:Dgc",
        long_name="deep gradient compression",
        ruins_variance="zeros for nearly all values",
        own_momentum=True,
    ),
    CodecSpec("powersgd", "as low-rank products", f"{_ROOM}.powersgd:PowerSgd"),
):
    CODECS.register(_spec)
