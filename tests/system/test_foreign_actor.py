"""An actor that is written from the pages alone, and a real learner that trains on what it plays.

Its policy is docs/forward-pass.md in numpy, or the program of `penstock export --program` in ONNX
Runtime.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from plain_forward import PlainNetwork
from stranger import BEAT, BYE, WEIGHTS, WEIGHTS_GET, Stranger, decoded
from train_command import SMALL, Command, Penstock, assert_balanced, metrics, updates

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

Array = npt.NDArray[Any]
UPDATES = 30


class Brain(Protocol):
    """A policy with weights that can be exchanged."""

    state_size: int

    def load(self, flat: Array) -> None:
        """Take the weights of a WEIGHTS message."""

    def logits(self, obs: Array, state: Array) -> tuple[Array, Array]:
        """Returns logits ``[E, actions]``, and the next state ``[E, state_size]``."""


class PlainBrain:
    """The formulas of docs/forward-pass.md."""

    def __init__(self, welcome: dict[str, Any]) -> None:
        self._welcome = welcome
        model = welcome["config"]["model"]
        self.state_size = 2 * model["core_size"] if model["core"] == "lstm" else 0

    def load(self, flat: Array) -> None:
        welcome = self._welcome
        self._network = PlainNetwork(
            welcome["config"], welcome["spaces"], welcome["layout"], np.array(flat)
        )

    def logits(self, obs: Array, state: Array) -> tuple[Array, Array]:
        computed = self._network(obs, state)
        return computed.decided_by, computed.state


class ProgramBrain:
    """The file that `penstock export --program` wrote."""

    def __init__(self, path: Path, welcome: dict[str, Any]) -> None:
        self._session = onnxruntime.InferenceSession(path)
        about = json.loads(self._session.get_modelmeta().custom_metadata_map["penstock"])
        assert about["layout"] == welcome["layout"]
        self.state_size = about["state_size"]

        self.spread = 0.0
        """The largest difference between two logits so far."""

    def load(self, flat: Array) -> None:
        self._weights = np.array(flat)

    def logits(self, obs: Array, state: Array) -> tuple[Array, Array]:
        feed = {"obs": obs, "weights": self._weights}
        names = ["logits"]
        if self.state_size:
            feed["state"] = state
            names.append("state_out")
        logits, *next_state = self._session.run(names, feed)
        self.spread = max(self.spread, float(np.ptp(logits, 1).max()))
        return logits, next_state[0] if next_state else state


class ForeignActor(Stranger):
    """Plays the environment of the WELCOME's config, and records it as the page says."""

    def __init__(self, address: str, make_brain: Callable[[dict[str, Any]], Brain]) -> None:
        super().__init__(address)
        welcome = self._joined()
        self.is_over = False
        self._brain = make_brain(welcome)
        self._stamp = (0, 0)
        self._has_weights = False
        self._asked_s = 0.0
        self._rng = np.random.default_rng(7)

        envs = self.spec["envs"]
        name = welcome["config"]["env"]["id"]
        self._envs = [gymnasium.make(name) for _ in range(envs)]
        self._obs = np.stack([env.reset(seed=seed)[0] for seed, env in enumerate(self._envs)])
        self._state = np.zeros((envs, self._brain.state_size), np.float32)
        self._has_ended = np.zeros(envs, np.bool_)
        self._returns = np.zeros(envs, np.float32)
        self._lengths = np.zeros(envs, np.int32)

    def play(self, until: Callable[[], object]) -> None:
        """Play and send unrolls until a condition is met, or the run is over."""
        while not self.is_over and not until():
            self._handle_messages()
            if not self._has_weights or self.sequence >= self.limit:
                self.say(BEAT, sequence=self.sequence, produced_steps=self.produced_steps)
                self.socket.poll(50)
                continue

            stamp = self._stamp
            columns, steps = self._unroll()
            self.send_slot(columns, steps, stamp)

    def close(self) -> None:
        for env in self._envs:
            env.close()
        super().close()

    def _joined(self) -> dict[str, Any]:
        """Returns the WELCOME of a learner that may still be starting."""
        deadline_s = time.monotonic() + 80
        while True:
            self.say(1, {"spec": None, "want": 2})
            if self.socket.poll(1000):
                fields, meta, _ = self.receive()
                assert fields["kind"] == 2, meta
                self.run_id, self.spec_hash = fields["run_id"], fields["spec_hash"]
                self.limit = fields["sequence"]
                self.spec = meta["spec"]
                return dict(meta)
            assert time.monotonic() < deadline_s

    def _handle_messages(self) -> None:
        """Take newer weights, and ask again for those after them."""
        while self.socket.poll(0):
            fields, meta, frames = self.receive()
            if fields["kind"] == BYE:
                self.is_over = True
            if fields["kind"] == WEIGHTS:
                self._brain.load(decoded(meta, frames[0]))
                self._stamp = fields["generation"], fields["version"]
                self._has_weights = True
                self._asked_s = 0.0
        if time.monotonic() > self._asked_s + 1:
            self.say(WEIGHTS_GET, {"have": [*self._stamp] if self._has_weights else None})
            self._asked_s = time.monotonic()

    def _unroll(self) -> tuple[dict[str, Array], int]:
        """Returns the columns of an unroll, and the number of its steps."""
        rows, envs = self.spec["unroll"], self.spec["envs"]
        extents = {"unroll": (rows, envs), "unroll+1": (rows + 1, envs), "slot": (envs,)}
        columns = {
            name: np.zeros((*extents[kind], *shape), dtype)
            for name, dtype, shape, kind in self.spec["columns"]
        }
        if self._brain.state_size:
            columns["core_state"][:] = self._state
        columns["policy_version"][:] = self._stamp[1]

        for t in range(rows):
            columns["obs"][t] = self._obs
            logits, self._state = self._brain.logits(self._obs, self._state)
            self._state = np.array(self._state)
            shares = np.exp(logits - logits.max(1, keepdims=True))
            shares /= shares.sum(1, keepdims=True)
            uniform = self._rng.random((envs, 1))
            actions = (shares.cumsum(1)[:, :-1] <= uniform).sum(1)
            columns["action"][t] = actions
            columns["behaviour_logp"][t] = np.log(shares[np.arange(envs), actions])
            for e in range(envs):
                self._step(columns, t, e)
        columns["obs"][rows] = self._obs
        return columns, int(columns["alive"].sum())

    def _step(self, columns: dict[str, Array], t: int, e: int) -> None:
        """Step one environment; after an episode's end the row is not a decision but its reset."""
        if self._has_ended[e]:
            self._obs[e], _ = self._envs[e].reset()
            self._state[e] = 0
            self._has_ended[e] = False
            self._returns[e] = self._lengths[e] = 0
            return

        action = int(columns["action"][t, e])
        self._obs[e], reward, terminated, truncated, _ = self._envs[e].step(action)
        self._returns[e] += reward
        self._lengths[e] += 1
        self._has_ended[e] = terminated or truncated
        columns["reward"][t, e] = reward
        columns["terminated"][t, e] = terminated
        columns["truncated"][t, e] = truncated
        columns["alive"][t, e] = True
        columns["episode_return"][t, e] = self._returns[e]
        columns["episode_length"][t, e] = self._lengths[e]


