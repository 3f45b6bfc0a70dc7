"""A resume keeps the id of a run at Weights & Biases."""

from __future__ import annotations

from pathlib import Path

from full_disk import full_disk
from penstock.monitor.wandb import ID_FILE, _id


def test_resume_keeps_the_wandb_id(tmp_path: Path) -> None:
    made = _id(tmp_path)
    assert len(made) == 12
    assert _id(tmp_path) == made


def test_a_full_disk_ends_no_run_and_leaves_no_part_of_an_id(tmp_path: Path) -> None:
    with full_disk(5):
        assert len(_id(tmp_path)) == 12
    assert not (tmp_path / ID_FILE).exists()
    made = _id(tmp_path)
    assert (tmp_path / ID_FILE).read_text() == made == _id(tmp_path)
