"""Pictures of the documentation: their sizes, and errors where they cannot be made."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import pictures
from penstock.configs.errors import UserError

ROOT = Path(__file__).parents[3]


def test_pictures_of_the_docs_are_small() -> None:
    found = [path for path in (ROOT / "docs" / "images").rglob("*") if path.is_file()]
    assert len(found) > 15
    assert [path.name for path in found if path.stat().st_size > pictures.NBYTES] == []


def test_every_agent_of_the_docs_is_in_the_gallery() -> None:
    agents = {path.stem for path in pictures.AGENTS.glob("*.safetensors")}
    assert agents == set(pictures.CLIPS)
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert [name for name in sorted(agents) if f"images/agents/{name}.gif" not in page] == []


def test_returns_in_the_gallery_are_those_of_the_agents() -> None:
    """Where the better way is set in bold, the gallery repeats it."""

    def bold(page: str) -> list[str]:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        return sorted(part for i, part in enumerate(text.split("**")) if i % 2)

    assert bold("gallery.md") == bold("agents.md")


def test_a_missing_browser_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"playwright is not installed: pip install .*browser"):
        pictures.find_browser()


def test_a_missing_chromium_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("playwright")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    with pytest.raises(UserError, match="need Chromium, which is not installed: playwright inst"):
        pictures.find_browser()


def test_the_last_panel_of_a_terminal_is_shown(tmp_path: Path) -> None:
    terminal = pictures.Terminal.__new__(pictures.Terminal)
    terminal._said = (
        "╭─ a\r\n│ 1\r\n╰──╯\r\n\x1b[1A╭─ b\r\n│ \x1b[32m2\x1b[0m\r\n╰──╯\r\n╭─ c\r\n".encode()
    )
    assert terminal.frame() == "╭─ b\n│ \x1b[32m2\x1b[0m\n╰──╯"
    assert "color: #" in pictures._as_html(terminal.frame())
    terminal._said = b"nothing"
    with pytest.raises(UserError, match="no panel: nothing"):
        terminal.frame()


def test_pictured_run_has_a_terminal_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys, time; print('╭', sys.stdout.isatty(), flush=True); time.sleep(100)"
    monkeypatch.setattr(pictures, "_penstock", lambda *arguments: [sys.executable, *arguments])
    with pictures.Terminal.running(tmp_path, "-c", script) as terminal:
        while "True" not in terminal.text():
            assert terminal.process.poll() is None
    assert terminal.process.returncode
