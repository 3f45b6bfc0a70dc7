"""What the page shows of a profile: its tables, the shares of each process, and its timeline.

Both come from files in the run's folder, which may be of another release, or from elsewhere: their
size is bounded, and a file of another form gives a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.core.formatting import finite
from penstock.monitor.run_folder.files import FORM_ERRORS, Row, open_in, read_json, stamp
from penstock.profiling.report import last_minute
from penstock.profiling.report.files import DATA, TRACE
from penstock.profiling.report.last_minute import TimelineSpan
from penstock.profiling.report.tables import heading, tables
from penstock.profiling.report.trace import even_limit

MOST_SPANS = 100_000  # spans of a timeline, some 600 KB as JSON
MOST_THREADS = 64  # threads of a timeline
MOST_TEXT = 300  # characters of a name or a sentence
# At most so much of a trace is read.
TRACE_NBYTES = 64 << 20
TRACE_LINES = 500_000
LINE_NBYTES = 4096
# Times and lengths of spans are below this, in µs: 11 days.
MOST_US = 1e12
# In the short form of a timeline, each part is one of these letters.
SIGNS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
GAP = "-"  # no span


def profile_of(folder: Path) -> Row | None:
    """Returns the figures of `profile.json` as the page draws them.

    None if the run has no profile, or a row with ``error`` if it has another form.
    """
    if stamp(folder, DATA) == (0, 0, 0):
        return None
    profile = read_json(folder, DATA)
    try:
        return _shown_profile(profile)
    except FORM_ERRORS as error:
        text = (
            f"{DATA} does not have the form of this release ({type(error).__name__}: {error}); "
            "profile the run's config again with: penstock profile"
        )
        return {"error": text[:MOST_TEXT]}


def _shown_profile(profile: Mapping[str, Any]) -> Row:
    """Returns the figures of a profile; raises one of `FORM_ERRORS` for another form."""
    verdict = profile["verdict"]
    return {
        "heading": heading(profile)[:MOST_TEXT],
        "verdict": {key: _text(verdict[key]) for key in ("finding", "reason", "next_step")},
        "also": [_text(further["finding"]) for further in profile["also"]],
        "bars": _bars(profile),
        "tables": [
            {
                "title": _text(table.title),
                "columns": [_text(name) for name in table.columns],
                "rows": [[_text(cell) for cell in row] for row in table.rows],
            }
            for table in tables(profile)
        ],
        "notes": [_text(note) for note in profile.get("notes", [])],
    }


def _bars(profile: Mapping[str, Any]) -> list[Row]:
    """Returns the shares of the parts in the time of each process, where they are above 0."""
    kinds = ("learner", "actors", "connectors", "others")
    bars = []
    for process in (process for kind in kinds for process in profile[kind]):
        shares = {str(part): finite(share) for part, share in process["ledger"].items()}
        parts = {part: share for part, share in shares.items() if share is not None and share > 0}
        bars.append({"name": _text(process["name"]), "parts": parts})
    return bars


def timeline_of(folder: Path) -> Row:
    """Returns the spans of `trace.json`, as `timeline` does; without threads if there is none."""
    try:
        with open_in(folder, TRACE) as file:
            return _read_trace(file)
    except OSError:
        return timeline({}, "")


def recorded_of(folder: Path) -> Row:
    """Returns the spans that the supervisor has written on request, as `timeline_of` does.

    ``time`` is when it wrote them; None without such a file, or if that has another form.
    """
    content = read_json(folder, last_minute.FILE)
    if content:
        with suppress(*FORM_ERRORS):
            spans = timeline(last_minute.decode_spans(content), _text(content["note"]))
            return {**spans, "time": finite(content["time"])}
    return {**timeline({}, ""), "time": None}


def _read_trace(file: Any) -> Row:
    """Returns the spans of a trace, which has one event in each line.

    Lines of another form are left out, and so is what is beyond `TRACE_NBYTES` and `TRACE_LINES`.
    """
    trace = _TraceReader()
    readable_nbytes = TRACE_NBYTES
    for _ in range(TRACE_LINES):
        line = file.readline(LINE_NBYTES)
        readable_nbytes -= len(line)
        if not line or readable_nbytes < 0:
            break
        try:
            trace.read_line(line)
        except FORM_ERRORS:
            continue
    return timeline(trace.spans_by_name(), trace.note)


class _TraceReader:
    """The names and spans in the lines of a trace that were read so far."""

    def __init__(self) -> None:
        self.note = ""
        """A sentence on what the spans cover."""
        # Keys are the `pid` of processes, and with the `tid` of threads, of any type.
        self._process_names: dict[object, str] = {}
        self._thread_names: dict[tuple[object, object], str] = {}
        self._spans: dict[tuple[object, object], list[TimelineSpan]] = {}

    def read_line(self, line: bytes) -> None:
        """Read one line; raises one of `FORM_ERRORS` if it has another form."""
        if line.startswith(b'{"displayTimeUnit"'):
            head = json.loads(line.strip() + b"]}")
            self.note = _text(head["otherData"]["holds"])
            return
        if not line.startswith(b'{"'):
            return

        event = json.loads(line.decode().strip().rstrip(","))
        thread = event["pid"], event["tid"]
        if event["ph"] == "X":
            begin_us = float(event["ts"])
            us = float(event["dur"])
            if abs(begin_us) < MOST_US and 0 <= us < MOST_US:
                self._spans.setdefault(thread, []).append((_text(event["name"]), begin_us, us))
        elif event["name"] == "process_name":
            self._process_names[event["pid"]] = _text(event["args"]["name"])
        elif event["name"] == "thread_name":
            self._thread_names[thread] = _text(event["args"]["name"])

    def spans_by_name(self) -> dict[str, list[TimelineSpan]]:
        """Returns the spans of each thread, by its name and that of its process."""
        spans = {}
        for (pid, tid), thread_spans in self._spans.items():
            process = self._process_names.get(pid, pid)
            thread = self._thread_names.get((pid, tid), tid)
            spans[f"{process}/{thread}"] = thread_spans
        return spans


def timeline(threads: Mapping[str, Sequence[TimelineSpan]], note: str) -> Row:
    """Returns spans in a short form, at most `MOST_SPANS` of them: the newest of each thread.

    Args:
        threads: by name, the spans of a thread by rising begin.
        note: a sentence on what the spans cover.

    Returns: ``threads``, each with its ``begin`` in µs and with the successive lengths ``us`` in
    whole µs, of which the sign in ``signs`` gives the part by ``parts``, or `GAP`; and ``from``
    and ``to``, in µs.
    """
    shown = dict(list(threads.items())[:MOST_THREADS])
    most_each = even_limit([len(spans) for spans in shown.values()], MOST_SPANS)

    sign_of: dict[str, str] = {}
    rows = []
    begins = []
    ends = []
    for name, spans in shown.items():
        newest = spans[max(0, len(spans) - most_each) :] if most_each else []
        if newest:
            row = _short_form(name, newest, sign_of)
            rows.append(row)
            begins.append(row["begin"])
            ends.append(row["begin"] + sum(row["us"]))

    total = sum(len(spans) for spans in threads.values())
    drawn = sum(min(len(spans), most_each) for spans in shown.values())
    if drawn < total:
        bound = f"of {total:,} spans the newest {drawn:,} are shown"
        note = f"{note}; {bound}" if note else bound
    return {
        "threads": rows,
        "parts": {sign: part for part, sign in sign_of.items()},
        "from": min(begins, default=0),
        "to": max(ends, default=0),
        "note": note,
    }


def _short_form(name: str, spans: Sequence[TimelineSpan], sign_of: dict[str, str]) -> Row:
    """Returns the row of one thread, as `timeline` describes it; adds parts to ``sign_of``."""
    begin = round(spans[0][1])
    signs = []
    lengths = []
    end = begin  # of the spans so far
    for part, begin_us, us in spans:
        span_begin = round(begin_us)
        span_end = round(begin_us + us)
        if span_begin > end:
            signs.append(GAP)
            lengths.append(span_begin - end)
            end = span_begin
        if span_end > end:  # a shorter one cannot be drawn, and its time goes to the next
            signs.append(_sign(part, sign_of))
            lengths.append(span_end - end)
            end = span_end
    return {"name": name, "begin": begin, "signs": "".join(signs), "us": lengths}


def _sign(part: str, sign_of: dict[str, str]) -> str:
    """Returns the sign of a part, the next free one if it has none.

    Parts beyond the number of signs have the last one.
    """
    if part not in sign_of and len(sign_of) < len(SIGNS):
        sign_of[part] = SIGNS[len(sign_of)]
    return sign_of.get(part, SIGNS[-1])


def _text(value: Any) -> str:
    """Returns a value of any type as text of bounded length."""
    return str(value)[:MOST_TEXT]
