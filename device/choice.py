"""Which device a learner trains on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.configs.errors import UserError
from penstock.device.cuda import CudaDevice
from penstock.device.host import HostDevice, OtherDevice
from penstock.device.interface import Device

DEVICES: dict[str, Callable[[torch.device], Device]] = {
    "cpu": lambda device: HostDevice(),
    "cuda": CudaDevice,
}
"""How to make the device of each type of torch device."""


def runs_behind(tensor: Tensor) -> bool:
    """Return whether a tensor's device runs behind its host, so that reading a value waits."""
    return device_of(tensor.device).runs_behind


def device_of(device: torch.device) -> Device:
    """Return the `Device` of a torch device, as tensors have it."""
    return DEVICES[device.type](device)


def any_device(device: torch.device) -> Device:
    """Return the `Device` of a torch device; also of one that no learner trains on."""
    return device_of(device) if device.type in DEVICES else OtherDevice(device)


def pick_device(name: str) -> torch.device:
    """Return the torch device of the option `learner.device`.

    A GPU always has its index, since `torch.cuda.set_device` takes no other. Raises UserError where
    there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)

    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise UserError(
                f"learner.device {name} is not there: {torch.cuda.device_count()} CUDA devices are "
                "found; set learner.device=auto or cpu"
            )
    return device
