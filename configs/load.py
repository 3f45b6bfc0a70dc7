"""Makes a checked config from a target and overrides, and converts configs to YAML and back.

A target is a preset, a YAML file, a gymnasium id, or `module:EnvId-v0` / `module:function`. A
gymnasium id for which there is a preset stands for that preset. Any other Atari game stands for
`breakout` with that game. Where no preset of the algorithm applies, it has defaults for the kind of
environment (`configs.kinds`). The environment is not imported here, so its existence is not
checked.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

from pydantic import ValidationError

from penstock.configs.algorithms import ALGORITHMS
from penstock.configs.errors import UserError
from penstock.configs.kinds import defaults, kind_of, without_replaced
from penstock.configs.layers import Layers
from penstock.configs.messages import explain, show
from penstock.configs.model import complete_stored
from penstock.configs.schema import Config
from penstock.configs.yaml_text import MOST_CHARS, parse, write

PRESETS = Path(__file__).resolve().parent
CONFIG_FILE = "config.yaml"
SHOWN_MAKERS = 3  # functions that a message names

_GYMNASIUM_ID = re.compile(r"([\w:-]+/)?[\w:.-]+-v\d+")
_ATARI, _ATARI_PRESET = re.compile(r"ALE/\w+-v\d+"), "breakout"  # settings that suit all of them
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


def resolve(target: str | Config, overrides: Sequence[str] = ()) -> Config:
    """Returns the config of a target, or the config itself, with ``key=value`` overrides.

    Raises:
        UserError: with a line for each mistake.
    """
    return resolve_target(target, overrides).config


def resolve_target(target: str | Config, overrides: Sequence[str] = ()) -> Resolved:
    """Returns the config of a target, with its name and its origin.

    Args:
        target: preset, file, environment, or a config.
        overrides: options as ``key=value``.

    Raises:
        UserError: with a line for each mistake.
    """
    layers = Layers()

    # Which algorithm it is comes first, as a change of it clears the settings of the one before.
    overrides = sorted(overrides, key=lambda text: not _ALGO_OVERRIDE.match(text))
    named = [text.partition("=")[2].strip() for text in overrides if _ALGO_OVERRIDE.match(text)]
    kinds = [text.partition("=")[2].strip() for text in overrides if _KIND_OVERRIDE.match(text)]
    algo, kind = (found[-1] if found else None for found in (named, kinds))
    name, origin = _lay_target(layers, target, algo, None if kind == "auto" else kind)
    written = isinstance(target, Config) or Path(target).name == CONFIG_FILE
    if Config.model_fields.keys() <= layers.values.keys():
        written = True
        complete_stored(layers.values)
    mistakes = []
    for override in overrides:
        try:
            layers.add_override(override)
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UserError("\n".join(mistakes))
    of_kind = "" if layers.preset or written else _lay_kind(layers)
    config = _check(layers, target if isinstance(target, str) else origin)
    return Resolved(config, name, origin, _dropped(layers, config), of_kind)


def load_run(run_dir: str | Path) -> Config:
    """Returns the config of the run in a folder.

    Raises:
        UserError: if the folder holds no run, or its config is not valid.
    """
    path = Path(run_dir) / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            f"{run_dir} has no {CONFIG_FILE}, so it is not a run; give the folder of a run"
        )
    return resolve(str(path))


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
    lines = (line.strip() for line in text.splitlines())
    paragraph = takewhile(lambda line: line.startswith("#") and line.strip("# "), lines)
    return " ".join(line.strip("# ") for line in paragraph)


def _lay_target(
    layers: Layers, target: str | Config, algo: str | None, kind: str | None
) -> tuple[str, str]:
    """Add the target's settings; returns its name and origin. ``algo`` and ``kind`` are the
    requested algorithm and kind of environment."""
    if isinstance(target, Config):
        layers.values = target.model_dump()
        return _own_name(target.env.id), "the given config"
    names = presets()
    if target in names:
        _lay_preset(layers, target)
        if algo not in (None, layers.algo):
            return _lay_sibling(layers, target, algo)
        return target, f"preset {target}"
    if target.endswith(".py"):
        raise _python_file(target)
    if found := _FILE_TARGET.fullmatch(target):
        target = f"{_module_of(found['path'])}:{found['name']}"
    if target.endswith((".yaml", ".yml")) or os.path.isfile(target):
        base = _lay_file(layers, Path(target), target)
        name = Path(target).stem if Path(target).name != CONFIG_FILE else Path(target).parent.name
        return name or "run", f"file {target}" + (f" over preset {base}" if base else "")
    if _GYMNASIUM_ID.fullmatch(target) or _MODULE_TARGET.fullmatch(target):
        return _lay_game(layers, target, algo, kind)
    if os.path.isfile(f"{target}.py"):
        raise _python_file(f"{target}.py")
    if "/" in target and not os.path.lexists(target):
        raise UserError(
            f"there is no {show(target)}; give a preset, a YAML file, a gymnasium id such as "
            "CartPole-v1, or module:function, or the folder of a run to resume"
        )
    close = get_close_matches(target, names, n=1, cutoff=0.0)
    raise UserError(
        f"{show(target)} is not a target; the nearest preset is {close[0]}, and a target is a "
        f"preset ({', '.join(names)}), a YAML file, a gymnasium id such as CartPole-v1, "
        "or module:function"
    )


def _python_file(path: str) -> UserError:
    module = ".".join(Path(path).with_suffix("").parts).strip("/.")
    module = _module_of(path) if os.path.isfile(path) else module
    named = " or ".join(f"{module}:{name}" for name in _makers_in(path)[:SHOWN_MAKERS])
    return UserError(
        f"{path} is a Python file; name the function in it that makes the environment: "
        f"{named or f'{module}:FUNCTION'}"
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
    below = os.path.relpath(os.path.realpath(path), os.path.realpath(os.curdir))
    module = Path(below).with_suffix("").parts
    if all(part.isidentifier() for part in module):
        return ".".join(module)
    if ".." in module:
        raise UserError(
            f"{show(path)} is not below the current folder, from which actors import it; start in "
            f"{os.path.dirname(os.path.abspath(path))}"
        )
    raise UserError(f"{show(path)} cannot be imported by that name; rename it")


def _dropped(layers: Layers, config: Config) -> str:
    """A sentence with the options of another algorithm that the config does not use, and the
    defaults in their place; empty if there are none."""
    now = config.algo.model_dump()
    changed, gone = [], []
    for key, value in layers.dropped.items():
        if key not in now:
            gone.append(f"algo.{key} {show(value)}")
        elif now[key] != value and ("algo", key) not in layers.places:
            changed.append(f"algo.{key} {show(value)} -> {show(now[key])}")
    parts = [f"{', '.join(changed)} by default"] if changed else []
    parts += [f"without {', '.join(gone)}"] if gone else []
    if layers.lent_by:
        parts.append("of the preset's other sections only env is kept")
    if not parts:
        return ""
    return f"algo.name {config.algo.name} in place of {layers.before}: {'; '.join(parts)}"


def _lay_sibling(layers: Layers, name: str, algo: str | None) -> tuple[str, str]:
    """Replace a preset by one for the same environment and another algorithm, if there is one."""
    env_id = layers.values["env"]["id"]
    for sibling, preset in _by_game(env_id).items():
        if preset.algo == algo:
            layers.values, layers.places = preset.values, preset.places
            layers.preset = preset.preset
            return sibling, f"preset {sibling}, which is {name} with algo.name {algo}"
    return name, f"preset {name}"


def _by_game(env_id: str) -> dict[str, Layers]:
    """The presets for an environment, by name. For an Atari game that has none it is the general
    preset, under the game's name."""
    found: dict[str, Layers] = {}
    for path in sorted(PRESETS.glob("*.yaml")):
        # Parsing all of them would take long; a preset without the id is for another environment.
        if env_id not in path.read_text(encoding="utf-8"):
            continue
        preset = Layers()
        _lay_preset(preset, path.stem)
        if preset.values["env"]["id"] == env_id:
            found[path.stem] = preset
    if not found and _ATARI.fullmatch(env_id):
        general = Layers()
        _lay_preset(general, _ATARI_PRESET)
        general.values["env"]["id"] = env_id
        found[_own_name(env_id)] = general
    return found


