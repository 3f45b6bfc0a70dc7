"""The web game: its physics in two languages, and its page in a real browser."""

from __future__ import annotations

import random

import pytest

from javascript import WEB_GAME, run_node

pytestmark = pytest.mark.system

STEPS = 20_000

REPLAY = """
const { Court } = await import(given.game);
const court = new Court();
const seen = given.script.map(([left, right, serve]) => {
  const point = court.tick(left, right);
  if (serve) court.serve(...serve);
  return [point, ...court.observe(-1), ...court.observe(1)];
});
console.log(JSON.stringify(seen));
"""


def test_both_files_of_the_game_compute_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WEB_GAME))
    import duel

    # Players who follow the ball and at times do anything, so there are rallies and points.
    choices = random.Random(3)
    court = duel.Court()
    script = []
    expected = []
    hits = points = 0
    for _ in range(STEPS):
        actions = []
        for paddle in (court.left, court.right):
            follow = duel.UP if court.y > paddle.y else duel.DOWN
            actions.append(follow if choices.random() < 0.4 else choices.randrange(3))
        flies_right = court.speed_x > 0
        point = court.tick(*actions)
        serve = None
        if point:
            serve = [choices.choice([-1, 1]), choices.uniform(-1, 1)]
            court.serve(*serve)
        elif flies_right != (court.speed_x > 0):
            hits += 1
        points += abs(point)
        script.append([*actions, serve])
        expected.append([point, *court.observe(-1), *court.observe(1)])
    assert min(hits, points) > 50, f"{hits} hits and {points} points make no rallies"

    game = (WEB_GAME / "game.mjs").as_uri()
    assert run_node(REPLAY, {"game": game, "script": script}) == expected
