"""The types of values in a config, each with a description.

Whole numbers may be written as 1e6, numbers as 3e-4; a boolean is never a number. The description
of a type appears in error messages ("it must be ...") and in the generated reference, so that both
agree with the check.
"""

from __future__ import annotations

import ipaddress
import os
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, AllowInfNan, BeforeValidator, Field, JsonValue, Strict

from penstock.configs.limits import MOST_CHAIRS


@dataclass(frozen=True)
class ValueDescription:
    """Description of a type's values that completes the sentence "it must be ..."."""

    text: str


def _whole(value: Any) -> Any:
    """Convert 1e6, as a number or as text, to 1000000; return other values unchanged."""
    if isinstance(value, str):
        value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: Any) -> Any:
    """Convert a text to the number that it is; return other values unchanged."""
    if isinstance(value, str):
        for convert in (int, float):
            try:
                return convert(value)
            except ValueError:
                continue
    return value


def bounds(value: str) -> tuple[int, int]:
    """Returns the least and the greatest number of a `Range`."""
    least, _, most = value.partition("..")
    return int(least), int(most)


def _valid_range(value: str) -> str:
    """Returns a `Range`. Raises ValueError if its numbers fall, or are too large."""
    least, most = bounds(value)
    if not least <= most <= MOST_PROCESSES:
        raise ValueError(f"{least} is more than {most}, or {most} than {MOST_PROCESSES}")
    return value


# Larger numbers are mistakes on any machine, and would exhaust its memory or never end.
MOST_SMALL = 1 << 10
MOST_PROCESSES = 1 << 14  # the number of actors that connectors accept
MOST_LARGE = 1 << 20
MOST_WHOLE = (1 << 63) - 1  # the largest number of 64 bits


_Whole = Annotated[int, BeforeValidator(_whole), Strict()]
Natural = Annotated[
    _Whole, Field(ge=0, le=MOST_WHOLE), ValueDescription("a whole number of at least 0")
]
Count = Annotated[
    _Whole, Field(ge=1, le=MOST_WHOLE), ValueDescription("a whole number of at least 1")
]
Small = Annotated[
    _Whole, Field(ge=1, le=MOST_SMALL), ValueDescription(f"a whole number from 1 to {MOST_SMALL}")
]
SmallNatural = Annotated[
    _Whole, Field(ge=0, le=MOST_SMALL), ValueDescription(f"a whole number from 0 to {MOST_SMALL}")
]
Chairs = Annotated[
    _Whole, Field(ge=1, le=MOST_CHAIRS), ValueDescription(f"a whole number from 1 to {MOST_CHAIRS}")
]
Processes = Annotated[
    _Whole,
    Field(ge=1, le=MOST_PROCESSES),
    ValueDescription(f"a whole number from 1 to {MOST_PROCESSES}"),
]
Large = Annotated[
    _Whole, Field(ge=1, le=MOST_LARGE), ValueDescription(f"a whole number from 1 to {MOST_LARGE}")
]
Niceness = Annotated[_Whole, Field(ge=0, le=19), ValueDescription("a whole number from 0 to 19")]
Range = Annotated[
    str,
    Strict(),
    Field(pattern=r"^[1-9]\d{0,5}\.\.[1-9]\d{0,5}$"),
    AfterValidator(_valid_range),
    ValueDescription("`MIN..MAX`, such as `8..40`"),
]
Port = Annotated[_Whole, Field(ge=0, le=65535), ValueDescription("a port from 0 to 65535")]
Seed = Annotated[
    _Whole, Field(ge=0, le=2**32 - 1), ValueDescription("a whole number from 0 to 4294967295")
]

