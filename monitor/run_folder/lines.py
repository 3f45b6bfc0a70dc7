"""Reads files of JSON objects, one a line: whole, as they grow, or a sample of their lines.

A line that is still being written, or was damaged by a crash or a full disk, is left out, and so is
one of more than `LINE_NBYTES`. Memory is bounded also where a file has holes of many gigabytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic_core import from_json

from penstock.monitor.run_folder.files import Row, open_in, stamp

LINE_NBYTES = 1 << 20
CHUNK_NBYTES = 1 << 20  # read at a time
LINES_NBYTES = 4 << 30  # only the end of a longer file is read
# Bytes at the end of a file that are read for its last line; the second where that is longer.
LAST_LINE_NBYTES = (1 << 16, 1 << 21)
PROBES = 8  # places of a file at which the length of its lines is measured
PROBED_LINES = 8  # lines that are measured at each of these

Lines = list[Row]


def objects(text: bytes) -> Lines:
    """Returns the JSON objects in the complete lines of ``text``; other lines are left out."""
    rows: Lines = []
    complete = text[: text.rfind(b"\n") + 1]
    for line in complete.split(b"\n"):
        with suppress(ValueError, RecursionError):
            # `from_json` takes a quarter of the time of json.loads.
            value = from_json(line) if 0 < len(line) <= LINE_NBYTES else None
            if isinstance(value, dict):
                rows.append(value)
    return rows


def lines(path: Path) -> Lines:
    """Returns the objects of a file's last `LINES_NBYTES`; empty if it cannot be read."""
    file = JsonLines(path.parent, path.name, most=LINES_NBYTES, follow_links=True)
    return [line for chunk in file.chunks() for line in chunk]


def last_line(folder: Path, *parts: str, since: int = 0, follow_links: bool = False) -> Row:
    """Returns the last object of a file; empty without one.

    Args:
        folder: see `files.open_in`.
        parts: see `files.open_in`.
        since: only objects are taken that begin at this byte or later.
        follow_links: see `files.open_in`.
    """
    with suppress(OSError), open_in(folder, *parts, follow_links=follow_links) as file:
        size = file.seek(0, os.SEEK_END)
        for nbytes in LAST_LINE_NBYTES:
            file.seek(max(since, size - nbytes))
            tail = file.read(nbytes)
            complete = tail[: tail.rfind(b"\n") + 1]
            for line in reversed(complete.split(b"\n")):
                if rows := objects(line + b"\n"):
                    return rows[0]
    return {}


class CompleteLines:
    """Joins chunks of a file of any size to complete lines, in bounded memory."""

    def __init__(self, *, skips: bool = False) -> None:
        """``skips``: whether the first chunk begins within a line, whose end is left out."""
        self._incomplete = b""  # the beginning of the last line
        self._skips = skips  # whether the next bytes belong to a line that is left out

    def add(self, chunk: bytes) -> bytes:
        """Returns the lines that ``chunk`` completes.

        Of these, the first may be `LINE_NBYTES` longer than the chunk; longer ones are left out.
        """
        # Behind the last line break stands the beginning of the next line.
        complete, newline, self._incomplete = (self._incomplete + chunk).rpartition(b"\n")
        if newline and self._skips:
            complete = complete.partition(b"\n")[2]
            self._skips = False

        if len(self._incomplete) > LINE_NBYTES:
            self._incomplete = b""
            self._skips = True
        return complete + newline


class JsonLines:
    """Reads a growing file of JSON objects, each byte once.

    A file that was replaced or became shorter is read again from its start: `replaced` is then true
    for the first objects that follow.
    """

    def __init__(
        self, folder: Path, *parts: str, most: int | None = None, follow_links: bool = False
    ) -> None:
        """Begin before the first byte; the file need not be there yet.

        Args:
            folder: see `files.open_in`.
            parts: see `files.open_in`.
            most: if more bytes than this are new, those at the beginning are left out; None: all
                are read.
            follow_links: see `files.open_in`.
        """
        self._folder = folder
        self._parts = parts
        self._most = most
        self._follow_links = follow_links

        self._inode = 0  # of the file that was read; 0 before the first read
        self._offset = 0  # bytes that were read
        self._lines = CompleteLines()
        self.replaced = False
        self.nbytes = 0
        """Size of the file at the last read."""

    @property
    def offset(self) -> int:
        """Bytes that were read."""
        return self._offset

    def follow(self, *parts: str) -> bool:
        """Continue in the file of another name if that is the one that was read: a log that was
        rotated. Returns whether it is."""
        inode = stamp(self._folder, *parts)[0]
        if not self._inode or inode != self._inode:
            return False
        self._parts = parts
        return True

    def chunks(self) -> Iterator[Lines]:
        """Yields the objects of new complete lines, a list per chunk; none if the file cannot be
        read."""
        try:
            opened = open_in(self._folder, *self._parts, follow_links=self._follow_links)
        except OSError:
            return

        with opened as file:
            status = os.fstat(file.fileno())
            self.nbytes = status.st_size

            # Begin at the start of a file that was replaced or cut.
            begins_anew = status.st_ino != self._inode or status.st_size < self._offset
            # A replaced file that is still empty yields nothing: the next one to yield says so.
            self.replaced = bool(self._inode) and (begins_anew or not self._offset)
            if begins_anew:
                self._inode = status.st_ino
                self._offset = 0
                self._lines = CompleteLines()

            # Leave out what is too much.
            if self._most is not None and self.nbytes - self._offset > self._most:
                self._offset = self.nbytes - self._most
                self._lines = CompleteLines(skips=True)

            file.seek(self._offset)
            while data := file.read(CHUNK_NBYTES):
                self._offset += len(data)
                yield objects(self._lines.add(data))
                self.replaced = False


def read_sample(folder: Path, *parts: str, nbytes: int) -> Lines:
    """Returns the objects of lines at even distances over a file, and of its last lines, in their
    order; empty if the file cannot be read.

    A line that does not fit the distance at which lines are read is left out.

    Args:
        folder: see `files.open_in`.
        parts: see `files.open_in`.
        nbytes: about as many bytes are read, however long the file is.
    """
    part_nbytes = nbytes // 16
    try:
        with open_in(folder, *parts) as file:
            descriptor = file.fileno()
            size = file.seek(0, os.SEEK_END)
            last_from = max(0, size - part_nbytes)

            # Measure how long lines are, at some places of the file.
            places = [size * k // PROBES for k in range(PROBES)]
            longest = max(
                _longest_line(os.pread(descriptor, part_nbytes, place), place > 0)
                for place in places
            )

            # A window contains a complete line; lines vary in length.
            window = 2 * longest + 256
            count = max(1, (nbytes - part_nbytes) // window)
            rows: Lines = []
            for place in range(0, last_from, max(window, last_from // count)):
                data = os.pread(descriptor, window, place)
                begin = data.find(b"\n") + 1 if place else 0
                if place + begin <= last_from:  # later lines are read below
                    rows += objects(data[begin : data.find(b"\n", begin) + 1])

            # The end of the file is read without gaps.
            data = os.pread(descriptor, size - last_from, last_from)
            begin = data.find(b"\n") + 1 if last_from else 0
            return rows + objects(data[begin:])
    except OSError:
        return []


def _longest_line(data: bytes, begins_within_line: bool) -> int:
    """Returns the length of the longest of the first `PROBED_LINES` lines, in bytes with its line
    break; of an incomplete line if there is no other."""
    parts = data.split(b"\n", PROBED_LINES + 1)
    complete = parts[1:-1] if begins_within_line else parts[:-1]
    return 1 + max(map(len, complete or parts))
