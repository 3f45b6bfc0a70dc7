// Charts by plotly.js, which is loaded when the first chart is drawn; a frozen page contains it.

import { h, number, svg } from "./dom.js";

let loading = null;

/** Load plotly.js once what is drawn without it is on the screen: until it has run, nothing else can. */
function load() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  loading = loading || new Promise((resolve) => {
    requestAnimationFrame(() => setTimeout(resolve));
  }).then(() => new Promise((resolve, reject) => {
    const script = h("script", { src: "vendor/plotly.min.js" });
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error("plotly.js could not be loaded")));
    document.head.append(script);
  }));
  return loading;
}

// Distinguishable with red-green blindness (after Okabe and Ito), darker on white.
const LIGHT = ["#1f5fbf", "#c25400", "#007a5a", "#a3457f", "#7a6a00", "#2a8fbd", "#6b4fbb", "#5b6470"];
const DARK = ["#7fb0ff", "#ff9f57", "#3ecfa3", "#e58fc0", "#dccb4c", "#79cdf0", "#b7a2ff", "#a9b4bf"];

export const isDark = () => document.documentElement.dataset.theme === "dark";
export const colour = (i) => (isDark() ? DARK : LIGHT)[i % LIGHT.length];

// Parts of time, in the order in which they are stacked. The colours of one chart are distinguishable,
// also with each kind of colour blindness; parts of different processes share colours. Each chart has a
// legend. Waiting is pale, and what no part claims has the strongest contrast.
const PARTS = {
  compute: "#3f37f5", forward: "#bd80a6", backward: "#3f37f5", optimize: "#43abf2", device: "#19671e",
  step: "#19671e", infer: "#bd80a6", write: "#ebcf76", process: "#43abf2", receive: "#bd80a6",
  decompress: "#3f37f5", gather: "#ebcf76", h2d: "#a0f519", h2d_exposed: "#a0f519",
  compress: "#8724b1", send: "#87a67a", reduce: "#f31948", reduce_exposed: "#f31948", pull: "#bd80a6", pull_exposed: "#bd80a6", publish: "#87a67a",
  save: "#e57819", count: "#8724b1", bookkeeping: "#8724b1", other: "strong", wait: "pale", wait_data: "pale",
};
const ORDER = Object.keys(PARTS);

export function partColour(part) {
  const found = PARTS[part] ?? "strong";
  if (found === "pale") return isDark() ? "#39424d" : "#d9dde2";
  return found === "strong" ? (isDark() ? "#e8eaed" : "#30353b") : found;
}

export const partOrder = (a, b) => (ORDER.indexOf(a) + 1 || 99) - (ORDER.indexOf(b) + 1 || 99);

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function layout(extra = {}) {
  const axis = {
    gridcolor: css("--soft"), linecolor: css("--line"), zerolinecolor: css("--line"),
    tickfont: { color: css("--dim"), size: 11 }, automargin: true, fixedrange: false,
  };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: css("--text") },
    margin: { l: 44, r: 8, t: 10, b: 26 }, showlegend: false, hovermode: "x unified", dragmode: "zoom",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text"), size: 12 } },
    uirevision: "same",
    ...extra,
    xaxis: { ...axis, showspikes: false, ...extra.xaxis },
    yaxis: { ...axis, fixedrange: true, nticks: 5, ...extra.yaxis },
  };
}

const CONFIG = { displayModeBar: false, responsive: true, displaylogo: false, doubleClick: false };

let queue = Promise.resolve();

/** Draw or redraw; resolves with the element. Charts are drawn one after another, and the browser paints in between. */
export function draw(element, traces, extra) {
  if (!window.Plotly) sketch(element, traces, extra);
  const drawn = queue.then(async () => {
    const plotly = await load();
    if (!element.isConnected) return element;
    element.querySelector(".sketch")?.remove();
    await plotly.react(element, traces, layout(extra), CONFIG);
    return element;
  });
  queue = drawn.catch(() => {}).then(() => new Promise((resolve) => setTimeout(resolve)));
  return drawn;
}

/** Resolves when no chart waits to be drawn. */
export const idle = () => queue;

/** The lines of a chart with its axes, to be read until plotly.js is there, which makes it one to zoom. */
function sketch(element, traces, { xaxis = {} } = {}) {
  const lines = traces.filter((trace) => trace.mode === "lines" && !trace.stackgroup && trace.line?.width !== 0);
  const points = lines.map(({ x, y }) => x.map((each, i) => [each, y[i]]));
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const [x, y] of points.flat()) {
    [left, right, low, high] = [Math.min(left, x), Math.max(right, x), Math.min(low, y), Math.max(high, y)];
  }
  if (!(right > left)) return;
  [left, right] = xaxis.range ?? [left, right];
  const margin = 0.055 * (high - low || 1); // as plotly.js leaves
  low -= margin;
  high += margin;
  const across = (x) => (100 * (x - left)) / (right - left), up = (y) => 100 - (100 * (y - low)) / (high - low);
  const xs = xaxis.tickvals ?? ticks(left, right, 7), ys = ticks(low, high, 5);
  const picture = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none" },
    ...xs.map((x) => svg("line", { x1: across(x), x2: across(x), y1: 0, y2: 100 })),
    ...ys.map((y) => svg("line", { x1: 0, x2: 100, y1: up(y), y2: up(y) })),
    ...lines.map((line, i) => svg("polyline", {
      points: points[i].map(([x, y]) => `${across(x)},${up(y)}`).join(" "), stroke: line.line?.color ?? css("--dim"), opacity: line.opacity ?? 1,
    })));
  const labels = [
    ...xs.map((x, i) => label("span.across", "left", across(x), xaxis.ticktext?.[i] ?? compact(x))),
    ...ys.map((y) => label("span.up", "top", up(y), compact(y))),
  ];
  element.replaceChildren(h("div.sketch", { "aria-hidden": "true" }, picture, h("div", null, labels)));
}

function label(what, side, place, text) {
  const element = h(what, null, text);
  element.style[side] = `${place}%`;
  return element;
}

/** Round numbers between two, at most about `most`. */
function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough), first = Math.ceil(low / step);
  // Counted beforehand: beside a large value `first + 1` can be `first`.
  const count = Math.min(Math.floor(high / step) - first + 1, 2 * most);
  return count > 0 ? Array.from({ length: count }, (_, i) => (first + i) * step) : [];
}

/** 1500000 -> "1.5M", as plotly.js labels axes. */
function compact(value) {
  const [limit, unit] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([each]) => Math.abs(value) >= each) ?? [1, ""];
  return `${Number((value / limit).toPrecision(4))}${unit}`;
}

/** Free what plotly keeps for the charts within an element. */
export function release(element) {
  if (window.Plotly) element.querySelectorAll(".js-plotly-plot").forEach((each) => window.Plotly.purge(each));
}

/** Calls back when elements come into view, and knows which are. */
export class Visible {
  constructor(callback) {
    this.seen = new Set();
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) { this.seen.add(entry.target); callback(entry.target); }
        else this.seen.delete(entry.target);
      }
    }, { rootMargin: "200px" });
  }
  watch(element) { this.observer.observe(element); }
  has(element) { return this.seen.has(element); }
  close() { this.observer.disconnect(); }
}

/** A sentence for readers of the screen that cannot see a chart. */
export function describe(title, lines) {
  const parts = lines.map(({ name, y }) => {
    if (!y.length) return `${name}: no values`;
    return `${name}: last ${number(y[y.length - 1])}, from ${number(Math.min(...y))} to ${number(Math.max(...y))}`;
  });
  return `${title}. ${parts.join("; ")}`;
}
