"""What the page shows of a profile: its tables, the shares of each process, and its timeline.

Both come from files in the run's folder, which may be of another release, or from elsewhere: their
size is bounded, and a file of another form gives a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.formatting import finite
from penstock.monitor.run_folder.files import FORM_ERRORS, Row, open_in, read_json, stamp
from penstock.profiling.report import last_minute
from penstock.profiling.report.files import DATA, TRACE
from penstock.profiling.report.tables import heading, tables
from penstock.profiling.report.trace import limit

MOST_SPANS = 100_000  # some 600 KB as JSON
MOST_THREADS = 64
MOST_TEXT = 300
TRACE_NBYTES = 64 << 20
TRACE_LINES = 500_000
LINE_NBYTES = 4096
SIGNS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of the parts
GAP = "-"


def profile_of(folder: Path) -> Row | None:
    """Returns the figures of `profile.json` as the page draws them.

    None if the run has no profile, or a row with ``error`` if it has another form.
    """
    if stamp(folder, DATA) == (0, 0, 0):
        return None
    profile = read_json(folder, DATA)
    try:
        verdict = profile["verdict"]
        return {
            "heading": heading(profile)[:MOST_TEXT],
            "verdict": {key: _text(verdict[key]) for key in ("finding", "reason", "next_step")},
            "also": [_text(found["finding"]) for found in profile["also"]],
            "bars": list(_bars(profile)),
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
    except FORM_ERRORS as error:
        return {
            "error": f"{DATA} does not have the form of this release ({type(error).__name__}: "
            f"{error}); profile the run's config again with: penstock profile"[:MOST_TEXT]
        }


def _bars(profile: Mapping[str, Any]) -> list[Row]:
    """Returns the shares of the parts in the time of each process, where they are above 0."""
    kinds = ("learner", "actors", "connectors", "others")
    entries = [entry for kind in kinds for entry in profile[kind]]
    found = []
    for entry in entries:
        shares = {str(part): finite(share) for part, share in entry["ledger"].items()}
        known = {part: share for part, share in shares.items() if share is not None and share > 0}
        found.append({"name": _text(entry["name"]), "parts": known})
    return found


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
    nothing: Row = {**timeline({}, ""), "time": None}
    found = read_json(folder, last_minute.FILE)
    if not found:
        return nothing
    try:
        return {
            **timeline(last_minute.decoded(found), _text(found["note"])),
            "time": finite(found["time"]),
        }
    except FORM_ERRORS:
        return nothing


def _read_trace(file: Any) -> Row:
    """Returns the spans of a trace, which has one event in each line.

    Lines of another form are left out, and so is what is beyond `TRACE_NBYTES` and `TRACE_LINES`.
    """
    note = ""
    processes: dict[object, str] = {}
    names: dict[object, str] = {}
    threads: dict[object, list[tuple[str, float, float]]] = {}
    left = TRACE_NBYTES
    for _ in range(TRACE_LINES):
        line = file.readline(LINE_NBYTES)
        left -= len(line)
        if not line or left < 0:
            break
        try:
            if line.startswith(b'{"displayTimeUnit"'):
                head = json.loads(line.strip() + b"]}")
                note = _text(head["otherData"]["holds"])
                continue
            if not line.startswith(b'{"'):
                continue
            event = json.loads(line.decode().strip().rstrip(","))
            key = event["pid"], event["tid"]
            if event["ph"] == "X":
                begin_us, us = float(event["ts"]), float(event["dur"])
                if abs(begin_us) < 1e12 and 0 <= us < 1e12:
                    threads.setdefault(key, []).append((_text(event["name"]), begin_us, us))
            elif event["name"] == "process_name":
                processes[event["pid"]] = _text(event["args"]["name"])
            elif event["name"] == "thread_name":
                names[key] = _text(event["args"]["name"])
        except FORM_ERRORS:
            continue
    named = {
        f"{processes.get(key[0], key[0])}/{names.get(key, key[1])}": spans
        for key, spans in threads.items()
        if isinstance(key, tuple)
    }
    return timeline(named, note)


def timeline(threads: Mapping[str, Sequence[tuple[str, float, float]]], note: str) -> Row:
    """Returns spans in a short form, at most `MOST_SPANS` of them: the newest of each thread.

    Args:
        threads: by name, the spans of a thread by rising begin.
        note: a sentence on what the spans cover.

    Returns: ``threads``, each with its ``begin`` in µs and with the successive lengths ``us`` in
    whole µs, of which the sign in ``signs`` gives the part by ``parts``, or `GAP`; and ``from``
    and ``to``, in µs.
    """
    shown = dict(list(threads.items())[:MOST_THREADS])
    each = limit([len(spans) for spans in shown.values()], MOST_SPANS)

    parts: dict[str, str] = {}
    found = []
    begins: list[int] = []
    ends: list[int] = []
    for name, spans in shown.items():
        kept = spans[max(0, len(spans) - each) :] if each else []
        if not kept:
            continue
        begin = at = round(kept[0][1])
        signs, lengths = [], []
        for part, begin_us, us in kept:
            start, end = round(begin_us), round(begin_us + us)
            if start > at:
                signs.append(GAP)
                lengths.append(start - at)
                at = start
            if end > at:  # a shorter one cannot be drawn, and its time goes to the next
                signs.append(_sign(part, parts))
                lengths.append(end - at)
                at = end
        found.append({"name": name, "begin": begin, "signs": "".join(signs), "us": lengths})
        begins.append(begin)
        ends.append(at)

    total = sum(len(spans) for spans in threads.values())
    drawn = sum(min(len(spans), each) for spans in shown.values())
    if drawn < total:
        cut = f"of {total:,} spans the newest {drawn:,} are shown"
        note = f"{note}; {cut}" if note else cut
    return {
        "threads": found,
        "parts": {sign: part for part, sign in parts.items()},
        "from": min(begins, default=0),
        "to": max(ends, default=0),
        "note": note,
    }


def _sign(part: str, parts: dict[str, str]) -> str:
    """Returns the sign of a part, the next free one if it has none.

    Parts beyond the number of signs have the last one.
    """
    if part not in parts and len(parts) < len(SIGNS):
        parts[part] = SIGNS[len(parts)]
    return parts.get(part, SIGNS[-1])


def _text(value: Any) -> str:
    return str(value)[:MOST_TEXT]