def trained_by(
    learner: Command, folder: Path, make_brain: Callable[[dict[str, Any]], Brain]
) -> list[dict[str, Any]]:
    """Plays until the learner has trained and saved; returns the metrics of that time."""
    lines_before = metrics(folder)
    updates_before = updates(folder)
    actor = ForeignActor(f"ipc://{folder}/sockets/wire", make_brain)
    try:
        actor.play(
            lambda: (
                updates(folder) > updates_before + UPDATES
                and (folder / "checkpoints/last").exists()
            )
        )
        actor.leave()
    finally:
        actor.close()
    learner.process.send_signal(signal.SIGTERM)
    code, summary, err = learner.end()
    assert code == 143, err
    assert_balanced(summary)
    return metrics(folder)[len(lines_before) :]


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_learner_finds_the_log_probabilities_of_a_foreign_actor_in_its_own_network(
    penstock: Penstock, tmp_path: Path, core: str
) -> None:
    """First with the formulas, then with the program of what was trained by them."""
    run = tmp_path / "run"

    def learner(*options: str) -> Command:
        sizes = (*SMALL, f"model.core={core}", "checkpoint.every_steps=10", "weights.dtype=fp32")
        return penstock("learner", "cartpole", *sizes, "run.dir=run", *options, "--json")

    trained_by(learner("learner.lr=1e-2"), run, PlainBrain)
    code, _, err = penstock("export", "run", "actor.onnx", "--program", "--json").end()
    assert code == 0, err

    # The weights hardly change any more, so that the learner's probability of each action is what
    # the actor recorded.
    actor: list[ProgramBrain] = []

    def make_brain(welcome: dict[str, Any]) -> Brain:
        actor.append(ProgramBrain(tmp_path / "actor.onnx", welcome))
        return actor[0]

    lines = trained_by(learner("learner.lr=1e-9", "--resume=must"), run, make_brain)
    trained = [line for line in lines if "kl" in line]
    assert trained
    assert actor[0].spread > 0.1, "an even policy would hide a wrong network"
    assert max(abs(line["kl"]) for line in trained) < 1e-6
    assert max(abs(line["rho"] - 1) for line in trained) < 1e-5


@pytest.mark.slow
def test_a_foreign_actor_with_an_exported_program_solves_cartpole(
    penstock: Penstock, tmp_path: Path
) -> None:
    """The program is that of another run, of one update."""
    once = ("run.dir=other", "stop.learner_steps=1", "--json")
    code, _, err = penstock("train", "cartpole", *once).end()
    assert code == 0, err
    code, _, err = penstock("export", "other", "actor.onnx", "--program", "--json").end()
    assert code == 0, err

    options = ("run.dir=run", "eval.every_steps=null", "stop.confirm_episodes=0")
    learner = penstock("learner", "cartpole", *options, "--json")
    actor = ForeignActor(
        f"ipc://{tmp_path}/run/sockets/wire",
        lambda welcome: ProgramBrain(tmp_path / "actor.onnx", welcome),
    )
    try:
        actor.play(lambda: learner.process.poll() is not None)
        actor.leave()
    finally:
        actor.close()
    code, summary, err = learner.end()
    assert code == 0, err
    assert summary["solved_at_s"]
    assert_balanced(summary)
