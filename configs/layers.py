"""Merges the values of preset, file and overrides, and records where each value was set.

Maps are merged key by key. An empty map clears the values below it. null in place of a map is
ignored, so that all keys of a section may be commented out. A map that names another algorithm than
the one below it replaces the section `algo`, as settings of one algorithm are not meant for
another; only `REWARD_OPTIONS`, which are about the environment's rewards, are kept. If the
algorithm has defaults of its own for each kind of environment, a preset below it lends its section
`env` and no other, as its network, replay and optimizer were chosen for another algorithm. Likewise
`stop.return: null` removes the `stop.hold_s` below it, and a schedule of `learner.lr` removes
`learner.lr_end_fraction` and `learner.lr_decay_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.configs.algorithms import ALGORITHMS, DEFAULT
from penstock.configs.errors import UserError
from penstock.configs.keys import is_section
from penstock.configs.yaml_text import KeyPath, parse

# Options of `algo` that another algorithm keeps, as they are about the environment.
REWARD_OPTIONS = ("reward_clip", "reward_scale")
# It has no meaning without `stop.return`.
HOLD = ("stop", "hold_s")
# Maps whose keys are no options.
MAPS = (("env", "kwargs"), ("algo", "settings"), ("model", "settings"))
# They have no meaning beside a schedule of `learner.lr`.
DECAY = (("learner", "lr_end_fraction"), ("learner", "lr_decay_steps"))
MOST_PARTS = 100  # parts of an override's name
LONGEST_PLACE = 300  # characters
_EXAMPLE = "write an option and its value, for example learner.lr=3e-4"


@dataclass
class Layers:
    """The merged values, and for each path the place (`file:line` or override) that set it."""

    values: dict[str, Any] = field(default_factory=dict)
    """Sections with their options."""
    places: dict[KeyPath, str] = field(default_factory=dict)
    """The place that set each value or map, by its path."""
    dropped: dict[str, Any] = field(default_factory=dict)
    """Options of the section `algo` that a change of the algorithm removed."""
    dropped_algo: str = DEFAULT
    """The algorithm that had them."""
    preset_places: dict[KeyPath, str] = field(default_factory=dict)
    """The places of a preset whose values are included; empty where there is none."""
    lending_algo: str = ""
    """The algorithm of a preset that lent its section `env` alone; empty where none did."""

    @property
    def algo(self) -> str:
        """The algorithm chosen so far."""
        section = self.values.get("algo")
        return str(section.get("name", DEFAULT)) if isinstance(section, dict) else DEFAULT

    def add_file(
        self, values: Mapping[str, Any], lines: Mapping[KeyPath, int], source: str
    ) -> None:
        """Merge the values of a file over the others.

        Args:
            values: sections of the file.
            lines: line of each value, by its path.
            source: name of the file.
        """
        self._merge(values, (), lambda path: f"{source}:{lines[path]}")

    def add_override(self, text: str) -> None:
        """Merge ``a.b=value`` over the other values.

        Raises:
            UserError: if the text has another form, or its value is not YAML.
        """
        name, equals, raw = text.partition("=")
        path = tuple(name.strip().split("."))
        place = f"override {text}"
        if len(place) > LONGEST_PLACE:
            place = f"{place[:LONGEST_PLACE]}..."

        if not equals or not all(path):
            raise UserError(f"{place}: this is not key=value; {_EXAMPLE}")
        if len(path) > MOST_PARTS:
            raise UserError(
                f"{place}: its name has {len(path)} parts, and at most {MOST_PARTS} are allowed; "
                f"{_EXAMPLE}"
            )

        value, _ = parse(raw, place, is_override=True)
        for key in reversed(path):
            value = {key: value}
        self._merge(value, (), lambda _: place)

    def add_below(
        self, values: Mapping[str, Any], places: Mapping[KeyPath, str], at: KeyPath = ()
    ) -> None:
        """Add values where nothing is set; an empty map that is set stays empty.

        Args:
            values: values of the map at the path ``at``.
            places: place of each value, by its path.
            at: path of the map; by default the map of all sections.
        """
        target = self._map_at(at)
        for key, value in values.items():
            path = (*at, key)
            is_set = key in target
            # A map is added key by key, unless an empty map or another value is set in its place.
            takes_keys = not is_set or (isinstance(target[key], dict) and target[key])

            if isinstance(value, dict) and takes_keys:
                self.add_below(value, places, path)
            elif not is_set:
                target[key] = value
            else:
                continue
            self.places.setdefault(path, places[path])

    def remove_preset(self) -> None:
        """Remove the values that the preset has set, except in the sections `env` and `algo`."""
        kept_sections = ("env", "algo")
        for section in [*self.values]:
            if section not in kept_sections:
                self.values |= self._without_preset({section: self.values.pop(section)})

        self.places = {
            path: place
            for path, place in self.places.items()
            if path[0] in kept_sections or self.preset_places.get(path) != place
        }
        self.preset_places = {}

    def _without_preset(self, values: Mapping[str, Any], at: KeyPath = ()) -> dict[str, Any]:
        """Returns the values of the map at a path that the preset has not set.

        Maps that become empty are left out. A value that a file or an override has set again has
        another place than in the preset.
        """
        remaining = {}
        for key, value in values.items():
            path = (*at, key)
            if isinstance(value, dict) and value:
                if inner := self._without_preset(value, path):
                    remaining[key] = inner
                continue

            is_of_preset = path in self.preset_places
            if not is_of_preset or self.places.get(path) != self.preset_places[path]:
                remaining[key] = value
        return remaining

    def drop_algo(self) -> None:
        """Remove the section `algo`, except `REWARD_OPTIONS`."""
        section = self._map_at(("algo",))
        self.dropped_algo = self.algo
        self.dropped = {
            key: value for key, value in section.items() if key not in (*REWARD_OPTIONS, "name")
        }

        self.values["algo"] = {key: section[key] for key in REWARD_OPTIONS if key in section}
        kept_paths = {("algo", key) for key in REWARD_OPTIONS}
        self.places = {
            path: place
            for path, place in self.places.items()
            if path[0] != "algo" or path in kept_paths
        }

    def place(self, path: KeyPath) -> str | None:
        """Returns the place that set the value at a path, or the innermost map around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return None

    def _merge(
        self, values: Mapping[str, Any], at: KeyPath, place: Callable[[KeyPath], str]
    ) -> None:
        """Merge values over those of the map at a path; ``place`` returns the place of each."""
        # Another algorithm drops the settings of the one before, and of a preset all but `env`.
        algo = str(values.get("name", self.algo))
        if at == ("algo",) and algo != self.algo:
            self.drop_algo()
            if self.preset_places and ALGORITHMS.has_defaults(algo):
                self.lending_algo = self.dropped_algo
                self.remove_preset()

        # Options that have no meaning beside a new value are removed.
        target = self._map_at(at)
        if at == ("stop",) and values.get("return", 0) is None:
            self._drop(target, HOLD)
        if at == ("learner",) and isinstance(values.get("lr"), Mapping):
            for option in DECAY:
                self._drop(target, option)

        for key, value in values.items():
            path = (*at, key)
            if value is None and _is_map(path):
                continue
            self.places[path] = place(path)
            if isinstance(value, dict) and value:
                self._merge(value, path, place)
            else:
                target[key] = value

    def _drop(self, section: dict[str, Any], path: KeyPath) -> None:
        """Remove an option of a section, unless an override set it."""
        if not self.places.get(path, "").startswith("override"):
            section.pop(path[-1], None)
            self.places.pop(path, None)

    def _map_at(self, path: KeyPath) -> dict[str, Any]:
        """Returns the map at a path; it is made where there is none."""
        values = self.values
        for key in path:
            if not isinstance(values.get(key), dict):
                values[key] = {}
            values = values[key]
        return values


def _is_map(path: KeyPath) -> bool:
    """Whether the value at a path is a map."""
    return path in MAPS or is_section(".".join(path))
