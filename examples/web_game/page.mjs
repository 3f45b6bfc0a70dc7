// The page of Duel: the match, who plays it, and what is drawn.

import { PageAgent, ServedAgent } from "./agents.mjs";
import { BALL_RADIUS, Court, DOWN, HALF_HEIGHT, HALF_WIDTH, PADDLE_HALF, PADDLE_SPEED, PADDLE_X, POINTS, STAY, TICKS_PER_S, UP } from "./game.mjs";

const LEFT = -1, RIGHT = 1;
const SERVE_TICKS = 45; // the ball waits in the middle before it flies
const LONGEST_FRAME_S = 0.1; // a page that was hidden does not catch up
const TRAIL = 14; // places of the ball that are still seen
const $ = (id) => document.getElementById(id);

/** The keyboard and the pointer of a person, as one of the game's actions. */
class Hands {
  #keys = new Set();
  #height = null; // where the pointer wants the paddle

  constructor(canvas) {
    this.canvas = canvas;
    addEventListener("keydown", (event) => this.#press(event));
    addEventListener("keyup", (event) => this.#keys.delete(event.code));
    addEventListener("blur", () => this.#keys.clear());
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("pointermove", (event) => this.#point(event));
  }

  action(paddle) {
    if (this.#keys.has("ArrowUp") || this.#keys.has("KeyW")) return UP;
    if (this.#keys.has("ArrowDown") || this.#keys.has("KeyS")) return DOWN;
    if (this.#height === null) return STAY;
    // A paddle goes on for some ticks before it stands.
    const distance = this.#height - (paddle.y + 3 * paddle.speed);
    if (Math.abs(distance) < PADDLE_SPEED) return STAY;
    return distance > 0 ? UP : DOWN;
  }

  #press(event) {
    if (!["ArrowUp", "ArrowDown", "KeyW", "KeyS"].includes(event.code) || isField(event.target)) return;
    event.preventDefault();
    this.#keys.add(event.code);
    this.#height = null;
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.#height = HALF_HEIGHT * (1 - (2 * (event.clientY - box.top)) / box.height);
  }
}

/** A match: the court, the points, and whether the ball flies. */
class Match {
  court = new Court();
  points = { [LEFT]: 0, [RIGHT]: 0 };
  ticksToServe = SERVE_TICKS;

  constructor() {
    this.#serve();
  }

  get isOver() {
    return Math.max(this.points[LEFT], this.points[RIGHT]) >= POINTS;
  }

  get ballFlies() {
    return this.ticksToServe === 0;
  }

  /** Advance by one tick. Returns the side that has won a point, or 0. */
  tick(leftAction, rightAction) {
    if (!this.ballFlies) {
      this.ticksToServe -= 1;
      return 0;
    }
    const point = this.court.tick(leftAction, rightAction);
    if (point === 0) return 0;
    const winner = point === 1 ? LEFT : RIGHT;
    this.points[winner] += 1;
    this.#serve();
    return winner;
  }

  #serve() {
    this.court.serve(Math.random() < 0.5 ? 1 : -1, 2 * Math.random() - 1);
    this.ticksToServe = SERVE_TICKS;
  }
}

/** The sides that the agent plays: it is asked every few ticks, and its last actions hold until it has answered. */
class AgentSides {
  actions = { [LEFT]: STAY, [RIGHT]: STAY };
  decisions = 0;
  #agent;
  #sides;
  #rewards;
  #answer = null; // the promise of the running question
  #times = [];

  constructor(agent, sides) {
    this.#agent = agent;
    this.#sides = sides;
    this.#rewards = sides.map(() => 0);
  }

  /** Ask, unless the last question is still open. */
  ask(court, onfailure) {
    if (this.#answer) return;
    const started = performance.now();
    this.#answer = this.#agent.act(this.#seen(court), this.#takeRewards()).then((actions) => {
      this.#sides.forEach((side, i) => { this.actions[side] = actions[i]; });
      this.decisions += actions.length;
      this.#times = [...this.#times.slice(-99), performance.now() - started];
    }).catch(onfailure).finally(() => { this.#answer = null; });
  }

  point(winner) {
    this.#rewards = this.#rewards.map((reward, i) => reward + (this.#sides[i] === winner ? 1 : -1));
  }

  /** End the episode of each side. */
  async end(court) {
    await this.#answer;
    this.actions = { [LEFT]: STAY, [RIGHT]: STAY };
    await this.#agent.end(this.#seen(court), this.#takeRewards());
  }

  close() {
    this.#agent.close();
  }

  /** The median time of an answer in milliseconds. */
  get latency() {
    return [...this.#times].sort((a, b) => a - b)[this.#times.length >> 1];
  }

  #seen(court) {
    return this.#sides.map((side) => court.observe(side));
  }

  #takeRewards() {
    const rewards = this.#rewards;
    this.#rewards = rewards.map(() => 0);
    return rewards;
  }
}

/** Draws the court. */
class Painter {
  #trail = [];
  #still = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    this.colours = Object.fromEntries(["left", "right", "ball"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  draw({ court, ballFlies, ticksToServe }) {
    const { canvas, context, colours } = this;
    const ratio = devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });

    // The court fills the canvas: x to the right, y upwards, the origin in the middle.
    context.setTransform(width / 2 / HALF_WIDTH, 0, 0, -height / 2 / HALF_HEIGHT, width / 2, height / 2);
    context.clearRect(-HALF_WIDTH, -HALF_HEIGHT, 2 * HALF_WIDTH, 2 * HALF_HEIGHT);
    context.fillStyle = "rgb(255 255 255 / 18%)";
    for (let y = -HALF_HEIGHT; y < HALF_HEIGHT; y += 0.1) context.fillRect(-0.005, y, 0.01, 0.05);
    this.#paddle(-PADDLE_X, court.left, colours.left);
    this.#paddle(PADDLE_X, court.right, colours.right);

    // The ball with its trail; it swells while it waits to be served.
    this.#trail = ballFlies && !this.#still.matches ? [...this.#trail.slice(1 - TRAIL), [court.x, court.y]] : [];
    context.fillStyle = colours.ball;
    this.#trail.forEach(([x, y], i) => this.#ball(x, y, (BALL_RADIUS * (i + 1)) / TRAIL, (0.35 * i) / TRAIL));
    const swelling = ballFlies || this.#still.matches ? 0 : 0.4 * Math.abs(Math.sin(ticksToServe / 7));
    this.#ball(court.x, court.y, BALL_RADIUS * (1 + swelling), 1);
  }

  #paddle(x, { y }, colour) {
    const thickness = 0.05; // behind the line at which the ball bounces
    this.context.fillStyle = colour;
    this.context.beginPath();
    this.context.roundRect(x < 0 ? x - thickness : x, y - PADDLE_HALF, thickness, 2 * PADDLE_HALF, 0.02);
    this.context.fill();
  }

  #ball(x, y, radius, opacity) {
    this.context.globalAlpha = opacity;
    this.context.beginPath();
    this.context.arc(x, y, radius, 0, 2 * Math.PI);
    this.context.fill();
    this.context.globalAlpha = 1;
  }
}

