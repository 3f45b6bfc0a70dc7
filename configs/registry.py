"""Registries of implementations in other rooms: specs by name.

`configs` imports no other room. The modules `penstock.REGISTRIES` register a spec of each
algorithm, codec, optimizer, pace, transport and sink. They are imported when a spec is first
needed. The options of an implementation are fields of its section.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic_core import CoreSchema, core_schema

import penstock


class Spec(Protocol):
    """Description of an implementation that is available without importing it."""

    @property
    def name(self) -> str:
        """Unique among the specs of a registry."""


S = TypeVar("S", bound=Spec)


class Registry(Generic[S]):
    """Specs by name, in the order in which they were registered.

    An option whose value is the name of a spec is a field ``Annotated[str, registry]``.
    """

    _complete: ClassVar[bool] = False  # whether the modules that register specs are imported
    _all: ClassVar[list[Registry[Any]]] = []  # every registry

    def __init__(self, kind: str, reserved: tuple[str, ...] = ()) -> None:
        """Make an empty registry.

        Args:
            kind: name of one that is registered, such as "codec", for messages.
            reserved: further names that an option may have as its value.
        """
        self._kind = kind
        self._reserved = reserved
        self._specs: dict[str, S] = {}
        self._all.append(self)

    @property
    def specs(self) -> Mapping[str, S]:
        """All specs by name; the first access imports the modules that register them."""
        if not Registry._complete:
            for module in penstock.REGISTRIES:
                import_module(module)
            Registry._complete = True
        return MappingProxyType(self._specs)

    def register(self, spec: S) -> None:
        """Add a spec. Raises ValueError for a name that is taken."""
        if spec.name in (*self._reserved, *self._specs):
            raise ValueError(f"{self._kind} {spec.name} exists already; choose another name")
        self._specs[spec.name] = spec

    def unregister(self, name: str) -> None:
        """Remove the spec ``name``; for tests."""
        del self._specs[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The values of an option that names a spec."""
        return *self._reserved, *self.specs

    def listed(self) -> str:
        """Returns the specs in words, for the description of such an option."""
        return ", ".join(f"`{name}`" for name in self.specs)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Returns the schema of such an option for pydantic."""
        text = core_schema.str_schema(strict=True)
        return core_schema.no_info_after_validator_function(self._validated, text)

    def _validated(self, name: str) -> str:
        """Returns a name. Raises ValueError for one that is neither registered nor reserved."""
        if name not in self.names:
            raise ValueError(f"{name} is not a {self._kind}")
        return name


def registered() -> tuple[Spec, ...]:
    """Returns the specs of all registries."""
    return tuple(spec for registry in Registry._all for spec in registry.specs.values())
