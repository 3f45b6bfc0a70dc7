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

ATOMS = (type(None), bool, int, float, str)
KEPT = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type,
    partial, np.dtype, np.ufunc, slice, range, EnvSpec, WrapperSpec, PurePath, Executor,
    type(threading.Lock()), type(threading.RLock()), logging.Logger, logging.Handler,
)  # fmt: skip
BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
KINDS: Mapping[type, str] = {
    **dict.fromkeys(ATOMS, "atom"),
    bytes: "bytes", tuple: "tuple", np.ndarray: "array", list: "list", set: "set",
    frozenset: "frozenset", dict: "dict", OrderedDict: "ordered", deque: "deque",
    np.random.Generator: "generator", np.random.RandomState: "random_state",
    random.Random: "random",
}  # fmt: skip
PROGRAM = ("keep", "enum", "unsavable")  # kinds of values whose attributes no state holds
POINTER_NBYTES = np.dtype(np.intp).itemsize
NOTHING = object()  # in the place of a value that the new environment does not have

Node = Any  # an atom, or [kind, ...]


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
        kind = _kind(value)
        match kind:
            case "atom":
                secret = isinstance(value, str) and redacted(value) != value
                return ["keep"] if secret else value
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
        self._number(value)
        return self._numbered(kind, value, place)

    def _numbered(self, kind: str, value: Any, place: str) -> Node:
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
                own = sorted(_attributes(value).items())
                attributes = {k: self.node(v, f"{place}.{k}") for k, v in own}
                return [kind, _class_name(value), attributes]
        raise NotSavableError(f"{place} is of class {_class_name(value)}")

    def _items(self, values: Iterable[Any], place: str) -> list[Node]:
        return [self.node(value, f"{place}[{i}]") for i, value in enumerate(values)]

    def _array(self, value: npt.NDArray[Any], place: str) -> Node:
        """Returns the node of an array: the memory that views share, and where in it they lie."""
        root = value
        while type(root.base) is np.ndarray:
            root = root.base
        if root.base is not None and not isinstance(root.base, bytes | bytearray):
            raise NotSavableError(f"{place} is an array in memory of {_class_name(root.base)}")
        order = sorted(range(root.ndim), key=lambda axis: -abs(root.strides[axis]))
        flat = root.transpose(order)
        if not flat.flags.c_contiguous:
            raise NotSavableError(f"{place} is an array whose memory has gaps")
        if id(root) not in self._memories:
            self._memories[id(root)] = len(self._memories)
            self._alive.append(root)
            memory: Node = self._plain(flat, place).reshape(-1).view(np.uint8)
        else:
            memory = self._memories[id(root)]
        first = value.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        dtype = self._plain(value, place).dtype.str
        self._number(value)
        return ["array", memory, dtype, [*value.shape], [*value.strides], first]

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
        self._numbered: list[Any] = []
        self._memories: list[npt.NDArray[np.uint8]] = []
        self._used: set[int] = set()  # objects of the new environment that have their state

    def value(self, node: Node, now: Any, place: str) -> Any:
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
        kind, *rest = node
        match kind:
            case "keep":
                if now is NOTHING:
                    raise NotSavableError(f"{place} is missing in a new environment")
                return now
            case "ref":
                return self._shared(rest[0], now, place)
            case "enum":
                return _enum(*rest)
            case "scalar":
                return rest[0][()]
            case "bytes":
                return rest[0].tobytes()
            case "tuple":
                return tuple(self._items(rest[0], now, place))
            case "array":
                return self._array(*rest)
            case "object" | "own" | "mujoco":
                return self._object(kind, rest, now, place)
            case "generator" | "random_state" | "random":
                return self._random(kind, rest[-1], now)
        return self._container(kind, rest, now, place)

    def _shared(self, number: Any, now: Any, place: str) -> Any:
        if type(number) is not int or not 0 <= number < len(self._numbered):
            raise ValueError(f"{place} is value {number!r:.40} of {len(self._numbered)}")
        value = self._numbered[number]
        if id(value) in self._used and _kind(now) in PROGRAM:
            raise _other_class(place, _class_name(value), now)
        return value

    def _container(self, kind: str, rest: list[Any], now: Any, place: str) -> Any:
        made: Any
        if kind in ("dict", "ordered"):
            made = {} if kind == "dict" else OrderedDict()
            self._numbered.append(made)
            before = now if _kind(now) in ("dict", "ordered") else {}
            for key_node, node in rest[0]:
                key = self.value(key_node, NOTHING, place)
                made[key] = self.value(node, before.get(key, NOTHING), f"{place}[{key!r}]")
            return made
        if kind == "frozenset":
            number = len(self._numbered)
            self._numbered.append(None)
            made = self._numbered[number] = frozenset(self._items(rest[0], now, place))
            return made
        match kind:
            case "list":
                made = []
            case "set":
                made = set()
            case "deque":
                made = deque(maxlen=rest[0])
            case _:
                raise ValueError(f"there are no values of kind {kind!r:.40}")
        self._numbered.append(made)
        items = self._items(rest[-1], now, place)
        if kind == "set":
            made.update(items)
        else:
            made.extend(items)
        return made

    def _items(self, nodes: list[Node], now: Any, place: str) -> list[Any]:
        before = [*now] if _kind(now) in ("list", "tuple", "deque") else []
        before += [NOTHING] * (len(nodes) - len(before))
        return [self.value(node, before[i], f"{place}[{i}]") for i, node in enumerate(nodes)]

    def _array(
        self, memory: Node, dtype: str, shape: list[int], strides: list[int], first: int
    ) -> npt.NDArray[Any]:
        if isinstance(memory, np.ndarray):
            self._memories.append(memory.astype(np.uint8))
        of = self._memories[memory if isinstance(memory, int) else -1]
        if 0 in shape:
            made = np.empty(shape, plain_dtype(dtype))
        else:
            made = np.ndarray(tuple(shape), plain_dtype(dtype), of.data, first, tuple(strides))
        self._numbered.append(made)
        return made

    def _object(self, kind: str, rest: list[Any], now: Any, place: str) -> Any:
        if now is NOTHING or now is None or id(now) in self._used:
            raise NotSavableError(f"{place} has no object in a new environment")
        if kind != "mujoco" and _class_name(now) != rest[0]:
            raise _other_class(place, rest[0], now)
        if _kind(now) in PROGRAM:
            raise UserError(
                f"the checkpoint would change {printable(place)}, which is of class "
                f"{_class_name(now)}: a part of the program, which no state of environments "
                "includes; it was made up or is of another version, so resume from another one"
            )
        if _kind(now) != kind:
            raise NotSavableError(f"{place} was saved as {kind} and would be as {_kind(now)}")

        self._numbered.append(now)
        self._used.add(id(now))
        if kind == "mujoco":
            return self._mujoco(now, *rest)
        state = rest[1]
        if kind == "own":
            now.load_state_dict(self.value(state, NOTHING, place))
            return now
        before, named = _attributes(now), getattr(now, "__dict__", {})
        for gone in before.keys() - state.keys():
            if gone in named:
                del named[gone]
            else:
                object.__delattr__(now, gone)
        for attribute, node in state.items():
            own = self.value(node, before.get(attribute, NOTHING), f"{place}.{attribute}")
            if attribute in _slots(type(now)):
                object.__setattr__(now, attribute, own)
            else:
                named[attribute] = own
        return now

    @staticmethod
    def _mujoco(now: Any, time: float, arrays: dict[str, npt.NDArray[Any]]) -> Any:
        now.time = time
        for name in _mujoco_arrays(now):
            values = getattr(now, name)
            if name in arrays and values.shape == arrays[name].shape:  # contacts come and go
                values[...] = arrays[name]
        return now

    def _random(self, kind: str, state: Any, now: Any) -> Any:
        made = now if id(now) not in self._used else None
        match kind:
            case "generator":
                name = state["bit_generator"]
                if name not in BIT_GENERATORS:
                    raise ValueError(f"there is no bit generator {name!r}")
                bits = getattr(made, "bit_generator", None)
                if type(made) is not np.random.Generator or type(bits).__name__ != name:
                    made = np.random.Generator(getattr(np.random, name)())
                made.bit_generator.state = state
            case "random_state":
                made = made if type(made) is np.random.RandomState else np.random.RandomState()
                made.set_state(state)
            case _:
                made = made if type(made) is random.Random else random.Random()
                version, words, gauss = state[0], state[1], state[2]
                made.setstate((version, tuple(words), gauss))
        self._used.add(id(made))
        self._numbered.append(made)
        return made


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


