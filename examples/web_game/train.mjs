// The page that trains: settings, figures and the curve. trainer.mjs plays.

const MEAN_OF = 100; // matches
const MOST_POINTS = 5;
const CURVE_POINTS = 400; // beyond them every second one is left out
const $ = (id) => document.getElementById(id);

/** The mean return after each match, drawn. */
class Curve {
  #canvas = $("curve");
  #means = [];
  #every = 1; // matches between two points
  #count = 0;

  add(mean) {
    if (this.#count++ % this.#every) return;
    this.#means.push(mean);
    if (this.#means.length < CURVE_POINTS) return;
    this.#means = this.#means.filter((_, i) => i % 2 === 0);
    this.#every *= 2;
  }

  draw() {
    const canvas = this.#canvas, context = canvas.getContext("2d");
    const ratio = devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const { width, height } = canvas;
    const y = (value) => (height * (MOST_POINTS + 0.5 - value)) / (2 * MOST_POINTS + 1);

    // Lines at the best, at even and at the worst return.
    context.fillStyle = "rgb(255 255 255 / 25%)";
    for (const value of [MOST_POINTS, 0, -MOST_POINTS]) context.fillRect(0, y(value), width, ratio);
    context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--left");
    context.lineWidth = 2 * ratio;
    context.beginPath();
    const step = width / Math.max(this.#means.length - 1, 1);
    this.#means.forEach((mean, i) => context.lineTo(i * step, y(mean)));
    context.stroke();
  }
}

/** A worker that trains, and what it has reported. */
class Training {
  #worker = new Worker(new URL("trainer.mjs", import.meta.url), { type: "module" });
  #curve = new Curve();
  #last = []; // returns of the last matches
  #played = 0;
  #began = performance.now();

  constructor(settings, onfailure) {
    this.#worker.onmessage = ({ data }) => {
      if (data.failure !== undefined) onfailure(data.failure);
      else if (data.message !== undefined) $("trouble").textContent = data.message;
      else this.#show(data);
    };
    this.#worker.onerror = (event) => onfailure(event.message || "trainer.mjs cannot be loaded");
    this.#worker.postMessage(settings);
  }

  stop() {
    this.#worker.terminate();
  }

  #show({ decisions, returns }) {
    for (const value of returns) {
      this.#last = [...this.#last.slice(1 - MEAN_OF), value];
      this.#curve.add(this.#mean);
    }
    this.#played += returns.length;
    if (this.#played) $("return").textContent = this.#mean.toFixed(2);
    $("played").textContent = this.#played.toLocaleString("en");
    $("decisions").textContent = decisions.toLocaleString("en");
    $("rate").textContent = Math.round((1000 * decisions) / (performance.now() - this.#began)).toLocaleString("en");
    this.#curve.draw();
  }

  get #mean() {
    return this.#last.reduce((sum, value) => sum + value, 0) / this.#last.length;
  }
}

let training = null;

function show(isTraining) {
  $("train").textContent = isTraining ? "Stop" : "Train";
  document.querySelectorAll("#settings label").forEach((label) => { label.inert = isTraining; });
  document.body.dataset.state = isTraining ? "training" : "stopped";
}

function stop(trouble = "") {
  training?.stop();
  training = null;
  $("trouble").textContent = trouble;
  show(false);
}

$("settings").onsubmit = (event) => {
  event.preventDefault();
  if (training) return stop();
  const settings = {
    url: $("url").value.trim(), token: $("token").value, matches: $("seats").valueAsNumber, rival: $("rival").value,
  };
  $("trouble").textContent = "";
  training = new Training(settings, (failure) => stop(failure));
  show(true);
};
show(false);
