"""The JSON Schema of a YAML file with a config, by which editors complete and check the file.

It describes a file, not a config: every option may be left out, `base` names a preset, `lines` are
those of a league, and null in place of a map is ignored. The options in `algo` depend on the
algorithm, which `algo.name` or the base chooses. The schema checks options one by one;
`schema.Config` also checks combinations.
"""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from penstock.configs.algorithms import DEFAULT
from penstock.configs.keys import Option, algorithms, options, sections
from penstock.configs.load import LINES, presets, resolve
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
    options_by_algo = {name: options(name) for name in algorithms()}
    algo_of_preset = {name: resolve(name).algo.name for name in presets()}
    kinds = sections()
    kind_by_algo = dict(zip(algorithms(), kinds.pop("algo"), strict=True))

    # The options of the default algorithm stand for all that depend on no algorithm.
    default_options = options_by_algo[DEFAULT]
    properties: dict[str, Any] = {
        "base": {"description": "The preset that this file changes.", "enum": list(algo_of_preset)},
        "algo": {
            "description": "The algorithm and its options.",
            "type": ["object", "null"],
            "properties": {"name": _value(default_options["algo.name"])},
        },
    }
    for name, (kind,) in kinds.items():
        properties[name] = _section(name, kind, default_options)

    # A line of a league has the sections in which it differs from the others.
    properties[LINES] = {
        "description": "The lines of a league, for `penstock league`.",
        "type": "object",
        "additionalProperties": {
            "type": ["object", "null"],
            "properties": {name: {"$ref": f"#/properties/{name}"} for name in sections()},
            "additionalProperties": False,
        },
    }

    # The section `algo` has the options of the algorithm that the file chooses.
    choices = [
        {"if": _chooses(algo, algo_of_preset), "then": {"properties": {"algo": _ref(algo)}}}
        for algo in kind_by_algo
    ]
    return {
        "$schema": DIALECT,
        "title": "Config of a Penstock run",
        "type": "object",
        "properties": {name: properties[name] for name in ("base", *sections(), LINES)},
        "additionalProperties": False,
        "allOf": choices,
        "$defs": {
            algo: _section("algo", kind, options_by_algo[algo])
            for algo, kind in kind_by_algo.items()
        },
    }


def _ref(algo: str) -> dict[str, Any]:
    """Returns a reference to the schema of an algorithm's section."""
    return {"$ref": f"#/$defs/{algo}"}


def _chooses(algo: str, algo_of_preset: dict[str, str]) -> dict[str, Any]:
    """Returns the condition that a file is for an algorithm.

    A file chooses it by its `algo.name`, otherwise by its base; otherwise it is the default.
    """
    has_name = _has_algo_name({"const": algo})
    bases = [preset for preset, preset_algo in algo_of_preset.items() if preset_algo == algo]
    without_name: list[dict[str, Any]] = [
        {"properties": {"base": {"enum": bases}}, "required": ["base"]}
    ]
    if algo == DEFAULT:
        without_name.append({"not": {"required": ["base"]}})
    return {"anyOf": [has_name, {"not": _has_algo_name({}), "anyOf": without_name}]}


def _has_algo_name(rule: dict[str, Any]) -> dict[str, Any]:
    """Returns the condition that a file has an `algo.name` which obeys a rule."""
    section = {"type": "object", "properties": {"name": rule}, "required": ["name"]}
    return {"properties": {"algo": section}, "required": ["algo"]}


def _section(name: str, kind: type[Section], known: dict[str, Option]) -> dict[str, Any]:
    """Returns the schema of a section, whose options are those among ``known`` with its name."""
    hints = get_type_hints(kind)
    properties = {}
    for attribute, field in kind.model_fields.items():
        key = field.serialization_alias or attribute
        full_name = f"{name}.{key}"
        if full_name in known:
            properties[key] = _value(known[full_name])
        else:
            # A field that is no option is a section in this one.
            properties[key] = _section(full_name, hints[attribute], known)

    return {
        "description": inspect.cleandoc(kind.__doc__ or ""),
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": False,
    }


def _value(option: Option) -> dict[str, Any]:
    """Returns the schema of an option's values, with its description and its default."""
    pydantic_schema = TypeAdapter(option.hint).json_schema()
    schema = _standard(pydantic_schema, pydantic_schema.get("$defs", {}))
    if schema.get("type") == "object":
        schema["type"] = ["object", "null"]

    schema = {"description": option.description, **schema}
    extra = option.field.json_schema_extra
    if isinstance(extra, dict):
        schema |= extra
    if not option.required:
        schema["default"] = to_jsonable_python(option.default, by_alias=True)
    return schema


def _standard(schema: Any, definitions: dict[str, Any]) -> Any:
    """Returns a schema of pydantic's in the dialect of this one.

    Bounds get the dialect's names, and definitions take the place of references to them. The
    definition of any JSON value is recursive; it becomes the schema that allows anything.
    """
    if isinstance(schema, list):
        return [_standard(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema

    if (reference := schema.get("$ref")) is not None:
        name = reference.removeprefix("#/$defs/")
        return {} if name == "JsonValue" else _standard(definitions[name], definitions)

    standard = {
        _BOUNDS.get(key, key): _standard(value, definitions)
        for key, value in schema.items()
        if key != "$defs"
    }
    if "patternProperties" in standard:
        standard["additionalProperties"] = False
    return standard