def _other_class(place: str, name: str, now: Any) -> NotSavableError:
    return NotSavableError(f"{place} was of class {name} and is of {_class_name(now)}")


def _attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, also in slots; of a space those that may change."""
    found = dict(getattr(value, "__dict__", {}))
    found |= {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    if isinstance(value, gymnasium.Space):
        return {name: own for name, own in found.items() if not isinstance(own, np.ndarray)}
    return found


def _slots(made: type) -> set[str]:
    return {
        name
        for base in made.__mro__
        for name, member in vars(base).items()
        if type(member) is types.MemberDescriptorType
    }


def _is_plain(made: type) -> bool:
    """Returns whether an object of a class holds nothing but its attributes: no part is in C.

    Such an object has no items of variable size, and is no larger than an `object` with a pointer
    for each slot, and for its `__dict__` and its weak references if it has these.
    """
    links = bool(made.__dictoffset__) + bool(made.__weakrefoffset__)
    most = object.__basicsize__ + (len(_slots(made)) + links) * POINTER_NBYTES
    return made.__itemsize__ == 0 and made.__basicsize__ <= most


def _saves_itself(value: Any) -> bool:
    own = all(hasattr(type(value), name) for name in ("state_dict", "load_state_dict"))
    return own and isinstance(value, gymnasium.Env | VectorEnv)


def _mujoco_arrays(value: Any) -> list[str]:
    """Returns the names of the writeable arrays of MuJoCo's data."""
    names = [name for name in dir(value) if not name.startswith("_")]
    found = {name: getattr(value, name) for name in names}
    return [name for name, own in found.items() if type(own) is np.ndarray and own.flags.writeable]


def _is_mujoco(value: Any, name: str) -> bool:
    mujoco = sys.modules.get("mujoco")
    return mujoco is not None and type(value) is getattr(mujoco, name)


def _class_name(value: Any) -> str:
    module = getattr(type(value), "__module__", "")  # SWIG's classes have none
    return f"{module}.{type(value).__qualname__}"


def _enum(class_name: str, name: str) -> Enum:
    """Returns a member of an enumeration that the program has imported."""
    module, _, qualified = class_name.rpartition(".")
    found: Any = getattr(sys.modules[module], qualified)
    if not (isinstance(found, type) and issubclass(found, Enum)):
        raise ValueError(f"{class_name} is no enumeration")
    return found[name]
