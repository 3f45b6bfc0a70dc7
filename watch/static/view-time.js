// Time: where each process spends its wall clock, over the run.

import { get } from "./api.js";
import { Visible, describe, draw, partColour, partOrder } from "./chart.js";
import { fill, h, percent, setText } from "./dom.js";
import { verdict } from "./view-flow.js";
import { swatch, timeTicks } from "./view-learning.js";

const MEANS = { wait_data: "waits for data", h2d_exposed: "copy to the device", reduce_exposed: "waits for other learners", infer: "inference", step: "environment step", h2d: "copy to the device", count: "counting, reports", save: "checkpoints" };

export class TimeView {
  constructor(panel, { run }) {
    this.run = run;
    this.cards = new Map();
    this.visible = new Visible((plot) => this.redraw(plot));
    this.verdict = h("div");
    this.legend = h("ul.legend");
    this.grid = h("div.charts");
    this.note = h("p.note", null, "Reading …");
    fill(panel, this.verdict, this.legend, this.note, this.grid);
  }

  async update(now) {
    const text = JSON.stringify([now.verdict, now.also]);
    if (text !== this.text) { this.text = text; fill(this.verdict, verdict(now)); }
    this.turns = (this.turns ?? -1) + 1;
    if (now.state === "running" && this.turns % 2 && now.read >= 1) return;
    const found = await get("ledgers", { run: this.run });
    this.note.hidden = found.processes.length > 0 && !found.left_out;
    setText(this.note, found.left_out ? `${found.left_out} further processes are not drawn.` : "No ledger yet: the first comes with the first line of metrics.");
    const parts = new Set();
    for (const process of found.processes) {
      const { name, x } = process;
      if (!this.cards.has(name)) this.add(name);
      const card = this.cards.get(name);
      card.x = x;
      card.parts = Object.entries(process.parts).filter(([, y]) => Math.max(...y) >= 0.005).sort(([a], [b]) => partOrder(a, b));
      card.parts.forEach(([part]) => parts.add(part));
      card.stale = true;
      const last = (part) => process.parts[part]?.at(-1);
      const busy = "compute" in process.parts ? `utilization ${percent(last("compute"))}`
        : `works ${percent(1 - (last("wait") ?? 0) - (last("other") ?? 0))}`;
      setText(card.value, busy);
      card.plot.setAttribute("aria-label", describe(`Time of ${name}`, card.parts.map(([part, y]) => ({ name: part, y }))));
      if (this.visible.has(card.plot)) this.redraw(card.plot);
    }
    const legend = [...parts].sort(partOrder);
    if (legend.join() !== this.drawn) {
      this.drawn = legend.join();
      fill(this.legend, legend.map((part) => h("li", null, swatch("i", partColour(part)), MEANS[part] ? `${part}: ${MEANS[part]}` : part)));
    }
  }

  add(name) {
    const value = h("span.value"), isFirst = name.includes(",");
    const plot = h(isFirst ? "div.plot" : "div.plot.strip", { role: "img" });
    this.grid.append(h(isFirst ? "div.card.wide" : "div.card", null, h("header", null, h("h3", null, name), value), plot));
    this.cards.set(name, { plot, value });
    this.visible.watch(plot);
  }

  async redraw(plot) {
    const card = [...this.cards.values()].find((each) => each.plot === plot);
    if (!card?.stale) return;
    card.stale = false;
    const traces = card.parts.map(([part, y]) => ({
      x: card.x, y, name: part, mode: card.x.length > 1 ? "lines" : "markers", stackgroup: "one", fillcolor: partColour(part),
      line: { width: 0, shape: "vh", color: partColour(part) }, hovertemplate: "%{y:.0%}",
    }));
    await draw(plot, traces, {
      xaxis: { ...timeTicks([card.x[0], card.x.at(-1)]), hoverformat: ".1f", fixedrange: true },
      yaxis: { range: [0, 1], tickformat: ".0%", tickvals: [0, 0.5, 1] },
      dragmode: false,
    });
  }

  close() { this.visible.close(); }
}
