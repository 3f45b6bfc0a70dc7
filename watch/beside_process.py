"""The process of `PageBeside`: serves one run, until its standard input is closed."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from penstock.configs.errors import UserError
from penstock.watch.server import Listen, serve


def main(run_dir: str) -> int:
    """Serve the run on loopback; the address, or the reason for none, is a JSON object on standard
    output."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        serve(run_dir, Listen(), lambda address: _say(address=address))
    except UserError as error:
        _say(error=str(error))
        return 2
    return 0


def _say(**fields: str) -> None:
    print(json.dumps(fields), flush=True)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
