// Learning: curves of a run, and of others that are compared with it.

import { get } from "./api.js";
import { Visible, colour, css, describe, draw, idle } from "./chart.js";
import { clock, count, fill, h, number, percent, remember, remembered, setText, short, swatch } from "./dom.js";

// In the order in which they are read: does it learn, why not, how stable.
const RETURN = "episode_return_mean";
const EVALUATED = ["eval_return_greedy", "eval_return_sampled"];
const TITLES = {
  [RETURN]: "Return", episode_return_all_mean: "Return, all environments", policy_loss: "Policy loss", value_loss: "Value loss", q_loss: "Q loss",
  critic_loss: "Critic loss", actor_loss: "Actor loss", entropy: "Entropy", alpha: "Temperature alpha",
  kl: "KL divergence", ratio_clipped: "Share of ratios clipped", explained_variance: "Explained variance",
  policy_lag_mean: "Policy lag", learning_rate: "Learning rate", grad_norm: "Gradient norm", td_error: "TD error",
  q_mean: "Mean Q", episode_length_mean: "Episode length", trained_steps_per_s: "Trained steps/s",
};
const UNITS = { entropy: "nats", kl: "nats", policy_lag_mean: "updates", episode_length_mean: "steps" };
const BAD = new Set(["restart", "hang", "kill", "lost", "rollback", "rejected"]);
const READ_MS = 100; // until the next request, while metrics are being read
const SMOOTH = [1, 3, 10, 30, 100, 300];

export class LearningView {
  constructor(panel, { run, compare, runs, add }) {
    this.run = run;
    this.names = [run, ...compare];
    this.titles = Object.fromEntries(runs.map((row) => [row.name, row.title]));
    this.x = remembered("x") === "time_s" ? "time_s" : "env_steps";
    this.smooth = SMOOTH.includes(Number(remembered("smooth"))) ? Number(remembered("smooth")) : 1;
    this.together = remembered("seeds") === "together";
    this.siblings = seeds(run, runs);
    this.add = add;
    this.added = [];
    this.range = null;
    this.version = "";
    this.signs = new Set(); // of the marks on the charts
    this.cards = new Map();
    this.visible = new Visible((plot) => this.redraw(plot));
    this.build(panel);
    this.load().catch(() => {}); // the first update reports it
  }

  build(panel) {
    const axis = (value, label) => h("button", {
      type: "button", "aria-pressed": this.x === value, onclick: (event) => {
        this.x = value;
        remember("x", value);
        for (const each of event.currentTarget.parentElement.children) each.setAttribute("aria-pressed", each === event.currentTarget);
        this.setRange(null);
      },
    }, label);
    const smooth = h("select", { onchange: (event) => {
      this.smooth = Number(event.target.value);
      remember("smooth", this.smooth);
      this.again();
    } }, SMOOTH.map((n) => h("option", { value: n, selected: n === this.smooth }, n === 1 ? "none" : `mean of ${n}`)));
    this.more = h("select", { onchange: (event) => {
      if (event.target.value) this.added.push(event.target.value);
      event.target.value = "";
      this.again();
    } }, h("option", { value: "" }, "choose …"));
    this.reset = h("button", { type: "button", hidden: true, onclick: () => this.setRange(null) }, "Show all");
    this.legend = h("ul.legend");
    this.grid = h("div.charts");
    this.empty = h("p.note", null, "Reading …");
    this.progress = h("p.loading.dim", { role: "progressbar", "aria-label": "Metrics that are read", "aria-valuemin": 0, "aria-valuemax": 100, hidden: true }, h("span"), h("span.bar", null, h("i")));
    fill(panel,
      h("div.controls", null,
        h("div.segmented", { role: "group", "aria-label": "Horizontal axis" }, axis("env_steps", "Steps"), axis("time_s", "Time")),
        h("label", null, "Smoothing", smooth), h("label", null, "Add a metric", this.more), this.seedControls(), this.reset),
      this.legend, this.progress, this.empty, this.grid);
    this.drawLegend();
  }

  /** Compare all seeds of the run's folder, and draw them as one line. */
  seedControls() {
    const missing = this.siblings.filter((name) => !this.names.includes(name));
    if (this.siblings.length < 2) return null;
    if (missing.length) return h("button", { type: "button", onclick: () => this.add(missing) }, `Compare all ${this.siblings.length} seeds`);
    const box = h("input", { type: "checkbox", onchange: (event) => {
      this.together = event.target.checked;
      remember("seeds", this.together ? "together" : "apart");
      this.drawLegend();
      this.again();
    } });
    box.checked = this.together;
    return h("label", null, box, "Seeds as mean and range");
  }

