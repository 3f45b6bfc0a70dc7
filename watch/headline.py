"""What the head of the page states of a run: whether it stands still, whether it learns, and what
went wrong. Times are seconds since the epoch; the page writes them in the reader's time zone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.core.formatting import count, finite, number
from penstock.monitor.intervals import Floats
from penstock.monitor.run_folder.files import Row
from penstock.monitor.run_folder.folder import short_text
from penstock.monitor.run_folder.record import FINENESS

# A run stands still without a line of metrics for so many seconds, and for so many intervals.
STALL_S = 30.0
STALL_INTERVALS = 10
# Without a line of metrics for so long, the list of runs too looks for a stopped learner.
OVERDUE_S = 5.0
OVERDUE_INTERVALS = 3.0
# A run may take this long to write its first line of metrics.
START_S = 300.0
# A process without a report for so long is named.
SILENT_S = 10.0
# States of a process in which nothing is wrong with it.
GOOD_STATES = ("runs", "ended", "starts", "not started")

# The measurements are divided into as many bins; their means are compared.
BINS = 10
FEWEST_MEASUREMENTS = 2 * BINS
# Each return is the mean of so many episodes: before as many, it is the mean of fewer.
EPISODES = 100
# A change of the return is significant if it exceeds all three: this share of the range of the
# bins' means, so many standard deviations within a bin, and the error of rounding a mean.
SIGNIFICANT_SHARE = 0.1
SIGNIFICANT_DEVIATIONS = 2.0
ROUNDING = 1e-9
# The return is falling if the last bin is so far below the best one, as a share of the range.
FALLING_BELOW_BEST = 0.25
# The return is flat if it stays for this share of the run.
FLAT_SHARE = 0.25
# A change that was significant before counts until it is below this share of the bounds above.
FAINT = 0.5
# The next decision is made after so many times the seconds of the last one, and so much later.
DECISION_RATIO = 1.1
DECISION_S = 15.0
# The last decisions are made again, to find out what was significant before.
REPEATED_DECISIONS = 8
CHANGES = ("rising", "falling")

MOST_NAMED = 3  # processes named in one sentence
CAUSE_LENGTH = 200  # characters of a cause


class ReturnCurve(NamedTuple):
    """The measurements of the return in training; each field is [N] float64."""

    steps: Floats
    """Agent steps, rising."""
    returns: Floats
    """Mean returns of the last episodes."""
    episodes: Floats
    """Episodes that have ended by then, rising."""
    seconds: Floats
    """Time of training, rising."""

    def first(self, count: int) -> ReturnCurve:
        """Returns the first ``count`` measurements."""
        return ReturnCurve(*(values[:count] for values in self))


def is_overdue(now_s: float, row: Mapping[str, Any]) -> bool:
    """Whether lines of metrics are missing; ``row`` as for `is_silent`."""
    silent_s = now_s - float(row["written"])
    return silent_s > max(OVERDUE_S, OVERDUE_INTERVALS * _line_interval_s(row))


def is_silent(now_s: float, began_s: float, row: Mapping[str, Any]) -> bool:
    """Whether a run in progress has written no line of metrics for too long.

    Args:
        now_s: the present.
        began_s: when the supervisor began, which may have resumed the run.
        row: of the list of runs: ``written``, the time of the last line, 0 without one;
            ``interval_s``, its `run.interval_s`; and ``seconds``, its time of training.
    """
    written_s = float(row["written"])
    if written_s <= began_s:
        return now_s - began_s > START_S
    return now_s - written_s > max(STALL_S, STALL_INTERVALS * _line_interval_s(row))


def _line_interval_s(row: Mapping[str, Any]) -> float:
    """Seconds from one line of metrics to the next, which are further apart in a long run."""
    return max(finite(row["interval_s"]) or 0.0, (finite(row["seconds"]) or 0.0) / FINENESS)


def stall(
    processes: Sequence[Mapping[str, Any]], written_s: float, *, silent: bool, host: Any = None
) -> Row | None:
    """Returns why a run in progress stands still; None if it does not.

    A learner that was stopped by a signal stands still at once, one of several only if ``silent``.

    Args:
        processes: of the status, with ``now``.
        written_s: time of the last line of metrics; 0 without one.
        silent: as `is_silent` returns it.
        host: of the supervisor; processes of other hosts cannot be continued from there.

    Returns: ``why``, ``names`` of the processes in it, ``since``, and the ``command`` that
    continues the run, if one is known.
    """
    learners = [process for process in processes if str(process.get("name")).startswith("learner")]
    stopped = [learner for learner in learners if learner.get("state") == "stopped"]
    since_s = written_s or None

    if stopped and (silent or len(learners) == 1):
        command = None
        if not _other_hosts(stopped, host):
            pids = " ".join(str(learner.get("pid")) for learner in stopped)
            command = f"kill -CONT {pids}"
        return {
            "why": _why_stopped(stopped, host),
            "names": [learner["name"] for learner in stopped][:MOST_NAMED],
            "since": since_s,
            "command": command,
        }

    if not silent:
        return None
    names = []
    sentences = []
    for process in processes:
        problem = wrong(process)
        if problem:
            names.append(process.get("name"))
            sentences.append(f"{process.get('name')}: {problem}")
    why = "no new line of metrics"
    if sentences:
        why = f"{why} ({listed(sentences, '; ')})"
    return {"why": why, "names": names[:MOST_NAMED], "since": since_s, "command": None}


def _why_stopped(stopped: Sequence[Mapping[str, Any]], host: Any) -> str:
    """Returns which learners were stopped by a signal, and on which hosts other than ``host``."""
    names = listed([str(learner["name"]) for learner in stopped])
    verb = "is" if len(stopped) == 1 else "are"
    other_hosts = _other_hosts(stopped, host)
    place = f" on {listed(other_hosts)}" if other_hosts else ""
    return f"{names} {verb} stopped by a signal{place}"


def _other_hosts(processes: Sequence[Mapping[str, Any]], host: Any) -> list[str]:
    """Returns the hosts of ``processes`` other than ``host``; one without a host is on that."""
    hosts = [process.get("host", host) for process in processes]
    return sorted({str(name) for name in hosts if name != host})


def wrong(process: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a process of the status at present; None if nothing is.

    No figure in it grows, as a screen reader would announce each.
    """
    state = process.get("now")
    if state not in GOOD_STATES:
        return str(state)
    silent_s = finite(process.get("silent_s"))
    if process.get("pid") is not None and silent_s is not None and silent_s > SILENT_S:
        return f"no report for more than {SILENT_S:g} s"
    return None


