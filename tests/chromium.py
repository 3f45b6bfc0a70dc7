"""A headless Chromium for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """Chromium of the system, or playwright's own. Skips the test if there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    paths = [path for name in NAMES if (path := shutil.which(name))]
    with api.sync_playwright() as playwright:
        with suppress(api.Error):
            own = playwright.chromium.executable_path
            paths += [own] if Path(own).exists() else []
        if not paths:
            pytest.skip("no Chromium: playwright install chromium, or Debian's chromium")
        browser = playwright.chromium.launch(executable_path=paths[0], args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
