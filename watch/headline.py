"""What the head of the page states of a run: whether it stands still, whether it learns, and what
went wrong. Times are seconds since the epoch; the page writes them in the reader's time zone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.formatting import count, finite, number
from penstock.monitor.intervals import Floats
from penstock.monitor.run_folder.files import Row
from penstock.monitor.run_folder.folder import short_text
from penstock.monitor.run_folder.record import FINENESS

STALL_S = 30.0  # without a line of metrics, at least
OVERDUE_S = 5.0  # without a line of metrics: then the learner is looked at, in the list too
STALL_INTERVALS = 10  # of `run.interval_s`, of which as many are missing
START_S = 300.0  # until the first line of metrics
SILENT_S = 10.0  # without a report of a process
BINS = 10  # of the measurements, whose means are compared
FEWEST = 2 * BINS
EPISODES = 100  # of which a return is the mean: before as many, it is the mean of fewer
CLEAR = 0.1  # a change of the return, as a share of the range of the bins
FALL = 0.25  # below the best bin
ROUNDING = 1e-9  # of a mean
NOISES = 2.0  # a change in standard deviations within a bin
FLAT = 0.25  # share of the measurements in which the return has to stay
FAINT = 0.5  # of these bounds: a change that was clear before counts until it is below
AGAIN = 1.1  # times the seconds of the last decision, when the next one is made
AGAIN_S = 15.0  # and as many seconds later at least
DECISIONS = 8  # the last ones, which are made again to find out what was clear before
CHANGES = ("rising", "falling")
GOOD = ("runs", "ended", "starts", "not started")
MOST_NAMED = 3
MOST_CAUSE = 200  # characters


def is_overdue(now_s: float, row: Mapping[str, Any]) -> bool:
    """Whether lines of metrics are missing; ``row`` as for `is_silent`."""
    return now_s - float(row["written"]) > max(OVERDUE_S, 3.0 * _between_s(row))


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
    return now_s - written_s > max(STALL_S, STALL_INTERVALS * _between_s(row))


def _between_s(row: Mapping[str, Any]) -> float:
    """Seconds from one line to the next, which are further apart in a long run."""
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

    Returns: ``why``, ``since``, and the ``command`` that continues the run, if one is known.
    """
    learners = [each for each in processes if str(each.get("name")).startswith("learner")]
    stopped = [each for each in learners if each.get("state") == "stopped"]
    since = written_s or None

    if stopped and (silent or len(learners) == 1):
        pids = " ".join(str(each.get("pid")) for each in stopped)
        named = listed([str(each["name"]) for each in stopped])
        why = f"{named} {'is' if len(stopped) == 1 else 'are'} stopped by a signal"
        away = sorted({str(on) for each in stopped if (on := each.get("host", host)) != host})
        if away:
            why = f"{why} on {listed(away)}"
        return {"why": why, "since": since, "command": None if away else f"kill -CONT {pids}"}

    if not silent:
        return None
    bad = [f"{each.get('name')}: {found}" for each in processes if (found := wrong(each))]
    why = "no new line of metrics"
    if bad:
        why = f"{why} ({listed(bad, '; ')})"
    return {"why": why, "since": since, "command": None}


