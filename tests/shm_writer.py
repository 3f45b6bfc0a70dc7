"""A writer over shared memory, as a program that a test can stop and kill.

    python shm_writer.py SOCKET WANT [hold]

Writes slots whose every value is the sequence number, as fast as slots are lent. With "hold" it
takes one slot, fills half of it, says so on standard output, and never publishes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from penstock.transport.shm.link import ShmLink


def main() -> None:
    link = ShmLink(Path(sys.argv[1]), None, int(sys.argv[2]))
    sequence = 0
    while True:
        with link.slot(1.0) as slot:
            if slot is None:
                continue
            for column in slot.columns.values():
                column[...] = sequence % 200
                if sys.argv[3:] == ["hold"]:
                    print("holding", flush=True)
                    time.sleep(60)
            slot.header["sequence"] = sequence
            sequence += 1


if __name__ == "__main__":
    main()
