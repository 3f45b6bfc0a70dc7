"""The state of environments as plain data, put back into environments that were made the same way.

`state_of` walks the attributes of a vector environment: numbers, texts, containers, numpy arrays
and random generators, and in turn the attributes of its objects. `restore` walks a new one, already
reset, alongside: it sets the attributes of the objects in it. No object of any class is
made from a file, and only those objects are changed that the writer would walk (`_kind` decides for
both), so a state may come from anyone. Containers and arrays are made anew; those that were shared,
also in part (views), are shared again.

What is part of the program stays as it is in the new environment: functions, classes, locks,
loggers, specs of environments, the bounds of spaces; so do texts that contain a secret of the
config. A state that changes such a part was not written here and ends the resume. An object of
a class in C or C++ cannot be saved (`NotSavableError`), except numpy's and Python's random
generators and MuJoCo's data. An environment with such objects is saved if its class has
`state_dict() -> plain data` and `load_state_dict(state)`.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from gymnasium.vector import VectorEnv

from penstock.configs.errors import UserError, printable
from penstock.configs.secrets import redacted
from penstock.core.specs import plain_dtype

# Classes of values that are nodes themselves.
ATOMS = (type(None), bool, int, float, str)
# Classes of values that stay as they are in the new environment.
KEPT = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type,
    partial, np.dtype, np.ufunc, slice, range, EnvSpec, WrapperSpec, PurePath, Executor,
    type(threading.Lock()), type(threading.RLock()), logging.Logger, logging.Handler,
)  # fmt: skip
# numpy's bit generators, which are made by name from a state.
BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
# The kind of node of a value of just such a class; `_kind` knows the others.
KINDS: Mapping[type, str] = {
    **dict.fromkeys(ATOMS, "atom"),
    bytes: "bytes", tuple: "tuple", np.ndarray: "array", list: "list", set: "set",
    frozenset: "frozenset", dict: "dict", OrderedDict: "ordered", deque: "deque",
    np.random.Generator: "generator", np.random.RandomState: "random_state",
    random.Random: "random",
}  # fmt: skip
# Kinds of values that are parts of the program, so that no state holds their attributes.
PROGRAM = ("keep", "enum", "unsavable")
POINTER_NBYTES = np.dtype(np.intp).itemsize
# Stands for a value that the new environment does not have.
NOTHING = object()

# A value as plain data: an atom, or a list that begins with its kind.
Node = Any


class NotSavableError(Exception):
    """Environments cannot be saved or restored; the message says which attribute is the cause."""


def state_of(env: VectorEnv) -> Node:
    """Returns the state of ``env`` between two steps, for `penstock.core.state_bytes`.

    Raises:
        NotSavableError: if a part of it cannot be saved.
    """
    try:
        return _Writer().node(env, type(env).__name__)
    except RecursionError as error:
        raise NotSavableError(f"{type(env).__name__} is nested too deeply") from error


def restore(env: VectorEnv, state: Node) -> None:
    """Put the state of `state_of` into ``env``, which was made with the same options and reset.

    Raises:
        NotSavableError: if ``env`` is built otherwise. It must not be used then.
        UserError: if the state would change a part of the program.
    """
    try:
        if _Reader().value(state, env, type(env).__name__) is not env:
            raise ValueError("it is of no environment")
    except NotSavableError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as e:
        raise NotSavableError(f"the saved state of {type(env).__name__} does not fit ({e})") from e


class _Writer:
    """Makes nodes of values.

    Each object and container is numbered at its first place; later places refer to that number.
    ``place`` is the way to a value through attributes and keys, for messages.
    """

    def __init__(self) -> None:
        # Numbers of objects and containers by their `id`.
        self._numbers: dict[int, int] = {}
        # Numbers of the memories of arrays, by the `id` of the array that owns the memory.
        self._memories: dict[int, int] = {}
        # All that has a number, so that no `id` is used twice.
        self._alive: list[Any] = []

    def node(self, value: Any, place: str) -> Node:
        """Returns the node of a value.

        Raises:
            NotSavableError: if it cannot be saved.
        """
        # Values without a number: wherever they lie, they are written again.
        kind = _kind(value)
        match kind:
            case "atom":
                is_secret = isinstance(value, str) and redacted(value) != value
                return ["keep"] if is_secret else value
            case "keep":
                return ["keep"]
            case "enum":
                return ["enum", _class_name(value), value.name]
            case "scalar":
                return ["scalar", self._plain(np.asarray(value), place)]
            case "bytes":
                return ["bytes", np.frombuffer(value, np.uint8)]
            case "tuple":
                return ["tuple", self._items(value, place)]

        if id(value) in self._numbers:
            return ["ref", self._numbers[id(value)]]
        if kind == "array":
            return self._array(value, place)
        # A value may contain itself, so it has its number before its parts are written.
        self._number(value)
        return self._numbered(kind, value, place)

    def _numbered(self, kind: str, value: Any, place: str) -> Node:
        """Returns the node of a container, a random generator or an object."""
        match kind:
            case "list" | "set" | "frozenset":
                return [kind, self._items(value, place)]
            case "dict" | "ordered":
                items = [
                    [self.node(k, place), self.node(v, f"{place}[{k!r}]")] for k, v in value.items()
                ]
                return [kind, items]
            case "deque":
                return [kind, value.maxlen, self._items(value, place)]

            case "generator":
                state = value.bit_generator.state
                if state["bit_generator"] in BIT_GENERATORS:
                    return [kind, state]
            case "random_state":
                return [kind, dict(value.get_state(legacy=False))]
            case "random":
                version, words, gauss = value.getstate()
                return [kind, [version, [*words], gauss]]

            case "mujoco":
                arrays = {name: np.array(getattr(value, name)) for name in _mujoco_arrays(value)}
                return [kind, value.time, arrays]
            case "own":
                return [kind, _class_name(value), self.node(value.state_dict(), place)]
            case "object":
                attributes = {
                    name: self.node(attribute, f"{place}.{name}")
                    for name, attribute in sorted(_attributes(value).items())
                }
                return [kind, _class_name(value), attributes]
        raise NotSavableError(f"{place} is of class {_class_name(value)}")

    def _items(self, values: Iterable[Any], place: str) -> list[Node]:
        return [self.node(value, f"{place}[{i}]") for i, value in enumerate(values)]

    def _array(self, value: npt.NDArray[Any], place: str) -> Node:
        """Returns the node of an array: the memory that views share, and where in it they lie."""
        # The array that owns the memory, and its values in the order in which they lie there.
        owner = value
        while type(owner.base) is np.ndarray:
            owner = owner.base
        if owner.base is not None and not isinstance(owner.base, bytes | bytearray):
            raise NotSavableError(f"{place} is an array in memory of {_class_name(owner.base)}")
        axes = sorted(range(owner.ndim), key=lambda axis: -abs(owner.strides[axis]))
        flat = owner.transpose(axes)
        if not flat.flags.c_contiguous:
            raise NotSavableError(f"{place} is an array whose memory has gaps")

        # The memory itself at its first place, and its number at later ones.
        memory: Node
        if id(owner) not in self._memories:
            self._memories[id(owner)] = len(self._memories)
            self._alive.append(owner)
            memory = self._plain(flat, place).reshape(-1).view(np.uint8)
        else:
            memory = self._memories[id(owner)]

        offset = value.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        dtype = self._plain(value, place).dtype.str
        self._number(value)
        return ["array", memory, dtype, [*value.shape], [*value.strides], offset]

    def _number(self, value: Any) -> None:
        """Give a value the next number."""
        self._alive.append(value)
        self._numbers[id(value)] = len(self._numbers)

    @staticmethod
    def _plain(value: npt.NDArray[Any], place: str) -> npt.NDArray[Any]:
        """Returns the array. Raises NotSavableError if its dtype is not of plain numbers."""
        try:
            plain_dtype(value.dtype.str)
        except ValueError as error:
            raise NotSavableError(f"{place} is an array of {value.dtype}") from error
        return value


class _Reader:
    """Makes the values of nodes, in the order in which `_Writer` numbered them.

    ``present`` is the value that lies at the same place in the new environment, or `NOTHING`.
    """

    def __init__(self) -> None:
        # The values that have a number, in its order.
        self._numbered: list[Any] = []
        self._memories: list[npt.NDArray[np.uint8]] = []
        # The `id` of each object of the new environment that has its state.
        self._restored: set[int] = set()

    def value(self, node: Node, present: Any, place: str) -> Any:
        """Returns the value of ``node``.

        Args:
            node: the saved value.
            present: the value at its place in the new environment. An object is changed to the
                saved state and returned.
            place: the way to it through attributes and keys, for messages.

        Raises:
            NotSavableError: if the new environment has no object for the state.
            UserError: if the state would change a part of the program.
            ArithmeticError, AttributeError, LookupError, TypeError or ValueError: for data that
                `_Writer` does not make.
        """
        if type(node) in ATOMS:
            return node
        kind, *fields = node
        match kind:
            case "keep":
                if present is NOTHING:
                    raise NotSavableError(f"{place} is missing in a new environment")
                return present
            case "ref":
                return self._shared(fields[0], present, place)
            case "enum":
                return _enum(*fields)
            case "scalar":
                return fields[0][()]
            case "bytes":
                return fields[0].tobytes()
            case "tuple":
                return tuple(self._items(fields[0], present, place))
            case "array":
                return self._array(*fields)
            case "object" | "own" | "mujoco":
                return self._object(kind, fields, present, place)
            case "generator" | "random_state" | "random":
                return self._random(kind, fields[-1], present)
        return self._container(kind, fields, present, place)

    def _shared(self, number: Any, present: Any, place: str) -> Any:
        """Returns the value with a number, which an earlier place has too."""
        if type(number) is not int or not 0 <= number < len(self._numbered):
            raise ValueError(f"{place} is value {number!r:.40} of {len(self._numbered)}")
        value = self._numbered[number]
        if id(value) in self._restored and _kind(present) in PROGRAM:
            raise _other_class(place, _class_name(value), present)
        return value

    def _container(self, kind: str, fields: list[Any], present: Any, place: str) -> Any:
        """Returns a new container. It has its number before its items, which may refer to it."""
        container: Any
        if kind in ("dict", "ordered"):
            container = {} if kind == "dict" else OrderedDict()
            self._numbered.append(container)
            present_items = present if _kind(present) in ("dict", "ordered") else {}
            for key_node, node in fields[0]:
                key = self.value(key_node, NOTHING, place)
                present_item = present_items.get(key, NOTHING)
                container[key] = self.value(node, present_item, f"{place}[{key!r}]")
            return container

        if kind == "frozenset":
            number = len(self._numbered)
            self._numbered.append(None)
            container = frozenset(self._items(fields[0], present, place))
            self._numbered[number] = container
            return container

        match kind:
            case "list":
                container = []
            case "set":
                container = set()
            case "deque":
                container = deque(maxlen=fields[0])
            case _:
                raise ValueError(f"there are no values of kind {kind!r:.40}")
        self._numbered.append(container)
        items = self._items(fields[-1], present, place)
        if kind == "set":
            container.update(items)
        else:
            container.extend(items)
        return container

    def _items(self, nodes: list[Node], present: Any, place: str) -> list[Any]:
        """Returns the values of a container's items, next to those of ``present``."""
        present_items = [*present] if _kind(present) in ("list", "tuple", "deque") else []
        present_items += [NOTHING] * (len(nodes) - len(present_items))
        return [self.value(node, present_items[i], f"{place}[{i}]") for i, node in enumerate(nodes)]

    def _array(
        self, memory: Node, dtype: str, shape: list[int], strides: list[int], offset: int
    ) -> npt.NDArray[Any]:
        """Returns an array in its memory, which other arrays may share."""
        if isinstance(memory, np.ndarray):
            self._memories.append(memory.astype(np.uint8))
        owner = self._memories[memory if isinstance(memory, int) else -1]

        if 0 in shape:
            array = np.empty(shape, plain_dtype(dtype))
        else:
            array = np.ndarray(
                tuple(shape), plain_dtype(dtype), owner.data, offset=offset, strides=tuple(strides)
            )
        self._numbered.append(array)
        return array

    def _object(self, kind: str, fields: list[Any], present: Any, place: str) -> Any:
        """Put a state into the object that lies at its place, and return the object."""
        if present is NOTHING or present is None or id(present) in self._restored:
            raise NotSavableError(f"{place} has no object in a new environment")
        if kind != "mujoco" and _class_name(present) != fields[0]:
            raise _other_class(place, fields[0], present)
        if _kind(present) in PROGRAM:
            raise UserError(
                f"the checkpoint would change {printable(place)}, which is of class "
                f"{_class_name(present)}: a part of the program, which no state of environments "
                "includes; it was made up or is of another version, so resume from another one"
            )
        if _kind(present) != kind:
            raise NotSavableError(f"{place} was saved as {kind} and would be as {_kind(present)}")

        self._numbered.append(present)
        self._restored.add(id(present))
        if kind == "mujoco":
            time, arrays = fields
            return self._mujoco(present, time, arrays)
        state = fields[1]
        if kind == "own":
            present.load_state_dict(self.value(state, NOTHING, place))
        else:
            self._set_attributes(present, state, place)
        return present

    def _set_attributes(self, present: Any, state: dict[str, Node], place: str) -> None:
        """Give an object the attributes of ``state``, and remove those that it does not have."""
        present_attributes = _attributes(present)
        named = getattr(present, "__dict__", {})
        for name in present_attributes.keys() - state.keys():
            if name in named:
                del named[name]
            else:
                object.__delattr__(present, name)

        for name, node in state.items():
            value = self.value(node, present_attributes.get(name, NOTHING), f"{place}.{name}")
            if name in _slots(type(present)):
                object.__setattr__(present, name, value)
            else:
                named[name] = value

    @staticmethod
    def _mujoco(present: Any, time: float, arrays: dict[str, npt.NDArray[Any]]) -> Any:
        """Put the time and the arrays into MuJoCo's data, and return it."""
        present.time = time
        for name in _mujoco_arrays(present):
            values = getattr(present, name)
            # Arrays of contacts have another length with each number of contacts.
            if name in arrays and values.shape == arrays[name].shape:
                values[...] = arrays[name]
        return present

    def _random(self, kind: str, state: Any, present: Any) -> Any:
        """Returns a generator: the one at its place if that is of its class, else a new one."""
        generator = present if id(present) not in self._restored else None
        match kind:
            case "generator":
                name = state["bit_generator"]
                if name not in BIT_GENERATORS:
                    raise ValueError(f"there is no bit generator {name!r}")
                bits = getattr(generator, "bit_generator", None)
                if type(generator) is not np.random.Generator or type(bits).__name__ != name:
                    generator = np.random.Generator(getattr(np.random, name)())
                generator.bit_generator.state = state
            case "random_state":
                if type(generator) is not np.random.RandomState:
                    generator = np.random.RandomState()
                generator.set_state(state)
            case _:
                if type(generator) is not random.Random:
                    generator = random.Random()
                version, words, gauss = state[0], state[1], state[2]
                generator.setstate((version, tuple(words), gauss))

        self._restored.add(id(generator))
        self._numbered.append(generator)
        return generator


