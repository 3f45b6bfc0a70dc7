"""`penstock bench reduce`: what each codec sends, how long its steps take, and what it loses.

Learners reduce made-up gradients (`simulated.gradients`), each on a host of its own
behind a link of each rate; without the rights for that, all on loopback. Bytes are counted at the
learners' sockets; the interface's counters and the codec's own reckoning stand beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from common import finish
from hosts import LINKS, MOST, Hosts, NoHostsError, hosts
from penstock.configs.errors import UserError
from penstock.configs.reduce import AUTO, CODECS
from simulated.group import Learners, learners
from simulated.network import parse_count

YARDSTICK = "none"
LOOPBACK = "loopback"
COUNTED = ("interface_bytes_per_step", "interface_payload_per_step")
ERROR_STEPS = 100
BACKWARD_S = 0.05
MOST_SECONDS = 600.0
NOTES = """\
B/step: bytes that one learner hands to its sockets; ratio: of fp32's; theory: by the codec's own
reckoning; wire: at the interface without headers. ms: a step in the fastest burst of steps back
to back, and of such with a backward pass of {backward_ms:g} ms that needs no processor (bw). error:
relative, of one step; error100: of the sum of 100 steps."""

Result = dict[str, Any]


class ReducePlan(NamedTuple):
    """What to measure. ``links`` is None where none was asked for."""

    learners: int
    parameters: int
    codecs: tuple[str, ...]
    links: tuple[str, ...] | None
    seconds: float


def main(plan: ReducePlan, as_json: bool) -> None:
    """Measure and print: a line as each figure comes, a table, and with ``as_json`` the result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    people = sys.stderr if as_json else sys.stdout
    result = measure(plan, lambda text: print(text, file=people, flush=True))
    finish("reduce", result, table(result), argparse.Namespace(json=as_json, save=False))
    print(NOTES.format(**result), file=people)


def make_plan(
    count: int, parameters: str, codecs: str, links: str | None, seconds: float
) -> ReducePlan:
    """Check the options. Raises UserError."""
    if not 2 <= count <= MOST:
        raise UserError(f"--learners {count}: it must be from 2, as one reduces nothing, to {MOST}")
    if not 0 < seconds <= MOST_SECONDS:
        raise UserError(f"--seconds {seconds:g}: it must be above 0 and at most {MOST_SECONDS:g}")
    wanted = CODECS.names if codecs == "all" else _listed("--codecs", codecs, CODECS.names)
    return ReducePlan(
        count,
        parse_count(parameters),
        (YARDSTICK, *(name for name in wanted if name != YARDSTICK)),
        None if links is None else _listed("--links", links, tuple(LINKS)),
        seconds,
    )


def measure(plan: ReducePlan, say: Callable[[str], None]) -> Result:
    """The result as it is printed. Raises UserError where links asked for cannot be made."""
    with contextlib.ExitStack() as stack:
        place, links, where = _place(plan, stack)
        say(where)
        group = stack.enter_context(learners(plan.learners, plan.parameters, place))
        [hello, *_] = group.do("hello")
        bench = _Bench(group, place, plan.seconds, say)
        for codec in plan.codecs:
            if codec != AUTO:
                bench.add(codec)
        for link in links:
            bench.measure(link, AUTO in plan.codecs)
    return {
        "learners": plan.learners,
        "parameters": hello["parameters"],
        "links": list(links),
        "where": where,
        "backward_ms": BACKWARD_S * 1e3,
        "codecs": bench.codecs,
    }


def table(result: Result) -> list[list[Any]]:
    """All figures, a row for each codec."""
    links = result["links"]
    heading: list[Any] = ["codec", "B/step", "ratio", "theory", "wire", "code ms"]
    heading += [f"ms {link}{suffix}" for link in links for suffix in ("", " bw")]
    return [[*heading, "error", "error100"], *_rows(result["codecs"], links)]


def _rows(codecs: dict[str, Result], links: Sequence[str]) -> Iterator[list[Any]]:
    for name, figures in codecs.items():
        counted = ("bytes_per_step", "bytes_ratio", "bytes_theory", "interface_payload_per_step")
        row = [name, *map(figures.get, counted), figures["code_ms"]]
        for link in links:
            row += [figures["step_ms"][link], figures["step_with_backward_ms"][link]]
        yield [*row, figures["relative_error"], figures["relative_error_100"]]


