"""`penstock league FILE`: the lines of a league, which are runs that play against each other.

A line is an ordinary run in a folder of its own, ``LEAGUE/<line>``. All lines share one pool,
``LEAGUE/pool``: each adds its members there, and draws its opponents from it. They share nothing
else. This process resolves the lines, checks what only shows when they are compared, starts them
(`run_group`), and ends all of them when one has failed.

``LEAGUE/lines/<line>.yaml`` is the whole config of a line. The line's process trains it, and
`penstock league LEAGUE --resume auto` reads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from penstock.configs.code_references import references_in_training
from penstock.configs.errors import UserError
from penstock.configs.league import LeagueConfig, LineConfig, is_line_name
from penstock.configs.load import Resolved, dump, line_names, resolve, resolve_target
from penstock.configs.schema import Config
from penstock.core import used_names
from penstock.core.cores import usable_cores
from penstock.core.files import write_atomic
from penstock.core.formatting import clock, count
from penstock.core.run_dir import Resume, check, default_run_dir, in_use
from penstock.launch.alone import call_in_process
from penstock.launch.resumed import check_run_dir_given
from penstock.launch.run_group import (
    SIGNALLED,
    RunEnd,
    check_shared,
    cores_of,
    fixed_cores,
    group_exit_code,
    run_command,
    run_commands,
    say_line,
)
from penstock.launch.signals import SignalsAfterRun

POOL = "pool"
"""Folder of the pool, in that of a league."""
LINES = "lines"
"""Folder of the lines' configs, in that of a league."""
SET_OPTIONS = ("league.name", "league.lines", "league.pool")
"""Options of a line that the command sets."""


class LeagueLines(NamedTuple):
    """The lines of a league, and its folder."""

    folder: Path
    lines: Mapping[str, Config]
    """The config of each line by its name; `league.name`, `league.lines`, `league.pool` and
    `run.dir` are set."""


def is_league(folder: Path) -> bool:
    """Returns whether a folder is that of a league."""
    return any((folder / LINES).glob("*.yaml"))


def train_league(source: str, overrides: Sequence[str], resume: Resume, *, as_json: bool) -> int:
    """Train the lines of a league until all have ended, or one has failed.

    Args:
        source: file of a league; or the folder of one, whose lines are resumed.
        overrides: options of all lines, each ``key=value``.
        resume: how each line resumes from its own folder.
        as_json: whether the result goes to standard output as JSON, and all other text to standard
            error.

    Returns: the exit code: 2 after a mistake of the user, otherwise 1 if a line has failed,
    otherwise 130 or 143 after a signal, otherwise 0.

    Raises:
        UserError: the lines do not go together; nothing has been started or written.
    """
    if Path(source).is_dir():
        league = read_folder(Path(source), overrides)
    else:
        league = read_file(source, overrides, resume)
    check_lines(league.lines)
    check_networks(layouts_of(league.lines))
    _check_folder(league, resume)

    stream = sys.stderr if as_json else sys.stdout
    cores = sum(map(cores_of, league.lines.values()))
    sentence = f"{len(league.lines)} lines would keep {cores} cores busy; this host has"
    say_line(f"{sentence} {usable_cores():g}, which they share", stream)

    commands = {
        name: run_command(str(path), [], league.folder / name, resume)
        for name, path in _write_lines(league).items()
    }
    ends = run_commands(
        commands,
        at_once=len(commands),
        print_line=partial(say_line, stream=stream),
        name="line",
        together=True,
        handler_after=SignalsAfterRun(),
    )
    code = _exit_code(ends, len(commands))

    # A full disk, a closed pipe or a damaged pool does not hide the results from `as_json`.
    with suppress(OSError, UserError):
        _show(league, ends, stream)
    if as_json:
        lines = [{"line": name, **end.summary} for name, end in ends.items()]
        print(json.dumps({"dir": str(league.folder), "exit_code": code, "lines": lines}))
    return code


def read_file(path: str, overrides: Sequence[str], resume: Resume) -> LeagueLines:
    """Returns the league that a file describes.

    Args:
        path: YAML file with a config and the map `lines`.
        overrides: options of all lines, each ``key=value``.
        resume: whether an earlier league is resumed, whose folder must then be named.

    Raises:
        UserError: the file is no league, or a line is not valid.
    """
    names = line_names(path)
    _check_names(path, names)
    lines = {name: _resolve_line(path, overrides, name) for name in names}
    configs = {name: line.config for name, line in lines.items()}

    run_dirs = {config.run.dir for config in configs.values()}
    if len(run_dirs) > 1:
        raise UserError(
            f"{path}: run.dir is the folder of the league, and a line sets another one; set it "
            "beside `lines`"
        )
    first = next(iter(lines.values()))
    check_run_dir_given(first.config, resume)
    folder = Path(first.config.run.dir or default_run_dir(first.name))

    return _league(folder, _with_seeds(configs))


