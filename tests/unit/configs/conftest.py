"""A target without defaults of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """A target with the schema's defaults: the config of a run, to which no kind adds any."""
    path = tmp_path / "plain" / "config.yaml"
    path.parent.mkdir()
    path.write_text("env: {id: Acrobot-v1}\n")
    return str(path)