  drawLegend() {
    const isSeed = (name) => this.together && this.siblings.length > 1 && this.siblings.includes(name);
    const runs = this.names.filter((name) => !isSeed(name) || name === this.run).map((name) => h("li", null,
      swatch("i", colour(this.names.indexOf(name))), isSeed(name) ? `${folderOf(name)}: mean, lowest and highest of its seeds` : this.titles[name] ?? name));
    if (this.target) runs.push(h("li.dim", null, swatch("i.target", "none"), `Target: stop.return = ${number(this.target.value)}`));
    if (this.target && this.target.reached !== null) runs.push(h("li.dim", null, h("span", { "aria-hidden": "true" }, "★ "), "Target reached in training"));
    const marks = [["Evaluated greedily", "●"], ["Evaluated sampled", "○"], ["Checkpoint (on Return)", "▲"], ["Restart, loss, rollback", "◆"]];
    fill(this.legend, runs, marks.filter(([, sign]) => this.signs.has(sign)).map(([text, sign]) => h("li.dim", null, h("span", { "aria-hidden": "true" }, `${sign} `), text)));
  }

  async update(now) {
    this.now = now;
    if (!this.metrics || !(this.turns % 10)) await this.loadMetrics();
    this.turns = (this.turns || 0) + 1;
    await this.load();
  }

  async loadMetrics() {
    const { groups } = await get("metrics", { run: this.names });
    this.metrics = new Set(Object.values(groups).flat());
    const known = new Set([...this.more.options].map((option) => option.value));
    for (const [group, names] of Object.entries(groups)) {
      const fresh = names.filter((name) => !known.has(name) && !(name in TITLES) && !name.startsWith("eval_"));
      if (!fresh.length) continue;
      let box = this.more.querySelector(`optgroup[label="${CSS.escape(group)}"]`);
      if (!box) { box = h("optgroup", { label: group }); this.more.append(box); }
      box.append(...fresh.map((name) => h("option", { value: name }, name)));
    }
  }

  again() { this.version = ""; return this.load().catch(() => {}); }

  setRange(range) {
    this.range = range;
    this.reset.hidden = range === null;
    this.again();
  }

  async load() {
    if (this.loading) { this.pending = true; return; }
    this.loading = true;
    try {
      const wanted = [...Object.keys(TITLES), ...this.added].filter((name) => !this.metrics || this.metrics.has(name));
      const [low, high] = this.range ?? [null, null];
      const found = await get("curves", {
        run: this.names, metric: [...wanted, ...EVALUATED], x: this.x, smooth: this.smooth, low, high, known: this.version,
        seeds: this.together ? "together" : "apart",
      });
      this.showProgress(found.read);
      if (found.unchanged) return;
      this.version = found.version;
      this.show(found, wanted);
    } finally {
      this.loading = false;
      if (this.pending) { this.pending = false; this.load().catch(() => {}); }
    }
  }

  /** How much of the metrics is read, and the next request if that is not all. */
  showProgress(shares) {
    const all = Object.values(shares), share = all.reduce((sum, each) => sum + each, 0) / all.length;
    this.progress.hidden = share >= 1;
    if (share >= 1) return;
    setText(this.progress.firstChild, `${percent(share)} of the metrics are read; until all are, curves are drawn from a sample of the lines.`);
    this.progress.setAttribute("aria-valuenow", Math.round(100 * share));
    this.progress.querySelector("i").style.width = `${100 * share}%`;
    if (this.waits) return;
    this.waits = true;
    idle().then(() => setTimeout(() => { // first the charts, then the rest of the metrics
      this.waits = false;
      if (!this.closed && !document.hidden) this.load().catch(() => {});
    }, READ_MS));
  }

