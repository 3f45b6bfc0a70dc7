"""Hostile bytes for tests/fuzz: integers at their limits, strange msgpack, mutated messages.

An attacker computes checksums too, so a mutated message is signed again: what is tested is what
stands behind the checksum. `fuzzed` sets how many examples a test draws, and `bounded` fails an
example that takes more time or memory than its input is worth.
"""

from __future__ import annotations

import math
import os
import resource
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from penstock.transport import wire
from penstock.transport.checksum import crc32
from penstock.transport.wire import Header, MessageKind

EXAMPLES = int(os.environ.get("PENSTOCK_FUZZ_EXAMPLES", 0))
DEFAULT_EXAMPLES = 8
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]  # without explanations

EXTREMES = (
    0, 1, 2, 63, 64, 255, 256, 2**16, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1,
    2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
FLOATS = (0.0, -0.0, 1e-300, -1.0, 1e300, 1.7e308, math.nan, math.inf, -math.inf)


def fuzzed(cost: float = 1.0, **options: Any) -> settings:
    """How many examples a test draws: `DEFAULT_EXAMPLES`, or PENSTOCK_FUZZ_EXAMPLES, by ``cost``.

    The default examples are the same in every run; those of a long run are drawn anew each time.
    """
    return settings(
        max_examples=max(3, int((EXAMPLES or DEFAULT_EXAMPLES) / cost)),
        deadline=None,
        derandomize=not EXAMPLES,
        print_blob=True,
        phases=PHASES if "PENSTOCK_FUZZ_NO_SHRINK" not in os.environ else PHASES[:3],
        suppress_health_check=list(HealthCheck),
        **options,
    )


@contextmanager
def bounded(seconds: float = 5.0, nbytes: int = 192 << 20) -> Iterator[None]:
    """Fails where the block takes ``seconds`` of processor time, or raises the peak of resident
    memory by ``nbytes``."""
    began_s, before = time.process_time(), _peak_nbytes()
    yield
    took_s, grown = time.process_time() - began_s, _peak_nbytes() - before
    assert took_s < seconds, f"it took {took_s:.1f} s of processor time"
    assert grown < nbytes, f"it took {grown >> 20} MiB more memory"


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# --------------------------------------------------------------------------------------- values


def unsigned(bits: int) -> st.SearchStrategy[int]:
    """Whole numbers of so many bits, mostly at the limits."""
    most = 2**bits - 1
    return st.sampled_from([n for n in EXTREMES if n <= most]) | st.integers(0, most)


def signed(bits: int) -> st.SearchStrategy[int]:
    """Whole numbers of so many bits with a sign, mostly at the limits."""
    most = 2 ** (bits - 1)
    limits = [n for n in EXTREMES if n < most]
    return st.sampled_from([*limits, *(-n for n in limits), -most]) | st.integers(-most, most - 1)


floats = st.sampled_from(FLOATS) | st.floats()
integers = signed(64) | unsigned(64)
scalars = (
    st.none() | st.booleans() | integers | floats | st.text(max_size=5) | st.binary(max_size=5)
)


def values(keys: Sequence[str] = (), max_leaves: int = 8) -> st.SearchStrategy[Any]:
    """What JSON or msgpack can say; maps have some of ``keys``."""
    names = st.sampled_from(keys) | st.text(max_size=3) if keys else st.text(max_size=3)
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
        max_leaves=max_leaves,
    )


def packed(value: Any) -> bytes:
    """The msgpack of a value."""
    result: bytes = msgpack.packb(value)
    return result


def nested(depth: int, inner: bytes = b"\x01") -> bytes:
    """msgpack of lists in lists."""
    return b"\x91" * depth + inner


class Raw(bytes):
    """msgpack that stands for itself inside `packed_with`."""


def packed_with(value: Any) -> bytes:
    """The msgpack of a value in which `Raw` parts stand as they are."""
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, dict):
        body = b"".join(packed_with(k) + packed_with(v) for k, v in value.items())
        return b"\xdf" + struct.pack(">I", len(value)) + body
    if isinstance(value, list | tuple):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(packed_with, value))
    return packed(value)


STRANGE_MSGPACK = [
    b"",
    b"\xc1",  # no type
    b"\xff",
    b"\xa5ab",  # too short
    b"\xa2\xff\xfe",  # not UTF-8
    b"\xc4\x01a",  # binary
    b"\xd6\xff\x00\x00\x00\x00",  # a time
    b"\xc7\x04\x05abcd",  # an extension
    b"\x82\xa1a\x01\xa1a\x02",  # a key twice
    b"\x81\x01\x02",  # a key that is no text
    b"\x81\x91\x01\x02",  # a key that is a list
    b"\xdd\xff\xff\xff\xff",  # 2^32 - 1 elements that are not there
    b"\xdd\x00\x10\x00\x00" * 1000,
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    nested(10),
    nested(400),
    nested(1000),
    nested(5000),
    b"\x81\xa1a" * 1000 + b"\x01",
]
DEEP = [Raw(nested(depth)) for depth in (50, 400, 900, 1000)]
strange_msgpack = st.sampled_from(STRANGE_MSGPACK) | st.binary(max_size=40)


