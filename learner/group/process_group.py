"""A group of learners: its process groups for one epoch, from meeting to leaving.

The supervisor names the members of an epoch (on several machines they are fixed). They meet in a
store, check that their options agree, and connect. Any later failure is a `GroupLostError`: a group
is never repaired; the next epoch makes a new one, which takes some hundredths of a second. A member
that leaves closes its connections at once, so that a rank waiting in a collective is released as
soon as a peer's connection closes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save
from torch.distributed.distributed_c10d import _set_pg_timeout

from penstock import __version__
from penstock.configs.errors import UserError
from penstock.configs.reduce import ReduceConfig
from penstock.configs.schema import Config
from penstock.core.notes import note_logger
from penstock.core.params import Arrays
from penstock.device.choice import device_of
from penstock.learner.group.collective import GroupCollective, as_group_lost
from penstock.learner.sync.gradient_sync import GroupLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = note_logger(__name__)

# Seconds between two looks at the store.
POLL_S = 0.005
# Names of the states of torch's random generators in a checkpoint: on the CPU, and on a GPU.
RANDOM = "random"
DEVICE_RANDOM = "device-random"
# Characters of another learner's option that are shown.
SHOWN = 200
# Longest wait for a connection, in seconds, to members that were there a moment ago.
CONNECT_S = 5.0
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NCCL_VARIABLES = {
    # NCCL's own watchdog would end the process: `DeviceQueue` notices, and `close` aborts.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # After a failure it would first write a dump, and sleep for a minute; `close` joins its thread.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# Options in which learners may differ, as they depend on the machine.
OWN = ("device", "nice", "threads", "env_threads")
OWN_OF_PARTS = {"reduce": {"interface"}}


class LearnerGroup:
    """The connected members of one epoch."""

    def __init__(
        self,
        store: Store,
        epoch: int,
        members: Sequence[int],
        me: int,
        device: torch.device,
        cfg: ReduceConfig,
        is_lost: Callable[[], bool] | None = None,
    ) -> None:
        """Connect with the others, all of which are present (`meet`).

        Args:
            store: where the members exchange their addresses.
            epoch: of the group.
            members: ranks of the learners.
            me: this learner's rank.
            device: on which the gradients are.
            cfg: the section `learner.reduce`.
            is_lost: returns whether a member is lost, if members are on several hosts. Any thread
                calls it.

        Raises:
            GroupLostError: a member has ended, or does not answer.
        """
        self.epoch = epoch
        self._device = device_of(device)
        self.members = tuple(members)
        """Ranks of the learners."""
        self.rank = self.members.index(me)
        """Position of this learner among them."""
        self.world = len(self.members)
        connect_timeout = timedelta(seconds=min(cfg.timeout_s, CONNECT_S))

        # Small values on the CPU go through gloo.
        with as_group_lost("connecting", ValueError, MemoryError):
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"epoch-{epoch}", store),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.world,
                timeout=connect_timeout,
            )
        assert dist.group.WORLD is not None
        self.control = GroupCollective(dist.group.WORLD, is_lost)
        """Collective calls for small values on the CPU."""

        backend = self._backend()
        with as_group_lost("connecting"):
            for name, value in NCCL_VARIABLES.items():
                os.environ.setdefault(name, value)
            gradients = dist.new_group(timeout=connect_timeout, backend=backend)
        assert isinstance(gradients, dist.ProcessGroup)
        self.gradients = GroupCollective(gradients, is_lost if backend == "gloo" else None)
        """Collective calls for tensors on the device."""

        # Once connected, a member may be busy for longer.
        for group in (dist.group.WORLD, gradients):
            _set_pg_timeout(timedelta(seconds=cfg.timeout_s), group)

    def _backend(self) -> str:
        """Choose the backend for gradients. NCCL needs a GPU of its own for each learner."""
        if not self._device.runs_behind:
            return "gloo"

        devices = self.gather([crc32(self._device.identity().encode())])
        if len({device for [device] in devices}) == self.world:
            return "nccl"
        if self.rank == 0:
            logger.info("learners share a GPU, so gradients are reduced by gloo, through the host")
        return "gloo"

    def close(self) -> None:
        """Leave at once: the others detect it, as connections close with their last use.

        The gradients' group is aborted: a normal shutdown of NCCL would wait for a reduction that
        never completes.
        """
        self.gradients.group.abort()

        # gloo closes the connections of a group when its last reference goes, and waits then for
        # collectives that are still in it. So a thread has the last references, and drops them.
        last_references = [self.control.group, self.gradients.group]
        del self.control.group, self.gradients.group
        dist.destroy_process_group()
        threading.Thread(target=last_references.clear, name="leave", daemon=True).start()
        del last_references

    def broadcast(self, arrays: Arrays | None, source: int) -> Arrays:
        """Copy the arrays of the member at position ``source`` to all members.

        The other members give None. Raises GroupLostError.
        """
        data = np.frombuffer(save(arrays or {}), np.uint8).copy()
        size = torch.tensor([len(data)])

        # The others learn the number of bytes first, and make room for them.
        with as_group_lost("broadcast"):
            dist.broadcast(size, source)
            if self.rank != source:
                data = np.empty(int(size), np.uint8)
            dist.broadcast(torch.from_numpy(data), source)

        received: Arrays = load(data.tobytes())
        return received

    def collect_states(self, state: Arrays) -> Arrays:
        """Collect the state that every member keeps for itself, and that of its random generators.

        Args:
            state: this member's arrays, by name.

        Returns:
            The arrays of all members; each name begins with the member's position in the group.
        """
        state = state | {RANDOM: torch.get_rng_state().numpy()}
        if (device_random := self._device.random_state()) is not None:
            state[DEVICE_RANDOM] = device_random.numpy()

        collected: Arrays = {}
        for rank in range(self.world):
            received = self.broadcast(state if rank == self.rank else None, rank)
            collected |= {f"{rank}/{name}": array for name, array in received.items()}
        return collected

    def restore_own(self, states: Arrays) -> Arrays:
        """Restore this member's random generators from the result of `collect_states`.

        Returns this member's other arrays, by name; empty if the states are of another number of
        members.
        """
        if f"{self.world - 1}/{RANDOM}" not in states or f"{self.world}/{RANDOM}" in states:
            return {}

        prefix = f"{self.rank}/"
        state = {k.removeprefix(prefix): v for k, v in states.items() if k.startswith(prefix)}
        torch.set_rng_state(torch.from_numpy(state.pop(RANDOM)))
        device_random = state.pop(DEVICE_RANDOM, None)
        if device_random is not None and self._device.runs_behind:
            self._device.set_random_state(torch.from_numpy(device_random))
        return state

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Returns some integers of every member, in the order of the group."""
        local = torch.tensor(values)
        gathered = torch.empty(self.world, len(local), dtype=torch.int64)
        self.control.all_gather(gathered, local)
        rows: list[list[int]] = gathered.tolist()
        return rows


