"""`codec: auto`: the fastest form of the gradients that does not change what is learned.

At the start all learners together time small and large sums, and each times the coding of every
codec that works with its optimizer (`penstock.learner.codecs.auto`). A step is then predicted as

    coding + bytes sent / bandwidth + latency of one exchange for each bucket

Candidates are fp32 and the codecs that only round (relative error up to a few per cent).
Predictions leave out that learners wait for each other and share cores, so the fastest of them, and
fp32 where it is close, run a few real steps; rounding must then gain ROUNDED_GAIN over fp32. Lossy
codecs (more variance, or delayed values) are never chosen: what they cost in learning depends on
the run's length and the network's size, and no measurement at the start shows it. Their predicted
times are reported. Every rank decides by the same means over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.configs.group import codec_contradictions
from penstock.configs.reduce import CODECS
from penstock.configs.sections import LearnerConfig

ROUNDED_GAIN = 1.05  # factor by which rounding must be faster than fp32
CLOSE = 2.0  # predictions may be off by this factor


class Cost(NamedTuple):
    """The cost of one update on one rank."""

    code_s: float
    """Seconds that the coding takes."""
    nbytes: float
    """Bytes that are sent."""


class NetworkCost(NamedTuple):
    """The cost of one rank's traffic, as measured by sums over all ranks."""

    nbytes_per_s: float
    latency_s: float
    """Seconds of one exchange of next to no bytes."""


class Choice(NamedTuple):
    """A codec's name, and a sentence with the reason."""

    codec: str
    text: str


def candidates(cfg: LearnerConfig) -> list[str]:
    """Returns the codecs to time: those that work with the optimizer and the pace."""
    names = [name for name, spec in CODECS.specs.items() if spec.tried_by_auto]
    return [name for name in names if not list(codec_contradictions(_with_codec(cfg, name)))]


def predict_s(cost: Cost, network: NetworkCost, buckets: int) -> float:
    """Returns the predicted seconds of one step's reduction in so many ``buckets``."""
    return cost.code_s + cost.nbytes / network.nbytes_per_s + buckets * network.latency_s


def best(step_s: Mapping[str, float]) -> str:
    """Returns the better of fp32 ("none") and the fastest rounding codec.

    ``step_s`` are the seconds of a step by codec.
    """
    rounding = [name for name in step_s if CODECS.specs[name].loss == "rounding"]
    fastest = min(rounding, key=step_s.__getitem__, default="none")
    if step_s.get("none", math.inf) < ROUNDED_GAIN * step_s[fastest]:
        return "none"
    return fastest


def finalists(predicted: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the codecs that run a few real steps.

    ``predicted`` are the seconds of a step by codec, among them "none", which is fp32.
    """
    fastest = best(predicted)
    plain = ["none"] if predicted["none"] < CLOSE * predicted[fastest] else []
    return tuple(dict.fromkeys([*plain, fastest]))


def decide(
    measured: Mapping[str, float], predicted: Mapping[str, float], network: NetworkCost
) -> Choice:
    """Choose among the `finalists`.

    Args:
        measured: seconds of a real step, by finalist.
        predicted: predicted seconds of a step, by codec; the reason lists those not measured.
        network: the cost of traffic, for the reason.
    """
    chosen = best(measured)
    text = (
        f"{chosen}: reducing a step's gradients takes {_ms(measured[chosen])} on this network of "
        f"{network.nbytes_per_s * 8 / 1e6:,.0f} Mbit/s"
    )
    text += "".join(f", {name} {_ms(measured[name])}" for name in measured if name != chosen)

    unmeasured = [name for name in predicted if name not in measured]
    unmeasured.sort(key=predicted.__getitem__)
    lossy = [name for name in unmeasured if CODECS.specs[name].loss == "lossy"]
    usable = [name for name in unmeasured if name not in lossy]
    text += _predictions("predicted", usable, predicted)
    text += _predictions(
        "predicted of lossy codecs, which are used only if they are named", lossy, predicted
    )
    return Choice(chosen, text)


def _predictions(title: str, names: Sequence[str], predicted: Mapping[str, float]) -> str:
    """Returns a clause with the predicted time of each named codec; empty without names."""
    if not names:
        return ""
    return f"; {title}: {', '.join(f'{name} {_ms(predicted[name])}' for name in names)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _with_codec(cfg: LearnerConfig, name: str) -> LearnerConfig:
    return cfg.model_copy(update={"reduce": cfg.reduce.model_copy(update={"codec": name})})
