"""Writers of a shared replay, killed at random instructions: whether any row that is drawn is torn.

    python benchmarks/torn_rows.py --kills 1000 --seed 0

Writers are forked from a warm process. Each counts the bytes that it has written in a page that is
shared, and is killed by SIGKILL when a random count is reached and a random number of microseconds
has passed: before it is attached, while it fills a slot, between two instructions of publishing it.
Half of them add step by step, half fill whole slots in place. Columns of a row carry a checksum of
each other; after each kill a batch is drawn and checked, and now and then every row there is. The
buffer is small, so that slots of writers that died are soon lent again.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common import finish, parser
from penstock.replay import Replay, Writer

FLOATS, UNROLL, WRITERS, CAPACITY = 60, 8, 4, 4096
ROW_NBYTES = 2 * 4 * FLOATS
LIVES = 1 << 16  # writers that a run may have
BYTES, PUBLISHED = 0, 1  # words of a writer on the shared page
START_S = 20.0
MOST_US = 400
CHECK_ALL_EVERY = 100
COLUMNS = {
    "obs": (np.float32, (FLOATS,)),
    "action": (np.int64, ()),
    "writer": (np.int64, ()),
    "checksum": (np.uint32, ()),
}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--kills", type=int, default=1000)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--nursery", nargs=2, help="used by the benchmark itself")
    args = made.parse_args()
    if args.nursery:
        nursery(args.nursery[0], int(args.nursery[1]))
        return
    result = run(args.kills, args.seed)
    rows = [["what", "count"], *([name, value] for name, value in result.items())]
    finish("torn_rows", result, rows, args)


def run(kills: int, seed: int) -> dict[str, Any]:
    """Kill so many writers; what was found."""
    rng = random.Random(seed)
    began_s = time.monotonic()
    counts = dict.fromkeys(("before the first row", "inside a slot", "between two slots"), 0)
    checked = torn = 0
    with (
        Replay(COLUMNS, CAPACITY, unroll=UNROLL, shared=True, seed=seed, writers=WRITERS) as replay,
        _nursery(replay.serve()) as (start, words),
    ):
        alive = [start(rng) for _ in range(WRITERS)]
        for kill in range(kills):
            ident, pid = alive.pop(rng.randrange(len(alive)))
            _wait_for(words, ident, rng)
            _kill(pid)
            done = int(words[ident, BYTES])
            inside = done % (UNROLL * ROW_NBYTES)
            names = list(counts)
            counts[names[0] if not done else names[1] if inside else names[2]] += 1
            alive.append(start(rng))
            if len(replay) >= 64:
                batch = replay.sample(64)
                checked, torn = checked + 64, torn + _torn(batch)
            if kill % CHECK_ALL_EVERY == CHECK_ALL_EVERY - 1:
                rows = _all(replay)
                checked, torn = checked + len(rows["action"]), torn + _torn(rows)
        for _, pid in alive:
            _kill(pid)
        ends_s = time.monotonic() + START_S
        while replay.stats()["writers"] and time.monotonic() < ends_s:
            time.sleep(0.01)
        stats = replay.stats()
        rows = _all(replay)
        checked, torn = checked + len(rows["action"]), torn + _torn(rows)
        published = UNROLL * int(words[:, PUBLISHED].sum())
        store = replay.table.store
        slots = len(store.free) + len(replay.table.order)
    return {
        "kills": kills,
        "seed": seed,
        "seconds": round(time.monotonic() - began_s, 1),
        **{f"killed {name}": count for name, count in counts.items()},
        "rows added": stats["inserted"],
        "rows checked": checked,
        "torn rows": torn,
        "published rows that are missing": max(0, published - stats["inserted"]),
        "writers still counted": stats["writers"],
        "slots that did not come back": stats["slots"] - slots,
    }


def _wait_for(words: Any, ident: int, rng: random.Random) -> None:
    """Until a writer has come to a random place."""
    nbytes = rng.choice((0, 1, 1)) * rng.randrange(1, 40 * UNROLL * ROW_NBYTES)
    ends_s = time.monotonic() + START_S
    while int(words[ident, BYTES]) < nbytes:
        if time.monotonic() > ends_s:
            raise TimeoutError(f"writer {ident} stands still")
    most_us = 20_000 if not nbytes else MOST_US  # the first also while it attaches
    ends_s = time.monotonic() + rng.random() * most_us * 1e-6
    while time.monotonic() < ends_s:
        pass


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _torn(batch: Any) -> int:
    """Rows whose columns do not belong together."""
    pairs = zip(
        batch["obs"], batch["next_obs"], batch["writer"], batch["action"], batch["checksum"],
        strict=True,
    )  # fmt: skip
    return sum(_checksum(o, n, int(w), int(a)) != int(c) for o, n, w, a, c in pairs)


def _all(replay: Replay) -> Any:
    with replay.lock:
        replay.collect()
        return replay.gather.batch(np.flatnonzero(replay.table.valid), None)


def _checksum(obs: Any, after: Any, ident: int, count: int) -> int:
    return zlib.crc32(obs.tobytes() + after.tobytes() + f"{ident} {count}".encode())


# ------------------------------------------------------------------------------- writers


@contextmanager
def _nursery(address: str) -> Iterator[tuple[Any, Any]]:
    """``start(rng)`` forks a writer from a warm process: its number and process id; and the words
    that writers count in, [LIVES, 2]."""
    fd = os.memfd_create("torn_rows")
    os.ftruncate(fd, LIVES * 16)
    words = np.frombuffer(mmap.mmap(fd, LIVES * 16), np.int64).reshape(LIVES, 2)
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), "--nursery", address, str(fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[fd],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    tell, hear, idents = process.stdin, process.stdout, iter(range(LIVES))

    def start(rng: random.Random) -> tuple[int, int]:
        ident = next(idents)
        tell.write(f"{rng.choice(('add', 'slot'))} {ident}\n".encode())
        tell.flush()
        return ident, int(hear.readline())

    try:
        yield start, words
    finally:
        tell.close()
        process.wait()
        hear.close()
        os.close(fd)


def nursery(address: str, fd: int) -> None:
    """Fork a writer for each line of standard input; all end with it."""
    words = np.frombuffer(mmap.mmap(fd, LIVES * 16), np.int64).reshape(LIVES, 2)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    for line in sys.stdin:
        what, ident = line.split()
        pid = os.fork()
        if not pid:
            try:
                {"add": _add, "slot": _fill}[what](address, int(ident), words[int(ident)])
            except BaseException:  # the benchmark then finds no such process
                traceback.print_exc()
            finally:
                os._exit(0)
        os.write(1, f"{pid}\n".encode())


def _row(rng: Any, ident: int, count: int) -> dict[str, Any]:
    obs = rng.random(FLOATS, np.float32)
    after = obs[::-1].copy()
    return {
        "obs": obs,
        "next_obs": after,
        "action": count,
        "writer": ident,
        "checksum": _checksum(obs, after, ident, count),
        "reward": 0.0,
    }


def _add(address: str, ident: int, words: Any) -> None:
    rng, count = np.random.default_rng(ident), 0
    with Writer.attach(address) as writer:
        while True:
            writer.add(**_row(rng, ident, count), terminated=count % 50 == 49, truncated=False)
            count += 1
            words[BYTES] += ROW_NBYTES
            if not count % UNROLL:
                words[PUBLISHED] += 1


def _fill(address: str, ident: int, words: Any) -> None:
    """Whole slots, their rows in random order and each in pieces."""
    rng, count = np.random.default_rng(ident), 0
    with Writer.attach(address) as writer:
        while True:
            with writer.slot(timeout_s=10.0) as slot:
                for t in rng.permutation(UNROLL).tolist():
                    row = _row(rng, ident, count + t)
                    for name, value in row.items():
                        slot.columns[name][t, 0] = value
                        if name in ("obs", "next_obs"):
                            words[BYTES] += ROW_NBYTES // 2
                    slot.columns["terminated"][t, 0] = slot.columns["truncated"][t, 0] = 0
            count += UNROLL
            words[PUBLISHED] += 1


if __name__ == "__main__":
    main()