def read_folder(folder: Path, overrides: Sequence[str]) -> LeagueLines:
    """Returns the league in a folder.

    Args:
        folder: that of a league.
        overrides: options of all lines, each ``key=value``.

    Raises:
        UserError: the folder holds no league; a line is not valid; or its config names code that
            was not used on this host before.
    """
    if not is_league(folder):
        raise UserError(
            f"{folder} has no lines in a folder `{LINES}`, so it is no league; give the folder of "
            "one, or the file of a new one"
        )
    for override in overrides:
        name = override.partition("=")[0].strip()
        if name in ("run.dir", *SET_OPTIONS):
            raise UserError(f"{override}: a league in its folder has {name} already; leave it out")

    configs: dict[str, Config] = {}
    for path in sorted((folder / LINES).glob("*.yaml")):
        config = resolve(str(path), overrides)
        # The pool is that of this folder, wherever it was when the file was written.
        league = config.league.model_copy(update={"pool": None})
        configs[path.stem] = config.model_copy(update={"league": league})
        references = references_in_training(configs[path.stem])
        used_names.check(references, (), str(path), f"train {path} run.dir=OTHER")
    return _league(folder, configs)


def check_lines(lines: Mapping[str, Config]) -> None:
    """Check the configs of lines, alone and together.

    Raises:
        UserError: they do not go together.
    """
    for config in lines.values():
        check_shared(config, len(lines))

    first_name, first = next(iter(lines.items()))
    for name, config in lines.items():
        if config.env != first.env:
            raise UserError(
                f"lines {first_name} and {name} differ in the section env, and the lines of a "
                "league play the same game; set env beside `lines` only"
            )

    with_seats = [name for name, config in lines.items() if config.league.seats is not None]
    if with_seats and len(with_seats) < len(lines):
        [*_, without] = lines.keys() - with_seats
        raise UserError(
            f"line {with_seats[0]} has league.seats and line {without} has not; set the seats of "
            "each line where sides are unlike, and of none where they are alike"
        )

    playing = {name for name, config in lines.items() if config.league.pool_share}
    for name, config in lines.items():
        draw = config.league.draw
        if name not in playing and draw != LeagueConfig().draw:
            raise UserError(
                f"line {name} has league.draw {draw}, and draws nobody, as league.mirror and "
                "league.bots take all its games; set league.mirror=0 for an exploiter, or 0.5"
            )
    if not playing:
        raise UserError(
            "no line plays against members of the pool, as league.mirror and league.bots take all "
            "games; set league.mirror=0.5, or 0 for an exploiter"
        )


def check_networks(layouts: Mapping[str, int]) -> None:
    """Check that lines have the same network.

    Args:
        layouts: hash of the layout of each line's network, by its name.

    Raises:
        UserError: they have different ones.
    """
    first_name, first_layout = next(iter(layouts.items()))
    for name, layout in layouts.items():
        if layout != first_layout:
            raise UserError(
                f"lines {first_name} and {name} have different networks, and each plays with "
                "members of the other; set model and algo.name beside `lines` only"
            )


def layouts_of(lines: Mapping[str, Config]) -> dict[str, int]:
    """Check lines with their environment, in a process of its own, as it is the user's code.

    Returns: the hash of the layout of each line's network, by its name.

    Raises:
        UserError: the environment cannot be made, has no opponents, or has seats that no line
            plays; or a line's options do not fit it.
    """
    first = next(iter(lines.values()))
    request = {name: config.model_dump(mode="json") for name, config in lines.items()}
    layouts: dict[str, int] = call_in_process(
        f"{__name__}:{examine.__name__}",
        {"configs": request},
        start_s=first.run.start_timeout_s,
    )
    return layouts


def examine(configs: Mapping[str, Any]) -> dict[str, int]:
    """Do what `layouts_of` says in this process, with the config of each line as JSON."""
    from penstock.algos.samples import network_shape
    from penstock.envs import probe
    from penstock.envs.seats import check_options
    from penstock.learner.chairs import playable_lines

    lines = {name: Config.model_validate(values) for name, values in configs.items()}
    first = next(iter(lines.values()))
    info = probe(first.env)
    if not info.seating.has_opponents:
        raise UserError(
            f"environment {first.env.id} has no opponents, and the lines of a league play against "
            "each other; train it with penstock train"
        )

    for config in lines.values():
        check_options(config, info.seating)
        playable_lines(config.league, info.seating)
    return {name: network_shape(config, info).layout.hash for name, config in lines.items()}


def _resolve_line(path: str, overrides: Sequence[str], name: str) -> Resolved:
    """Returns the config of a line in the file of a league. Raises UserError."""
    config = resolve_target(path, overrides, line=name).config
    resolved = resolve_target(path, [*overrides, *fixed_cores(config)], line=name)
    _check_set_options(name, resolved.config.league)
    return resolved