def learning(curve: ReturnCurve, *, live: bool) -> Row:
    """Returns whether a run learns, by its mean return in training.

    It is decided at certain times, each a tenth of the run after the one before and at least
    `DECISION_S`, and at the end of a run that has ended; in between the sentence stays. In a run in
    progress another kind counts when two decisions in a row find it, and what was rising or
    falling is so until half the bounds (`FAINT`) find otherwise. So neither a measurement more nor
    a change that is as large as a bound lets the sentence alternate.

    Args:
        curve: the measurements so far.
        live: whether the run is in progress.

    Returns: ``kind``, which is "rising", "flat", "falling" or "early", and ``text``, a sentence
    with the figures.
    """
    measurements = len(curve.returns)
    if measurements < FEWEST_MEASUREMENTS:
        return _early(f"{measurements} measurements of the return", FEWEST_MEASUREMENTS)
    if curve.episodes[-1] < EPISODES:
        return _early(f"{count(float(curve.episodes[-1]))} episodes", EPISODES)

    # The first decision is made as soon as both are enough.
    enough_episodes = int(np.searchsorted(curve.episodes, EPISODES)) + 1
    first = max(FEWEST_MEASUREMENTS, enough_episodes)

    verdict: Row = {"kind": "early", "text": ""}
    decision = verdict
    for measured in _decisions(curve.seconds, first, live=live)[-REPEATED_DECISIONS:]:
        previous = decision
        decision = _judge(curve.first(measured))

        # A change that was significant before counts until it is faint.
        if verdict["kind"] in CHANGES and decision["kind"] not in CHANGES:
            faint = _judge(curve.first(measured), bounds=FAINT)
            if faint["kind"] == verdict["kind"]:
                decision = faint

        if verdict["kind"] == "early" or decision["kind"] in (verdict["kind"], previous["kind"]):
            verdict = decision
    return verdict if live else decision