def changed(value: Any) -> st.SearchStrategy[Any]:
    """A JSON value with one of its parts put in another's place, dropped, or made strange."""
    paths = list(_paths(value))

    @st.composite
    def change(draw: st.DrawFn) -> Any:
        made = value
        for _ in range(draw(st.integers(1, 2))):
            path = draw(st.sampled_from(paths))
            made = _replaced(made, path, draw)
        return made

    return change()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        items: Any = value.items()
    else:
        items = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        yield from _paths(inner, (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], draw: st.DrawFn) -> Any:
    if path:
        key, *rest = path
        try:
            inner = value[key]
        except (LookupError, TypeError):
            return value  # an earlier change took it away
        copy = dict(value) if isinstance(value, dict) else list(value)
        if not rest and draw(st.integers(0, 9)) == 0:
            del copy[key]
        else:
            copy[key] = _replaced(inner, tuple(rest), draw)
        return copy
    if isinstance(value, bool | str) or value is None:
        return draw(scalars | st.sampled_from(DEEP) | values(max_leaves=3))
    if isinstance(value, int | float):
        return draw(integers | floats | scalars)
    return draw(values(max_leaves=4) | st.sampled_from(DEEP))


# ------------------------------------------------------------------------------------- messages


def signed_parts(
    head: Header, meta: bytes, frames: Sequence[bytes] = (), said: tuple[int, int] | None = None
) -> list[bytes]:
    """The parts of a message with the right checksum, whatever its fields say; ``said`` replaces
    the number of frames and of their bytes, which `wire.encode` fills in."""
    number, nbytes = said or (len(frames), sum(map(len, frames)))
    head = head._replace(frames=number, coded_nbytes=nbytes)
    blank = struct.pack(wire.HEAD_FORMAT, wire.MAGIC, wire.PROTOCOL_VERSION, *head, 0)[:-4]
    crc = crc32(blank)
    for part in (meta, *frames):
        crc = crc32(part, crc)
    return [blank + struct.pack("<I", crc), meta, *frames]


def flipped(data: bytes, draw: st.DrawFn) -> bytes:
    """One to three bytes of it changed."""
    if not data:
        return draw(st.binary(max_size=4))
    changed_data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data) - 1))
        changed_data[at] ^= draw(st.integers(1, 255))
    return bytes(changed_data)


def cut(data: bytes, draw: st.DrawFn) -> bytes:
    """Empty, one byte, shorter, or longer."""
    how = draw(st.sampled_from(["empty", "byte", "short", "long", "twice"]))
    return {
        "empty": b"",
        "byte": data[:1],
        "short": data[: len(data) // 2],
        "long": data + b"\0",
        "twice": data + data,
    }[how]


HEAD_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "kind": st.sampled_from([int(kind) for kind in MessageKind]) | unsigned(8),
    "spec_hash": unsigned(64),
    "run_id": unsigned(64),
    "actor": unsigned(64),
    "incarnation": unsigned(32),
    "generation": unsigned(32),
    "sequence": unsigned(64),
    "version": unsigned(64),
    "steps": unsigned(64),
    "produced_steps": unsigned(64),
    "raw_nbytes": unsigned(64),
    "duration_s": floats,
}


@st.composite
def mutated(
    draw: st.DrawFn, head: Header, meta: Any, frames: Sequence[bytes] = (), fields: Any = None
) -> list[bytes]:
    """A sound message with one to three things wrong, and the right checksum, mostly."""
    wrong = ["field", "field", "field", "meta", "value"]
    wrong += ["frame", "cut", "swap", "more", "fewer"] if frames else ["more"]
    coded, parts = packed_with(meta), list(map(bytes, frames))
    said: tuple[int, int] | None = None
    for how in draw(st.lists(st.sampled_from(wrong), min_size=1, max_size=3)):
        at = draw(st.integers(0, len(parts) - 1)) if parts else 0
        if how == "field":
            name = draw(st.sampled_from(sorted(fields or HEAD_FIELDS)))
            head = head._replace(**{name: draw(HEAD_FIELDS[name])})
        elif how == "meta":
            coded = draw(strange_msgpack) if draw(st.booleans()) else flipped(coded, draw)
        elif how == "value":
            coded = packed_with(draw(changed(meta)))
        elif how == "more":
            parts.append(draw(st.binary(max_size=64)))
        elif parts and how == "frame":
            parts[at] = flipped(parts[at], draw)
        elif parts and how == "cut":
            parts[at] = cut(parts[at], draw)
        elif parts and how == "swap":
            parts[0], parts[at] = parts[at], parts[0]
        elif parts and how == "fewer":
            parts.pop(at)
    if draw(st.integers(0, 15)) == 0:
        said = draw(unsigned(16)), draw(unsigned(64))
    made = signed_parts(head, coded, parts, said)
    unsound = draw(st.integers(0, 15))
    if unsound == 0:
        made[0] = flipped(made[0], draw)
    elif unsound == 1:
        made[0] = cut(made[0], draw)
    elif unsound == 2:
        made = made[: draw(st.integers(0, 1))]
    return made


def only(*allowed: type[BaseException]) -> Callable[[Callable[[], Any]], BaseException | None]:
    """Calls a function: the error of an allowed type that it raised, or None. Others go on up."""

    def call(function: Callable[[], Any]) -> BaseException | None:
        try:
            function()
        except allowed as error:
            return error
        return None

    return call
