"""Type checkers know the options that codecs and sinks add to a config section."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.configs.reduce import CODECS
from penstock.configs.run import SINKS

TREE = ast.parse(Path(str(penstock.__file__)).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("section", "homes", "registry"),
    [
        (
            "_ReduceWithCodecs",
            {
                "_codecs": "penstock.learner.codecs.registry",
                "_lossy": "penstock.learner.extras.codecs.registry",
            },
            CODECS,
        ),
        ("_RunWithSinks", {"_sinks": "penstock.monitor.registry"}, SINKS),
    ],
)
def test_type_checkers_know_every_registered_option(
    section: str, homes: dict[str, str], registry: Any
) -> None:
    (found,) = [n for n in ast.walk(TREE) if isinstance(n, ast.ClassDef) and n.name == section]
    bases = [
        getattr(import_module(homes[base.value.id]), base.attr)
        for base in found.bases
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name)
    ]
    known = {name for base in bases for name in base.model_fields}
    for spec in registry.specs.values():
        if spec.options is not None:
            assert set(spec.options.model_fields) <= known, spec