/** The page: settings, the running match, and the clock. */
class Page {
  #match = new Match();
  #sides = null; // AgentSides, once the agent is there
  #state = "ready"; // "loading", "playing", "paused", "over"
  #hands = new Hands($("court"));
  #painter = new Painter($("court"));
  #tick = 0;
  #due = 0; // ticks that the clock is ahead
  #shown = 0; // the time of the last frame in milliseconds

  constructor() {
    $("serve").onclick = () => this.#proceed();
    $("pause").onclick = () => this.#proceed();
    $("restart").onclick = () => this.#restart();
    $("settings").onchange = (event) => this.#change(event.target);
    $("settings").onsubmit = (event) => event.preventDefault();
    document.onvisibilitychange = () => document.hidden && this.#state === "playing" && this.#show("paused");
    addEventListener("keydown", (event) => {
      if (isField(event.target) || event.repeat) return;
      if (event.code === "Space" && event.target.tagName !== "BUTTON") { event.preventDefault(); this.#proceed(); }
      if (event.code === "KeyR" && !event.ctrlKey && !event.metaKey) this.#restart();
    });
    this.#names();
    this.#show("ready");
    requestAnimationFrame((now) => this.#frame(now));
  }

  /** Serve, pause or go on: what the button says. */
  async #proceed() {
    if (this.#state === "loading") return;
    if (this.#state === "playing") return this.#show("paused");
    if (this.#state === "over") await this.#begin();
    $("trouble").textContent = "";
    if (!this.#sides) {
      this.#show("loading");
      try {
        this.#sides = await this.#load();
      } catch (error) {
        return this.#fail(error);
      }
    }
    this.#show("playing");
    $("court").focus({ preventScroll: true });
  }

  async #restart() {
    if (this.#state === "loading") return;
    await this.#begin();
    if (this.#state !== "ready") this.#show("playing");
  }

  /** A new match with the same players. */
  async #begin() {
    const finished = this.#match;
    this.#match = new Match();
    this.#points();
    await this.#sides?.end(finished.court).catch((error) => this.#fail(error));
  }

  /** Settings: another agent or other players begin a new match. */
  #change(field) {
    const atServer = $("place").value === "server";
    document.querySelectorAll(".server").forEach((label) => { label.hidden = !atServer; });
    if (field.id === "reaction") return;
    this.#drop();
    this.#match = new Match();
    this.#names();
    this.#points();
    $("trouble").textContent = "";
    this.#show("ready");
  }

  async #load() {
    const sides = $("players").value === "agents" ? [LEFT, RIGHT] : [LEFT];
    const agent = $("place").value === "server"
      ? await ServedAgent.connect({ url: $("url").value.trim(), token: $("token").value }, sides.length)
      : await PageAgent.load("duel.onnx");
    agent.onclose = (reason) => this.#fail(reason);
    return new AgentSides(agent, sides);
  }

  #drop() {
    this.#sides?.close();
    this.#sides = null;
  }

  #fail(error) {
    this.#drop();
    $("trouble").textContent = `${error.message}. Press Serve to try again.`;
    this.#match = new Match();
    this.#points();
    this.#show("ready");
  }

