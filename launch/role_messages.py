"""The fields of the messages from roles that the supervisor uses, and the check of these fields.

A role may have a defect, or be of another release. Its messages must not end the supervisor, on
which all other roles depend. Messages of other kinds have no fields here and are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.core.control import Message
from penstock.monitor.ranks import COUNTED, COUNTERS, GROUPS, HISTOGRAM, LATENCY, MOST, SUMMED

SHOWN_CHARS = 40  # of a value
WHOLE_TEXT = re.compile("-?[0-9]{1,18}")  # that `int` reads


class MessageField(NamedTuple):
    """A rule in words, and a function that returns whether a value follows it."""

    rule: str
    holds: Callable[[Any], bool]
    required: bool = True

    @property
    def optional(self) -> MessageField:
        return self._replace(required=False)


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _is_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(n, int | float) for n in value.values())


def _is_histogram(value: Any) -> bool:
    return _is_counts(value) and all(WHOLE_TEXT.fullmatch(key) for key in value)


def _has(fields: Mapping[str, MessageField]) -> MessageField:
    listed = ", ".join(f"{name} ({field.rule})" for name, field in fields.items() if field.required)
    rule = f"an object with {listed}" if listed else "an object"
    return MessageField(rule, lambda v: isinstance(v, dict) and not fault_in(v, fields))


TEXT, FLAG = MessageField("text", _is(str)), MessageField("true or false", _is(bool))
TEXT_OR_NONE = MessageField("text or null", _is(str, type(None)))
WHOLE, NUMBER = MessageField("a whole number", _is(int)), MessageField("a number", _is(int, float))
NUMBER_OR_NONE = MessageField("a number or null", _is(int, float, type(None)))
OBJECT_OR_NONE = MessageField("an object or null", _is(dict, type(None)))
COUNTS = MessageField("an object of numbers", _is_counts)
HISTOGRAM_OF = MessageField("an object of numbers by whole numbers", _is_histogram)

METRICS = {name: NUMBER_OR_NONE.optional for name in GROUPS | SUMMED}
METRICS |= {name: NUMBER.optional for name in (*COUNTERS, *MOST)}
METRICS |= {name: COUNTS.optional for name in (*COUNTED, "received")}
METRICS |= {name: HISTOGRAM_OF.optional for name in (HISTOGRAM, LATENCY)}
METRICS |= {name: NUMBER.optional for name in ("interval_s", "learner_compute_fraction")}
ACCOUNTING = {
    **dict.fromkeys(("produced", "trained", "in_flight"), WHOLE),
    **dict.fromkeys(("dropped", "lost"), COUNTS.optional),
}
PROGRESS = {"time_s": NUMBER, "trained_steps": WHOLE, "learner_steps": WHOLE, "best": FLAG}
ESTIMATE = _has({"mean": NUMBER_OR_NONE, "se": NUMBER_OR_NONE})
FIELDS: Mapping[str, Mapping[str, MessageField]] = {
    "error": {
        "message": TEXT,
        **dict.fromkeys(("traceback", "place"), TEXT.optional),
        **dict.fromkeys(("user", "fault"), FLAG.optional),
    },
    "stop": {"reason": TEXT, "error": TEXT_OR_NONE.optional},
    "group_failed": {"epoch": WHOLE, "message": TEXT},
    "event": {"data": OBJECT_OR_NONE.optional},
    "note": {"data": OBJECT_OR_NONE.optional},
    "metrics": METRICS,
    "final": {**METRICS, "accounting": _has(ACCOUNTING)},
    "checkpoint": {"folder": TEXT, "return_mean": NUMBER_OR_NONE, **PROGRESS},
    "evaluation": {
        **PROGRESS,
        "episodes": WHOLE,
        "best_return_mean": NUMBER_OR_NONE,
        "return": _has(dict.fromkeys(("mean", "std", "min", "max"), NUMBER)),
        "length": _has({"mean": NUMBER}),
        "play": TEXT,
        **dict.fromkeys(("greedy", "sampled"), ESTIMATE),
        "closing": _has({}).optional,
    },
}


def fault_in(message: Mapping[str, Any], fields: Mapping[str, MessageField]) -> str:
    """The first value of a message that breaks the rule of its field, in words such as "'reason' is
    3, and must be text"; empty if all follow the rules."""
    for name, field in fields.items():
        if name not in message:
            if field.required:
                return f"{name!r} is missing, and must be {field.rule}"
        elif not field.holds(message[name]):
            shown = repr(message[name])
            shown = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}..."
            return f"{name!r} is {shown}, and must be {field.rule}"
    return ""


def fault_of(message: Message) -> str:
    """`fault_in` for a message of a role."""
    return fault_in(message, {"kind": TEXT}) or fault_in(message, FIELDS.get(message["kind"], {}))
