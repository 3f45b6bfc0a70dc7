"""A simulated learner: ``python -m simulated.learner CONTROL_FD``.

Its first message says which learner of how many it is; each further one is a job, a method of
`Measure`, answered by one message. It ends with its parent.

Steps run back to back in bursts whose gradients were drawn before, so that drawing them, which is
no part of a step, neither counts nor lets one rank wait for another. Ranks begin a burst together.
The fastest burst is what counts: whatever else runs on the machine only makes longer.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from network_bytes import interface, tcp_nbytes
from penstock.configs.sections import LearnerConfig
from penstock.core.control import Channel, Message
from penstock.core.interfaces import AdamState, Codec, CodecContext, Collective
from penstock.core.memory import keep_freed_memory
from penstock.core.processes import die_with
from penstock.learner.codecs.auto import AFTER_WARMUP, choose_codec
from penstock.learner.codecs.buckets import parts_of
from penstock.learner.codecs.collective import SoloCollective
from penstock.learner.codecs.registry import CODECS, make_codec
from penstock.learner.group.collective import GroupCollective
from penstock.learner.optimizers.rules import BETAS
from simulated.gradients import Draws, Passes
from simulated.network import entries, shares_of_backward

CPU = torch.device("cpu")
VARIANCE_STEPS = 20  # gradients of which Adam's variance is the mean square
BURST = 8  # steps, at most
MOST_BURSTS = 40
SETTLE_S = 0.05  # for what sockets and queues still hold
CODING_STEPS = 15
# However long the others take on a busy machine, they are waited for: the command that has started
# the learners notices if all of them wait (`simulated.group`), and ends them.
TIMEOUT = timedelta(days=1)

Result = dict[str, Any]


class Measure:
    """One learner among ``ring.world``, each with gradients of its own for ``parameters``."""

    def __init__(self, ring: Collective, parameters: int, device: str) -> None:
        self._ring = ring
        self._interface = device
        listed = entries(parameters)
        self._parts = parts_of((name, torch.empty(shape, device="meta")) for name, shape in listed)
        self._size = self._parts[-1].stop
        self._cfg = LearnerConfig(count=ring.world, optimizer="sgd")
        self._draws = Draws(listed, ring.rank, ring.world)
        self._bursts = [torch.empty(self._size) for _ in range(BURST)]
        self._shares = shares_of_backward(listed)
        self._update = AFTER_WARMUP

    def hello(self) -> Result:
        return {"parameters": self._size}

    def code(self, codec: str) -> Result:
        """Milliseconds of one core that coding a step takes, on rank 0 while the others wait."""
        if self._ring.rank:
            return {}
        made, alone, grads = self._make(codec), SoloCollective(0, self._ring.world), self._bursts[0]
        times = []
        for step in range(CODING_STEPS):
            self._draws(step, grads)
            started_s = time.thread_time()
            self._reduce(made, grads, alone)
            times.append(time.thread_time() - started_s)
        return {"code_ms": statistics.median(times) * 1e3}

    def speed(self, codec: str, seconds: float) -> Result:
        """Time of a step that is only reduction, and what it sends."""
        made = self._make(codec)
        return self._run(lambda grads: self._reduce(made, grads, self._ring), seconds) | {
            "bytes_theory": made.nbytes(AFTER_WARMUP)
        }

    def compute(
        self, codec: str, seconds: float, overlap: bool, forward_s: float, backward_s: float
    ) -> Result:
        """Time of a step with passes that take so long and need no processor."""
        with ThreadPoolExecutor(1) as thread:
            passes = Passes(
                self._parts,
                forward_s,
                [share * backward_s for share in self._shares],
                self._make(codec),
                self._ring,
                thread,
                overlap=overlap,
            )
            result = self._run(passes, seconds)
            passes.close()
        return result

    def error(self, codec: str, steps: int) -> Result:
        """Relative error of one step after the warm-up, and of the sum of ``steps`` of them.

        A codec that sends momenta is compared with those of the exact sums.
        """
        spec = CODECS.specs[codec]
        adam = self._adam_state() if spec.reduces_gradients else None
        made = self._make(codec, adam)
        momentum, new = (self._cfg.momentum if spec.own_momentum else 0.0), 1.0
        if adam:
            momentum, new = BETAS[0], 1 - BETAS[0]
        grads, exact = torch.empty(self._size), torch.empty(self._size)
        velocity, sent, wanted = (torch.zeros(self._size) for _ in range(3))
        first = 0.0
        for step in range(steps):
            exact.copy_(self._draws(step, grads))
            self._ring.all_reduce(exact)
            self._reduce(made, grads, self._ring)
            velocity.mul_(momentum).add_(exact, alpha=new)
            if adam and spec.reduces_gradients:
                if spec.reduces_gradients(self._cfg.reduce, self._update):
                    grads.mul_(new).add_(adam.exp_avg, alpha=momentum)
                adam.exp_avg.copy_(grads)
            sent += grads
            wanted += velocity
            if step == 0:
                first = _relative(sent, wanted)
        return {"relative_error": first, "relative_error_100": _relative(sent, wanted)}

    def choose(self) -> Result:
        """What `codec: auto` takes, and the sentence that it says."""
        return choose_codec(self._cfg, self._parts, self._size, CPU, self._ring)._asdict()

    def _adam_state(self) -> AdamState:
        """Adam's state after many steps, with a momentum of 0."""
        grads, variance = torch.empty(self._size), torch.zeros(self._size)
        for step in range(VARIANCE_STEPS):
            self._draws(step, grads)
            self._ring.all_reduce(grads)
            variance.addcmul_(grads, grads, value=1 / VARIANCE_STEPS)
        return AdamState(torch.zeros(self._size), variance, torch.tensor(1e6), self._cfg.eps)

    def _make(self, name: str, adam: AdamState | None = None) -> Codec:
        cfg = self._cfg.reduce.model_copy(update={"codec": name})
        ring = self._ring
        context = CodecContext(cfg, self._parts, self._size, CPU, ring.world, ring.rank, adam=adam)
        return make_codec(context)

    def _reduce(self, codec: Codec, grads: Tensor, ring: Collective) -> None:
        self._update += 1
        codec.begin(self._update)
        for bucket in codec.buckets:
            codec.reduce(bucket, grads[bucket.start : bucket.stop], ring)

    def _run(self, step: Callable[[Tensor], None], seconds: float) -> Result:
        """Steps for about ``seconds``: a step's time in the fastest burst, bytes of a step."""
        self._burst(step, 1)
        guess_s = self._agree_max(self._burst(step, 1)[0])
        length = min(BURST, max(2, round(seconds / guess_s)))
        count = min(MOST_BURSTS, max(1, round(seconds / guess_s / length)))
        bursts = [self._burst(step, length) for _ in range(count)]
        steps = length * count
        return {
            "step_ms": min(spent_s for spent_s, _, _, _ in bursts) / length * 1e3,
            "steps": steps,
            "bytes_per_step": sum(handed for _, handed, _, _ in bursts) / steps,
            "interface_bytes_per_step": sum(total for _, _, total, _ in bursts) / steps,
            "interface_payload_per_step": sum(payload for _, _, _, payload in bursts) / steps,
        }

    def _burst(self, step: Callable[[Tensor], None], length: int) -> tuple[float, int, int, int]:
        """Seconds; bytes at the sockets, at the interface, and there without headers."""
        for grads in self._bursts[:length]:
            self._draws(self._update, grads)
            self._update += 1
        self._agree_max(0.0)
        time.sleep(SETTLE_S)
        before, handed = interface(self._interface), tcp_nbytes()
        started_s = time.perf_counter()
        for grads in self._bursts[:length]:
            step(grads)
        spent_s = time.perf_counter() - started_s
        handed = tcp_nbytes() - handed
        time.sleep(SETTLE_S)
        after = interface(self._interface)
        return spent_s, handed, after.nbytes - before.nbytes, after.payload_since(before)

    def _agree_max(self, value: float) -> float:
        """The largest value of all ranks; they leave together."""
        largest = torch.tensor([value])
        self._ring.all_reduce_max(largest)
        return float(largest)


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted))


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    start = _next(channel)
    die_with(start["parent_pid"], signal.SIGKILL)
    keep_freed_memory()
    os.environ["GLOO_SOCKET_IFNAME"] = start["interface"]
    torch.set_num_threads(1)
    rank, world = start["rank"], start["world"]
    meeting = "file://" + start["store"]
    dist.init_process_group("gloo", meeting, rank=rank, world_size=world, timeout=TIMEOUT)
    assert dist.group.WORLD is not None
    measure = Measure(GroupCollective(dist.group.WORLD), start["parameters"], start["interface"])
    while True:
        message = _next(channel)
        job = getattr(measure, message.pop("job"))
        channel.send(job(**message), patience_s=5.0)


def _next(channel: Channel) -> Message:
    while not channel.closed:
        select.select([channel], [], [])
        for message in channel.receive(most=1):
            return message
    os._exit(0)  # the parent has ended


if __name__ == "__main__":
    main()