  show(found, wanted) {
    const target = found.targets[this.run];
    const marks = (found.marks[this.run] ?? []).map((mark) => (BAD.has(mark.kind) ? "◆" : mark.kind === "checkpoint" ? "▲" : ""));
    const signs = new Set([...["●", "○"].filter((_, way) => found.curves[EVALUATED[way]]?.length), ...marks]);
    const legend = JSON.stringify([target, [...signs].sort()]);
    if (legend !== this.legendOf) { this.legendOf = legend; this.target = target; this.signs = signs; this.drawLegend(); }
    const drawn = wanted.filter((name) => found.curves[name]);
    if (!drawn.includes(RETURN) && EVALUATED.some((name) => found.curves[name])) drawn.unshift(RETURN);
    this.empty.hidden = drawn.length > 0;
    setText(this.empty, Object.values(found.read).some((part) => part < 1) ? "Reading …"
      : "No figures yet: the first line of metrics comes after the first interval of training.");
    for (const name of drawn) {
      if (!this.cards.has(name)) this.addCard(name);
      const card = this.cards.get(name);
      card.lines = found.curves[name] ?? [];
      card.evaluated = name === RETURN ? EVALUATED.map((each) => found.curves[each] ?? []) : [];
      card.marks = (found.marks[this.run] ?? []).filter((mark) => name === RETURN || BAD.has(mark.kind));
      card.target = name === RETURN ? target : null;
      card.stale = true;
      const own = card.lines.find((line) => line.run === this.run) ?? card.lines[0];
      // The head shows the return too, and is read at another moment than the curve.
      const isHead = name === RETURN && !this.range && !own?.smooth && !own?.low && own?.run === this.run && this.now?.name === this.run;
      const last = isHead ? this.now.figures.episode_return_mean : (own?.smooth ?? own)?.y.at(-1);
      setText(card.kind, own?.smooth ? "last, smoothed " : own?.low ? "last mean " : "last ");
      setText(card.value, last === undefined || last === null ? "" : short(last));
      card.plot.setAttribute("aria-label", describe(TITLES[name] ?? name,
        card.lines.map((line) => ({ name: this.titles[line.run] ?? line.run, y: line.y }))));
      if (this.visible.has(card.plot)) this.redraw(card.plot);
    }
  }

  addCard(name) {
    const value = h("span.value"), kind = h("span.unit", null, "last "), plot = h("div.plot", { role: "img" });
    const unit = UNITS[name] && h("span.unit", null, ` ${UNITS[name]}`);
    const wide = name === RETURN ? "div.card.wide" : "div.card";
    this.grid.append(h(wide, null, h("header", null, h("h2", { title: name }, TITLES[name] ?? name), h("span", null, kind, value, unit)), plot));
    const card = { name, value, kind, plot };
    this.cards.set(name, card);
    this.visible.watch(plot);
    // Bound once the chart exists.
    card.bind = () => {
      plot.on("plotly_relayout", (change) => {
        const low = change["xaxis.range[0]"], high = change["xaxis.range[1]"];
        if (low !== undefined) this.setRange([low, high]);
      });
      plot.on("plotly_doubleclick", () => this.setRange(null));
    };
  }

