// Duel: two paddles and a ball. The same game as duel.py, number for number: change both or neither.

// The court is 3 wide and 2 high, with its origin in the middle. Speeds are lengths a tick.
export const TICKS_PER_S = 60;
export const HALF_WIDTH = 1.5;
export const HALF_HEIGHT = 1.0;
export const BALL_RADIUS = 0.03;
export const PADDLE_X = 1.4;
export const PADDLE_HALF = 0.18; // half its length
export const PADDLE_SPEED = 0.03;
const PADDLE_ACCELERATION = 0.005;
const SERVE_SPEED = 0.024;
const FASTER = 1.1; // the ball after each hit
const BALL_SPEED = 0.08; // the fastest, in x
const STEEPNESS = 0.055; // speed in y after a hit with the end of a paddle
const DRAG = 0.35; // share of the paddle's speed that the ball takes along

export const STAY = 0, UP = 1, DOWN = 2;
// What x and speeds are divided by in an observation, so that all of its numbers are about 1.
const SCALE = [HALF_WIDTH, 1.0, BALL_SPEED, BALL_SPEED, 1.0, PADDLE_SPEED, 1.0, PADDLE_SPEED];
// The agent decides every fourth tick, and a match ends at so many points of one side.
export const TICKS_PER_STEP = 4;
export const POINTS = 5;

/** A paddle, which accelerates towards where its player wants it to go. */
export class Paddle {
  y = 0.0;
  speed = 0.0;

  /** Move for one tick by one of the actions STAY, UP, DOWN. */
  tick(action) {
    let wanted = 0.0;
    if (action === UP) wanted = PADDLE_SPEED;
    if (action === DOWN) wanted = -PADDLE_SPEED;
    const change = Math.min(Math.max(wanted - this.speed, -PADDLE_ACCELERATION), PADDLE_ACCELERATION);
    this.speed = this.speed + change;
    this.y = this.y + this.speed;

    // It stops at a wall.
    const limit = HALF_HEIGHT - PADDLE_HALF;
    if (this.y > limit) {
      this.y = limit;
      this.speed = 0.0;
    }
    if (this.y < -limit) {
      this.y = -limit;
      this.speed = 0.0;
    }
  }
}

/** The paddles and the ball of one rally after another. */
export class Court {
  left = new Paddle();
  right = new Paddle();

  constructor() {
    this.serve(1, 0.0);
  }

  /**
   * Put the ball into the middle.
   * @param {1 | -1} side 1: it flies to the right, -1: to the left.
   * @param {number} slope its speed in y as a share of that in x, from -1 to 1.
   */
  serve(side, slope) {
    this.x = 0.0;
    this.y = 0.0;
    this.speedX = side * SERVE_SPEED;
    this.speedY = slope * SERVE_SPEED;
  }

  /** Advance by one tick. Returns 1 for a point of the left, -1 of the right, otherwise 0. */
  tick(leftAction, rightAction) {
    this.left.tick(leftAction);
    this.right.tick(rightAction);

    // The ball flies, and bounces off the walls.
    const previousX = this.x;
    this.x = this.x + this.speedX;
    this.y = this.y + this.speedY;
    const wall = HALF_HEIGHT - BALL_RADIUS;
    if (this.y > wall) {
      this.y = 2 * wall - this.y;
      this.speedY = -this.speedY;
    }
    if (this.y < -wall) {
      this.y = -2 * wall - this.y;
      this.speedY = -this.speedY;
    }

    // A paddle returns a ball that crosses its line.
    const line = PADDLE_X - BALL_RADIUS;
    if (previousX < line && line <= this.x) this.#hit(this.right, line);
    if (this.x <= -line && -line < previousX) this.#hit(this.left, -line);

    if (this.x > HALF_WIDTH) return 1;
    if (this.x < -HALF_WIDTH) return -1;
    return 0;
  }

  /**
   * 8 numbers as the player of a side sees them, who always plays on the left: the ball's x, y and speed in x and y,
   * and y and speed of the own and of the other paddle, divided by SCALE.
   * @param {1 | -1} side -1: of the left, 1: of the right player.
   * @returns {number[]}
   */
  observe(side) {
    const own = side === -1 ? this.left : this.right;
    const other = side === -1 ? this.right : this.left;
    const ball = [-side * this.x, this.y, -side * this.speedX, this.speedY];
    const numbers = [...ball, own.y, own.speed, other.y, other.speed];
    return numbers.map((number, i) => number / SCALE[i]);
  }

  /** Return the ball at `line` if the paddle is there. Its end and its motion aim. */
  #hit(paddle, line) {
    const reach = PADDLE_HALF + BALL_RADIUS;
    const offset = (this.y - paddle.y) / reach;
    if (offset > 1 || offset < -1) return;
    this.x = 2 * line - this.x;
    this.speedX = -this.speedX * FASTER;
    this.speedX = Math.min(Math.max(this.speedX, -BALL_SPEED), BALL_SPEED);
    this.speedY = offset * STEEPNESS + paddle.speed * DRAG;
  }
}