class _Bench:
    """Results by codec as they come."""

    def __init__(
        self, group: Learners, place: Hosts | None, seconds: float, say: Callable[[str], None]
    ) -> None:
        self.codecs: dict[str, Result] = {}
        self._group, self._place, self._seconds, self._say = group, place, seconds, say

    def add(self, codec: str) -> None:
        """Measure what does not depend on the link."""
        self._limit("unlimited")
        [coding, *_] = self._group.do("code", codec=codec)
        [error, *_] = self._group.do("error", codec=codec, steps=ERROR_STEPS)
        self.codecs[codec] = {**coding, **error, "step_ms": {}, "step_with_backward_ms": {}}
        self._say(
            f"{codec}: {coding['code_ms']:.3g} ms of coding, relative error "
            f"{error['relative_error']:.2g}, {error['relative_error_100']:.2g} of 100 steps"
        )

    def measure(self, link: str, auto: bool) -> None:
        """Measure steps of all codecs over a link; ``auto``: and what it would take there."""
        for codec in [name for name in self.codecs if name != AUTO]:
            self._steps(codec, link)
        if auto:
            self._limit(link)
            [choice, *_] = self._group.do("choose")
            chosen = choice["codec"]
            if chosen not in self.codecs:
                self.add(chosen)
            if link not in self.codecs[chosen]["step_ms"]:
                self._steps(chosen, link)
            self._take(chosen, link, choice["text"])

    def _steps(self, codec: str, link: str) -> None:
        self._limit(link)
        result = self.codecs[codec]
        bare = self._group.do("speed", codec=codec, seconds=self._seconds)
        with_backward = self._group.do(
            "compute",
            codec=codec,
            seconds=self._seconds,
            overlap=True,
            forward_s=0.0,
            backward_s=BACKWARD_S,
        )
        # A step is over when it is over everywhere.
        result["step_ms"][link] = max(one["step_ms"] for one in bare)
        result["step_with_backward_ms"][link] = max(one["step_ms"] for one in with_backward)
        if "bytes_per_step" not in result:
            self._bytes(result, bare)
        self._say(f"{codec} over {link}: {result['step_ms'][link]:.4g} ms a step")

    def _bytes(self, result: Result, found: Sequence[Result]) -> None:
        for name in ("bytes_per_step", "bytes_theory", *(COUNTED if self._place else ())):
            result[name] = statistics.fmean(one[name] for one in found)
        plain = self.codecs[YARDSTICK].get("bytes_per_step", result["bytes_per_step"])
        result["bytes_ratio"] = plain / result["bytes_per_step"]

    def _take(self, chosen: str, link: str, why: str) -> None:
        """Note what auto took: its figures are those of what it took over the first link."""
        taken = self.codecs[chosen]
        auto = self.codecs.setdefault(AUTO, {**taken, "chosen": {}, "why": {}})
        for name in ("step_ms", "step_with_backward_ms"):
            auto[name] = {**auto[name], link: taken[name][link]}
        auto["chosen"][link], auto["why"][link] = chosen, why
        self._say(f"auto over {link} takes {why}")

    def _limit(self, link: str) -> None:
        if self._place is not None:
            self._place.limit(link)


def _place(
    plan: ReducePlan, stack: contextlib.ExitStack
) -> tuple[Hosts | None, Sequence[str], str]:
    """Hosts if there can be any, the links to measure over, and a sentence on both."""
    try:
        place = stack.enter_context(hosts(plan.learners))
    except NoHostsError as error:
        if plan.links is not None:
            raise UserError(
                f"--links {','.join(plan.links)}: links need network namespaces, and {error}; "
                "leave --links out to measure on loopback"
            ) from None
        where = f"{plan.learners} learners on loopback, at no limited rate, because {error}."
        return None, (LOOPBACK,), where
    where = f"{plan.learners} learners, each in a network namespace of its own behind a veth link."
    return place, plan.links or tuple(LINKS), where


def _listed(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UserError(f"{option} {text}: {name!r} is not one of {', '.join(known)}")
    return names
