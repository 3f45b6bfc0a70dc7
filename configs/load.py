"""Makes a checked config from a target and overrides, and converts configs to YAML and back.

A target is a preset, a YAML file, a gymnasium id, `pettingzoo/NAME`, or `module:EnvId-v0` /
`module:function`. A gymnasium id for which there is a preset stands for that preset. Any other
Atari game stands for `breakout` with that game. Where no preset of the algorithm applies, it has
defaults for the kind of environment (`configs.kinds`). The environment is not imported here, so its
existence is not checked.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from penstock.configs.algorithms import ALGORITHMS
from penstock.configs.errors import UserError
from penstock.configs.games import GAMES_ID
from penstock.configs.kinds import defaults, kind_of, without_replaced
from penstock.configs.layers import Layers
from penstock.configs.messages import explain, show
from penstock.configs.model import complete_stored
from penstock.configs.schema import Config
from penstock.configs.yaml_text import MOST_CHARS, KeyPath, parse, write

PRESETS = Path(__file__).resolve().parent
CONFIG_FILE = "config.yaml"
LINES = "lines"  # the key of a league's file that has the options of each line
SHOWN_MAKERS = 3  # functions that a message names

_GYMNASIUM_ID = re.compile(r"([\w:-]+/)?[\w:.-]+-v\d+")
_PETTINGZOO_ID = re.compile(r"pettingzoo/[\w.:-]+")
_ATARI = re.compile(r"ALE/\w+-v\d+")
_ATARI_PRESET = "breakout"  # the preset whose settings suit all Atari games
_ALGO_OVERRIDE = re.compile(r"\s*algo\.name\s*=")
_KIND_OVERRIDE = re.compile(r"\s*env\.kind\s*=")
_MODULE_TARGET = re.compile(r"[A-Za-z_][\w.]*:[\w./-]+")
_FILE_TARGET = re.compile(r"(?P<path>[^:]+\.py):(?P<name>[\w./-]+)")


@dataclass(frozen=True)
class Resolved:
    """A config, a name for its runs, and its origin."""

    config: Config
    name: str
    """Name of the preset, the file or the environment; valid as a folder name."""
    origin: str
    """Description of the base: `preset pong`, `file runs/x.yaml over preset pong`, ..."""
    note: str = ""
    """A sentence with the options of the base that another `algo.name` dropped, if it dropped
    any."""
    defaults: str = ""
    """Description of the defaults for a kind of environment, where these apply."""
    own_options: frozenset[str] = frozenset()
    """Options that a file or an override of the user has set, such as `learner.lr`."""


class TargetOrigin(NamedTuple):
    """The name and the origin of a target, as `Resolved` has them."""

    name: str
    origin: str


def resolve(target: str | Config, overrides: Sequence[str] = ()) -> Config:
    """Returns the config of a target, or the config itself, with ``key=value`` overrides.

    Raises:
        UserError: with a line for each mistake.
    """
    return resolve_target(target, overrides).config


def resolve_target(
    target: str | Config, overrides: Sequence[str] = (), *, line: str | None = None
) -> Resolved:
    """Returns the config of a target, with its name and its origin.

    Args:
        target: preset, file, environment, or a config.
        overrides: options as ``key=value``.
        line: a line of the league whose file the target is; None: the target is no such file.

    Raises:
        UserError: with a line for each mistake.
    """
    layers = Layers()

    # Which algorithm it is comes first, as a change of it clears the settings of the one before.
    overrides = sorted(overrides, key=lambda text: not _ALGO_OVERRIDE.match(text))
    algo = _last_value(_ALGO_OVERRIDE, overrides)
    kind = _last_value(_KIND_OVERRIDE, overrides)
    name, origin = _add_target(
        layers, target, algo=algo, kind=None if kind == "auto" else kind, line=line
    )

    # A config that Penstock wrote has all sections, and needs no defaults for a kind. It may be of
    # an earlier version, which did not write newer options.
    is_complete = isinstance(target, Config) or Path(target).name == CONFIG_FILE
    if Config.model_fields.keys() <= layers.values.keys():
        is_complete = True
        complete_stored(layers.values)

    _add_overrides(layers, overrides)
    own_options = frozenset(
        ".".join(path)
        for path, place in layers.places.items()
        if layers.preset_places.get(path) != place
    )
    kind_defaults = ""
    if not layers.preset_places and not is_complete:
        kind_defaults = _add_kind_defaults(layers)

    config = _check(layers, target if isinstance(target, str) else origin)
    return Resolved(
        config=config,
        name=name,
        origin=origin,
        note=_dropped_options(layers, config),
        defaults=kind_defaults,
        own_options=own_options,
    )


def _last_value(pattern: re.Pattern[str], overrides: Sequence[str]) -> str | None:
    """Returns the value of the last override that a pattern matches; None if there is none."""
    values = [text.partition("=")[2].strip() for text in overrides if pattern.match(text)]
    return values[-1] if values else None


def _add_overrides(layers: Layers, overrides: Sequence[str]) -> None:
    """Merge overrides over the other values.

    Raises:
        UserError: with a line for each that is no override.
    """
    mistakes = []
    for override in overrides:
        try:
            layers.add_override(override)
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UserError("\n".join(mistakes))


def load_run(run_dir: str | Path) -> Config:
    """Returns the config of the run in a folder.

    Raises:
        UserError: if the folder holds no run, or its config is not valid.
    """
    path = Path(run_dir) / CONFIG_FILE
    if not path.is_file():
        fault = f"has no {CONFIG_FILE}" if Path(run_dir).exists() else "does not exist"
        raise UserError(f"{run_dir} {fault}, so it is not a run; give the folder of a run")
    return resolve(str(path))


def line_names(path: str) -> list[str]:
    """Returns the names of the lines in a league's file, in their order.

    Raises:
        UserError: if it cannot be read, or has no lines.
    """
    values, _ = parse(_read(Path(path), path), path)
    lines = values.get(LINES) if isinstance(values, dict) else None
    if not isinstance(lines, dict):
        raise UserError(
            f"{path} has no map `{LINES}`, so it is no league; add the name of each line with the "
            "sections in which it differs, or start one run with penstock train"
        )
    return list(lines)


def dump(cfg: Config) -> str:
    """Returns the config as YAML with every option; it loads as an equal config."""
    return write(cfg.model_dump())


def presets() -> dict[str, str]:
    """Returns the description of each preset: the first paragraph of its file's comment."""
    return {
        path.stem: _first_paragraph(path.read_text(encoding="utf-8"))
        for path in sorted(PRESETS.glob("*.yaml"))
    }


