// What each thread did when, as a canvas with a row per thread. Any number of spans is drawn in the time of one
// look at each: what is narrower than a pixel is mixed there by its share of the time, so nothing is left out.

import { css, partColour } from "./chart.js";
import { fill, h, number, percent, setText, swatch } from "./dom.js";
import { capital } from "./view-flow.js";

const BAR = 16, LABEL = 15, AXIS = 22, ZOOM = 2, LEAST_US = 5; // heights in px; the shortest range
const GAP = "-";

export class Timeline {
  /** `found` is the answer of the view timeline. */
  constructor(place, found) {
    this.found = found;
    this.threads = found.threads.map((thread) => {
      const ends = new Float64Array(thread.us.length);
      let at = thread.begin;
      thread.us.forEach((us, i) => { ends[i] = at += us; });
      return { name: thread.name, begin: thread.begin, signs: thread.signs, ends };
    });
    this.whole = [found.from, Math.max(found.to, found.from + LEAST_US)];
    this.range = this.whole;
    this.colours = new Map(Object.entries(found.parts).map(([sign, part]) => [sign, rgb(partColour(part))]));
    this.canvas = h("canvas", {
      tabindex: 0, role: "img", "aria-label": this.described(), onpointerdown: (e) => this.press(e), onpointermove: (e) => this.move(e),
      onpointerup: (e) => this.release(e), onpointercancel: () => this.cancel(), onpointerleave: () => { if (!this.from) setText(this.said, "\u00a0"); },
      ondblclick: () => this.show(this.whole), onkeydown: (e) => this.key(e), onwheel: (e) => this.wheel(e),
    });
    this.said = h("p.dim", null, "\u00a0");
    const button = (label, title, act) => h("button", { type: "button", title, "aria-label": title, onclick: act }, label);
    const parts = Object.values(found.parts).map((part) => h("li", null, swatch("i", partColour(part)), part));
    fill(place,
      h("div.controls", null, button("+", "Zoom in", () => this.zoom(1 / ZOOM)), button("−", "Zoom out", () => this.zoom(ZOOM)),
        button("←", "Earlier", () => this.pan(-0.5)), button("→", "Later", () => this.pan(0.5)), button("Show all", "Show all of the timeline", () => this.show(this.whole)),
        h("span.dim", null, "Drag to zoom in; the keys + − ← → do the same as the buttons, and so does the wheel with Ctrl.")),
      h("ul.legend", null, parts), h("div.timeline", null, this.canvas), this.said, found.note && h("p.dim", null, `${capital(found.note)}.`));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas.parentElement);
  }

  close() { this.observer.disconnect(); }

  /** Shares of the time of the first threads, for readers of the screen. */
  described() {
    const lines = this.threads.slice(0, 8).map((thread) => {
      const spent = new Map();
      thread.ends.forEach((end, i) => spent.set(thread.signs[i], (spent.get(thread.signs[i]) ?? 0) + end - (i ? thread.ends[i - 1] : thread.begin)));
      const all = [...spent.values()].reduce((sum, us) => sum + us, 0);
      const shares = [...spent].filter(([sign]) => sign !== GAP).sort((a, b) => b[1] - a[1]).slice(0, 3);
      return `${thread.name}: ${shares.map(([sign, us]) => `${this.found.parts[sign]} ${percent(us / all)}`).join(", ")}`;
    });
    return `Timeline of ${this.threads.length} threads. ${lines.join("; ")}`;
  }

  show([low, high]) {
    const length = Math.min(Math.max(high - low, LEAST_US), this.whole[1] - this.whole[0]);
    const first = Math.min(Math.max(low, this.whole[0]), this.whole[1] - length);
    this.range = [first, first + length];
    this.draw();
  }

  zoom(factor, at = (this.range[0] + this.range[1]) / 2) {
    const [low, high] = this.range;
    this.show([at - (at - low) * factor, at + (high - at) * factor]);
  }

  pan(share) {
    const [low, high] = this.range, by = share * (high - low);
    this.show([low + by, high + by]);
  }

  key(event) {
    const acts = { "+": () => this.zoom(1 / ZOOM), "=": () => this.zoom(1 / ZOOM), "-": () => this.zoom(ZOOM), ArrowLeft: () => this.pan(-0.25), ArrowRight: () => this.pan(0.25), Home: () => this.show(this.whole) };
    if (!acts[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    acts[event.key]();
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.timeAt(event));
  }

  timeAt(event) {
    const box = this.canvas.getBoundingClientRect();
    return this.range[0] + (event.clientX - box.left) / box.width * (this.range[1] - this.range[0]);
  }

  press(event) {
    if (event.button) return;
    this.from = this.to = this.timeAt(event);
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (this.from === undefined) { this.point(event); return; }
    this.to = this.timeAt(event);
    this.draw();
  }

  release(event) {
    const [low, high] = [this.from, this.timeAt(event)].sort((a, b) => a - b);
    this.cancel();
    if (high - low > (this.range[1] - this.range[0]) / 100) this.show([low, high]);
  }

  cancel() { this.from = this.to = undefined; this.draw(); }

  /** Say what lies under the pointer. */
  point(event) {
    const y = event.clientY - this.canvas.getBoundingClientRect().top - AXIS;
    const thread = this.threads[Math.floor(y / (LABEL + BAR))], at = this.timeAt(event);
    const i = thread && at >= thread.begin ? firstAfter(thread.ends, at) : -1;
    if (i < 0 || i >= thread.ends.length || thread.signs[i] === GAP) { setText(this.said, "\u00a0"); return; }
    const begin = i ? thread.ends[i - 1] : thread.begin;
    setText(this.said, `${thread.name}: ${this.found.parts[thread.signs[i]]}, ${time(thread.ends[i] - begin)} from ${time(begin)} on`);
  }

  draw() {
    if (this.waits) return;
    this.waits = requestAnimationFrame(() => { this.waits = 0; this.paint(); });
  }

  paint() {
    const width = this.canvas.parentElement.clientWidth, height = AXIS + this.threads.length * (LABEL + BAR);
    if (!width || !this.canvas.isConnected) return;
    const scale = window.devicePixelRatio || 1, columns = Math.round(width * scale);
    this.canvas.width = columns;
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d"), back = rgb(css("--soft"));
    context.font = `${11 * scale}px system-ui, sans-serif`;
    context.fillStyle = css("--text");
    this.paintAxis(context, width, scale);
    this.threads.forEach((thread, row) => {
      const top = Math.round((AXIS + row * (LABEL + BAR)) * scale), rows = Math.round(BAR * scale);
      context.fillText(thread.name, 4 * scale, top + 11 * scale);
      const image = context.createImageData(columns, rows), line = this.mixed(thread, columns, back);
      for (let y = 0; y < rows; y++) image.data.set(line, y * columns * 4);
      context.putImageData(image, 0, top + Math.round(LABEL * scale) - 1);
    });
    if (this.from !== undefined) {
      const place = (at) => (at - this.range[0]) / (this.range[1] - this.range[0]) * columns;
      context.globalAlpha = 0.25;
      context.fillStyle = css("--accent");
      context.fillRect(place(this.from), 0, place(this.to) - place(this.from), this.canvas.height);
      context.globalAlpha = 1;
    }
  }

  /** The colours of a row of pixels. */
  mixed(thread, columns, back) {
    const [low, high] = this.range, perColumn = (high - low) / columns;
    const sums = new Float64Array(columns * 3), known = new Float64Array(columns);
    const { ends, signs } = thread;
    for (let i = firstAfter(ends, low); i < ends.length; i++) {
      const begin = Math.max(low, i ? ends[i - 1] : thread.begin);
      if (begin >= high) break;
      const colour = this.colours.get(signs[i]);
      if (!colour) continue;
      const from = (begin - low) / perColumn, to = Math.min(columns, (ends[i] - low) / perColumn);
      for (let x = Math.floor(from); x < to; x++) {
        const share = Math.min(to, x + 1) - Math.max(from, x);
        known[x] += share;
        for (let c = 0; c < 3; c++) sums[3 * x + c] += share * colour[c];
      }
    }
    const line = new Uint8ClampedArray(columns * 4);
    for (let x = 0; x < columns; x++) {
      const rest = Math.max(0, 1 - known[x]);
      for (let c = 0; c < 3; c++) line[4 * x + c] = sums[3 * x + c] + rest * back[c];
      line[4 * x + 3] = 255;
    }
    return line;
  }

  paintAxis(context, width, scale) {
    const [low, high] = this.range, about = (high - low) / Math.max(2, width / 110);
    const power = 10 ** Math.floor(Math.log10(about)), step = power * [1, 2, 5, 10].find((each) => each * power >= about);
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) {
      const x = (at - low) / (high - low) * width * scale, text = time(at, step);
      context.fillRect(x, 16 * scale, scale, 5 * scale);
      const half = context.measureText(text).width / 2;
      if (x - half > 0 && x + half < width * scale) context.fillText(text, x - half, 12 * scale);
    }
  }
}

/** The first index whose value is above. */
function firstAfter(values, at) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > at) high = middle; else low = middle + 1;
  }
  return low;
}

/** A time in µs, with as many digits as a step of `step` needs. */
function time(us, step = null) {
  if (step === null) return Math.abs(us) < 1000 ? `${Math.round(us)} µs` : Math.abs(us) < 1e6 ? `${number(us / 1e3)} ms` : `${(us / 1e6).toFixed(4)} s`;
  return `${(us / 1e6).toFixed(Math.min(6, Math.max(0, Math.ceil(-Math.log10(step / 1e6) - 1e-9))))} s`;
}

/** "#rgb" or "#rrggbb" as three numbers. */
function rgb(text) {
  const digits = text.slice(1), long = digits.length === 3 ? [...digits].map((each) => each + each).join("") : digits;
  return [0, 2, 4].map((at) => parseInt(long.slice(at, at + 2), 16));
}
