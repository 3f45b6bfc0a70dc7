"""The stages that run in one process each, as pieces of work: what an actor, a connector and a
learner's feeder do to the slots of a target, each without the others.

Frames are real: the target's environment, played with made-up weights.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.actors.rollout import Rollout
from penstock.algos.acting import make_inference
from penstock.algos.recorded import make_recorders
from penstock.algos.samples import network_shape, process, slot_spec
from penstock.autotune.forms import with_acting_form
from penstock.bench.rates import Work, as_json, rounds_of
from penstock.bench.traffic import receiving
from penstock.configs.league import LeagueConfig
from penstock.configs.schema import Config
from penstock.core.interfaces import Inference
from penstock.core.memory import keep_freed_memory
from penstock.core.observations import MASK
from penstock.core.params import POLICY_ID, Float32, Stamp
from penstock.core.specs import HEADER
from penstock.device.choice import device_of, pick_device
from penstock.envs import BatchedEnv, make
from penstock.envs.checking.vector import draw, draw_for
from penstock.learner.publisher import Publisher
from penstock.learner.sources.staging import Copier, StagingBatch, gather_threads
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Replay
from penstock.replay.factory import sampler_for
from penstock.transport.shm.store import Slot, SlotStore
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.wire import (
    Parts as Message,
)
from penstock.transport.wire import (
    SlotDecoder,
    SlotEncoder,
    decode,
    decode_weights,
    encode_weights,
)

UNROLLS = 2  # unrolls that are played, and then used in turn
REPLAY_NBYTES = 256e6  # upper limit of the frames in a replay
MOST_REPLAY_STEPS = 100_000
COPY_NBYTES = 64 << 20  # size of the block that the stage `memory` copies
DRAWN = 64  # actions of all environments that are drawn before they are timed, and used in turn

Array = npt.NDArray[Any]


def rounds(config: Mapping[str, Any], stages: Sequence[str], seconds: float) -> dict[str, Any]:
    """Measure stages of `Parts`, each for about ``seconds``.

    Returns:
        By stage, its rounds as `rates.as_json` has them, with the notes of the stage.
    """
    with contextlib.ExitStack() as stack:
        parts = Parts(Config.model_validate(config), stack)
        works = {stage: getattr(parts, stage)() for stage in stages}
        by_stage = rounds_of(works, seconds)
        return {stage: as_json(by_stage[stage]) | parts.notes.get(stage, {}) for stage in stages}


class Parts:
    """The stages of a target: each public method has a stage's name and returns its work.

    ``notes`` has further figures of some stages, by name.
    """

    def __init__(self, config: Config, stack: contextlib.ExitStack) -> None:
        """Make the environments, the weights and the inference of ``config``.

        ``stack`` closes everything that the stages open.
        """
        keep_freed_memory()  # torch actors, connectors and learners do so too
        self.notes: dict[str, dict[str, Any]] = {}
        # Opponents are left out: the stages are of games that the newest weights play alone.
        config = config.model_copy(update={"league": LeagueConfig()})
        self._config = config
        self._stack = stack

        self._env = make(config.env, config.actor_envs, config.actors.env_threads)
        stack.callback(self._env.close)
        self._spec = slot_spec(config, self._env.info)
        self._steps = self._spec.unroll * self._spec.envs  # agent steps of a slot

        self._rng = np.random.default_rng(0)
        self._layout = network_shape(config, self._env.info).layout
        self._weights = self._rng.normal(0, 0.05, self._layout.size).astype(np.float32)

        acting_config, _ = with_acting_form(config, self._env.info)
        self._inference = make_inference(acting_config, self._env.info, 0)
        self._inference.refresh(self._read_weights)

        # Both are filled when a stage first needs them.
        self._played: list[Slot] = []
        self._coded: list[Message] = []

    def _read_weights(self, out: Float32, newer_than: Stamp | None) -> Stamp:
        np.copyto(out, self._weights)
        return Stamp(0, 1)

    def memory(self) -> Work:
        """One thread copies a large block: the yardstick of this machine."""
        source = np.ones(COPY_NBYTES, np.uint8)
        target = np.ones(COPY_NBYTES, np.uint8)
        return Work(lambda: np.copyto(target, source), COPY_NBYTES)

    def environment(self) -> Work:
        """The environments step, with actions that were drawn before.

        Where they have an action mask, each step draws actions that it allows; the drawing then
        counts as the environments'.
        """
        env = self._env
        obs = self._present
        if self._has_mask():
            return Work(lambda: env.step_into(draw_for(env, obs, self._rng), obs), env.count)

        space = env.info.action_space
        actions = itertools.cycle([draw(space, env.count, self._rng) for _ in range(DRAWN)])
        return Work(lambda: env.step_into(next(actions), obs), env.count)

    def bare_environment(self) -> Work:
        """The vector environment steps without this package's adapter, with actions drawn before.

        With an action mask this is `environment`: such actions might be forbidden.
        """
        if self._has_mask():
            self.notes["bare_environment"] = {"note": "with the adapter, for its action masks"}
            return self.environment()

        vector = self._env.vector
        vector.reset(seed=0)
        actions = itertools.cycle([vector.action_space.sample() for _ in range(DRAWN)])
        return Work(lambda: vector.step(next(actions)), self._env.count)

    def inference(self) -> Work:
        """The policy decides on an actor's observations."""
        obs = self._slots()[0].columns["obs"]
        # A slot may hold the newest frames alone; the policy needs whole observations.
        if obs.shape[2:] != self._env.info.observation_space.shape:
            obs = self._present.copy()[None]

        rows = itertools.cycle(list(obs))
        return Work(lambda: self._inference.decide(next(rows)), self._env.count)

    def write(self) -> Work:
        """The rest of an actor's step: an unroll is recorded in a slot and processed.

        Environments and policy stand still meanwhile.
        """
        first = self._observations()
        env = StillEnv(self._env, first)
        inference = StillInference(self._inference, self._observations())
        recorders = make_recorders(self._config, env)
        rollout = Rollout(env, inference, 0, TimeLedger(), recorders)
        columns = self._spec.views(self._spec.zeros())
        if columns["obs"].shape[1:] == first.shape:  # a slot may hold the newest frames alone
            columns["obs"][:] = first

        def fill() -> None:
            rollout.fill(columns, 0)
            process(self._config.algo, columns)

        return Work(fill, self._steps)

    def encode(self) -> Work:
        """An unroll becomes a message: snappy, checksum, header."""
        encoder = SlotEncoder(self._spec, self._config.transport.codec)
        slots = itertools.cycle(self._slots())

        def encode() -> None:
            slot = next(slots)
            encoder.encode(slot.header, slot.payload, 1)

        coded_nbytes = sum(len(memoryview(part)) for part in self._messages()[0])
        self.notes["encode"] = {
            "nbytes_per_step": self._spec.payload_nbytes / self._steps,
            "ratio": self._spec.payload_nbytes / coded_nbytes,
        }
        return Work(encode, self._steps)

    def wire(self) -> Work:
        """Messages of the size of an encoded unroll come from another process through ZeroMQ.

        They are thrown away.
        """
        sizes = [len(memoryview(part)) for part in self._messages()[0]]
        self.notes["wire"] = {"nbytes_per_step": sum(sizes) / self._steps}
        return Work(self._stack.enter_context(receiving(sizes)), self._steps)

    def decompress(self) -> Work:
        """A message is checked and decompressed into a slot in shared memory."""
        store = self._store()
        decoder = SlotDecoder(self._spec)
        messages = itertools.cycle([decode(parts) for parts in self._messages()])
        slots = itertools.cycle(store.slots)
        return Work(lambda: decoder.decode(next(messages), next(slots).payload), self._steps)

    def gather(self) -> Work:
        """Slots in shared memory become a batch of the learner."""
        store = self._store()
        for slot, played in zip(store.slots, itertools.cycle(self._slots()), strict=False):
            slot.header["steps"] = self._steps
            for target, source in zip(slot.payload, played.payload, strict=True):
                np.copyto(target, source)

        threads = gather_threads(self._config.learner.gather_threads, self._device())
        self.notes["gather"] = {"threads": threads}
        copier = Copier(threads)
        self._stack.callback(copier.close)

        count = self._config.learner.batch_slots
        batch = StagingBatch(self._spec, count, self._device(), copier, store=store)
        slots = store.slots[:count]
        return Work(lambda: batch.gather(slots), self._steps * count, self._settle())

    def replay_add(self) -> Work:
        """Steps of an actor's environments are added to a replay that is full."""
        replay, step = self._replay()
        return Work(lambda: replay.add(**step), self._spec.envs)

    def replay_sample(self) -> Work:
        """Batches are drawn, and their priorities updated where there are any."""
        replay, _ = self._replay()
        count = self._config.replay.batch_size
        priorities = self._rng.random(count)

        def sample() -> None:
            batch = replay.sample(count)
            if self._config.replay.prioritized:
                replay.update_priorities(batch.keys, priorities)

        return Work(sample, count)

    def publish(self) -> Work:
        """The learner shows weights on the board, and an actor of its host takes them."""
        device = self._device()
        values = torch.from_numpy(self._weights).to(device)
        board = WeightsBoard.create(self._layout.size)
        self._stack.callback(board.close)
        publisher = Publisher([values], board)
        weights = np.empty_like(self._weights)  # an actor's copy

        def publish() -> None:
            publisher.publish(POLICY_ID, Stamp(0, 1))
            publisher.flush(wait=True)
            board.read(weights)

        return Work(publish, 1)

    def relay(self) -> Work:
        """Weights become a message, and the relay of another host shows them to an actor."""
        dtype = self._config.weights.dtype
        layout = self._layout
        board = WeightsBoard.create(layout.size)
        self._stack.callback(board.close)
        weights = np.empty_like(self._weights)  # an actor's copy

        def carry() -> None:
            parts = encode_weights(self._weights, Stamp(0, 1), dtype, layout, 1)
            board.publish(decode_weights(decode(parts), layout)[1], Stamp(0, 1))
            board.read(weights)

        return Work(carry, 1)

    def _slots(self) -> list[Slot]:
        """Returns unrolls that were really played, in memory of their own."""
        if self._played:
            return self._played

        recorders = make_recorders(self._config, self._env)
        rollout = Rollout(self._env, self._inference, 0, TimeLedger(), recorders)
        for index in range(UNROLLS):
            payload = self._spec.zeros()
            header = np.zeros((), HEADER)
            columns = self._spec.views(payload)
            steps = rollout.fill(columns, index)
            header["steps"] = steps
            header["produced_steps"] = steps
            process(self._config.algo, columns)
            self._played.append(Slot(index, header, tuple(payload), columns))
        self._env.reset_into(0, self._present)
        return self._played

    def _messages(self) -> list[Message]:
        """Returns the unrolls of `_slots` as messages, each with memory of its own."""
        if not self._coded:
            encoder = SlotEncoder(self._spec, self._config.transport.codec)
            for slot in self._slots():
                parts = encoder.encode(slot.header, slot.payload, 1)
                self._coded.append([bytes(part) for part in parts])
        return self._coded

    def _store(self) -> SlotStore:
        store = SlotStore(self._spec, max(2, self._config.learner.batch_slots))
        self._stack.callback(store.close)
        return store

    def _replay(self) -> tuple[Replay, dict[str, Any]]:
        """Returns a full replay of the environments' observations, and a step to add to it.

        The step is a dictionary of the arguments of `Replay.add`.
        """
        settings = self._config.replay
        envs = self._spec.envs
        space = self._env.info.observation_space
        actions = draw(self._env.info.action_space, envs, self._rng)

        # A replay of the config's capacity may not fit into memory; a stack keeps one frame a step.
        stack = self._config.transport.frame_stack or 1
        step_nbytes = space.dtype.itemsize * int(np.prod(space.shape)) / stack
        affordable = int(min(settings.capacity, MOST_REPLAY_STEPS, REPLAY_NBYTES / step_nbytes))
        capacity = max(affordable, 2 * settings.batch_size, 2 * envs)

        replay = Replay(
            {"obs": (space.dtype, space.shape), "action": (actions.dtype, actions.shape[1:])},
            capacity,
            envs=envs,
            frame_stack=stack,
            sampler=sampler_for(settings, lambda: 0),
            autoreset="none",
            seed=0,
        )
        self._stack.callback(replay.close)

        # All frames are equal, so that each stack continues the one before it.
        obs = np.ones_like(self._observations())
        never = np.zeros(envs, np.bool_)
        step: dict[str, Any] = {
            "obs": obs,
            "next_obs": obs.copy(),
            "action": actions,
            "reward": np.zeros(envs, np.float32),
            "terminated": never,
            "truncated": never,
        }
        for _ in range(capacity * 5 // 4 // envs + 1):
            replay.add(**step)
        return replay, step

    @cached_property
    def _present(self) -> Array:
        """The present observations of the environments, whose steps write them here.

        All stages step the same environments in turns, and their masks allow other actions after
        each step.
        """
        obs = self._observations()
        self._env.reset_into(0, obs)
        return obs

    def _observations(self) -> Array:
        """Returns zeros for one observation of each environment; all actions are allowed."""
        space = self._env.info.observation_space
        obs = np.zeros((self._env.count, *space.shape), space.dtype)
        for part in self._env.info.parts:
            if part.name == MASK:
                obs[:, part.offset : part.offset + part.nbytes] = 1
        return obs

    def _has_mask(self) -> bool:
        """Whether observations have a mask of the actions that are allowed."""
        return any(part.name == MASK for part in self._env.info.parts)

    def _device(self) -> torch.device:
        return pick_device(self._config.learner.device)

    def _settle(self) -> Callable[[], object]:
        return device_of(self._device()).synchronize


class StillEnv(BatchedEnv):
    """Environments in which nothing happens, and whose steps take no time."""

    def __init__(self, env: BatchedEnv, first: Array) -> None:
        """Stand for ``env``, with the observations ``first``, ``[count, *shape]``."""
        self.info = env.info
        self.count = env.count
        self.recorded = env.recorded

        # What a step returns: rewards, and whether episodes were terminated or truncated.
        never = np.zeros(env.count, np.bool_)
        self._outcome = (np.zeros(env.count, np.float32), never, never)
        self._first = first

    def reset_into(self, seed: int, out: Array) -> None:
        """Write the first observations, in which some action is allowed."""
        np.copyto(out, self._first)

    def step_into(self, actions: Array, out: Array) -> tuple[Array, Array, Array]:
        """Leave ``out`` as it is; returns rewards of 0, and no end of an episode."""
        return self._outcome


class StillInference:
    """Inference that takes no time: it decides what ``inference`` decided for ``observations``."""

    def __init__(self, inference: Inference, observations: Array) -> None:
        self._decision = inference.decide(observations)
        self.recorded = inference.recorded
        self.stamp = inference.stamp
        self.state = inference.state
        self.take_rewards = inference.take_rewards
        self.reset = inference.reset
        self.forget = inference.forget
        self.refresh = inference.refresh
        self.close = inference.close
        self.state_dict = inference.state_dict
        self.load_state_dict = inference.load_state_dict

    def decide(self, observations: Array) -> tuple[Array, tuple[Array, ...]]:
        """Returns the decision of the start; nothing is computed."""
        return self._decision
