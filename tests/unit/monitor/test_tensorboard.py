"""TensorBoard's files, read back record by record by their file format."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from full_disk import full_disk
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.monitor import sinks
from penstock.monitor.tensorboard import Board

CONFIG = {"learner": {"lr": 3e-4, "count": 1, "reduce": {}}, "env": {"id": "CartPole-v1"},
          "run": {"tensorboard": True, "dir": None, "callbacks": ["a:B"]}}  # fmt: skip
METRICS = {
    "env_steps": 640,
    "episode_return_mean": None,
    "ledger": {"compute": 0.75, "wait_data": 0.25},
    "ledgers": {"actor-0": {"step": 0.5}},
    "ranks": [{"rank": 0, "ledger": {"compute": 0.5}}],
    "policy_lag_histogram": {"0": 12},
    "exit_reason": "return",
}


def events(folder: Path) -> Iterator[Event]:
    """Records are: length u64, its checksum u32, an Event, its checksum u32."""
    [file] = folder.iterdir()
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack_from("<Q", data)
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_written_records_can_be_read(tmp_path: Path) -> None:
    board = Board(tmp_path, CONFIG)
    board.metrics(METRICS)
    board.metrics({"env_steps": 1280, "ledger": {"compute": 1.0}})
    board.close()
    found = [
        (event.step, value.tag, value.simple_value)
        for event in events(tmp_path / "tensorboard")
        for value in event.summary.value
        if not value.tag.startswith("_hparams_")
    ]
    assert (640, "time/ledger/compute", 0.75) in found
    assert (1280, "time/ledger/compute", 1.0) in found
    assert len(found) == 8
    assert {tag for _, tag, _ in found} == {
        "flow/env_steps", "time/ledger/compute", "time/ledger/wait_data",
        "time/ledgers/actor-0/step", "system/ranks/0/rank", "system/ranks/0/ledger/compute",
    }  # fmt: skip


def test_full_disk_leaves_complete_records_and_later_ones_are_readable(tmp_path: Path) -> None:
    board, folder = Board(tmp_path, CONFIG), tmp_path / "tensorboard"
    many = {f"figure_{i}": 1.0 for i in range(300)}
    for room, intervals in ((10, 3), (None, 2), (100, 4), (None, 2)):
        [size] = [file.stat().st_size for file in folder.glob("*")] or [0]
        with nullcontext() if room is None else full_disk(size + room):
            for i in range(intervals):
                with nullcontext() if room is None else pytest.raises(OSError, match="too large"):
                    board.metrics({"env_steps": 100 * size + i, **many})
    board.close()
    found = [*events(folder)]
    assert found[0].file_version == "brain.Event:2"
    assert len([event for event in found if len(event.summary.value) > 300]) == 4
    assert any(value.tag.startswith("_hparams_") for value in found[1].summary.value)


def test_the_config_is_written_as_hyper_parameters(tmp_path: Path) -> None:
    board = Board(tmp_path, CONFIG)
    for _ in range(2):
        board.metrics(METRICS)
    board.close()
    contents = {
        value.tag: HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for event in events(tmp_path / "tensorboard")
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "hparams"
    }
    session = contents["_hparams_/session_start_info"].session_start_info.hparams
    assert session["learner.lr"].number_value == 3e-4
    assert session["env.id"].string_value == "CartPole-v1"
    assert session["run.tensorboard"].bool_value is True
    assert "run.dir" not in session
    assert session["run.callbacks"].string_value == '["a:B"]'
    assert session["learner.reduce"].string_value == "{}"
    compared = contents["_hparams_/experiment"].experiment.metric_infos
    assert "train/episode_return_mean" in [info.name.tag for info in compared]


def test_a_run_without_metrics_writes_nothing(tmp_path: Path) -> None:
    Board(tmp_path, CONFIG).close()
    assert not (tmp_path / "tensorboard").exists()


def test_missing_library_is_named_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install .penstock\[tensorboard\]."):
        sinks.check_libraries(resolve("cartpole", ["run.tensorboard=true"]))