MOST = 1e30  # float32 ends at 3.4e38, and options are multiplied by other numbers
Number = Annotated[
    float,
    BeforeValidator(_number),
    Strict(),
    AllowInfNan(False),
    Field(ge=-MOST, le=MOST),
    ValueDescription("a finite number"),
]
LogStd = Annotated[
    Number, Field(ge=-20, le=5), ValueDescription("a number from -20 to 5")
]  # e^5 = 148 is far beyond actions scaled to ± 1
Positive = Annotated[Number, Field(gt=0), ValueDescription("a number above 0")]
NotNegative = Annotated[Number, Field(ge=0), ValueDescription("a number of at least 0")]
Fraction = Annotated[Number, Field(ge=0, le=1), ValueDescription("a number from 0 to 1")]
Part = Annotated[Number, Field(gt=0, lt=1), ValueDescription("a number above 0 and below 1")]
Share = Annotated[Number, Field(gt=0, le=1), ValueDescription("a number above 0 and up to 1")]

MemoryFormat = Literal["auto", "contiguous", "channels_last"]

Switch = Annotated[bool, Strict()]
Text = Annotated[
    str,
    Strict(),
    Field(min_length=1),
    ValueDescription("text (in quotes if it looks like a number)"),
]
Folder = Annotated[Text, AfterValidator(os.path.expanduser)]
"""A path, in which `~` at the beginning is the user's home: shells leave it in `run.dir=~/x`."""
Module = Annotated[
    str,
    Strict(),
    Field(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?$"),
    ValueDescription("`module` or `module:object`"),
]
Device = Annotated[
    str,
    Strict(),
    Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"),
    ValueDescription("`auto`, `cpu`, `cuda` or `cuda:N`"),
]
Address = Annotated[
    str,
    Strict(),
    Field(pattern=r"^(tcp://[^\s/]+:(\d{1,5}|\*)|ipc://\S+)$"),
    ValueDescription("an address such as `tcp://127.0.0.1:7700` or `ipc:///run/user/0/learner`"),
]
Sizes = Annotated[
    list[Large],
    Field(min_length=1, max_length=16),
    ValueDescription(f"a list of whole numbers from 1 to {MOST_LARGE}, such as [64, 64]"),
]
Filters = Annotated[
    list[Small],
    Field(max_length=8),
    ValueDescription(f"a list of whole numbers from 1 to {MOST_SMALL}, such as [16, 32], or []"),
]
Options = Annotated[dict[str, JsonValue], ValueDescription("a map of keyword arguments")]
_Object = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
Wrapper = (
    _Object | Annotated[dict[_Object, dict[str, JsonValue]], Field(min_length=1, max_length=1)]
)
Wrappers = Annotated[
    list[Wrapper],
    ValueDescription(
        "a list of `module:Class` or, with keyword arguments, `{module:Class: {key: value}}`"
    ),
]


def _different(names: list[str]) -> list[str]:
    """Returns the names. Raises ValueError if one of them occurs twice."""
    if len({*names}) < len(names):
        raise ValueError("a name occurs twice")
    return names


Names = Annotated[
    list[Text],
    AfterValidator(_different),
    ValueDescription("a list of different names, such as [is_success]"),
]
CoreInputNames = Annotated[
    list[Literal["action", "reward"]],
    AfterValidator(_different),
    ValueDescription("a list of `action` and `reward`, or []"),
]
Classes = Annotated[
    list[_Object],
    ValueDescription("a list of `module:Class`"),
]


def is_local(address: str) -> bool:
    """Whether only this host reaches a ``tcp://`` or ``ipc://`` address."""
    if address.startswith("ipc://"):
        return True

    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, an interface or a wildcard
        return False


def words(kind: Any) -> str:
    """Returns the description of an annotation.

    It is its `ValueDescription`, otherwise one made from its type.
    """
    if get_origin(kind) is Annotated:
        inner, *metadata = get_args(kind)
        descriptions = [item.text for item in metadata if isinstance(item, ValueDescription)]
        return descriptions[-1] if descriptions else words(inner)

    if get_origin(kind) is Literal:
        return either([f"`{choice}`" for choice in get_args(kind)])
    if get_origin(kind) in (Union, types.UnionType):
        return either([words(member) for member in get_args(kind)])
    return {bool: "true or false", type(None): "null"}.get(kind, "a map of keys")


def either(choices: Sequence[str]) -> str:
    """Returns the choices as text: `a, b or c`."""
    *most, last = choices
    return f"{', '.join(most)} or {last}" if most else last