def wrong(process: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a process of the status at present; None if nothing is.

    No figure in it grows, as a screen reader would announce each.
    """
    if process.get("now") not in GOOD:
        return str(process.get("now"))
    silent_s = finite(process.get("silent_s"))
    if process.get("pid") is not None and silent_s is not None and silent_s > SILENT_S:
        return f"no report for more than {SILENT_S:g} s"
    return None


def learning(
    steps: Floats, returns: Floats, episodes: Floats, seconds: Floats, *, live: bool
) -> Row:
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
    if len(returns) < FEWEST:
        return _early(f"{len(returns)} measurements of the return", FEWEST)
    if episodes[-1] < EPISODES:
        return _early(f"{count(float(episodes[-1]))} episodes", EPISODES)

    # The first decision is made as soon as both are enough.
    first = max(FEWEST, int(np.searchsorted(episodes, EPISODES)) + 1)

    verdict: Row = {"kind": "early", "text": ""}
    found = verdict
    for measured in _decisions(seconds, first, live=live)[-DECISIONS:]:
        known = steps[:measured], returns[:measured], episodes[:measured]
        previous, found = found, _judge(*known)

        # A change that was significant before counts until it is faint.
        if verdict["kind"] in CHANGES and found["kind"] not in CHANGES:
            faint = _judge(*known, bounds=FAINT)
            found = faint if faint["kind"] == verdict["kind"] else found

        if found["kind"] in (verdict["kind"], previous["kind"]) or verdict["kind"] == "early":
            verdict = found
    return verdict if live else found


def _decisions(seconds: Floats, first: int, *, live: bool) -> list[int]:
    """Returns how many measurements there were at each decision, ``first`` at the first one.

    ``seconds`` is the time of training at each measurement.
    """
    numbers = [first]
    while True:
        last_s = float(seconds[numbers[-1] - 1])
        next_s = max(AGAIN * last_s, last_s + AGAIN_S)
        if next_s > seconds[-1]:
            break
        numbers.append(int(np.searchsorted(seconds, next_s)) + 1)
    return numbers if live or numbers[-1] == len(seconds) else [*numbers, len(seconds)]


def _early(known: str, fewest: int) -> Row:
    return {"kind": "early", "text": f"too early to tell: {known}, {fewest} are needed"}


def _judge(steps: Floats, returns: Floats, episodes: Floats, bounds: float = 1.0) -> Row:
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
    last_quarter = steps[-1] - FLAT * (steps[-1] - steps[0])
    ended = float(episodes[-1] - np.interp(last_quarter, steps, episodes))

    # Lines of a long run are further apart, so the returns are taken at even steps.
    even = np.linspace(steps[0], steps[-1], len(steps))  # lines of a long run are further apart
    steps, returns = even, np.interp(even, steps, returns)
    bins = np.array_split(returns, BINS)
    means = np.array([part.mean() for part in bins])
    begins = [len(returns) - sum(map(len, bins[i:])) for i in range(BINS)]
    noise = float(np.median([part.std() for part in bins]))
    spread = float(means.max() - means.min())
    rounding = ROUNDING * float(np.abs(means).max())
    clear = max(bounds * CLEAR * spread, bounds * NOISES * noise, rounding)
    last, best = float(means[-1]), int(means.argmax())
    halfway = float(means[BINS // 2 - 1 : BINS // 2 + 1].mean())
    in_the_last = f"{number(last)} in the last tenth of the run"
    if means[best] - last > max(bounds * FALL * spread, clear):
        at = _steps(steps[begins[best]])
        text = f"falling: {number(float(means[best]))} at {at}, {in_the_last}"
        return {"kind": "falling", "text": text}

    # Is it flat, since the first bin after the last one that differs?
    differs = np.nonzero(np.abs(means - last) > clear)[0]
    first = int(differs[-1]) + 1 if len(differs) else 0
    change = last - halfway
    if first <= BINS * (1 - FLAT) or abs(change) <= clear:
        if ended < EPISODES:
            return _early(f"{count(ended)} episodes in the last quarter of the run", EPISODES)
        begin = begins[first]
        while begin and abs(returns[begin - 1] - last) <= clear:
            begin -= 1
        since = f"at least since {_steps(steps[begin])}" if begin else "since the start"
        return {"kind": "flat", "text": f"flat at {number(last)} {since}"}

    kind = "rising" if change > 0 else "falling"
    return {"kind": kind, "text": f"{kind}: {number(halfway)} halfway, {in_the_last}"}


def _steps(value: float) -> str:
    return f"{count(float(f'{value:.3g}'))} steps"


def end(state: str, error: Any, seen_s: float | None, trained: float | None, folder: Path) -> Row:
    """Returns the message on a run that did not end by one of its limits.

    Args:
        state: "died" or another one.
        error: the error in its summary, or None.
        seen_s: time of its last report.
        trained_steps: of the newest checkpoint; None without one.
        folder: of the run.
    """
    cause = "It died without ending: its supervisor was killed, or the machine stopped"
    if state == "stopped":
        cause = "It was stopped before it reached a limit"
    cause = str(error).rstrip(".") if error else cause

    left = "It has no checkpoint that can be read, so it begins anew"
    if trained is not None:
        left = f"Its newest checkpoint has {count(trained)} trained steps"

    kind = "plain" if state == "stopped" and not error else "bad"
    command = f"penstock train {shlex.quote(str(folder))} --resume auto"
    return trouble(kind, f"{cause}. {left}.", seen_s, command)


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
        text = f"{role} {cause[:MOST_CAUSE]}, {delay}"

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


def listed(texts: Sequence[str], between: str = ", ") -> str:
    """Joins the first texts, and says how many more there are."""
    more = len(texts) - MOST_NAMED
    return between.join([*texts[:MOST_NAMED], *([f"and {count(more)} more"] if more > 0 else [])])