def _own_name(env_id: str) -> str:
    """The environment's id as a folder name."""
    return re.sub(r"[^\w.-]+", "-", env_id)


def _lay_game(layers: Layers, env_id: str, algo: str | None, kind: str | None) -> tuple[str, str]:
    """Add the preset for an environment; of several, the one with the requested algorithm. Of a
    preset for another algorithm, or where a ``kind`` is requested, only a part is added."""
    own_name, found = _own_name(env_id), _by_game(env_id)
    layers.values["env"] = {"id": env_id}
    if found:
        name = next((name for name in found if found[name].algo == algo), next(iter(found)))
        layers.values, layers.places = found[name].values, found[name].places
        layers.preset = found[name].preset
        if algo in (None, found[name].algo) and kind is None:
            base = f"{_ATARI_PRESET}, with" if name == own_name else f"{name}, which trains"
            return name, f"preset {base} {env_id}"
        layers.keep_game()  # its other settings are for another algorithm
        layers.dropped = {}  # the target is the environment, not this preset
        layers.lend()
        if kind is not None:
            del layers.values["algo"]
            layers.places = {path: at for path, at in layers.places.items() if path[0] != "algo"}
    return own_name, "no preset"


def _lay_kind(layers: Layers) -> str:
    """Add the algorithm's defaults for the kind of environment below everything else; returns their
    description, empty where it has none."""
    env, spec = layers.values.get("env"), ALGORITHMS.specs.get(layers.algo)
    if not isinstance(env, dict) or spec is None or spec.defaults is None:
        return ""

    kind = kind_of(env)
    found = defaults(spec.defaults, kind)
    layers.add_below(without_replaced(found.values, layers.values), found.places)
    env["kind"] = kind
    return f"defaults of algo.name {spec.name} for env.kind {kind}: {found.source}"


