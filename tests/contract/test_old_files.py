"""What earlier versions wrote is read by this one: runs, policies, replay snapshots, messages.

tests/fixtures/make_fixtures.py wrote each folder of tests/fixtures, by the version that it is named
after. What the files hold follows from rules, which are repeated here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from fixtures.public_surface import surface
from penstock.core.params import ParamLayout
from penstock.core.specs import SlotSpec
from penstock.evaluation.loaded_policy import load_policy
from penstock.learner.extras.parameter_server import protocol
from penstock.replay import Replay
from penstock.replay.remote.batch_codec import read_shape, unpack
from penstock.transport import wire
from train_command import Command, metrics

FIXTURES = Path(__file__).parents[1] / "fixtures"
VERSIONS = sorted(path.name for path in FIXTURES.iterdir() if (path / "wire.msgpack").exists())
RUNS = [f"{v}/trained/{run.name}" for v in VERSIONS for run in (FIXTURES / v / "trained").iterdir()]
LAYOUT = ParamLayout((("w", (5, 3)), ("b", (3,))))
OTHER_DEFAULTS = (
    "actors.count",  # auto: 2 at the start, as before
    "learner.threads",  # auto: 1 at the start, as before
    "replay.checkpoint",  # auto: a resumed run continues with its replay where there is room
    "learner.prefetch",  # null: 1 with unrolls, as before, and 2 from replay
    "learner.micro_batch",  # null: 256 on a CPU, as before
    "learner.reduce.bucket_mb",  # null: 1 on a CPU, as before
    "learner.reduce.reternarize",  # false: sums are exact, as in the paper
)
REPLACED = {"penstock.replay.Replay.from_env": ["options"]}  # by the keywords that it stood for
VALUES = np.arange(18, dtype=np.float32) / 4


def test_fixtures_of_earlier_versions_exist() -> None:
    assert "0.1.0" in VERSIONS
    assert len(RUNS) >= 4


@pytest.mark.parametrize("version", VERSIONS)
def test_every_public_name_of_earlier_versions_exists(version: str) -> None:
    before = json.loads((FIXTURES / version / "surface.json").read_text())
    now = surface()
    for kind in ("commands", "options"):
        for name, fields in before[kind].items():
            for field, described in fields.items():
                if field in OTHER_DEFAULTS:
                    continue
                assert now[kind][name].get(field) == described, f"{name} {field}"
    for name, parameters in before["api"].items():
        assert name in now["api"]
        if parameters is not None:
            parameters = [each for each in parameters if each not in REPLACED.get(name, ())]
            kept = [each for each in now["api"][name] if each in parameters]
            assert kept == parameters, name


@pytest.mark.parametrize("run", RUNS)
def test_policy_of_an_earlier_version_acts_as_recorded(run: str) -> None:
    decided = json.loads((FIXTURES / run / "acts.json").read_text())
    policy = load_policy(FIXTURES / run, "last")
    for observation, action in zip(decided["observations"], decided["actions"], strict=True):
        row = np.asarray(observation, policy.observation_space.dtype)
        np.testing.assert_allclose(policy(row)[0], action, rtol=1e-4, atol=1e-5)


@pytest.mark.system
@pytest.mark.parametrize("run", RUNS)
def test_run_of_an_earlier_version_resumes(run: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(FIXTURES / run, folder)
    before = _updates(folder)
    limit = f"stop.learner_steps={before + 5}"
    code, summary, said = Command(
        tmp_path, "train", str(folder), "--resume", "must", "--json", limit
    ).end()
    assert code == 0, said
    assert summary["learner_steps"] >= before + 5
    assert _updates(folder) >= before + 5
    assert metrics(folder)[0]["learner_steps"] >= before


def _updates(folder: Path) -> int:
    head = (folder / "checkpoints" / "last" / "checkpoint.safetensors").read_bytes()
    size = int.from_bytes(head[:8], "little")
    meta = json.loads(head[8 : 8 + size])["__metadata__"]["penstock"]
    return int(json.loads(meta)["meta"]["progress"]["learner_steps"])


@pytest.mark.parametrize("version", VERSIONS)
def test_policy_exported_by_an_earlier_version_is_read(version: str) -> None:
    exported = load_policy(FIXTURES / version / "policy.penstock")
    trained = load_policy(FIXTURES / version / "trained" / "impala", "last")
    for observation in np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32):
        assert exported(observation)[0] == trained(observation)[0]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["uniform", "prioritized", "stacked"])
def test_replay_snapshot_of_an_earlier_version_is_read(version: str, name: str) -> None:
    replay = Replay.load(FIXTURES / version / "snapshots" / name)
    assert 64 <= len(replay) <= 100  # its capacity, and what whole slots leave over
    seen = set()
    for _ in range(20):
        batch = replay.sample(32)
        i = batch.action // 3
        seen |= set(i.tolist())
        np.testing.assert_array_equal(batch.obs[:, -1], np.repeat(i[:, None], 4, 1))
        np.testing.assert_array_equal(batch.next_obs[:, -1], np.repeat(i[:, None] + 1, 4, 1))
        np.testing.assert_array_equal(batch.reward, i / 2)
        np.testing.assert_array_equal(batch.terminated, i % 10 == 9)
        if name == "stacked":
            before = np.where(i % 10 == 0, i, i - 1)
            np.testing.assert_array_equal(batch.obs[:, 0], np.repeat(before[:, None], 4, 1))
    assert max(seen) == 99
    assert len(seen) == len(replay)


@pytest.mark.parametrize("version", VERSIONS)
class TestMessages:
    def test_hello_is_read(self, version: str) -> None:
        message = wire.decode(_frames(version, "hello"))
        meta = wire.verify(message)
        assert message.head.kind == wire.MessageKind.HELLO
        head = message.head
        assert (head.run_id, head.actor, head.incarnation) == (1 << 60, 5, 2)
        assert (head.sequence, head.produced_steps) == (3, 18)
        assert meta["want"] == 2
        assert SlotSpec.from_dict(meta["spec"]).hash == message.head.spec_hash

    @pytest.mark.parametrize("name", ["slot", "slot_raw"])
    def test_slot_is_read(self, version: str, name: str) -> None:
        spec = SlotSpec.from_dict(msgpack.unpackb(_frames(version, "spec")[0]))
        payload = spec.zeros()
        message = wire.decode(_frames(version, name))
        wire.SlotDecoder(spec).decode(message, payload)
        views = spec.views(payload)
        assert set(views) == {"obs", "reward", "seat"}
        for column, values in views.items():
            expected = np.arange(values.size).reshape(values.shape) % 7 + len(column)
            np.testing.assert_array_equal(values, expected)
        assert (message.head.actor, message.head.incarnation, message.head.sequence) == (5, 2, 9)
        assert message.head.produced_steps == 60

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_weights_are_read(self, version: str, dtype: str) -> None:
        message = wire.decode(_frames(version, f"weights_{dtype}"))
        values = wire.to_float32(wire.decode_weights(message, LAYOUT)[1])
        np.testing.assert_array_equal(values, VALUES)  # quarters up to 5 fit bfloat16
        assert (message.head.generation, message.head.version) == (1, 4)

    def test_gradients_are_refused(self, version: str) -> None:
        """Learners of one run are of the same release."""
        for name in ("push_dense", "push_sparse"):
            with pytest.raises(wire.WireError, match=r"version 1 of the protocol instead of 3"):
                protocol.decode(_frames(version, name))

    def test_replay_batch_is_read(self, version: str) -> None:
        meta, frame = _frames(version, "batch")
        batch = unpack(read_shape(msgpack.unpackb(meta)), frame)
        assert batch.obs.tolist() == np.arange(12).reshape(6, 2).tolist()
        assert batch["keys"].tolist() == list(range(6))


def _frames(version: str, name: str) -> Sequence[Any]:
    messages = msgpack.unpackb((FIXTURES / version / "wire.msgpack").read_bytes())
    return list(messages[name])
