"""Writes docs/cli.md from the commands.

python -m penstock.cli.reference > docs/cli.md
python -m penstock.cli.reference --check docs/cli.md
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer

from penstock.cli.app import app

_COMMAND = "python -m penstock.cli.reference"
_KINDS = {str: "TEXT", int: "N", float: "X"}
_HEAD = f"""\
<!-- Written by `{_COMMAND}` from cli/app.py; change it there. -->

# Commands

The arguments and options of each command; `--help` after a command prints the same. A `TARGET` is a
preset, a YAML file, a gymnasium id, `module:EnvId-v0` or `module:function`; `KEY=VALUE` are options
of [the configuration](configuration.md). Exit codes: 0 success, 1 failure, 2 an error in the
command or the config, 130 and 143 a clean end after Ctrl-C or SIGTERM. With `--json` the last line
of standard output is one JSON object, and other text goes to standard error.
"""


def reference() -> str:
    """The page, as Markdown."""
    return "\n".join([_HEAD, *_pages("penstock", typer.main.get_command(app))])


def _pages(name: str, command: Any) -> Iterator[str]:
    """One section for each command; that of a group precedes those of its commands."""
    children = getattr(command, "commands", {})
    if name != "penstock" and (not children or command.invoke_without_command):
        yield _section(name, command)
    for child, below in children.items():
        yield from _pages(f"{name} {child}", below)


def _section(name: str, command: Any) -> str:
    context = typer.Context(command)
    parameters = [p for p in command.get_params(context) if p.name != "help"]
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    usage = [name, *(_usage(argument) for argument in arguments)]
    rows = "\n".join(
        f"| `{_names(p)}` | {_default(p)} | {(p.help or '').replace('|', chr(92) + '|')} |"
        for p in parameters
    )
    table = f"\n| | default | |\n|---|---|---|\n{rows}\n" if rows else ""
    text = inspect.cleandoc(command.help or "")
    return f"## {name}\n\n    {' '.join(usage)}\n\n{text}\n{table}"


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    text = f"{name} ..." if argument.nargs == -1 else name
    return text if argument.required else f"[{text}]"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    name = "/".join(parameter.opts)
    if parameter.is_flag:
        return name
    kind = parameter.type_descriptor.annotation
    choices = [choice for part in (kind, *get_args(kind)) for choice in get_args(part)]
    words = "\\|".join(c for c in choices if isinstance(c, str))
    shown = (parameter.metavar or "").replace("|", chr(92) + "|")
    return f"{name} {words or shown or _KINDS[_plain(kind)]}"


def _plain(kind: Any) -> Any:
    """``int`` of ``int | None``."""
    return next((part for part in get_args(kind) if part in _KINDS), kind)


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    if default is None or default is False or not isinstance(default, str | int | float):
        return ""
    return f"`{default}`"


def main() -> int:
    """Print the page, or compare it with a file: 0 when equal, else 1."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=main.__doc__)
    parser.add_argument(
        "--check", metavar="FILE", type=Path, help="check whether FILE is up to date"
    )
    path: Path | None = parser.parse_args().check
    if path is None:
        sys.stdout.write(reference())
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == reference():
        return 0
    print(f"{path} differs from the commands; run: make reference", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