def _decisions(seconds: Floats, first: int, *, live: bool) -> list[int]:
    """Returns how many measurements there were at each decision, ``first`` at the first one.

    ``seconds`` is the time of training at each measurement.
    """
    measured = [first]
    while True:
        last_s = float(seconds[measured[-1] - 1])
        next_s = max(DECISION_RATIO * last_s, last_s + DECISION_S)
        if next_s > seconds[-1]:
            break
        measured.append(int(np.searchsorted(seconds, next_s)) + 1)

    # A run that has ended is judged by all of its measurements.
    if not live and measured[-1] != len(seconds):
        measured.append(len(seconds))
    return measured


def _early(amount: str, fewest: int) -> Row:
    """Returns the verdict that there is too little to judge, with the ``amount`` that there is."""
    return {"kind": "early", "text": f"too early to tell: {amount}, {fewest} are needed"}


class _BinnedReturn(NamedTuple):
    """The returns of a run at even steps, divided into `BINS` parts of equally many steps."""

    steps: Floats
    """The even steps, [N] float64."""
    returns: Floats
    """The return at each of them, [N] float64."""
    starts: list[int]
    """The place of each bin's first return."""
    means: Floats
    """The mean of each bin, [BINS] float64."""
    noise: float
    """The median of the standard deviations within a bin."""

    @property
    def spread(self) -> float:
        """The range of the means."""
        return float(self.means.max() - self.means.min())

    def significant_change(self, bounds: float) -> float:
        """Returns by how much the return has to change so that this is no noise."""
        rounding = ROUNDING * float(np.abs(self.means).max())
        return max(
            bounds * SIGNIFICANT_SHARE * self.spread,
            bounds * SIGNIFICANT_DEVIATIONS * self.noise,
            rounding,
        )

    @classmethod
    def of(cls, curve: ReturnCurve) -> _BinnedReturn:
        """Divides a curve. Lines of a long run are further apart, so it is interpolated."""
        steps = np.linspace(curve.steps[0], curve.steps[-1], len(curve.steps))
        returns = np.interp(steps, curve.steps, curve.returns)
        bins = np.array_split(returns, BINS)
        return cls(
            steps=steps,
            returns=returns,
            starts=[len(returns) - sum(map(len, bins[i:])) for i in range(BINS)],
            means=np.array([values.mean() for values in bins]),
            noise=float(np.median([values.std() for values in bins])),
        )


