// Charts by plotly.js, which is loaded when the first chart is drawn.

import { h, number } from "./dom.js";

let loading = null;

function load() {
  loading = loading || new Promise((resolve, reject) => {
    const script = h("script", { src: "vendor/plotly.min.js" });
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error("plotly.js could not be loaded")));
    document.head.append(script);
  });
  return loading;
}

// Distinguishable with red-green blindness (after Okabe and Ito), darker on white.
const LIGHT = ["#1f5fbf", "#c25400", "#007a5a", "#a3457f", "#7a6a00", "#2a8fbd", "#6b4fbb", "#5b6470"];
const DARK = ["#7fb0ff", "#ff9f57", "#3ecfa3", "#e58fc0", "#dccb4c", "#79cdf0", "#b7a2ff", "#a9b4bf"];

export const isDark = () => document.documentElement.dataset.theme === "dark";
export const colour = (i) => (isDark() ? DARK : LIGHT)[i % LIGHT.length];

// Parts of time, in the order in which they are stacked: work is blue to green, overheads are warm,
// waiting is grey.
const PARTS = {
  compute: 0, forward: "#3d78cc", backward: "#1f5fbf", optimize: "#7ba7e4", device: "#174a96",
  step: "#2f8f6f", infer: "#3d78cc", write: "#7cc4aa", process: "#a7d8c6", receive: "#2a8fbd",
  decompress: "#79cdf0", gather: "#b9a85a", h2d: "#d0c27a", h2d_exposed: "#d0c27a",
  compress: "#6b4fbb", send: "#b7a2ff", reduce: "#a3457f", reduce_exposed: "#a3457f", publish: "#c98a3d",
  save: "#b5532a", count: "#dba671", bookkeeping: "#dba671", other: "#8a939d", wait: "grey", wait_data: "grey",
};
const ORDER = Object.keys(PARTS);

export function partColour(part) {
  const found = PARTS[part];
  if (found === 0) return isDark() ? "#5b96ec" : "#1f5fbf";
  if (found === "grey") return isDark() ? "#39424d" : "#d9dde2";
  return found || "#8a939d";
}

export const partOrder = (a, b) => (ORDER.indexOf(a) + 1 || 99) - (ORDER.indexOf(b) + 1 || 99);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

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

/** Draw or redraw; resolves with the element. */
export async function draw(element, traces, extra) {
  const plotly = await load();
  if (!element.isConnected) return element;
  await plotly.react(element, traces, layout(extra), CONFIG);
  return element;
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
