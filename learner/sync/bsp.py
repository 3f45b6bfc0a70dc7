"""Bulk-synchronous pace: in every step the gradients of all learners are summed.

Each turn begins with a small all-reduce of the control messages: it gives the total number of
samples, and whether to stop, save or regroup. A learner without samples contributes zeros and the
residuals of its codec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from penstock.configs.reduce import AUTO
from penstock.configs.sections import LearnerConfig
from penstock.core.interfaces import CodecContext
from penstock.core.notes import note_logger
from penstock.core.params import Arrays, Floats
from penstock.learner.codecs.auto import AFTER_WARMUP, choose_codec
from penstock.learner.codecs.buckets import VALUE_NBYTES
from penstock.learner.codecs.collective import all_reduce_nbytes
from penstock.learner.codecs.reducer import Reducer
from penstock.learner.codecs.registry import CODECS, make_codec
from penstock.learner.group.process_group import LearnerGroup
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.progress import BOOKED
from penstock.learner.sync.gradient_sync import ControlMessage, GradientSync
from penstock.learner.sync.pace import PaceContext
from penstock.profiling.ledger import Part, TimeLedger

logger = note_logger(__name__)

# Name in a checkpoint of the codec that made the residuals.
CODEC = "codec"


class Bsp:
    """Learners that step together: the `GradientSync` of one group."""

    def __init__(
        self,
        group: LearnerGroup,
        optimizers: Mapping[str, FlatOptimizer],
        cfg: LearnerConfig,
        ledger: TimeLedger,
        reducing: TimeLedger,
        shared: Mapping[str, Tensor],
        drain: Callable[[], None],
    ) -> None:
        """Make the sync of one group.

        Args:
            group: the connected learners.
            optimizers: by name, the same on every rank.
            cfg: the section `learner`.
            ledger: time ledger of the training thread.
            reducing: time ledger of the thread that reduces.
            shared: other tensors that must be equal on all ranks, by name.
            drain: called before the device is waited for (`DeviceQueue.drain`).
        """
        self.world = group.world
        self.rounds = 0
        self.unsent: Floats = np.zeros(len(BOOKED))  # everything is sent in every turn
        self._group = group
        self._optimizers = optimizers
        self._shared = shared
        self._drain = drain
        self._cfg = cfg
        self._ledger = ledger
        self._reducing = reducing
        self._thread = ThreadPoolExecutor(1, "reduce")
        self._reducers = {
            id(optimizer): self._make_reducer(optimizer) for optimizer in optimizers.values()
        }
        """The reducer of each optimizer's gradients, by the optimizer's identity."""

    def sync_control(self, mine: ControlMessage) -> ControlMessage:
        self._ledger.switch(Part.REDUCE)
        vector = torch.from_numpy(mine.pack())
        self._group.control.all_reduce(vector)
        self.rounds += 1
        return ControlMessage.unpack(vector.numpy())

    def prepare_backward(self, optimizer: FlatOptimizer, total: float) -> None:
        self._reducers[id(optimizer)].prepare_backward(optimizer.updates, total)

    def step(self, optimizer: FlatOptimizer, total: float, env_steps: int) -> Tensor:
        """Reduce the gradients of all learners, and take an optimizer step by their mean.

        Every `learner.reduce.check_every` updates all learners are compared (`check_equal`).
        Returns the gradient norm, float32 ``[]``; not finite if the step was skipped.
        """
        self._ledger.switch(Part.REDUCE)
        self._reducers[id(optimizer)].finish(optimizer.updates, total)
        self._ledger.switch(Part.OPTIMIZE)
        norm = optimizer.step(1.0, env_steps)

        if optimizer.updates % self._cfg.reduce.check_every == 0:
            self._drain()
            self._ledger.switch(Part.REDUCE)
            self.check_equal()
        return norm

    def all_reduce(self, values: Tensor) -> None:
        part = self._ledger.part
        self._ledger.switch(Part.REDUCE)
        self._group.gradients.all_reduce(values)
        self._ledger.switch(part)

    def all_reduce_min(self, value: float) -> float:
        negative = torch.tensor([-value], dtype=torch.float64)
        self._group.control.all_reduce_max(negative)
        return -float(negative)

    def check_equal(self) -> None:
        """Compare parameters and statistics with the other learners, by their checksums.

        Raises RuntimeError, which names the first one that differs.
        """
        named_arrays = []
        for name, optimizer in self._optimizers.items():
            values = optimizer.values.cpu().numpy()
            for part in optimizer.parts:
                named_arrays.append((f"{name}.{part.name}", values[part.start : part.stop]))
            updates = optimizer.updates
        named_arrays += [(name, values.cpu().numpy()) for name, values in self._shared.items()]

        ranks = self._group.members
        checksums = self._group.gather([crc32(array.data) for _, array in named_arrays])
        for rank, member_sums in zip(ranks[1:], checksums[1:], strict=True):
            for (name, _), first, other in zip(
                named_arrays, checksums[0], member_sums, strict=True
            ):
                if first != other:
                    raise RuntimeError(
                        f"{name} of rank {rank} differs from that of rank {ranks[0]} after "
                        f"{updates} updates; the learners were not made alike, or memory is "
                        "faulty: resume from the last checkpoint"
                    )

    def state_dict(self, *, saves: bool) -> Arrays:
        """Returns the residuals of all learners' codecs, by name, and the name of the codec."""
        state = {
            f"{name}/{kind}": values.cpu().numpy()
            for name, optimizer in self._optimizers.items()
            for kind, values in self._reducers[id(optimizer)].codec.residuals().items()
        }
        state[CODEC] = np.frombuffer(self._cfg.reduce.codec.encode(), np.uint8)
        return self._group.collect_states(state)

    def load_state_dict(self, state: Arrays) -> None:
        """Restore the residuals; those of another codec are ignored."""
        own_state = self._group.restore_own(state)
        # Codecs name their residuals alike, and mean other units by them: gradients, velocities or
        # Adam's steps. Checkpoints of earlier versions do not name the codec.
        if CODEC in own_state and own_state[CODEC].tobytes() != self._cfg.reduce.codec.encode():
            return
        for name, optimizer in self._optimizers.items():
            for kind, values in self._reducers[id(optimizer)].codec.residuals().items():
                if f"{name}/{kind}" in own_state:
                    values.copy_(torch.from_numpy(own_state[f"{name}/{kind}"]))

    def close(self) -> None:
        """Leave the group; an unfinished reduction is lost."""
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()
        self._thread.shutdown(cancel_futures=True)
        self._group.close()

    def sent_share(self) -> float:
        """Returns what one rank sends in a step after all warm-ups, as a share of its bytes in
        float32."""
        sent_nbytes = sum(reducer.codec.nbytes(AFTER_WARMUP) for reducer in self._reducers.values())
        plain_nbytes = sum(
            all_reduce_nbytes(VALUE_NBYTES * len(optimizer.values), self.world)
            for optimizer in self._optimizers.values()
        )
        return sent_nbytes / plain_nbytes

    def _make_reducer(self, optimizer: FlatOptimizer) -> Reducer:
        """Make what reduces the gradients of an optimizer, by the codec of `learner.reduce`.

        If the codec applies momentum itself, the optimizer's momentum and clipping end.
        """
        cfg = self._cfg.reduce
        context = CodecContext(
            cfg=cfg,
            parts=optimizer.parts,
            size=len(optimizer.grads),
            device=optimizer.grads.device,
            world=self._group.world,
            rank=self._group.rank,
            momentum=self._cfg.momentum,
            grad_clip=self._cfg.grad_clip,
            adam=optimizer.adam,
        )
        codec = make_codec(context)
        if CODECS.specs[cfg.codec].own_momentum:
            optimizer.momentum = 0.0
            optimizer.grad_clip = None
        return Reducer(
            optimizer.grads,
            optimizer.parameters,
            codec,
            ring=self._group.gradients,
            thread=self._thread,
            ledger=self._reducing,
            overlap=cfg.overlap,
        )


