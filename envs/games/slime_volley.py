"""`penstock/SlimeVolley-v0`: volleyball between two slimes, with the published physics.

A vectorised port of David Ha's slimevolleygym (2020, https://github.com/hardmaru/slimevolleygym,
Apache 2.0): same physics, observations, rewards and built-in player, to the last bit of a double.
Seat 0 is the right slime, which the published environment trains, and seat 1 the left one.

A seat gains 1 where the ball falls on the other's ground, and loses 1 where it falls on its own.
Each has five lives; the game ends when one has none, and is truncated after 3000 steps.

An observation is 12 numbers: x, y and the two speeds of oneself, of the ball, and of the other, all
divided by 10. Each seat sees itself on the right, and the distance of the other to the fence. As in
the original, the step that ends a point shows what the step before showed. An action is three
buttons: forward (to the fence), backward and jump.

The scripted player `baseline` is the original's: a recurrent network of 120 parameters. Here its
memory begins anew with each game.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, MultiBinary
from gymnasium.vector import AutoresetMode

from penstock.envs.games.seat_games import (
    RANDOM,
    Array,
    Flags,
    Floats,
    Ints,
    SeatGames,
    SeatResults,
    duel_results,
)

Doubles = npt.NDArray[np.float64]

BASELINE = "baseline"
LIVES = 5
MAX_STEPS = 3000
# Steps for which the ball is held still before a point.
DELAY = 30

# The buttons.
_FORWARD = 0
_BACKWARD = 1
_JUMP = 2

# Lengths in units of the original: the field is 48 wide, and x is 0 at the fence.
_WIDTH = 48.0
_GROUND = 1.5
_FENCE_WIDTH = 1.0
_FENCE_HEIGHT = 3.5
_BALL_RADIUS = 0.5
_SLIME_RADIUS = 1.5
# Units per second, and seconds.
_SPEED_X = 10 * 1.75
_SPEED_Y = 10 * 1.35
_BALL_SPEED = 15 * 1.5
_GRAVITY = -9.8 * 2 * 1.5
_TIME_STEP = 1 / 30.0
# By so much a ball is moved out of what it touches.
_NUDGE = 0.1
# What observations are divided by.
_SCALE = 10.0
# The side of each seat: right of the fence, left of it.
_SIDES = np.array([1.0, -1.0])

# The weights of the built-in player, as the original lists them.
_BASELINE_WEIGHTS = np.array([
    7.5719, 4.4285, 2.2716, -0.3598, -7.8189, -2.5422, -3.2034, 0.3935, 1.2202, -0.49, -0.0316,
    0.5221, 0.7026, 0.4179, -2.1689, 1.646, -13.3639, 1.5151, 1.1175, -5.3561, 5.0442, 0.8451,
    0.3987, -2.9501, -3.7811, -5.8994, 6.4167, 2.5014, 7.338, -2.9887, 2.4586, 13.4191, 2.7395,
    -3.9708, 1.6548, -2.7554, -1.5345, -6.4708, 9.2426, -0.7392, 0.4452, 1.8828, -2.6277, -10.851,
    -3.2353, -4.4653, -3.1153, -1.3707, 7.318, 16.0902, 1.4686, 7.0391, 1.7765, -1.155, 2.6697,
    -8.8877, 1.1958, -3.2839, -5.4425, 1.6809, 7.6812, -2.4732, 1.738, 0.3781, 0.8718, 2.5886,
    1.6911, 1.2953, -9.0052, -4.6038, -6.7447, -2.5528, 0.4391, -4.9278, -3.6695, -4.8673, -1.6035,
    1.5011, -5.6124, 4.9747, 1.8998, 3.0359, 6.2983, -4.8568, -2.1888, -4.1143, -3.9874, -0.0459,
    4.7134, 2.8952, -9.3627, -4.685, 0.3601, -1.3699, 9.7294, 11.5596, 0.1918, 3.0783, 0.0329,
    -0.1362, -0.1188, -0.7579, 0.3278, -0.977, -0.9377,
]).reshape(7, 15)  # fmt: skip
_BASELINE_BIASES = np.array([2.2935, -2.0353, -1.7786, 5.4567, -3.6368, 3.4996, -0.0685])
# An output above it presses its button.
_PRESSED = 0.75

# Pixels per unit of a picture, its size in units, and the colours.
_PIXELS = 8
_PICTURE_HEIGHT = 20
_BACKGROUND = (11, 16, 19)
_GROUND_COLOUR = (116, 114, 117)
_FENCE_COLOUR = (102, 56, 35)
_BALL_COLOUR = (217, 79, 0)
_SLIME_COLOURS = ((255, 236, 0), (35, 93, 188))


class SlimeVolley(SeatGames):
    """Actions are three buttons, 0 or 1 each: forward, backward, jump. A person presses them by the
    arrow keys."""

    metadata = {  # noqa: RUF012
        "autoreset_mode": AutoresetMode.NEXT_STEP,
        "render_modes": ["rgb_array"],
        "render_fps": 50,
        "seats": 2,
        "sides": (0, 1),
        "bots": (RANDOM, BASELINE),
        # The right slime, seat 0, goes forward to the left.
        "keys": (
            {"left": _FORWARD, "right": _BACKWARD, "up": _JUMP},
            {"right": _FORWARD, "left": _BACKWARD, "up": _JUMP},
        ),
    }

    def __init__(self, num_games: int = 1, *, render_mode: str | None = None) -> None:
        """Make the games.

        Args:
            num_games: number of games.
            render_mode: as of gymnasium; pictures can be rendered in any mode.
        """
        super().__init__(num_games, Box(-np.inf, np.inf, (12,), np.float32), MultiBinary(3))
        self.render_mode = render_mode

        # Of the ball the place, the speed, and x before its last move, each [games].
        self._ball_x = np.zeros(num_games)
        self._ball_y = np.zeros(num_games)
        self._ball_vx = np.zeros(num_games)
        self._ball_vy = np.zeros(num_games)
        self._ball_last_x = np.zeros(num_games)
        # Of the slimes the place and the speed, each [games, seats].
        self._x = np.zeros((num_games, 2))
        self._y = np.zeros((num_games, 2))
        self._vx = np.zeros((num_games, 2))
        self._vy = np.zeros((num_games, 2))

        # Lives of the seats, [games, seats]; steps of the games, and steps until the ball moves.
        self._lives = np.zeros((num_games, 2), np.int64)
        self._age = np.zeros(num_games, np.int64)
        self._delay = np.zeros(num_games, np.int64)
        # What the seats see, [games, seats, 12], not yet divided.
        self._seen = np.zeros((num_games, 2, 12))
        # The outputs of the built-in player, which are its memory, [games, seats, 7].
        self._baseline = np.zeros((num_games, 2, 7))

    def get_action_meanings(self) -> list[str]:
        """The names of the buttons, in their order."""
        return ["forward", "backward", "jump"]

    def render(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """Returns a picture of each game, uint8 ``[160, 384, 3]``; seat 0 is yellow."""
        return tuple(self._picture(game) for game in range(self.num_games))

    def _begin(self, games: Ints) -> None:
        self._x[games] = _WIDTH / 4 * _SIDES
        self._y[games] = _GROUND
        self._vx[games] = 0
        self._vy[games] = 0
        self._lives[games] = LIVES
        self._age[games] = 0
        self._baseline[games] = 0
        self._serve(games)
        self._look(games)

    def _play(self, moves: Array, is_live: Flags) -> SeatResults:
        self._move_slimes(moves > 0)
        self._move_ball()
        for seat in (1, 0):
            self._bounce(
                self._x[:, seat], self._y[:, seat], self._vx[:, seat], self._vy[:, seat],
                radius=_SLIME_RADIUS,
            )  # fmt: skip
        # The fence has a round top, which does not move.
        still = np.zeros(self.num_games)
        top = np.full(self.num_games, _FENCE_HEIGHT)
        self._bounce(still, top, still, still, radius=_FENCE_WIDTH / 2)
        falls = self._meet_edges()

        # Seat 1 defends the left, where x is 0 or less.
        gains = np.where(self._ball_x <= 0, 1, -1) * falls
        self._lives[:, 0] -= gains < 0
        self._lives[:, 1] -= gains > 0
        self._age += 1

        # What was seen last stays in the step that ends a point.
        scored = np.flatnonzero(falls)
        if scored.size:
            self._serve(scored)
            self._look(np.flatnonzero(~falls))
        else:
            self._look(self._games)

        over = (self._lives == 0).any(1)
        late = (self._age >= MAX_STEPS) & ~over
        lead = self._lives[:, 0] - self._lives[:, 1]
        return duel_results(gains, over=over, late=late, lead=lead)

    def _observe(self) -> Floats:
        return (self._seen / _SCALE).astype(np.float32).reshape(self.num_envs, 12)

    def _serve(self, games: Ints) -> None:
        """Throw the ball up in the middle of the field, with a random speed."""
        self._ball_x[games] = 0
        self._ball_last_x[games] = 0
        self._ball_y[games] = _WIDTH / 4
        self._ball_vx[games] = self.np_random.uniform(-20, 20, len(games))
        self._ball_vy[games] = self.np_random.uniform(10, 25, len(games))
        self._delay[games] = DELAY

    def _move_slimes(self, pressed: Flags) -> None:
        """Move the slimes by their buttons, bool ``[games, seats, 3]``."""
        steps = pressed[:, :, 1].astype(np.float64) - pressed[:, :, 0]
        self._vx = steps * _SPEED_X * _SIDES

        # Only a slime on the ground jumps.
        self._vy += _GRAVITY * _TIME_STEP
        on_ground = self._y <= _GROUND + _NUDGE * _TIME_STEP
        np.copyto(self._vy, pressed[:, :, 2] * _SPEED_Y, where=on_ground)

        self._x += self._vx * _TIME_STEP
        self._y += self._vy * _TIME_STEP
        landed = self._y <= _GROUND
        self._y[landed] = _GROUND
        self._vy[landed] = 0

        # Each stays in its half.
        nearest = _FENCE_WIDTH / 2 + _SLIME_RADIUS
        farthest = _WIDTH / 2 - _SLIME_RADIUS
        distance = self._x * _SIDES
        self._vx[(distance <= nearest) | (distance >= farthest)] = 0
        self._x = np.clip(distance, nearest, farthest) * _SIDES

    def _move_ball(self) -> None:
        """Let the ball fall and fly, where it is not held still."""
        moves = self._delay == 0
        self._delay -= ~moves
        vx = self._ball_vx
        vy = self._ball_vy + _GRAVITY * _TIME_STEP

        square = vx * vx + vy * vy
        fast = np.flatnonzero(square > _BALL_SPEED * _BALL_SPEED)
        if fast.size:
            speed = np.sqrt(square[fast])
            vx = vx.copy()
            vx[fast] = vx[fast] / speed * _BALL_SPEED
            vy[fast] = vy[fast] / speed * _BALL_SPEED

        np.copyto(self._ball_vx, vx, where=moves)
        np.copyto(self._ball_vy, vy, where=moves)
        np.copyto(self._ball_last_x, self._ball_x, where=moves)
        self._ball_x += self._ball_vx * _TIME_STEP * moves
        self._ball_y += self._ball_vy * _TIME_STEP * moves

    def _bounce(self, x: Doubles, y: Doubles, vx: Doubles, vy: Doubles, *, radius: float) -> None:
        """Let the ball bounce off a round object that it touches.

        Args:
            x: of the object's centre, ``[games]``, as all of these.
            y: of its centre.
            vx: its speed.
            vy: its speed.
            radius: of the object.
        """
        reach = _BALL_RADIUS + radius
        across = self._ball_x - x
        up = self._ball_y - y
        hit = np.flatnonzero(across * across + up * up < reach * reach)
        if not hit.size:
            return

        # Push the ball out, along the line through both centres.
        distance = np.sqrt(across[hit] * across[hit] + up[hit] * up[hit])
        normal_x = across[hit] / distance
        normal_y = up[hit] / distance
        inside = np.arange(len(hit))
        while inside.size:
            games = hit[inside]
            self._ball_x[games] += normal_x[inside] * _NUDGE
            self._ball_y[games] += normal_y[inside] * _NUDGE
            across_x = x[games] - self._ball_x[games]
            across_y = y[games] - self._ball_y[games]
            square = across_x * across_x + across_y * across_y
            inside = inside[square < reach * reach]

        # Mirror the relative speed.
        relative_x = self._ball_vx[hit] - vx[hit]
        relative_y = self._ball_vy[hit] - vy[hit]
        towards = relative_x * normal_x + relative_y * normal_y
        self._ball_vx[hit] = relative_x - normal_x * (towards * 2) + vx[hit]
        self._ball_vy[hit] = relative_y - normal_y * (towards * 2) + vy[hit]

    def _meet_edges(self) -> Flags:
        """Let the ball bounce off walls, ceiling and fence; returns where it falls down."""
        margin = _NUDGE * _TIME_STEP
        wall = _WIDTH / 2 - _BALL_RADIUS
        hit = np.flatnonzero(np.abs(self._ball_x) >= wall)
        if hit.size:
            self._ball_vx[hit] *= -1
            self._ball_x[hit] = np.sign(self._ball_x[hit]) * (wall - margin)

        falls = self._ball_y <= _BALL_RADIUS + _GROUND
        ceiling = _WIDTH - _BALL_RADIUS
        hit = np.flatnonzero(self._ball_y >= ceiling)
        if hit.size:
            self._ball_vy[hit] *= -1
            self._ball_y[hit] = ceiling - margin

        # The ball hits the fence if it was beside it, and would be in it or beyond.
        edge = _FENCE_WIDTH / 2 + _BALL_RADIUS
        side = np.where(self._ball_last_x > 0, 1.0, -1.0)
        crosses = (self._ball_x * side <= edge) & (self._ball_last_x * side > edge)
        hit = np.flatnonzero(crosses & (self._ball_y <= _FENCE_HEIGHT) & ~falls)
        if hit.size:
            self._ball_vx[hit] *= -1
            self._ball_x[hit] = side[hit] * (edge + margin)
        return falls

    def _look(self, games: Ints) -> None:
        """Write what the seats of these games see."""
        seen = np.empty((len(games), 2, 12))
        seen[:, :, 0] = self._x[games] * _SIDES
        seen[:, :, 1] = self._y[games]
        seen[:, :, 2] = self._vx[games] * _SIDES
        seen[:, :, 3] = self._vy[games]
        seen[:, :, 4] = self._ball_x[games, None] * _SIDES
        seen[:, :, 5] = self._ball_y[games, None]
        seen[:, :, 6] = self._ball_vx[games, None] * _SIDES
        seen[:, :, 7] = self._ball_vy[games, None]
        # The other sees itself as it is seen.
        seen[:, :, 8:] = seen[:, ::-1, :4]
        self._seen[games] = seen

    def _scripted(self, name: str, rows: Ints) -> Ints:
        """Returns the buttons of the built-in player, ``[len(rows), 3]``."""
        games, seats = np.divmod(rows, 2)
        inputs = np.concatenate(
            (self._seen[games, seats, :8] / _SCALE, self._baseline[games, seats]), 1
        )
        outputs = np.tanh(inputs @ _BASELINE_WEIGHTS.T + _BASELINE_BIASES)
        self._baseline[games, seats] = outputs
        return np.asarray(outputs[:, :3] > _PRESSED, np.int64)

    def _picture(self, game: int) -> npt.NDArray[np.uint8]:
        """Returns a picture of a game, uint8 ``[160, 384, 3]``."""
        height = _PICTURE_HEIGHT * _PIXELS
        width = int(_WIDTH) * _PIXELS
        # The place of each pixel's centre; the first row of a picture is the highest one.
        y = (height - 0.5 - np.arange(height))[:, None] / _PIXELS
        x = (np.arange(width) + 0.5) / _PIXELS - _WIDTH / 2

        picture = np.full((height, width, 3), _BACKGROUND, np.uint8)
        in_fence = (np.abs(x) <= _FENCE_WIDTH / 2) & (y <= _FENCE_HEIGHT)
        on_top = x**2 + (y - _FENCE_HEIGHT) ** 2 <= (_FENCE_WIDTH / 2) ** 2
        picture[in_fence | on_top] = _FENCE_COLOUR
        for seat, colour in enumerate(_SLIME_COLOURS):
            up = y - self._y[game, seat]
            across = x - self._x[game, seat]
            picture[(across**2 + up**2 <= _SLIME_RADIUS**2) & (up >= 0)] = colour

        across = x - self._ball_x[game]
        up = y - self._ball_y[game]
        picture[across**2 + up**2 <= _BALL_RADIUS**2] = _BALL_COLOUR
        picture[np.broadcast_to(y <= _GROUND, (height, width))] = _GROUND_COLOUR

        # A lamp at the seat's edge for each life that it may yet lose.
        for seat, colour in enumerate(_SLIME_COLOURS):
            for life in range(1, self._lives[game, seat]):
                lamp = _SIDES[seat] * (_WIDTH / 2 + 0.5 - 2 * life)
                picture[(x - lamp) ** 2 + (y - (_PICTURE_HEIGHT - 1.5)) ** 2 <= 0.25] = colour
        return picture