def _kind(value: Any) -> str:
    """Returns the kind of node that `_Writer` makes of a value.

    `_Reader` changes no object in any other way.
    """
    if type(value) in KINDS:
        return KINDS[type(value)]
    if isinstance(value, KEPT) or _is_mujoco(value, "MjModel"):
        return "keep"
    if isinstance(value, Enum):
        return "enum"
    if isinstance(value, np.generic):
        return "scalar"
    if _is_mujoco(value, "MjData"):
        return "mujoco"
    if _saves_itself(value):
        return "own"
    return "object" if _is_plain(type(value)) else "unsavable"


def _other_class(place: str, name: str, present: Any) -> NotSavableError:
    return NotSavableError(f"{place} was of class {name} and is of {_class_name(present)}")


def _attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, also in slots; of a space those that may change."""
    attributes = dict(getattr(value, "__dict__", {}))
    slots = _slots(type(value))
    attributes |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    if isinstance(value, gymnasium.Space):
        return {
            name: attribute
            for name, attribute in attributes.items()
            if not isinstance(attribute, np.ndarray)
        }
    return attributes


def _slots(cls: type) -> set[str]:
    """Returns the names of the slots of a class, with those of its bases."""
    return {
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if type(member) is types.MemberDescriptorType
    }


def _is_plain(cls: type) -> bool:
    """Returns whether an object of a class holds nothing but its attributes: no part is in C.

    Such an object has no items of variable size, and is no larger than an `object` with a pointer
    for each slot, and for its `__dict__` and its weak references if it has these.
    """
    pointers = len(_slots(cls))
    if cls.__dictoffset__:
        pointers += 1
    if cls.__weakrefoffset__:
        pointers += 1
    most_nbytes = object.__basicsize__ + pointers * POINTER_NBYTES
    return cls.__itemsize__ == 0 and cls.__basicsize__ <= most_nbytes


def _saves_itself(value: Any) -> bool:
    """Returns whether an environment has `state_dict` and `load_state_dict`."""
    has_both = all(hasattr(type(value), name) for name in ("state_dict", "load_state_dict"))
    return has_both and isinstance(value, gymnasium.Env | VectorEnv)


def _mujoco_arrays(value: Any) -> list[str]:
    """Returns the names of the writeable arrays of MuJoCo's data."""
    attributes = {name: getattr(value, name) for name in dir(value) if not name.startswith("_")}
    return [
        name
        for name, attribute in attributes.items()
        if type(attribute) is np.ndarray and attribute.flags.writeable
    ]


def _is_mujoco(value: Any, name: str) -> bool:
    mujoco = sys.modules.get("mujoco")
    return mujoco is not None and type(value) is getattr(mujoco, name)


def _class_name(value: Any) -> str:
    module = getattr(type(value), "__module__", "")  # SWIG's classes have none
    return f"{module}.{type(value).__qualname__}"


def _enum(class_name: str, name: str) -> Enum:
    """Returns a member of an enumeration that the program has imported."""
    module, _, qualified_name = class_name.rpartition(".")
    enumeration: Any = getattr(sys.modules[module], qualified_name)
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum)):
        raise ValueError(f"{class_name} is no enumeration")
    return enumeration[name]