  async redraw(plot) {
    const card = [...this.cards.values()].find((each) => each.plot === plot);
    if (!card?.stale || !card.lines) return;
    card.stale = false;
    const inTime = this.x === "time_s";
    const traces = [];
    for (const line of card.lines) {
      const i = this.names.indexOf(line.run), name = escaped(this.titles[line.run] ?? line.run);
      const few = line.x.length < 2 ? "markers" : "lines";
      if (line.low) {
        const edge = { x: line.x, mode: "lines", line: { width: 0, color: colour(i) }, showlegend: false };
        traces.push({ ...edge, y: line.low, name: "lowest", hovertemplate: "%{y:.5~g}" });
        traces.push({ ...edge, y: line.high, name: "highest", fill: "tonexty", fillcolor: `${colour(i)}33`, hovertemplate: "%{y:.5~g}" });
        traces.push({ x: line.x, y: line.y, mode: few, name: `mean of ${line.count}`, line: { color: colour(i), width: 1.8 }, hovertemplate: "%{y:.5~g}" });
      } else if (line.smooth) {
        traces.push({ x: line.x, y: line.y, mode: few, line: { color: colour(i), width: 1 }, opacity: 0.25, hoverinfo: "skip" });
        traces.push({ x: line.smooth.x, y: line.smooth.y, mode: few, name, line: { color: colour(i), width: 1.8 }, hovertemplate: "%{y:.5~g}" });
      } else {
        traces.push({ x: line.x, y: line.y, mode: few, name, line: { color: colour(i), width: 1.5 }, hovertemplate: "%{y:.5~g}" });
      }
    }
    card.evaluated.forEach((lines, way) => {
      for (const line of lines) {
        const i = this.names.indexOf(line.run);
        traces.push({
          x: line.x, y: line.y, mode: "markers", name: `${escaped(this.titles[line.run] ?? line.run)}, ${way ? "sampled" : "greedy"}`,
          marker: { color: colour(i), size: 7, symbol: way ? "circle-open" : "circle", line: { width: 1.5, color: colour(i) } },
          hovertemplate: "%{y:.5~g}",
        });
      }
    });
    if (card.target) traces.push(...this.targetOf(card));
    const style = getComputedStyle(document.documentElement);
    const bad = style.getPropertyValue("--bad").trim(), dim = style.getPropertyValue("--dim").trim();
    const marks = spaced(card.marks.filter((mark) => !this.range || (mark.x >= this.range[0] && mark.x <= this.range[1])), this.extent(card));
    if (marks.length) {
      const isBad = (mark) => BAD.has(mark.kind);
      traces.push({
        x: marks.map((mark) => mark.x), y: marks.map(() => 0.03), yaxis: "y2", mode: "markers", name: "",
        marker: { color: marks.map((mark) => (isBad(mark) ? bad : dim)), size: 7, symbol: marks.map((mark) => (isBad(mark) ? "diamond" : "triangle-up")) },
        text: marks.map((mark) => escaped(`${mark.kind}${mark.role ? ` ${mark.role}` : ""}: ${mark.text ?? ""}`.slice(0, 90))),
        hovertemplate: "%{text}<extra></extra>",
      });
    }
    const shapes = marks.filter((mark) => BAD.has(mark.kind)).slice(-40).map((mark) => ({
      type: "line", xref: "x", yref: "paper", x0: mark.x, x1: mark.x, y0: 0, y1: 1, line: { color: bad, width: 1, dash: "dot" }, opacity: 0.5,
    }));
    const ticks = inTime ? timeTicks(this.extent(card)) : {};
    await draw(plot, traces, {
      shapes,
      xaxis: { ...ticks, nticks: 7, hoverformat: inTime ? ".1f" : ",.0f", ...(this.range ? { range: this.range } : { autorange: true, rangemode: "nonnegative" }), tickformat: inTime ? undefined : "~s" },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      uirevision: undefined,
    });
    if (plot.on && !card.bound) { card.bound = true; card.bind(); } // not if the view was closed meanwhile
  }

  /** A line at the return that the run is to reach, and a mark where it has. */
  targetOf(card) {
    const { value, reached } = card.target, colours = { color: css("--text") };
    const line = { x: this.extent(card), y: [value, value], mode: "lines", line: { ...colours, width: 1, dash: "dash" }, hoverinfo: "skip" };
    if (reached === null || (this.range && (reached < this.range[0] || reached > this.range[1]))) return [line];
    return [line, { x: [reached], y: [value], mode: "markers", name: "target reached", marker: { ...colours, size: 12, symbol: "star" }, hovertemplate: "%{y:.5~g}" }];
  }

  extent(card) {
    if (this.range) return this.range;
    const all = [...card.lines, ...card.evaluated.flat()].flatMap((line) => [line.x[0], line.x.at(-1)]).filter(Number.isFinite);
    return [Math.min(0, ...all), Math.max(...all)];
  }

  close() {
    this.closed = true;
    this.visible.close();
  }
}

/** All marks of what went wrong, and of the others as many as can be distinguished. */
function spaced(marks, [low, high]) {
  let last = -Infinity;
  return marks.filter((mark) => {
    if (BAD.has(mark.kind)) return true;
    if (mark.x - last < (high - low) / 40) return false;
    last = mark.x;
    return true;
  });
}

const folderOf = (name) => name.slice(0, Math.max(0, name.lastIndexOf("/")));

/** The runs seed-N of the folder of a run that is one of them; at most as many as are compared. */
function seeds(run, runs) {
  const isSeed = (name) => name.slice(name.lastIndexOf("/") + 1).startsWith("seed-");
  if (!isSeed(run)) return [];
  return runs.map((row) => row.name).filter((name) => isSeed(name) && folderOf(name) === folderOf(run)).sort().slice(0, 24);
}

/** Ticks at round numbers of seconds, minutes or hours. */
export function timeTicks([low, high]) {
  const steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 259200, 604800];
  const step = steps.find((each) => (high - low) / each <= 7) ?? 604800 * Math.ceil((high - low) / 604800 / 7);
  const values = [];
  for (let at = Math.ceil(low / step) * step; at <= high && values.length < 20; at += step) values.push(at);
  return values.length > 1 ? { tickvals: values, ticktext: values.map(clock) } : {};
}

// plotly.js reads a small subset of HTML in texts.
export const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