  #frame(now) {
    const elapsed = Math.min((now - this.#shown) / 1000, LONGEST_FRAME_S);
    this.#shown = now;
    this.#due = this.#state === "playing" ? this.#due + elapsed * TICKS_PER_S : 0;
    while (this.#due >= 1 && this.#state === "playing") {
      this.#due -= 1;
      this.#advance();
    }
    this.#painter.draw(this.#match);
    requestAnimationFrame((later) => this.#frame(later));
  }

  #advance() {
    const match = this.#match, sides = this.#sides;
    if (match.ballFlies && this.#tick++ % Number($("reaction").value) === 0)
      sides.ask(match.court, (error) => sides === this.#sides && this.#fail(error)); // unless it was sent away
    const isPerson = $("players").value === "person";
    const rightAction = isPerson ? this.#hands.action(match.court.right) : sides.actions[RIGHT];
    const winner = match.tick(sides.actions[LEFT], rightAction);
    if (this.#tick % 30 === 0) this.#figures();
    if (winner === 0) return;

    sides.point(winner);
    this.#points();
    $("said").textContent = `Point for ${this.#name(winner)}: ${match.points[LEFT]} to ${match.points[RIGHT]}`;
    if (match.isOver) this.#show("over");
  }

  #show(state) {
    this.#state = state;
    const { points } = this.#match;
    const winner = points[LEFT] > points[RIGHT] ? LEFT : RIGHT;
    const messages = {
      ready: "Ready?", loading: "The agent is coming …", playing: "", paused: "Paused",
      over: winner === RIGHT && this.#name(RIGHT) === "You" ? "You win!" : `${this.#name(winner)} wins.`,
    };
    const orders = { ready: "Serve", loading: "Serve", playing: "Serve", paused: "Go on", over: "Play again" };
    $("veil").hidden = state === "playing";
    $("message").textContent = messages[state];
    $("serve").textContent = orders[state];
    $("serve").disabled = state === "loading";
    $("settings").inert = state === "loading";
    $("pause").disabled = state !== "playing" && state !== "paused";
    $("pause").textContent = state === "paused" ? "Go on" : "Pause";
    document.body.dataset.state = state;
  }

  #points() {
    $("left-points").value = this.#match.points[LEFT];
    $("right-points").value = this.#match.points[RIGHT];
  }

  #figures() {
    const { decisions, latency } = this.#sides;
    if (latency !== undefined) $("latency").textContent = `${decisions.toLocaleString("en")} decisions, ${latency.toFixed(1)} ms each (median)`;
  }

  #names() {
    const isPerson = $("players").value === "person";
    $("left-name").textContent = isPerson ? "Agent" : "Agent on the left";
    $("right-name").textContent = isPerson ? "You" : "Agent on the right";
  }

  #name(side) {
    return $(side === LEFT ? "left-name" : "right-name").textContent;
  }
}

function isField(element) {
  return ["INPUT", "SELECT"].includes(element.tagName);
}

new Page();