class BspPace:
    """Makes `Bsp` for each group; a `core.interfaces.Pace`. It resolves the codec `auto`."""

    def __init__(self, context: PaceContext) -> None:
        self._ctx, self._config, self._trainer = context
        self._auto_codec = ""
        """The codec that `auto` stands for; empty before it was measured."""
        self._noted_share = False
        """Whether the user was told how much the codec sends."""

    def join(self, group: LearnerGroup | None, source: int = 0) -> GradientSync:
        """Make the sync of a group, with the codec of the member at position ``source``."""
        assert group is not None
        cfg = self._config.learner
        if cfg.reduce.codec == AUTO:
            reduce = cfg.reduce.model_copy(update={"codec": self._resolve_auto(group, source)})
            cfg = cfg.model_copy(update={"reduce": reduce})

        sync = Bsp(
            group,
            self._trainer.optimizers(),
            cfg,
            ledger=self._ctx.ledger,
            reducing=self._ctx.status.ledger("reduce", Part.WAIT),
            shared=self._trainer.shared_statistics(),
            drain=self._trainer.queue.drain,
        )
        if group.rank == 0 and group.world > 1 and not self._noted_share:
            self._noted_share = True
            note_share(cfg.reduce.codec, sync.sent_share())
        return sync

    def _resolve_auto(self, group: LearnerGroup, source: int) -> str:
        """Returns the codec that `auto` stands for.

        It is that of the member at position ``source``. If that knows none, all members measure the
        network now.
        """
        encoded = np.frombuffer(self._auto_codec.encode(), np.uint8)
        received = group.broadcast({"codec": encoded}, source)["codec"]
        self._auto_codec = received.tobytes().decode()
        if self._auto_codec:
            return self._auto_codec
        if group.world == 1:  # there is no network to measure yet
            return "none"

        largest = max(self._trainer.optimizers().values(), key=lambda each: len(each.values))
        choice = choose_codec(
            self._config.learner,
            parts=largest.parts,
            size=len(largest.values),
            device=self._trainer.device,
            ring=group.gradients,
        )
        self._auto_codec = choice.codec
        if group.rank == 0:
            logger.info("learner.reduce.codec auto is %s", choice.text)
        return self._auto_codec


def note_share(codec: str, share: float) -> None:
    """Tell the user if a lossy codec sends more than half of the bytes of float32.

    Usually the network's layers are too small for it, and travel as they are.

    Args:
        codec: its name.
        share: of the bytes of float32 that it sends.
    """
    if CODECS.specs[codec].loss == "lossy" and share > 0.5:
        logger.info(
            "learner.reduce.codec %s sends %.0f %% of the bytes of fp32 with this network and its "
            "options; set learner.reduce.codec=int8, which sends a quarter, or none",
            codec,
            100 * share,
        )