def _first_paragraph(text: str) -> str:
    """Returns the first paragraph of the comment at the start of a text, as one line."""
    lines = (line.strip() for line in text.splitlines())
    paragraph = takewhile(lambda line: line.startswith("#") and line.strip("# "), lines)
    return " ".join(line.strip("# ") for line in paragraph)


def _add_target(
    layers: Layers,
    target: str | Config,
    *,
    algo: str | None,
    kind: str | None,
    line: str | None = None,
) -> TargetOrigin:
    """Add the settings of a target.

    Args:
        layers: the values so far, which are empty.
        target: preset, file, environment, or a config.
        algo: the requested algorithm; None: that of the target.
        kind: the requested kind of environment; None: by the environment.
        line: as of `resolve_target`.

    Raises:
        UserError: if it is no target; the message names the nearest.
    """
    if isinstance(target, Config):
        layers.values = target.model_dump()
        return TargetOrigin(_folder_name(target.env.id), "the given config")

    if target in presets():
        _add_preset(layers, target)
        if algo not in (None, layers.algo):
            return _replace_by_sibling(layers, target, algo)
        return TargetOrigin(target, f"preset {target}")

    if target.endswith(".py"):
        raise _python_file_error(target)
    if match := _FILE_TARGET.fullmatch(target):
        target = f"{_module_of(match['path'])}:{match['name']}"

    if target.endswith((".yaml", ".yml")) or os.path.isfile(target):
        base = _add_file(layers, Path(target), target, line=line)
        name = Path(target).stem
        if Path(target).name == CONFIG_FILE:
            name = Path(target).parent.name  # the run's folder
        origin = f"file {target}"
        if base:
            origin += f" over preset {base}"
        return TargetOrigin(name or "run", origin)

    ids = (_GYMNASIUM_ID, _MODULE_TARGET, _PETTINGZOO_ID)
    if target == GAMES_ID or any(pattern.fullmatch(target) for pattern in ids):
        return _add_env(layers, target, algo=algo, kind=kind)
    raise _no_target_error(target)


def _no_target_error(target: str) -> UserError:
    """Returns the error for a text that is no target."""
    if os.path.isfile(f"{target}.py"):
        return _python_file_error(f"{target}.py")
    if "/" in target and not os.path.lexists(target):
        return UserError(
            f"there is no {show(target)}; give a preset, a YAML file, a gymnasium id such as "
            "CartPole-v1, or module:function, or the folder of a run to resume"
        )

    names = presets()
    [nearest] = get_close_matches(target, names, n=1, cutoff=0.0)
    return UserError(
        f"{show(target)} is not a target; the nearest preset is {nearest}, and a target is a "
        f"preset ({', '.join(names)}), a YAML file, a gymnasium id such as CartPole-v1, "
        "or module:function"
    )