def _judge(curve: ReturnCurve, bounds: float = 1.0) -> Row:
    """Returns one decision on the measurements so far.

    The run is divided into ten parts of equally many steps; a part has a mean and a standard
    deviation, and the noise is the median of these deviations. With the range of the ten means, a
    change is significant if it exceeds a tenth of the range and twice the noise. The return

    - is falling if the last mean is significantly below the best one, by a quarter of the range or
      more;
    - is flat if no mean differs significantly from the last one for a quarter of the run or longer,
      since the first measurement from which on none before these means does. If fewer than
      `EPISODES` have ended in the last quarter, it is too early to say so: the mean return has not
      changed because few of its episodes have;
    - else is rising or falling if the last mean is significantly above or below that of the middle.

    ``bounds`` multiplies the tenth, the quarter of the range and the noise.
    """
    binned = _BinnedReturn.of(curve)
    means = binned.means
    significant = binned.significant_change(bounds)
    last = float(means[-1])
    last_text = f"{number(last)} in the last tenth of the run"

    best = int(means.argmax())
    if means[best] - last > max(bounds * FALLING_BELOW_BEST * binned.spread, significant):
        best_steps = _steps(binned.steps[binned.starts[best]])
        text = f"falling: {number(float(means[best]))} at {best_steps}, {last_text}"
        return {"kind": "falling", "text": text}

    # The return is flat from the bin after the last one that differs.
    different_bins = np.nonzero(np.abs(means - last) > significant)[0]
    flat_bin = int(different_bins[-1]) + 1 if len(different_bins) else 0
    halfway = float(means[BINS // 2 - 1 : BINS // 2 + 1].mean())
    change = last - halfway
    if flat_bin <= BINS * (1 - FLAT_SHARE) or abs(change) <= significant:
        recent_episodes = _recent_episodes(curve)
        if recent_episodes < EPISODES:
            return _early(
                f"{count(recent_episodes)} episodes in the last quarter of the run", EPISODES
            )
        flat_start = binned.starts[flat_bin]
        while flat_start and abs(binned.returns[flat_start - 1] - last) <= significant:
            flat_start -= 1
        since = "since the start"
        if flat_start:
            since = f"at least since {_steps(binned.steps[flat_start])}"
        return {"kind": "flat", "text": f"flat at {number(last)} {since}"}

    kind = "rising" if change > 0 else "falling"
    return {"kind": kind, "text": f"{kind}: {number(halfway)} halfway, {last_text}"}


def _recent_episodes(curve: ReturnCurve) -> float:
    """Returns how many episodes have ended in the share of the run in which a return is flat."""
    start = curve.steps[0]
    end = curve.steps[-1]
    recent_start = end - FLAT_SHARE * (end - start)
    return float(curve.episodes[-1] - np.interp(recent_start, curve.steps, curve.episodes))


def _steps(value: float) -> str:
    """Returns a number of steps as text, with three significant digits."""
    return f"{count(float(f'{value:.3g}'))} steps"


def end(
    state: str,
    error: Any,
    *,
    seen_s: float | None,
    trained_steps: float | None,
    folder: Path,
    games_play: bool = False,
) -> Row:
    """Returns the message on a run that did not end by one of its limits.

    Args:
        state: "died" or another one.
        error: the error in its summary, or None.
        seen_s: time of its last report.
        trained_steps: of the newest checkpoint; None without one.
        folder: of the run.
        games_play: whether games play in place of actors.
    """
    if error:
        cause = str(error).rstrip(".")
    elif state == "stopped":
        cause = "It was stopped before it reached a limit"
    else:
        cause = "It died without ending: its supervisor was killed, or the machine stopped"

    checkpoint = "It has no checkpoint that can be read, so it begins anew"
    if trained_steps is not None:
        checkpoint = f"Its newest checkpoint has {count(trained_steps)} trained steps"

    kind = "plain" if state == "stopped" and not error else "bad"
    name = "serve-env" if games_play else "train"
    command = f"penstock {name} {shlex.quote(str(folder))} --resume auto"
    return trouble(kind, f"{cause}. {checkpoint}.", time_s=seen_s, command=command)


def restart(event: Mapping[str, Any], restarts: float) -> Row:
    """Returns the message on a restart from which the run has recovered.

    Args:
        event: of the kind "restart". One of a release that recorded no ``cause`` is shown as it is.
        restarts: of all processes.
    """
    role = str(event.get("role") or "a process")
    data = event.get("data")
    details = data if isinstance(data, Mapping) else {}
    cause = short_text(details.get("cause"))
    delay_s = finite(details.get("delay_s"))

    if cause is None:
        text = short_text(event.get("text")) or f"{role} ended"
    else:
        delay = "restarted" if delay_s is None else f"restarted {delay_s:g} s later"
        text = f"{role} {cause[:CAUSE_LENGTH]}, {delay}"

    total = f" {count(restarts)} restarts in all." if restarts > 1 else ""
    return trouble("past", f"{text}.{total}", finite(event.get("time")))


def trouble(kind: str, text: str, time_s: float | None = None, command: str | None = None) -> Row:
    """Returns a message on what went wrong.

    Args:
        kind: "bad", "warn", "plain", or "past" of what has recovered.
        time_s: when it happened.
        command: continues the run.
    """
    return {"kind": kind, "time": time_s, "text": text, "command": command}


def listed(texts: Sequence[str], separator: str = ", ") -> str:
    """Joins the first texts, and says how many more there are."""
    shown = [*texts[:MOST_NAMED]]
    more = len(texts) - MOST_NAMED
    if more > 0:
        shown.append(f"and {count(more)} more")
    return separator.join(shown)
