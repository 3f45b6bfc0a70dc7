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
from penstock.learner.codecs.auto import AFTER_WARMUP, choose
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
        self._group = group
        self._optimizers = optimizers
        self._shared = shared
        self._drain = drain
        self._cfg = cfg
        self._ledger = ledger
        self._reducing = reducing
        self._thread = ThreadPoolExecutor(1, "reduce")
        self._reducers = {
            id(optimizer): self._reducer(optimizer) for optimizer in optimizers.values()
        }
        self.rounds = 0
        self.unsent: Floats = np.zeros(len(BOOKED))  # everything is sent in every turn

    def sync_control(self, mine: ControlMessage) -> ControlMessage:
        self._ledger.switch(Part.REDUCE)
        vector = torch.from_numpy(mine.pack())
        self._group.control.all_reduce(vector)
        self.rounds += 1
        return ControlMessage.unpack(vector.numpy())

    def prepare_backward(self, optimizer: FlatOptimizer, total: float) -> None:
        self._reducers[id(optimizer)].prepare_backward(optimizer.updates, total)

    def step(self, optimizer: FlatOptimizer, total: float, env_steps: int) -> Tensor:
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
        before = self._ledger.part
        self._ledger.switch(Part.REDUCE)
        self._group.gradients.all_reduce(values)
        self._ledger.switch(before)

    def all_reduce_min(self, value: float) -> float:
        negative = torch.tensor([-value], dtype=torch.float64)
        self._group.control.all_reduce_max(negative)
        return -float(negative)

    def check_equal(self) -> None:
        """Compare parameters and statistics with the other learners, by their checksums.

        Raises RuntimeError, which names the first one that differs.
        """
        named = []
        for name, optimizer in self._optimizers.items():
            values = optimizer.values.cpu().numpy()
            for part in optimizer.parts:
                named.append((f"{name}.{part.name}", values[part.start : part.stop]))
            updates = optimizer.updates
        named += [(name, values.cpu().numpy()) for name, values in self._shared.items()]

        first, *others = self._group.gather([crc32(array.data) for _, array in named])
        for place, other in enumerate(others, start=1):
            for (name, _), mine, its in zip(named, first, other, strict=True):
                if mine != its:
                    ranks = self._group.members
                    raise RuntimeError(
                        f"{name} of rank {ranks[place]} differs from that of rank {ranks[0]} after "
                        f"{updates} updates; the learners were not made alike, or memory is "
                        "faulty: resume from the last checkpoint"
                    )

    def state_dict(self, *, saves: bool) -> Arrays:
        """Returns the residuals of all learners' codecs, by name, and the name of the codec."""
        own = {
            f"{name}/{kind}": values.cpu().numpy()
            for name, optimizer in self._optimizers.items()
            for kind, values in self._reducers[id(optimizer)].codec.residuals().items()
        }
        own[CODEC] = np.frombuffer(self._cfg.reduce.codec.encode(), np.uint8)
        return self._group.collect_states(own)

    def load_state_dict(self, state: Arrays) -> None:
        """Restore the residuals; those of another codec are ignored."""
        own = self._group.restore_own(state)
        # Codecs name their residuals alike, and mean other units by them: gradients, velocities or
        # Adam's steps. Checkpoints of earlier versions do not name the codec.
        if CODEC in own and own[CODEC].tobytes() != self._cfg.reduce.codec.encode():
            return
        for name, optimizer in self._optimizers.items():
            for kind, values in self._reducers[id(optimizer)].codec.residuals().items():
                if f"{name}/{kind}" in own:
                    values.copy_(torch.from_numpy(own[f"{name}/{kind}"]))

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
        sent = sum(reducer.codec.nbytes(AFTER_WARMUP) for reducer in self._reducers.values())
        plain = sum(
            all_reduce_nbytes(VALUE_NBYTES * len(optimizer.values), self.world)
            for optimizer in self._optimizers.values()
        )
        return sent / plain

    def _reducer(self, optimizer: FlatOptimizer) -> Reducer:
        cfg, group = self._cfg.reduce, self._group
        context = CodecContext(
            cfg,
            optimizer.parts,
            len(optimizer.grads),
            optimizer.grads.device,
            group.world,
            group.rank,
            self._cfg.momentum,
            self._cfg.grad_clip,
            optimizer.adam,
        )
        codec = make_codec(context)
        if CODECS.specs[cfg.codec].own_momentum:
            optimizer.momentum, optimizer.grad_clip = 0.0, None
        return Reducer(
            optimizer.grads,
            optimizer.parameters,
            codec,
            group.gradients,
            self._thread,
            self._reducing,
            overlap=cfg.overlap,
        )


class BspPace:
    """Makes `Bsp` for each group; a `core.interfaces.Pace`. It resolves the codec `auto`."""

    def __init__(self, context: PaceContext) -> None:
        self._ctx, self._config, self._trainer = context
        self._codec = ""  # the codec of `auto`, once it was measured
        self._noted_share = False

    def join(self, group: LearnerGroup | None, source: int = 0) -> GradientSync:
        assert group is not None
        cfg = self._config.learner
        if cfg.reduce.codec == AUTO:
            reduce = cfg.reduce.model_copy(update={"codec": self._measured(group, source)})
            cfg = cfg.model_copy(update={"reduce": reduce})
        trainer, ctx = self._trainer, self._ctx
        sync = Bsp(
            group,
            trainer.optimizers(),
            cfg,
            ctx.ledger,
            reducing=ctx.status.ledger("reduce", Part.WAIT),
            shared=trainer.shared(),
            drain=trainer.queue.drain,
        )
        if group.rank == 0 and group.world > 1 and not self._noted_share:
            self._noted_share = True
            note_share(cfg.reduce.codec, sync.sent_share())
        return sync

    def _measured(self, group: LearnerGroup, source: int) -> str:
        """The codec of the member ``source``, else the one that is measured now."""
        known = np.frombuffer(self._codec.encode(), np.uint8)
        self._codec = group.broadcast({"codec": known}, source)["codec"].tobytes().decode()
        if not self._codec and group.world == 1:  # there is no network to measure yet
            return "none"
        if not self._codec:
            largest = max(self._trainer.optimizers().values(), key=lambda o: len(o.values))
            device, cfg = self._trainer.device, self._config.learner
            choice = choose(cfg, largest.parts, len(largest.values), device, group.gradients)
            self._codec = choice.codec
            if group.rank == 0:
                logger.info("learner.reduce.codec auto is %s", choice.text)
        return self._codec


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
