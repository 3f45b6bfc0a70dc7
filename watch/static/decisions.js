// What the policy decided in each step of a video: the actions as bars, and the value's curve. They
// follow the video as it plays; a slider chooses a step, and with it the place in the video.

import { count, fill, h, number, percent, setText, svg } from "./dom.js";

const WIDTH = 600, HEIGHT = 90; // of the curve's own coordinates
const LATE = 1e-3; // seconds by which the time of a picture may be rounded down

export class Decisions {
  /** ``found`` as api/decisions gives it; ``video`` is null for a picture that moves by itself. */
  constructor(place, found, video) {
    this.found = found;
    this.video = video;
    this.last = found.picture.length - 1;
    this.slider = h("input", { type: "range", min: 0, max: this.last, value: 0, "aria-label": "Step of the video", oninput: () => this.seek(Number(this.slider.value)) });
    this.line = h("p.stepline");
    this.bars = h("div.bars");
    this.beyond = h("p.stepline");
    this.curve = makeCurve(found);
    this.rows = this.makeRows();
    if (this.rows.length) { // a list, which scrolls if it is long
      for (const [name, value] of [["role", "list"], ["aria-label", TITLES[found.kind] ?? "Action"], ["tabindex", 0]]) this.bars.setAttribute(name, value);
    }
    fill(place, this.line, this.slider, this.bars, this.beyond, this.curve?.element, h("p.dim", null, this.notes()));
    this.show(0);
    this.follow();
  }

  notes() {
    const { kind, steps, values, value } = this.found;
    const texts = [TITLES[kind] ? `${TITLES[kind]} in each state, and the action that was taken (●).` : "The action that was taken."];
    if (value.some((each) => each !== null)) texts.push("Value: the discounted return that the network expects, in the units of its training.");
    if (steps > this.last + 1) texts.push(`Only the first ${count(this.last + 1)} of ${count(steps)} steps are kept.`);
    const kept = this.rows.length;
    if (kept && values > kept) texts.push(`Only the first ${count(kept)} of ${count(values)} values are kept.`);
    if (!this.video) texts.push("A GIF does not tell which picture it shows, so choose a step.");
    return texts.join(" ");
  }

  makeRows() {
    const { kind, names, counts, rows, action } = this.found;
    const components = kind === "mean" ? rows[0].map((_, i) => names[i] ?? `number ${i + 1}`) : [];
    if (kind !== "mean") {
      (counts.length ? counts : [rows[0].length]).forEach((n, part) => {
        for (let i = 0; i < n && components.length < (rows[0].length || 0); i++) components.push(names[components.length] ?? nameOf(i, part, counts));
      });
    }
    const drawn = components.map((name) => {
      const row = { name: h("span.name", { title: name }, name), fill: h("i"), value: h("span.num") };
      row.element = h("div.bar", { role: "listitem" }, row.name, h(kind === "mean" ? "span.meter.signed" : "span.meter", { "aria-hidden": "true" }, row.fill), row.value);
      return row;
    });
    if (!drawn.length && action[0].length) this.plain = h("p");
    fill(this.bars, drawn.map((row) => row.element), this.plain);
    const known = rows.flat().filter((x) => x !== null);
    this.range = known.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
    return drawn;
  }

  /** The chosen row of each component of an action; it may be beyond those that are kept. */
  chosen(k) {
    const { kind, counts, action } = this.found;
    if (kind === "mean") return [];
    let first = 0;
    return action[k].map((choice, i) => { const at = first + choice; first += counts[i] ?? 0; return at; });
  }