def _lay_preset(layers: Layers, name: str) -> None:
    _lay_file(layers, PRESETS / f"{name}.yaml", f"configs/{name}.yaml")
    layers.preset = dict(layers.places)
    layers.dropped = {}  # by the preset itself, and not by the user


def _lay_file(layers: Layers, path: Path, source: str) -> str | None:
    """Add a file over the preset that it names as its base; returns the name of the base."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARS + 1)
    except UnicodeDecodeError:
        raise UserError(
            f"{source} cannot be read: it is not UTF-8 text; name a YAML file"
        ) from None
    except (OSError, ValueError) as error:  # ValueError for a NUL character
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{source} cannot be read: {reason}; name a YAML file") from None
    values, lines = parse(text, source)
    if not isinstance(values, dict | None):
        raise UserError(f"{source} is {show(values)}; it must contain sections such as `env:`")

    values = values or {}
    base: str | None = values.pop("base", None)
    if base is not None:
        if base not in list(presets()):
            raise UserError(
                f"{source}:{lines[('base',)]}: base is {show(base)}; it must be a preset: "
                f"{', '.join(presets())}"
            )
        _lay_preset(layers, base)
        if path.resolve().parent == PRESETS:  # a preset was chosen with all that its base has
            layers.preset = {}
    layers.add_file(values, lines, source)
    return base


def _check(layers: Layers, source: str) -> Config:
    try:
        return Config.model_validate(layers.values, by_alias=True, by_name=False)
    except ValidationError as error:
        raise UserError(explain(error, layers, source)) from None
