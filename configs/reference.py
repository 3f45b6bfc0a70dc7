"""Writes docs/configuration.md from the schema.

python -m penstock.configs.reference > docs/configuration.md
python -m penstock.configs.reference --check docs/configuration.md
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.configs.keys import Option, algorithms, options, sections
from penstock.configs.load import presets
from penstock.configs.messages import show
from penstock.configs.section import Section

_COMMAND = "python -m penstock.configs.reference"
_HEAD = f"""\
<!-- Written by `{_COMMAND}` from the schema in configs/; change it there. -->

# Configuration

    penstock train TARGET [key=value ...]
    penstock config show TARGET [key=value ...]    # prints the complete config

A **target** is one of

| target | for example | starts from |
|---|---|---|
| a preset | `pong` | the preset |
| a YAML file | `my/run.yaml` | the preset named by `base: pong` in it, otherwise the defaults |
| a gymnasium id | `CartPole-v1` | the preset for this environment, otherwise the defaults |
| a module with an id or a function | `games:Maze-v0`, `games:make_maze` | the defaults |

The defaults are those in the tables below. The algorithms have
[others for each kind of environment](algorithms.md#defaults), in which `env.kind` is chosen.

The presets are

{{presets}}

**Overrides** are `section.option=value`, such as `learner.lr=3e-4`, `model.hidden=[64,64]` or
`env.kwargs.frameskip=2`; the last one counts. Values in files and in overrides are read as YAML
1.2: `3e-4` and `1e6` are numbers, only `true` and `false` are booleans, `null` is the absent value,
and a value in quotes is text. In an override `#` is part of the value, not a comment.

A file changes only the options that it names of its base, and an override only its own option: maps
are merged key by key. An empty map removes all keys: `env.kwargs={{{{}}}}` leaves no argument.
Another `algo.name` than that of the base drops the base's options of `algo`, except
`algo.reward_clip` and `algo.reward_scale`, and of a preset all sections but `env`; a line at the
start of the run lists them.

**An editor** completes, explains and checks the options of a file by its JSON Schema:

    penstock config schema > penstock.schema.json

In VS Code, with the extension "YAML" of Red Hat, and in every editor that uses
yaml-language-server, the first line of a file names the schema, relative to the file:

    # yaml-language-server: $schema=penstock.schema.json

Or set it for a folder, in `.vscode/settings.json`:
`"yaml.schemas": {{{{"./penstock.schema.json": "configs/*.yaml"}}}}`.
The schema contains the options of the chosen algorithm, by `algo.name` or by the base. It checks
options one by one; `penstock config show FILE` also checks their combinations. Write it again after
an update of Penstock. In Python, [configs have types](python-api.md#write-a-config-in-python).
"""


def reference() -> str:
    """Returns the page, as Markdown."""
    preset_list = "\n".join(f"- `{name}`: {text}" for name, text in presets().items())
    return "\n".join([_HEAD.format(presets=preset_list), *map(_section, sections())])


def _section(name: str) -> str:
    """Returns the part of the page on a section; that of `algo` has one for each algorithm."""
    kinds = sections()[name]
    if len(kinds) == 1:
        return f"## {name}\n\n{_summary(kinds[0])}\n\n{_table(name, options())}"

    intro = f"The algorithm, chosen by `{name}.name`; each has options of its own."
    parts = [
        f"### {name}.name={algo}\n\n{_summary(kind)}\n\n{_table(name, options(algo))}"
        for algo, kind in zip(algorithms(), kinds, strict=True)
    ]
    return "\n".join([f"## {name}\n\n{intro}\n", *parts])


def _summary(kind: type[Section]) -> str:
    """Returns the docstring of a section."""
    return inspect.cleandoc(kind.__doc__ or "")


def _table(section: str, known: Mapping[str, Option]) -> str:
    """Returns a table of those options among ``known`` that a section has."""
    rows = "\n".join(_rows(section, known))
    return f"| option | value | default | meaning |\n|---|---|---|---|\n{rows}\n"


def _rows(section: str, known: Mapping[str, Option]) -> Iterator[str]:
    """Yields the rows of a table, in which a vertical bar is escaped."""
    for name, option in known.items():
        if name.startswith(f"{section}."):
            meaning = " ".join(option.description.split())
            cells = (f"`{name}`", option.words, _default(option), meaning)
            escaped = [cell.replace("|", "\\|") for cell in cells]
            yield f"| {' | '.join(escaped)} |"


def _default(option: Option) -> str:
    """Returns the default of an option as code, without the quotes of a text."""
    if option.required:
        return "required"
    default = show(option.default).strip("'")
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
    print(f"{path} differs from the schema; run: {_COMMAND} > {path}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