  show(k) {
    const { kind, counts, rows, std, action, reward, value } = this.found;
    this.step = k;
    this.slider.value = k;
    const total = reward.slice(0, k + 1).reduce((sum, x) => sum + (x ?? 0), 0);
    setText(this.line, [`Step ${count(k + 1)} of ${count(this.last + 1)}`, `reward ${number(reward[k])}`, `total ${number(total)}`, value[k] === null ? "" : `value ${number(value[k])}`].filter(Boolean).join(" · "));
    this.slider.setAttribute("aria-valuetext", this.line.textContent);
    const chosen = this.chosen(k), [low, high] = this.range;
    this.rows.forEach((row, i) => {
      const x = rows[k][i] ?? null, isChosen = chosen.includes(i);
      row.element.classList.toggle("chosen", isChosen);
      setText(row.name, isChosen ? `● ${row.name.title}` : row.name.title);
      const clipped = Math.max(-1, Math.min(1, x ?? 0));
      if (kind === "mean") {
        row.fill.style.width = `${50 * Math.abs(clipped)}%`;
        row.fill.style.marginLeft = `${clipped < 0 ? 50 + 50 * clipped : 50}%`;
      } else row.fill.style.width = `${100 * (kind === "q" ? (x === null ? 0 : (x - low) / (high - low || 1)) : clipped)}%`;
      const spread = std[k]?.[i] ?? null;
      setText(row.value, kind === "probabilities" ? percent(x) : kind === "mean" ? `${number(x)}${spread === null ? "" : ` ± ${number(spread)}`}` : number(x));
    });
    const beyond = action[k].map((choice, part) => (chosen[part] >= this.rows.length ? nameOf(choice, part, counts) : "")).filter(Boolean);
    setText(this.beyond, this.rows.length && beyond.length ? `● ${beyond.join(", ")}: not among the values that are kept` : "");
    if (this.plain) setText(this.plain, `Action ${action[k].map(number).join(", ")}`);
    this.curve?.mark(k);
  }

  /** Show a step, and its picture. */
  seek(k) {
    this.show(k);
    if (this.video && this.found.fps) this.video.currentTime = this.found.picture[k] / this.found.fps + LATE;
  }

  follow() {
    const video = this.video, { fps, picture } = this.found;
    if (!video || !fps) return;
    const at = (time) => {
      const shown = Math.floor((time + LATE) * fps);
      let low = 0, high = this.last; // the last step whose picture is not after the one shown
      while (low < high) { const middle = (low + high + 1) >> 1; if (picture[middle] <= shown) low = middle; else high = middle - 1; }
      if (low !== this.step) this.show(low);
    };
    for (const name of ["timeupdate", "seeked"]) video.addEventListener(name, () => at(video.currentTime));
    if (!video.requestVideoFrameCallback) return;
    const each = (_, { mediaTime }) => { if (video.isConnected) { at(mediaTime); video.requestVideoFrameCallback(each); } };
    video.requestVideoFrameCallback(each);
  }
}

/** A choice without a name; of an action of several parts, with the number of the part. */
const nameOf = (choice, part, counts) => (counts.length > 1 ? `${part + 1}: ${number(choice)}` : `action ${number(choice)}`);

const TITLES = { probabilities: "Probability of each action", q: "Q-value of each action", mean: "Mean of each number of the action, from −1 to 1, ± its standard deviation" };

/** The value over the steps, with a mark at one of them; null without values. */
function makeCurve({ value, reward }) {
  const known = value.filter((x) => x !== null);
  if (known.length < 2) return null;
  const low = Math.min(...known), high = Math.max(...known), size = high - low || 1, last = value.length - 1;
  const x = (k) => (WIDTH * k) / (last || 1), y = (v) => HEIGHT - 6 - ((HEIGHT - 12) * (v - low)) / size;
  let path = "", pen = "M";
  value.forEach((v, k) => { if (v === null) pen = "M"; else { path += `${pen}${x(k).toFixed(1)} ${y(v).toFixed(1)}`; pen = "L"; } });
  const paid = reward.some((r) => r !== reward[0]) // no marks where every step pays alike
    ? reward.map((r, k) => (r ? `M${x(k).toFixed(1)} ${HEIGHT}v-5` : "")).join("") : "";
  const mark = svg("path", { class: "mark", "vector-effect": "non-scaling-stroke" });
  const element = h("figure.valuecurve", null,
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `Value over the steps, from ${number(low)} to ${number(high)}` },
      svg("path", { class: "rewards", d: paid, "vector-effect": "non-scaling-stroke" }), svg("path", { class: "value", d: path, "vector-effect": "non-scaling-stroke" }), mark),
    h("figcaption.dim", null, `Value, ${number(low)} to ${number(high)}${paid ? "; marks at the lower edge: rewards" : ""}`));
  return { element, mark: (k) => mark.setAttribute("d", `M${x(k).toFixed(1)} 0V${HEIGHT}`) };
}
