// Elements and numbers. All text is set as text, never as HTML: it comes from files and processes.

/** An element: h("td.num", {title: "..."}, "text", child). Attributes named on* are listeners. */
export function h(what, attributes, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  add(element, children);
  return element;
}

/** An element of SVG. */
export function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** An element of the given colour, which a text beside it explains. */
export function swatch(what, background) {
  const element = h(what, { "aria-hidden": "true" });
  element.style.background = background;
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

const choices = new Map();

/** A choice of the reader, which outlives the page where the browser allows it: not in every frame or file. */
export function remembered(name) {
  try { return choices.get(name) ?? localStorage.getItem(name); } catch { return null; }
}

export function remember(name, value) {
  choices.set(name, String(value));
  try { localStorage.setItem(name, value); } catch { /* it holds until the page is closed */ }
}

/** Set the text of an element only if it differs, so that a selection by the user survives. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Names of processes, options and values with a unit are not broken across lines.
const WHOLE = /(--[a-z-]+(?: (?:auto|must|no)\b)?|\b[a-z]+-\d+\b|\d[\d.,]* (?:%|(?:s|ms|B|KiB|MB|MiB|GiB|steps|updates|cores)\b)(?:\/s)?)/;

/** A sentence as nodes; `code` in it is an element. */
export const kept = (text) => text.split(/`([^`]+)`/).map((piece, k) => (k % 2 ? h("code", null, piece)
  : piece.split(WHOLE).map((part, i) => (i % 2 ? h("span.nowrap", null, part) : part))));

const NONE = "–", GAP = "\u00a0"; // a value and its unit stay on one line
const known = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : NONE;
}

/** 1234567 -> "1.23 M": figures of a strip, whose exact value is a tooltip. */
export function short(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) {
      const scaled = value / (unit === "k" ? 1e3 : limit);
      return `${scaled.toFixed(Math.abs(scaled) < 10 ? 2 : Math.abs(scaled) < 100 ? 1 : 0)}${GAP}${unit}`;
    }
  }
  return number(value);
}

export function number(value) {
  if (!known(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e4) return count(value);
  if (size < 1e-3) return value.toExponential(2);
  if (Number.isInteger(value)) return count(value);
  return value.toPrecision(4);
}

export function percent(value) {
  if (!known(value)) return NONE;
  return `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}${GAP}%`;
}

export function bytes(value) {
  if (!known(value)) return NONE;
  for (const [limit, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= limit) return `${(value / limit).toFixed(1)}${GAP}${unit}`;
  }
  return `${Math.round(value)}${GAP}B`;
}

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value < 1) return `${Math.round(1000 * value)}${GAP}ms`;
  if (value < 10) return `${value.toFixed(1)}${GAP}s`;
  return clock(value);
}

export function clock(value) {
  if (!known(value)) return NONE;
  const s = Math.floor(value % 60), m = Math.floor(value / 60) % 60, hours = Math.floor(value / 3600);
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

export function date(value) {
  if (!known(value) || !value) return NONE;
  const d = new Date(1000 * value), two = (n) => String(n).padStart(2, "0");
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ` +
    `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
}

/** The sum of counts by reason. */
export const total = (counts) => Object.values(counts).reduce((sum, n) => sum + n, 0);

/** The time of day, with the date if that is not today's. */
export function moment(value, now) {
  const text = date(value);
  return text.slice(0, 10) === date(now).slice(0, 10) ? text.slice(11) : text;
}

/** A table; columns are [title, cell of a row, "num" or ""]. */
export function table(columns, rows, options = {}) {
  const head = columns.map(([title, , kind]) => h(kind ? `th.${kind}` : "th", { scope: "col" }, title));
  const body = rows.map((row) => h(options.rowClass?.(row) ? `tr.${options.rowClass(row)}` : "tr", null,
    columns.map(([, cell, kind]) => h(kind ? `td.${kind}` : "td", null, cell(row)))));
  return h("div.scroll", null, h("table", null,
    options.noHead ? null : h("thead", null, h("tr", null, head)), h("tbody", null, body)));
}