def _python_file_error(path: str) -> UserError:
    """Returns the error for a target that is a Python file, with the functions that it may mean."""
    if os.path.isfile(path):
        module = _module_of(path)
    else:
        module = ".".join(Path(path).with_suffix("").parts).strip("/.")
    targets = [f"{module}:{name}" for name in _makers_in(path)[:SHOWN_MAKERS]]
    return UserError(
        f"{path} is a Python file; name the function in it that makes the environment: "
        f"{' or '.join(targets) or f'{module}:FUNCTION'}"
    )


def _makers_in(path: str) -> list[str]:
    """Returns functions and classes of a Python file.

    Those come first that seem to make an environment. Empty if the file cannot be read.
    """
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []

    names = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    return sorted(names, key=lambda name: not re.search("make|env", name, re.IGNORECASE))


def _module_of(path: str) -> str:
    """Returns the name by which actors import a file.

    Raises:
        UserError: if the file does not exist, or has no such name.
    """
    if not os.path.isfile(path):
        raise UserError(f"there is no {show(path)}; correct its name, or start in its folder")

    relative_path = os.path.relpath(os.path.realpath(path), os.path.realpath(os.curdir))
    parts = Path(relative_path).with_suffix("").parts
    if all(part.isidentifier() for part in parts):
        return ".".join(parts)
    if ".." in parts:
        raise UserError(
            f"{show(path)} is not below the current folder, from which actors import it; start in "
            f"{os.path.dirname(os.path.abspath(path))}"
        )
    raise UserError(f"{show(path)} cannot be imported by that name; rename it")


def _dropped_options(layers: Layers, config: Config) -> str:
    """Returns a sentence with the options that a change of the algorithm dropped.

    It lists the options that the config does not have, and those that have their default instead.
    Empty if there are none.
    """
    options = config.algo.model_dump()
    changed = []
    removed = []
    for key, value in layers.dropped.items():
        if key not in options:
            removed.append(f"algo.{key} {show(value)}")
        elif options[key] != value and ("algo", key) not in layers.places:
            changed.append(f"algo.{key} {show(value)} -> {show(options[key])}")

    parts = []
    if changed:
        parts.append(f"{', '.join(changed)} by default")
    if removed:
        parts.append(f"without {', '.join(removed)}")
    if layers.lending_algo:
        parts.append("of the preset's other sections only env is kept")
    if not parts:
        return ""
    return f"algo.name {config.algo.name} in place of {layers.dropped_algo}: {'; '.join(parts)}"


def _replace_by_sibling(layers: Layers, name: str, algo: str | None) -> TargetOrigin:
    """Replace a preset by one for the same environment and another algorithm, if there is one."""
    env_id = layers.values["env"]["id"]
    for sibling, preset in _presets_for(env_id).items():
        if preset.algo == algo:
            _take_preset(layers, preset)
            origin = f"preset {sibling}, which is {name} with algo.name {algo}"
            return TargetOrigin(sibling, origin)
    return TargetOrigin(name, f"preset {name}")


def _presets_for(env_id: str) -> dict[str, Layers]:
    """Returns the presets for an environment, by name.

    For an Atari game without a preset it is the general one, with the game's id and under its name.
    """
    by_name: dict[str, Layers] = {}
    for path in sorted(PRESETS.glob("*.yaml")):
        # Parsing all of them would take long; a preset without the id is for another environment.
        if env_id not in path.read_text(encoding="utf-8"):
            continue
        preset = Layers()
        _add_preset(preset, path.stem)
        if preset.values["env"]["id"] == env_id:
            by_name[path.stem] = preset

    if not by_name and _ATARI.fullmatch(env_id):
        general = Layers()
        _add_preset(general, _ATARI_PRESET)
        general.values["env"]["id"] = env_id
        by_name[_folder_name(env_id)] = general
    return by_name


def _take_preset(layers: Layers, preset: Layers) -> None:
    """Replace the values so far by those of a preset."""
    layers.values = preset.values
    layers.places = preset.places
    layers.preset_places = preset.preset_places


def _folder_name(env_id: str) -> str:
    """Returns an environment's id as a folder name."""
    return re.sub(r"[^\w.-]+", "-", env_id)


def _add_env(layers: Layers, env_id: str, *, algo: str | None, kind: str | None) -> TargetOrigin:
    """Add the preset for an environment; of several, the one with the requested algorithm.

    If all are for other algorithms, or a ``kind`` of environment is requested, only the preset's
    section `env` and the options about rewards are added. Without a preset the environment's id is
    all that is added.
    """
    folder_name = _folder_name(env_id)
    by_name = _presets_for(env_id)
    layers.values["env"] = {"id": env_id}
    if not by_name:
        return TargetOrigin(folder_name, "no preset")

    matching = (name for name, preset in by_name.items() if preset.algo == algo)
    name = next(matching, next(iter(by_name)))
    preset = by_name[name]
    _take_preset(layers, preset)
    if algo in (None, preset.algo) and kind is None:
        origin = f"preset {name}, which trains {env_id}"
        if name == folder_name:
            origin = f"preset {_ATARI_PRESET}, with {env_id}"
        return TargetOrigin(name, origin)

    # The preset's other settings are for another algorithm. The user named the environment and not
    # this preset, so that nothing of it counts as dropped.
    layers.drop_algo()
    layers.dropped = {}
    layers.remove_preset()
    if kind is not None:
        del layers.values["algo"]
        layers.places = {path: place for path, place in layers.places.items() if path[0] != "algo"}
    return TargetOrigin(folder_name, "no preset")