def _check_names(path: str, names: Sequence[str]) -> None:
    """Raise UserError if the names cannot be those of a league's lines."""
    if len(names) < 2:
        raise UserError(
            f"a league has at least 2 lines, and {path} has {len(names)}; add one, or start a run "
            "alone, which has a pool of its own, with penstock train"
        )
    for name in names:
        if not is_line_name(name) or name in (POOL, LINES):
            raise UserError(
                f"{path}: {name!r} cannot be the name of a line, which has a folder of this name "
                f"beside `{POOL}` and `{LINES}`; use up to 64 letters, digits, _, . and -"
            )


def _check_set_options(name: str, league: LeagueConfig) -> None:
    """Raise UserError if a line has an option that the command sets."""
    defaults = LeagueConfig()
    for option in SET_OPTIONS:
        key = option.removeprefix("league.")
        if getattr(league, key) != getattr(defaults, key):
            raise UserError(
                f"line {name} has {option}, which penstock league sets for each line; leave it out"
            )


def _check_folder(league: LeagueLines, resume: Resume) -> None:
    """Raise UserError if ``resume`` does not allow the lines in their folders, or they train."""
    for name in league.lines:
        folder = league.folder / name
        check(folder, resume)
        if in_use(folder):
            raise UserError(
                f"{folder} is in use by a run that has not ended; wait for it, or stop it"
            )
    pool = league.folder / POOL
    if resume == "no" and pool.exists():
        raise UserError(
            f"{pool} has the members of an earlier league; resume it with --resume auto, or set "
            "run.dir to another folder"
        )


def _with_seeds(configs: Mapping[str, Config]) -> dict[str, Config]:
    """Returns the configs with different seeds, as the same one gives the same initial weights.

    A line whose seed an earlier one has gets the next that is free.
    """
    lines: dict[str, Config] = {}
    seeds: set[int] = set()
    for name, config in configs.items():
        seed = config.run.seed
        while seed in seeds:
            seed += 1
        seeds.add(seed)
        run = config.run.model_copy(update={"seed": seed})
        lines[name] = config.model_copy(update={"run": run})
    return lines


def _league(folder: Path, configs: Mapping[str, Config]) -> LeagueLines:
    """Returns the league of some lines, each of which knows the others and the pool."""
    lines: dict[str, Config] = {}
    for name, config in configs.items():
        others = {
            other: LineConfig(draw=configs[other].league.draw, seats=configs[other].league.seats)
            for other in configs
            if other != name
        }
        # Commands that look at a line may have another current folder.
        pool = str(folder.absolute() / POOL)
        league = config.league.model_copy(update={"name": name, "lines": others, "pool": pool})
        run = config.run.model_copy(update={"dir": str(folder / name)})
        lines[name] = config.model_copy(update={"league": league, "run": run})
    return LeagueLines(folder, lines)


def _write_lines(league: LeagueLines) -> dict[str, Path]:
    """Write the config of each line, and remove those of lines that the league has no more.

    Returns: the file of each line, by its name.

    Raises:
        UserError: the files cannot be written.
    """
    folder = league.folder / LINES
    paths = {name: folder / f"{name}.yaml" for name in league.lines}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, path in paths.items():
            write_atomic(path, dump(league.lines[name]))
        for path in folder.glob("*.yaml"):
            if path.stem not in paths:
                path.unlink()
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {error.strerror}; set run.dir to another place"
        ) from error
    return paths


def _exit_code(ends: Mapping[str, RunEnd], requested: int) -> int:
    """Returns the exit code of a league: a failure counts more than the signals it has caused."""
    failure = max((end.code for end in ends.values() if end.code not in SIGNALLED), default=0)
    return failure or group_exit_code(ends, requested)


def _show(league: LeagueLines, ends: Mapping[str, RunEnd], stream: TextIO) -> None:
    """Print a table of the lines, then errors and where the files are."""
    from rich.console import Console
    from rich.table import Table

    from penstock.learner.pool import PolicyPool

    pool = PolicyPool(league.folder / POOL)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("line", "ended by", "members", "steps", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, end in ends.items():
        table.add_row(
            name,
            end.summary["exit_reason"],
            str(len(pool.members(name))),
            count(end.summary.get("env_steps")),
            clock(end.summary.get("time_s")),
        )
    width = None if stream.isatty() else 120
    Console(file=stream, width=width, markup=False, highlight=False).print(table)

    for name, end in ends.items():
        if end.summary["error"] is not None:
            say_line(f"line {name} failed: {end.summary['error']}", stream)
    if league.folder.is_dir():
        say_line(f"ratings, and who beats whom: penstock league {league.folder}", stream)
