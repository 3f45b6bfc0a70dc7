"""The JSON Schema of a YAML file with a config, by which editors complete and check the file.

It describes a file, not a config: every option may be left out, `base` names a preset, and null in
place of a map is ignored. The options in `algo` depend on the algorithm, which `algo.name` or the
base chooses. The schema checks options one by one; `schema.Config` also checks combinations.
"""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from penstock.configs.algorithms import DEFAULT
from penstock.configs.keys import Option, algorithms, options, sections
from penstock.configs.load import presets, resolve
from penstock.configs.section import Section

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_BOUNDS = {
    "gt": "exclusiveMinimum",
    "ge": "minimum",
    "lt": "exclusiveMaximum",
    "le": "maximum",
}
"""Names of bounds that pydantic leaves as they are where a validator precedes them."""


def json_schema() -> dict[str, Any]:
    """Returns the schema, with the options of everything that is registered."""
    known = {name: options(name) for name in algorithms()}
    kinds = sections()
    based = {name: resolve(name).algo.name for name in presets()}
    by_algorithm = dict(zip(algorithms(), kinds.pop("algo"), strict=True))
    properties: dict[str, Any] = {
        "base": {"description": "The preset that this file changes.", "enum": list(based)},
        "algo": {
            "description": "The algorithm and its options.",
            "type": ["object", "null"],
            "properties": {"name": _value(known[DEFAULT]["algo.name"])},
        },
    }
    properties |= {name: _section(name, kind, known[DEFAULT]) for name, (kind,) in kinds.items()}
    return {
        "$schema": DIALECT,
        "title": "Config of a Penstock run",
        "type": "object",
        "properties": {name: properties[name] for name in ("base", *sections())},
        "additionalProperties": False,
        "allOf": [
            {"if": _chooses(name, based), "then": {"properties": {"algo": _ref(name)}}}
            for name in by_algorithm
        ],
        "$defs": {name: _section("algo", kind, known[name]) for name, kind in by_algorithm.items()},
    }


def _ref(algo: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{algo}"}


def _chooses(algo: str, based: dict[str, str]) -> dict[str, Any]:
    """Returns the condition that a file is for an algorithm.

    A file chooses it by its `algo.name`, otherwise by its base; otherwise it is the default.
    """
    named = _names({"const": algo})
    bases = [preset for preset, its in based.items() if its == algo]
    chosen: list[dict[str, Any]] = [{"properties": {"base": {"enum": bases}}, "required": ["base"]}]
    if algo == DEFAULT:
        chosen.append({"not": {"required": ["base"]}})
    return {"anyOf": [named, {"not": _names({}), "anyOf": chosen}]}


def _names(rule: dict[str, Any]) -> dict[str, Any]:
    """Whether a file has an `algo.name` by a rule."""
    section = {"type": "object", "properties": {"name": rule}, "required": ["name"]}
    return {"properties": {"algo": section}, "required": ["algo"]}


def _section(name: str, kind: type[Section], known: dict[str, Option]) -> dict[str, Any]:
    hints, properties = get_type_hints(kind), {}
    for attribute, field in kind.model_fields.items():
        key = field.serialization_alias or attribute
        option = known.get(f"{name}.{key}")
        properties[key] = (
            _section(f"{name}.{key}", hints[attribute], known) if option is None else _value(option)
        )
    return {
        "description": inspect.cleandoc(kind.__doc__ or ""),
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": False,
    }


def _value(option: Option) -> dict[str, Any]:
    schema = TypeAdapter(option.hint).json_schema()
    found = _standard(schema, schema.get("$defs", {}))
    if found.get("type") == "object":
        found["type"] = ["object", "null"]
    more = option.field.json_schema_extra
    schema = {"description": option.description, **found}
    if isinstance(more, dict):
        schema |= more
    return schema if option.required else {**schema, "default": option.default}


def _standard(schema: Any, defined: dict[str, Any]) -> Any:
    """Returns a schema of pydantic's in the dialect of this one.

    Bounds get the dialect's names, and definitions take the place of references to them. The
    definition of any JSON value is recursive; it becomes the schema that allows anything.
    """
    if isinstance(schema, list):
        return [_standard(item, defined) for item in schema]
    if not isinstance(schema, dict):
        return schema

    if (reference := schema.get("$ref")) is not None:
        name = reference.removeprefix("#/$defs/")
        return {} if name == "JsonValue" else _standard(defined[name], defined)
    known = {key: value for key, value in schema.items() if key != "$defs"}
    found = {_BOUNDS.get(key, key): _standard(value, defined) for key, value in known.items()}
    return found | ({"additionalProperties": False} if "patternProperties" in found else {})
