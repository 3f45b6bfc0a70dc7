"""Call a function in a separate process: ``python -m penstock.launch.alone TARGET``.

A measurement there has the threads, the allocator and the freed memory of its role, and no state of
the calling process. Request and result are JSON, on standard input and output.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.processes import THREAD_VARIABLES, die_with, ending_programs, python

USERS_MISTAKE = 2
"""Exit code after a UserError."""
START_S = 300.0
"""How long a process may take, beside what it is known to measure."""


def call_in_process(
    target: str,
    request: Mapping[str, Any],
    *,
    seconds: float = 0.0,
    start_s: float = START_S,
    threads: int = 1,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Call a function in a process of its own.

    Args:
        target: ``module:function``.
        request: keyword arguments of the function, as JSON values.
        seconds: how long the function is known to measure.
        start_s: how long all else may take.
        threads: number of threads of numerical libraries in the process.
        variables: variables of its environment, beside those of this process.

    Returns: what the function returns, as JSON values.

    Raises:
        UserError: the function has raised it.
        RuntimeError: the function has failed; the message has the last line of its errors.
        subprocess.TimeoutExpired: the function hangs.
    """
    changed_variables = dict.fromkeys(THREAD_VARIABLES, str(threads)) | dict(variables or {})
    # The process has its temporary files in a folder of this one, which removes them also if it is
    # interrupted and kills the process.
    with tempfile.TemporaryDirectory(prefix="penstock-alone-") as folder:
        process = subprocess.run(
            python("penstock.launch.alone", target),
            input=json.dumps({"parent_pid": os.getpid(), "request": dict(request)}),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=start_s + 4 * seconds,
            env={**os.environ, **changed_variables, "TMPDIR": folder},
            check=False,
        )

    error_lines = process.stderr.strip().splitlines()
    code = process.returncode
    if code == USERS_MISTAKE:
        raise UserError(error_lines[-1] if error_lines else f"{target} gave no reason")
    if code != 0:
        reason = error_lines[-1] if error_lines else "silently"
        raise RuntimeError(f"{target} failed with {code}: {reason}")
    return json.loads(process.stdout)


def main() -> None:
    """Call the function that the command line names, with the request of standard input.

    Writes what it returns to standard output.
    """
    message = json.load(sys.stdin)
    die_with(message["parent_pid"], signal.SIGKILL)

    # The result has a descriptor of its own, as C code of libraries may write to descriptor 1.
    result_fd = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    module, _, function = sys.argv[1].partition(":")
    try:
        # Programs of an environment would hold standard error, which the parent reads to its end.
        # What libraries print goes there too.
        with ending_programs(), contextlib.redirect_stdout(sys.stderr):
            result = getattr(importlib.import_module(module), function)(**message["request"])
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(USERS_MISTAKE)

    with open(result_fd, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
