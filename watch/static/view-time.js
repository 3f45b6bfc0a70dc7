// Time: where each process spends its wall clock, over the run.

import { get } from "./api.js";
import { Visible, css, describe, draw, partColour, partOrder } from "./chart.js";
import { fill, h, percent, setText, swatch } from "./dom.js";
import { frozen } from "./frozen.js";
import { ProfileSection, RecordedTimeline } from "./profile.js";
import { means, verdict } from "./view-flow.js";
import { escaped, timeTicks } from "./view-learning.js";

const MEANS = { wait: "waits for data, room or an order", wait_data: "waits for data, or gathers it", bookkeeping: "count and save", write: "into the slot", process: "the algorithm's work on a slot", h2d_exposed: "copy to the device", reduce_exposed: "waits for other learners", pull: "waits for the parameter server", pull_exposed: "waits for the parameter server", infer: "inference", step: "environment step", h2d: "copy to the device", count: "counting, reports", save: "checkpoints" };

export class TimeView {
  constructor(panel, { run }) {
    this.run = run;
    this.cards = new Map();
    this.visible = new Visible((plot) => this.redraw(plot));
    this.verdict = h("div");
    this.window = h("p.dim");
    this.grid = h("div.charts");
    this.note = h("p.note", null, "Reading …");
    const profile = h("div");
    this.profile = new ProfileSection(profile, run);
    const recorded = h("div");
    this.recorded = new RecordedTimeline(recorded, run);
    fill(panel, profile, this.verdict, this.window, this.note, this.grid, recorded);
  }

  async update(now) {
    const text = JSON.stringify([now.verdict, now.also]);
    await this.profile.load();
    await this.recorded.load(now.state === "running" && !frozen);
    this.verdict.hidden = this.profile.hasVerdict; // it has measured more
    if (text !== this.text) { this.text = text; fill(this.verdict, verdict(now)); }
    this.turns = (this.turns ?? -1) + 1;
    if (now.state === "running" && this.turns % 2 && now.read >= 1) return;
    const found = await get("ledgers", { run: this.run });
    this.note.hidden = found.processes.length > 0 && !found.left_out;
    setText(this.note, found.left_out ? `${found.left_out} further processes are not drawn.` : "No ledger yet: the first comes with the first line of metrics.");
    setText(this.window, found.seconds ? `Shares of the wall clock of each main thread; a part includes the time in which the thread has no core. Beside the names: ${means(now)}.` : "");
    for (const process of found.processes) {
      const { name, x } = process;
      if (!this.cards.has(name)) this.add(name);
      const card = this.cards.get(name);
      card.x = x;
      card.parts = Object.entries(process.parts).filter(([, y]) => Math.max(...y) >= 0.005).sort(([a], [b]) => partOrder(a, b));
      card.stale = true;
      setText(card.value, "computes" in process ? `utilization ${percent(process.computes)}` : `works ${percent(process.works)}`);
      const legend = card.parts.map(([part]) => part);
      if (legend.join() !== card.drawn) {
        card.drawn = legend.join();
        fill(card.legend, legend.map((part) => h("li", null, swatch("i", partColour(part)), MEANS[part] ? `${part}: ${MEANS[part]}` : part)));
      }
      card.plot.setAttribute("aria-label", describe(`Time of ${name}`, card.parts.map(([part, y]) => ({ name: part, y }))));
      if (this.visible.has(card.plot)) this.redraw(card.plot);
    }
  }

  add(name) {
    const value = h("span.value"), legend = h("ul.legend"), isFirst = name.includes(",");
    const plot = h(isFirst ? "div.plot" : "div.plot.strip", { role: "img" });
    this.grid.append(h(isFirst ? "div.card.wide" : "div.card", null, h("header", null, h("h2", null, name), value), plot, legend));
    this.cards.set(name, { plot, value, legend });
    this.visible.watch(plot);
  }

  async redraw(plot) {
    const card = [...this.cards.values()].find((each) => each.plot === plot);
    if (!card?.stale) return;
    card.stale = false;
    const traces = card.parts.map(([part, y]) => ({
      x: card.x, y, name: escaped(part), mode: card.x.length > 1 ? "lines" : "markers", stackgroup: "one", fillcolor: partColour(part),
      line: { width: 0.8, shape: "vh", color: css("--card") }, marker: { color: partColour(part) }, hovertemplate: "%{y:.0%}",
    }));
    await draw(plot, traces, {
      xaxis: { ...timeTicks([card.x[0], card.x.at(-1)]), hoverformat: ".1f", fixedrange: true },
      yaxis: { range: [0, 1], tickformat: ".0%", tickvals: [0, 0.5, 1] },
      dragmode: false,
    });
  }

  close() { this.visible.close(); this.profile.close(); this.recorded.close(); }
}
