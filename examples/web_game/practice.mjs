// A match of Duel for training: the agent on the left against a scripted rival, as in duel.py.

import { BALL_RADIUS, Court, DOWN, HALF_HEIGHT, PADDLE_HALF, PADDLE_SPEED, PADDLE_X, POINTS, STAY, TICKS_PER_STEP, UP } from "./game.mjs";

const MOST_STEPS = 2000;
/** The spaces of the agent, as docs/games-protocol.md writes them. */
export const OBSERVATION = { Box: [-2, 2, [8], "<f4"] }, ACTION = { Discrete: [3, 0] };

/**
 * How strong rivals are: in which range the place lies from which they see the ball, how many of them foresee where it
 * arrives, and how far beyond the ends of their paddle they aim, in halves of it.
 */
export const RIVALS = {
  beginner: { watchesFrom: [0, 1], foresees: 0, spread: [1.5, 2.5] },
  any: { watchesFrom: [-1, 1], foresees: 0.7, spread: [0.8, 2.5] },
};

const between = ([low, high]) => low + (high - low) * Math.random();

/** A scripted player of the right side, of another strength in each match. */
class Rival {
  #watchesFrom;
  #foresees;
  #spread;
  #aim = 0; // with which place of the paddle it wants to hit; beyond the end it misses
  #wasComing = false;

  constructor(strength) {
    this.#watchesFrom = between(strength.watchesFrom);
    this.#foresees = Math.random() < strength.foresees;
    this.#spread = between(strength.spread);
  }

  /** Its action of this step. */
  act(court) {
    const isComing = court.speedX > 0;
    if (isComing && !this.#wasComing) this.#aim = between([-1, 1]) * this.#spread * PADDLE_HALF;
    this.#wasComing = isComing;

    let target = 0;
    if (isComing && court.x > this.#watchesFrom)
      target = (this.#foresees ? ballArrivesAt(court) : court.y) - this.#aim;
    // A paddle goes on for some ticks before it stands.
    const distance = target - (court.right.y + 3 * court.right.speed);
    if (Math.abs(distance) < PADDLE_SPEED) return STAY;
    return distance > 0 ? UP : DOWN;
  }
}

/** The height at which the ball will cross the line of the right paddle. */
function ballArrivesAt(court) {
  const wall = HALF_HEIGHT - BALL_RADIUS;
  let height = court.y + (court.speedY * (PADDLE_X - court.x)) / court.speedX;
  while (Math.abs(height) > wall) height = (height > 0 ? 2 * wall : -2 * wall) - height;
  return height;
}

/** One match after another. A reward is 1 for each point, and -1 for each point of the rival. */
export class Practice {
  #strength;

  /** @param {typeof RIVALS.any} strength */
  constructor(strength) {
    this.#strength = strength;
    this.begin();
  }

  begin() {
    this.court = new Court();
    /** Points of the agent minus those of its rival, from -5 to 5. */
    this.return = 0;
    /** Whether a side has its points, and whether the match took too long. */
    this.isOver = false;
    this.isCut = false;
    this.rival = new Rival(this.#strength);
    this.points = { [1]: 0, [-1]: 0 };
    this.steps = 0;
    this.#serve();
  }

  observe() {
    return this.court.observe(-1);
  }

  /** Play one step. Returns its reward. */
  step(action) {
    const rivalAction = this.rival.act(this.court);
    let reward = 0;
    for (let tick = 0; tick < TICKS_PER_STEP; tick++) {
      const point = this.court.tick(action, rivalAction);
      if (point === 0) continue;
      reward += point;
      this.points[point] += 1;
      this.#serve();
    }
    this.return += reward;
    this.steps += 1;
    this.isOver = Math.max(this.points[1], this.points[-1]) >= POINTS;
    this.isCut = this.steps >= MOST_STEPS;
    return reward;
  }

  #serve() {
    this.court.serve(Math.random() < 0.5 ? 1 : -1, 2 * Math.random() - 1);
  }
}
