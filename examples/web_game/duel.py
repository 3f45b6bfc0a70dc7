"""Duel: two paddles and a ball, for a person and an agent. `game.mjs` is the same game for a page.

    cd examples/web_game
    penstock train duel:Duel algo.name=ppo

Both files compute with + - * and comparisons of doubles alone, in the same order, so that they give
the same numbers to the last bit (tests/system/test_web_game.py). The agent plays the left side.
`observe` mirrors the court, so one agent can play either side.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete

# The court is 3 wide and 2 high, with its origin in the middle. Speeds are lengths a tick.
TICKS_PER_S = 60
HALF_WIDTH = 1.5
HALF_HEIGHT = 1.0
BALL_RADIUS = 0.03
PADDLE_X = 1.4
PADDLE_HALF = 0.18  # half its length
PADDLE_SPEED = 0.03
PADDLE_ACCELERATION = 0.005
SERVE_SPEED = 0.024
FASTER = 1.1  # the ball after each hit
BALL_SPEED = 0.08  # the fastest, in x
STEEPNESS = 0.055  # speed in y after a hit with the end of a paddle
DRAG = 0.35  # share of the paddle's speed that the ball takes along

STAY, UP, DOWN = range(3)
# What x and speeds are divided by in an observation, so that all of its numbers are about 1.
SCALE = (HALF_WIDTH, 1.0, BALL_SPEED, BALL_SPEED, 1.0, PADDLE_SPEED, 1.0, PADDLE_SPEED)
# The agent decides every fourth tick, and a match ends at so many points of one side.
TICKS_PER_STEP = 4
POINTS = 5
MOST_STEPS = 2_000


class Paddle:
    """A paddle, which accelerates towards where its player wants it to go."""

    def __init__(self) -> None:
        self.y = 0.0
        self.speed = 0.0

    def tick(self, action: int) -> None:
        """Move for one tick by one of the actions STAY, UP, DOWN."""
        wanted = 0.0
        if action == UP:
            wanted = PADDLE_SPEED
        if action == DOWN:
            wanted = -PADDLE_SPEED
        change = min(max(wanted - self.speed, -PADDLE_ACCELERATION), PADDLE_ACCELERATION)
        self.speed = self.speed + change
        self.y = self.y + self.speed

        # It stops at a wall.
        limit = HALF_HEIGHT - PADDLE_HALF
        if self.y > limit:
            self.y = limit
            self.speed = 0.0
        if self.y < -limit:
            self.y = -limit
            self.speed = 0.0


class Court:
    """The paddles and the ball of one rally after another."""

    def __init__(self) -> None:
        self.left = Paddle()
        self.right = Paddle()
        self.serve(1, 0.0)

    def serve(self, side: int, slope: float) -> None:
        """Put the ball into the middle.

        Args:
            side: 1: it flies to the right, -1: to the left.
            slope: its speed in y as a share of that in x, from -1 to 1.
        """
        self.x = 0.0
        self.y = 0.0
        self.speed_x = side * SERVE_SPEED
        self.speed_y = slope * SERVE_SPEED

    def tick(self, left_action: int, right_action: int) -> int:
        """Advance by one tick. Returns 1 for a point of the left, -1 of the right, otherwise 0."""
        self.left.tick(left_action)
        self.right.tick(right_action)

        # The ball flies, and bounces off the walls.
        previous_x = self.x
        self.x = self.x + self.speed_x
        self.y = self.y + self.speed_y
        wall = HALF_HEIGHT - BALL_RADIUS
        if self.y > wall:
            self.y = 2 * wall - self.y
            self.speed_y = -self.speed_y
        if self.y < -wall:
            self.y = -2 * wall - self.y
            self.speed_y = -self.speed_y

        # A paddle returns a ball that crosses its line.
        line = PADDLE_X - BALL_RADIUS
        if previous_x < line <= self.x:
            self._hit(self.right, line)
        if self.x <= -line < previous_x:
            self._hit(self.left, -line)

        if self.x > HALF_WIDTH:
            return 1
        if self.x < -HALF_WIDTH:
            return -1
        return 0

    def observe(self, side: int) -> list[float]:
        """Returns 8 numbers as the player of a side sees them, who always plays on the left.

        They are the ball's x, y and speed in x and y, and y and speed of the own and of the other
        paddle, divided by `SCALE`.

        Args:
            side: -1: of the left, 1: of the right player.
        """
        own = self.left if side == -1 else self.right
        other = self.right if side == -1 else self.left
        ball = (-side * self.x, self.y, -side * self.speed_x, self.speed_y)
        numbers = (*ball, own.y, own.speed, other.y, other.speed)
        return [number / scale for number, scale in zip(numbers, SCALE, strict=True)]

    def _hit(self, paddle: Paddle, line: float) -> None:
        """Return the ball at ``line`` if the paddle is there. Its end and its motion aim."""
        reach = PADDLE_HALF + BALL_RADIUS
        offset = (self.y - paddle.y) / reach
        if offset > 1 or offset < -1:
            return
        self.x = 2 * line - self.x
        self.speed_x = -self.speed_x * FASTER
        self.speed_x = min(max(self.speed_x, -BALL_SPEED), BALL_SPEED)
        self.speed_y = offset * STEEPNESS + paddle.speed * DRAG


class Rival:
    """A scripted player of the right side, of another strength in each match."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._watches_from = random.uniform(-1.0, 1.0)  # sees no ball left of this
        self._foresees = random.random() < 0.7  # where the ball arrives, or only where it is
        self._spread = random.uniform(0.8, 2.5)  # of its aim, in halves of its paddle
        self._aim = 0.0  # with which place of the paddle it wants to hit; beyond the end it misses
        self._was_coming = False

    def act(self, court: Court) -> int:
        """Returns its action of this step."""
        is_coming = court.speed_x > 0
        if is_coming and not self._was_coming:
            self._aim = self._random.uniform(-1, 1) * self._spread * PADDLE_HALF
        self._was_coming = is_coming

        target = 0.0
        if is_coming and court.x > self._watches_from:
            target = self._ball_arrives_at(court) if self._foresees else court.y
            target -= self._aim
        # A paddle goes on for some ticks before it stands.
        distance = target - (court.right.y + 3 * court.right.speed)
        if abs(distance) < PADDLE_SPEED:
            return STAY
        return UP if distance > 0 else DOWN

    def _ball_arrives_at(self, court: Court) -> float:
        """Returns the height at which the ball will cross the line of the right paddle."""
        wall = HALF_HEIGHT - BALL_RADIUS
        height = court.y + court.speed_y * (PADDLE_X - court.x) / court.speed_x
        while abs(height) > wall:
            height = (2 * wall if height > 0 else -2 * wall) - height
        return height


class Duel(gymnasium.Env[npt.NDArray[np.float32], Any]):
    """A match against `Rival`: 1 for each point, -1 for each point of the rival."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self) -> None:
        self.observation_space = Box(-2.0, 2.0, (8,), np.float32)
        self.action_space = Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._court = Court()
        self._rival = Rival(self.np_random)
        self._points = {1: 0, -1: 0}
        self._age = 0
        self._serve()
        return self._observation(), {}

    def step(
        self, action: Any
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        rival_action = self._rival.act(self._court)
        reward = 0.0
        for _ in range(TICKS_PER_STEP):
            point = self._court.tick(int(action), rival_action)
            if point:
                reward += point
                self._points[point] += 1
                self._serve()

        self._age += 1
        is_over = max(self._points.values()) >= POINTS
        return self._observation(), reward, is_over, self._age >= MOST_STEPS, {}

    def _serve(self) -> None:
        self._court.serve(int(self.np_random.choice([-1, 1])), self.np_random.uniform(-1, 1))

    def _observation(self) -> npt.NDArray[np.float32]:
        return np.array(self._court.observe(-1), np.float32)
