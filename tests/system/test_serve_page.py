"""The page of `penstock serve` in a browser, beside a game that plays."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("websockets")

from chromium import chromium
from game_client import FIRST, GameClient, step
from penstock.serving.service import Service
from served_games import random_policy, served

pytestmark = pytest.mark.system


def test_the_page_shows_the_policy_its_rows_and_what_is_served(tmp_path: Path) -> None:
    service = Service(random_policy(tmp_path, "parts"), "<b>a run</b>")
    with (
        chromium() as browser,
        served(service) as port,
        closing(GameClient(port, seats=3)) as game,
        closing(browser.new_page()) as page,
    ):
        errors: list[Any] = []
        page.on("pageerror", lambda error: errors.append(error))
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("h1", has_text="a run").wait_for()
        assert "<b>a run</b> plays served_games:parts, greedy" in page.inner_text("h1")
        columns = page.inner_text("#row")
        for name, dtype, _, _ in game.welcome["row"]:
            assert name in columns
            assert dtype in columns
        assert "choices [3,5]" in page.inner_text("#action")
        assert page.inner_text("#no-faults") == "None so far."

        # It follows what is served.
        observations = {"place": np.array([2, 3, 4]), "ways": np.full((3, 2), 1)}
        mask = {"action_mask": np.ones((3, 3), np.int8)}
        game.act(observations | mask, [FIRST] * 3)
        game.send(step([1], game.rows({"place": np.array([77])}), [64]))
        game.read_fault()
        page.locator("#faults", has_text="flags").wait_for()
        assert "decisions\n3\n" in page.inner_text("#figures")
        assert "seats\n3 of 65,536" in page.inner_text("#figures")
        assert page.inner_text("#faults").split() == ["field", "faults", "flags", "1"]
        assert f"ws://127.0.0.1:{port}/play" in page.inner_text("#web-socket")
        assert errors == []
