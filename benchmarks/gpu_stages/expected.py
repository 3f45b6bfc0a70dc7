"""The figures that are expected of an H100 with 16 cores, each with its reason.

A question (a finding that is true or false) is expected to be answered with yes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_stages.finding import Finding, Options


class Expected(NamedTuple):
    """A bound on a figure."""

    value: float
    reason: str
    at_most: bool = False


def _of_network(network: str) -> dict[str, Expected]:
    name = f"{network}, prefetch"
    return {
        f"{name}: utilization": Expected(0.97, "target: a batch is always ready"),
        f"{name}: kernels": Expected(0.90, "target: the rest are gaps between launches"),
        f"{name}: achieved / ceiling": Expected(0.95, "target: only the writers are added"),
        f"{name}: exposed copies": Expected(0.01, "target: copies overlap with the passes", True),
    }


_LINK = "PCIe 5 x16 carries 63 GB/s, less the headers of its packets"
_STAGED = "one core copies through the driver's own pinned memory"
_NO_WAIT = "a learner's host must run ahead of its GPU"
_EXACT = "fp32 without TF32 differs only in the order of sums"
EXPECTED: dict[str, dict[str, Expected]] = {
    "correctness": {
        f"{name}: gradient against the CPU's, relative difference": Expected(1e-4, _EXACT, True)
        for name in ("impala", "ppo", "dqn", "sac")
    },
    "copies": {
        f"{way}, {kind} {size} MB, GB/s": Expected(rate, reason)
        for way in ("host to device", "device to host")
        for kind, size, rate, reason in (
            ("pinned", 1, 25, "a call takes about 10 µs beside the copy"),
            ("pinned", 16, 45, _LINK),
            ("pinned", 256, 50, _LINK),
            ("unpinned", 1, 5, _STAGED),
            ("unpinned", 16, 8, _STAGED),
            ("unpinned", 256, 8, _STAGED),
        )
    },
    "ceilings": {
        f"{network}: learner / plain torch": Expected(
            0.85, "target: the loss and its data are more"
        )
        for network in ("nature_cnn", "impala_cnn")
    },
    "synchronisations": {
        f"{name}: synchronisations": Expected(0, _NO_WAIT, True)
        for name in ("impala", "ppo", "dqn", "sac")
    },
    "utilization": {**_of_network("nature_cnn"), **_of_network("impala_cnn")},
    "codecs": {
        f"{name}: {what}": Expected(bound, reason, True)
        for name in ("none", "fp16", "bf16", "int8", "onebit", "terngrad", "dropping", "dgc")
        for what, bound, reason in (
            ("ms", 2.0, "some tens of launches for each bucket, each of some µs"),
            ("synchronisations", 0, _NO_WAIT),
        )
    },
    "pong": {
        "trained agent steps/s": Expected(20_000, "target: 16,000 were measured once"),
        "minutes to 18": Expected(6.0, "target: 6.0 on 2 cores without a GPU", True),
    },
    "tests": {"failed": Expected(0, "no test may fail", True)},
}


def compared(stage: str, finding: Finding, options: Options) -> dict[str, Any]:
    """A finding as JSON, beside what is expected of it: ``ratio`` is measured / expected, ``met``
    is None where nothing is expected. Of a CPU only answers are."""
    value = finding.value
    bound = None if options.small else EXPECTED.get(stage, {}).get(finding.name)
    found: dict[str, Any] = {
        "name": finding.name,
        "value": value,
        "expected": None,
        "at_most": bool(bound and bound.at_most),
        "ratio": None,
        "met": None,
        "note": finding.note or (bound.reason if bound else ""),
    }
    if isinstance(value, bool):
        found |= {"expected": True, "met": value}
    elif bound is not None:
        found |= {"expected": bound.value, "met": False}
        if isinstance(value, int | float):
            found["met"] = value <= bound.value if bound.at_most else value >= bound.value
            found["ratio"] = value / bound.value if bound.value else None
    return found if finding.data is None else found | {"data": finding.data}


def line(compared: Mapping[str, Any]) -> str:
    """A comparison as a line of a table."""
    expected = ""
    if isinstance(compared["expected"], int | float) and compared["expected"] is not True:
        expected = f"{'<=' if compared['at_most'] else '>='} {text(compared['expected'])}"
    ratio = "" if compared["ratio"] is None else f"{compared['ratio']:.2f}"
    verdict = {True: "met", False: "MISSED", None: ""}[compared["met"]]
    value = text(compared["value"])
    columns = f"  {compared['name']:<58} {value:>12} {expected:>10} {ratio:>6} {verdict:<6}"
    return f"{columns} {compared['note']}".rstrip()


def text(value: Any) -> str:
    """A value for people: numbers to three digits."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and math.isfinite(value):
        return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return str(value)
