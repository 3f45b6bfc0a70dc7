"""A GPU that is not there: torch checks on which device each tensor lies, and computes nothing.

`FakeTensorMode` runs code with tensors that have a shape, a dtype and a device, and no values. Here
the device is one that torch registers for backends written in Python, as its CPU builds cannot make
even fake tensors of CUDA with a gradient. Under `pretended`

- a call with tensors of two devices fails, and
- so does what makes the host wait for the device: to read a value (`.item()`, `bool`), to use one
  as a shape (`nonzero`, a boolean mask), and a copy between the two without ``non_blocking``, which
  `torch.tensor(..., device=...)` makes, too, and
- so does a product or convolution of two dtypes, as on a GPU. `torch.autocast` casts as on CUDA.

Where there is a GPU, tests that import this are skipped: the registered device takes the place of
CUDA in the whole process. `Tensor.is_pinned` would be false for all memory there, and a backward
pass would not keep to the stream of its forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from penstock.device import choice
from penstock.device.host import HostDevice
from penstock.learner import base_trainer

if torch.cuda.is_available():
    pytest.skip("a GPU is there, and cannot be beside a pretended one", allow_module_level=True)


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("pretended", backend_module=_Module())
GPU = torch.device("pretended", 0)
FREE_NBYTES = 1 << 30

aten = torch.ops.aten
PRODUCTS = {
    aten.convolution, aten.convolution_backward, aten.mm, aten.addmm, aten.bmm, aten.baddbmm,
    aten.mv, aten.addmv, aten.dot,
}  # fmt: skip
# `torch.autocast` is a dispatch key, for which CUDA has kernels and a registered device has none.
# These are of ATen/autocast_mode.h: what computes in the lower precision, and what in float32.
LOWER = ("conv1d", "conv2d", "linear", "matmul", "mm", "mv", "addmm", "addmv", "bmm", "baddbmm")
FLOAT32 = ("layer_norm", "softmax.int", "log_softmax.int", "exp", "log", "mse_loss")
_parsed = torch._C._parse_dispatch_key("AutocastPrivateUse1")
assert _parsed is not None
_KEY: torch._C.DispatchKey = _parsed
_LIBRARY = torch.library.Library("aten", "IMPL")


def _autocast(name: str, dtype: torch.dtype) -> None:
    """Make an operation compute in ``dtype`` within `torch.autocast` of the device."""
    name, _, overload = name.partition(".")
    call = getattr(getattr(aten, name), overload or "default")

    def cast(value: Any) -> Any:
        eligible = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if eligible and value.dtype != torch.float64 else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            return call(*map(cast, args), **kwargs)

    _LIBRARY.impl(call._schema.name + (f".{overload}" if overload else ""), kernel, _KEY.name)


_OTHERS = torch.library.Library("_", "IMPL")
_OTHERS.fallback(torch.library.fallthrough_kernel, _KEY.name)
for _name in LOWER:
    _autocast(_name, torch.bfloat16)
for _name in FLOAT32:
    _autocast(_name, torch.float32)


class HostWaitsError(AssertionError):
    """A call makes the host wait for the device."""


class MixedDtypesError(AssertionError):
    """A product or convolution of two dtypes, which a GPU refuses."""


class PretendedDevice(HostDevice):
    """Its pinned memory is real, and full of zeros."""

    torch_device = GPU
    runs_behind = True

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with unset_fake_temporarily():
            return torch.zeros(tuple(shape), dtype=dtype)

    def memory_for(self, host: Tensor) -> Tensor:
        return torch.empty(host.shape, dtype=host.dtype, device=GPU)

    def free_nbytes(self) -> int:
        return FREE_NBYTES

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.device != source.device
        assert target.shape == source.shape
        assert target.dtype == source.dtype


class Waits(TorchDispatchMode):
    """Finds copies between host and device that wait. ``allowed``: they are right here.

    ``convolved`` are the inputs of convolutions, ``products`` the dtypes of products and
    convolutions, in their order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allowed = False
        self.convolved: list[Tensor] = []
        self.products: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            factors = [value for value in args if isinstance(value, Tensor)]
            dtypes = {value.dtype for value in factors}
            if len(dtypes) > 1:
                raise MixedDtypesError(f"{func} of {', '.join(map(str, dtypes))}")
            if factors[0].device == GPU:
                self.products.append(factors[0].dtype)
        if func is torch.ops.aten.convolution.default:
            self.convolved.append(args[0])
        if func is torch.ops.aten.index_put_.default and not args[2].dim() and not self.allowed:
            # With CUDA a number is a tensor of the host here, and `index_put_` copies it.
            raise HostWaitsError("an assignment of a number to places of the device waits")
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            waits = not ((kwargs or {}).get("non_blocking") or (len(args) > 2 and args[2]))
            crosses = source.device.type != found.device.type
            if crosses and waits and not self.allowed:
                raise HostWaitsError(f"a copy from {source.device} to {found.device} waits")
        return found


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Trainers are made on the device. What they make is made while waits are allowed."""
    monkeypatch.setitem(choice.DEVICES, GPU.type, lambda _: PretendedDevice())
    monkeypatch.setattr(base_trainer, "pick_device", lambda _: GPU)
    monkeypatch.setattr(nn.Module, "to", _to)
    monkeypatch.setattr(Tensor, "numpy", _numpy(Tensor.numpy))
    with FakeTensorMode(allow_non_fake_inputs=True), Waits() as waits:
        yield waits


def _to(module: nn.Module, device: torch.device) -> nn.Module:
    """`Module.to`, which cannot swap fake parameters."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None and id(value) not in made:
                moved = value.detach().to(device)
                made[id(value)] = nn.Parameter(moved, value.requires_grad)
            part._parameters[name] = None if value is None else made[id(value)]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return module


def _numpy(real: Any) -> Any:
    def numpy(tensor: Tensor) -> npt.NDArray[Any]:
        assert tensor.device.type == "cpu", "an array of a tensor on the device"
        with unset_fake_temporarily():
            if not isinstance(tensor, FakeTensor):
                found: npt.NDArray[Any] = real(tensor)
                return found
            return np.zeros(tensor.shape, real(torch.empty(0, dtype=tensor.dtype)).dtype)

    return numpy
