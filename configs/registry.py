"""Registries of implementations in other rooms: specs by name, and the options that they add.

`configs` imports no other room. The modules `penstock.REGISTRIES` register a spec of each
algorithm, codec, transport and sink. They are imported when a spec is first needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from pydantic import create_model, model_validator

import penstock
from penstock.configs.section import Contradiction, Section


class Spec(Protocol):
    """Description of an implementation that is available without importing it."""

    @property
    def name(self) -> str:
        """Unique among the specs of a registry."""


class ExtraOptions(Section):
    """Base of the options that a spec adds to a section."""

    @classmethod
    def of(cls, cfg: OpenSection) -> Self:
        """The values of these options in the section ``cfg``."""
        given = cfg.model_extra or {}
        return cls.model_validate({key: given[key] for key in cls.model_fields if key in given})

    def contradictions(self) -> Iterator[Contradiction]:
        """Invalid combinations of these options."""
        return iter(())


class SpecWithOptions(Spec, Protocol):
    """A spec that adds options to a section."""

    @property
    def options(self) -> type[ExtraOptions]:
        """The options' schema; `ExtraOptions` itself if there are none."""


S = TypeVar("S", bound=Spec)
SO = TypeVar("SO", bound=SpecWithOptions)


class Registry(Generic[S]):
    """Specs by name, in the order in which they were registered."""

    _complete: ClassVar[bool] = False
    _all: ClassVar[list[Registry[Any]]] = []

    def __init__(self, kind: str, reserved: tuple[str, ...] = ()) -> None:
        """``kind`` names what is registered, such as "codec"; ``reserved`` names are refused."""
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


def registered() -> tuple[Spec, ...]:
    """The specs of all registries."""
    return tuple(spec for registry in Registry._all for spec in registry.specs.values())


class OptionsRegistry(Registry[SO]):
    """Specs that add options to one section of the config, an `OpenSection`."""

    def __init__(
        self,
        kind: str,
        section: str,
        shared: type[Section],
        *,
        choice: str | None = None,
        reserved: tuple[str, ...] = (),
    ) -> None:
        """``section`` is the section's name, such as "learner.reduce", and ``shared`` its options
        that depend on no spec. ``choice`` is the option whose value is the name of a spec or one
        of the ``reserved`` names."""
        super().__init__(kind, reserved)
        self._section = section
        self.shared = shared
        self.choice = choice and f"{section}.{choice}"

    def register(self, spec: SO) -> None:
        """Add a spec. Raises ValueError for a name that is taken, or for an option that another
        spec defines differently."""
        # Not those of `_joined`: pydantic takes 40 ms for a schema, and each spec would have one.
        beside = [r for r in self._all if isinstance(r, OptionsRegistry) and r.fills(self._section)]
        kinds = [self.shared, *(each.options for r in beside for each in r._specs.values())]
        taken = {name: field for kind in kinds for name, field in kind.model_fields.items()}
        for name, option in spec.options.model_fields.items():
            if name in taken and repr(taken[name]) != repr(option):
                raise ValueError(
                    f"{self._kind} {spec.name}: {self._section}.{name} exists already with another "
                    "meaning; rename the option"
                )
        super().register(spec)

    @property
    def names(self) -> tuple[str, ...]:
        """The values of `choice`."""
        return *self._reserved, *self.specs

    def checked(self, name: str) -> str:
        """``name``, a value of `choice`. Raises ValueError if it is not one of `names`."""
        if self.specs and name not in self.names:
            raise ValueError(f"{name} is not a {self._kind}")
        return name

    def fills(self, section: str) -> bool:
        """Whether its specs add options to ``section``."""
        return self._section == section

    def listed(self) -> str:
        """The specs in words; a registry with a `choice` may say more than their names."""
        return ", ".join(f"`{name}`" for name in self.specs)


@cache
def _joined(shared: type[Section], added: tuple[type[ExtraOptions], ...]) -> type[Section]:
    """One schema with the fields of all, in the order of the arguments."""
    bases = [kind for kind in reversed(added) if kind is not ExtraOptions]
    return create_model(f"Joined{shared.__name__}", __base__=(*bases, shared)) if bases else shared


class OpenSection(Section, extra="allow"):
    """A section to which specs add options.

    The added options are its extra keys, and all of them are present. While no spec is registered,
    any extra key is accepted.
    """

    registries: ClassVar[tuple[OptionsRegistry[Any], ...]]
    """What adds options; each with the same ``shared`` ones."""

    @classmethod
    def joined(cls) -> type[Section]:
        """The schema of the section, with the options of all specs."""
        specs = [spec for registry in cls.registries for spec in registry.specs.values()]
        return _joined(cls.registries[0].shared, tuple(dict.fromkeys(s.options for s in specs)))

    @model_validator(mode="before")
    @classmethod
    def _check_all(cls, data: Any) -> Any:
        if any(registry.specs for registry in cls.registries) and isinstance(data, dict):
            return cls.joined().model_validate(data).model_dump()
        return data