def meet(
    store: Store,
    members: Sequence[int],
    me: int,
    hello: dict[str, Any],
    timeout_s: float,
    waiting: Callable[[], bool],
) -> None:
    """Wait until all members are present, and check that they have the same options.

    Args:
        store: where they meet.
        members: ranks of the learners.
        me: this learner's rank.
        hello: this learner's options by name.
        timeout_s: longest wait, in seconds.
        waiting: called repeatedly; returns whether to continue.

    Raises:
        UserError: options differ, or another learner has the same rank.
        GroupLostError: a member is missing after ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    token = os.urandom(8).hex()
    with as_group_lost("the meeting"):
        store.set(f"hello-{me}", json.dumps(hello))
        store.set(f"token-{me}", token)

        absent = [member for member in members if member != me]
        while absent:
            arrived = [member for member in absent if store.check([f"hello-{member}"])]
            for member in arrived:
                their_hello = read_value(store.get(f"hello-{member}"), member)
                _compare(hello, their_hello, me=me, member=member)
                absent.remove(member)

            # The token is another one if another learner has written it, under the same rank.
            if store.get(f"token-{me}") != token.encode():
                raise UserError(f"two learners have rank {me}; give each one its own")

            if absent:
                if not waiting():
                    raise GroupLostError("there is a newer group")
                if time.monotonic() > deadline_s:
                    ranks = ", ".join(map(str, absent))
                    raise GroupLostError(f"rank {ranks} did not come within {timeout_s:g} s")
                time.sleep(POLL_S)


def hello_of(config: Config, device: torch.device) -> dict[str, Any]:
    """Returns what all learners must have in common, by the name that a message shows.

    That is the version, the kind of device, since NCCL connects GPUs alone, and options by their
    dotted names.
    """
    hello: dict[str, Any] = {
        "the version of penstock": __version__,
        "the kind of learner.device": device.type,
    }
    for section in ("env", "algo", "model", "actors", "learner"):
        options = getattr(config, section).model_dump(mode="json", exclude=OWN_OF_PARTS)
        for name, value in options.items():
            if name not in OWN:
                hello[f"{section}.{name}"] = value
    return hello


def read_value(value: bytes, member: int) -> Any:
    """Decode the JSON that a member has written into the store.

    Raises UserError for anything else: the store takes values from any client.
    """
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise foreign_value(member) from None


def foreign_value(member: int) -> UserError:
    """Returns the error for a value that no learner has written into the store."""
    return UserError(
        f"what the store holds for rank {member} is not what a learner of Penstock writes; see "
        "that no other program uses its port, and that its network is closed to others"
    )


def _compare(hello: dict[str, Any], their_hello: Any, *, me: int, member: int) -> None:
    """Raise UserError if the options of a ``member`` differ from those of this learner, ``me``."""
    if not isinstance(their_hello, dict):
        raise foreign_value(member)
    for name, value in hello.items():
        if their_hello.get(name) != value:
            raise UserError(
                f"learners disagree on {name}: it is {value} on rank {me} and "
                f"{str(their_hello.get(name))[:SHOWN]} on rank {member}; start all with the same "
                "config and version"
            )


def use_interface(interface: str | None) -> None:
    """Make gloo and NCCL use a network interface, if there is one.

    It must be called before the first group.
    """
    if interface is not None:
        os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, interface))