def _add_kind_defaults(layers: Layers) -> str:
    """Add the algorithm's defaults for the kind of environment below everything else.

    Returns:
        A description of these defaults; empty where the algorithm has none.
    """
    env = layers.values.get("env")
    spec = ALGORITHMS.specs.get(layers.algo)
    if not isinstance(env, dict) or spec is None or spec.defaults is None:
        return ""

    kind = kind_of(env)
    kind_defaults = defaults(spec.defaults, kind)
    values = without_replaced(kind_defaults.values, layers.values)
    layers.add_below(values, kind_defaults.places)
    env["kind"] = kind
    return f"defaults of algo.name {spec.name} for env.kind {kind}: {kind_defaults.source}"


def _add_preset(layers: Layers, name: str) -> None:
    """Add a preset, and remember the place of each of its values."""
    _add_file(layers, PRESETS / f"{name}.yaml", f"configs/{name}.yaml")
    layers.preset_places = dict(layers.places)
    layers.dropped = {}  # the preset has dropped options of its base, and not the user


def _add_file(layers: Layers, path: Path, source: str, *, line: str | None = None) -> str | None:
    """Add a file over the preset that it names as its base.

    Args:
        layers: the values so far.
        path: path of the file.
        source: name of the file for messages and places.
        line: a line of the league that the file describes, whose options are added last.

    Returns:
        The name of the base; None without a base.

    Raises:
        UserError: if the file cannot be read, is no config, or its base is no preset.
    """
    values, lines = parse(_read(path, source), source)
    if not isinstance(values, dict | None):
        raise UserError(f"{source} is {show(values)}; it must contain sections such as `env:`")

    values = values or {}
    lines_of_league = values.pop(LINES, None)
    if lines_of_league is not None and line is None:
        raise UserError(
            f"{source}:{lines[(LINES,)]}: a file with `{LINES}` is a league, and this command is "
            f"of one run; start all lines with penstock league {source}"
        )

    base: str | None = values.pop("base", None)
    if base is not None:
        if base not in list(presets()):
            raise UserError(
                f"{source}:{lines[('base',)]}: base is {show(base)}; it must be a preset: "
                f"{', '.join(presets())}"
            )
        _add_preset(layers, base)
        # A preset was chosen together with all that its base has.
        if path.resolve().parent == PRESETS:
            layers.preset_places = {}

    layers.add_file(values, lines, source)
    if line is not None:
        _add_line(layers, lines_of_league[line], lines, source=source, line=line)
    return base


def _add_line(
    layers: Layers,
    sections: object,
    lines: Mapping[KeyPath, int],
    *,
    source: str,
    line: str,
) -> None:
    """Add the options of a league's line over those that all lines share.

    Args:
        layers: the values so far.
        sections: the value of the line in the file.
        lines: the line of text of each value in the file, by its path.
        source: name of the file for messages and places.
        line: name of the line.

    Raises:
        UserError: if the value is no map.
    """
    at = (LINES, line)
    if not isinstance(sections, dict | None):
        raise UserError(
            f"{source}:{lines[at]}: line {line} is {show(sections)}; it must be the sections in "
            "which it differs, as in `league: {draw: main}`"
        )
    own_lines = {path[len(at) :]: number for path, number in lines.items() if path[: len(at)] == at}
    layers.add_file(sections or {}, own_lines, source)


def _read(path: Path, source: str) -> str:
    """Returns the text of a file, one character more than `parse` accepts at most.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MOST_CHARS + 1)
    except UnicodeDecodeError:
        raise UserError(
            f"{source} cannot be read: it is not UTF-8 text; name a YAML file"
        ) from None
    except (OSError, ValueError) as error:  # ValueError for a NUL character in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{source} cannot be read: {reason}; name a YAML file") from None


def _check(layers: Layers, source: str) -> Config:
    """Returns the values as a checked config.

    Raises:
        UserError: with a line for each mistake; ``source`` is the place of options that are
            missing.
    """
    try:
        return Config.model_validate(layers.values, by_alias=True, by_name=False)
    except ValidationError as error:
        raise UserError(explain(error, layers, source)) from None
