// What penstock profile measured in a run: its verdict, the shares of each process, tables, and the timeline; and
// the timeline of the last minute of a living run.

import { Refused, get, order } from "./api.js";
import { partColour, partOrder } from "./chart.js";
import { date, fill, h, kept, percent, setText, swatch } from "./dom.js";
import { Timeline } from "./timeline.js";
import { capital } from "./view-flow.js";

/** Let a section show what it has, once: again only if the server did not reply. */
async function once(section) {
  if (section.loaded) return;
  try {
    await section.show();
    section.loaded = true;
  } catch (error) {
    section.loaded = error instanceof Refused;
    throw error;
  }
}

export class ProfileSection {
  constructor(place, run) {
    this.place = place;
    this.run = run;
    this.hasVerdict = false;
    this.fits = new ResizeObserver((entries) => entries.forEach(({ target }) => fold(target)));
  }

  /** Show the profile, if the run has one; once, as it does not change. */
  async load() {
    await once(this);
  }

  async show() {
    const { profile } = await get("profile", { run: this.run });
    if (!profile || this.closed) return;
    if (profile.error) { fill(this.place, h("p.note.warn", null, profile.error)); return; }
    this.hasVerdict = true;
    const timeline = h("div"), notes = h("div");
    fill(this.place,
      h("div.section", null, h("h2", null, "Profile"), h("span.dim", null, profile.heading)),
      h("section.verdict", { "aria-label": "Verdict of the profile" },
        h("p.finding", null, kept(capital(profile.verdict.finding))), h("p", null, kept(capital(profile.verdict.reason)), "."),
        h("p", null, h("strong", null, "Next: "), kept(profile.verdict.next_step), "."),
        profile.also.length ? h("ul", null, profile.also.map((each) => h("li", null, kept(capital(each)), "."))) : null),
      h("h3.section", null, "Shares of the window"), this.shares(profile.bars),
      h("h3.section", null, "Timeline"), timeline,
      profile.tables.map((each) => [h("h3.section", null, each.title), this.table(each)]),
      notes);
    const found = await get("timeline", { run: this.run });
    if (this.closed) return;
    fill(notes, profile.notes.filter((note) => !found.note.startsWith(note)).map((note) => h("p.dim", null, `${capital(note)}.`)));
    if (found.threads.length) this.timeline = new Timeline(timeline, found);
    else fill(timeline, h("p.dim", null, "The run's folder has no trace.json with spans."));
  }

  shares(bars) {
    const used = [...new Set(bars.flatMap((bar) => Object.keys(bar.parts)))].sort(partOrder);
    return [
      h("ul.legend", null, used.map((part) => h("li", null, swatch("i", partColour(part)), part))),
      h("div.shares", null, bars.map((bar) => {
        const parts = Object.entries(bar.parts).sort(([a], [b]) => partOrder(a, b));
        const text = parts.map(([part, share]) => `${part} ${percent(share)}`).join(", ");
        return [h("span", null, bar.name), h("div.meter", { role: "img", "aria-label": `${bar.name}: ${text || "no ledger"}`, title: text }, parts.map(([part, share]) => {
          const piece = swatch("i", partColour(part));
          piece.style.width = `${100 * Math.min(1, share)}%`;
          return piece;
        }))];
      })),
    ];
  }

  table({ columns, rows }) {
    const isList = columns.every((name) => !name);
    if (isList) return h("div.scroll", null, h("table", null, h("tbody", null, rows.map((row) => h("tr", null, h("td.dim", null, row[0]), h("td", null, row.slice(1).join(" ")))))));
    const head = columns.map((name, i) => h(i ? "th.num" : "th", { scope: "col" }, name));
    const body = rows.map((row) => h("tr", null, row.map((cell, i) => h(i ? "td.num" : "td", { "data-title": columns[i] }, cell))));
    const whole = h("div.scroll", null, h("table", null, h("thead", null, h("tr", null, head)), h("tbody", null, body)));
    this.fits.observe(whole);
    return whole;
  }

  close() { this.closed = true; this.fits.disconnect(); this.timeline?.close(); }
}

/** Make a block of each row of a table that is wider than its place. */
function fold(place) {
  const table = place.firstElementChild;
  table.classList.remove("folded");
  table.classList.toggle("folded", place.scrollWidth > place.clientWidth + 1);
}

/** The timeline of the last minute, recorded on a click; and the one that was recorded last. */
export class RecordedTimeline {
  constructor(place, run) {
    this.run = run;
    this.button = h("button", { type: "button", onclick: () => this.record() }, "Record a timeline");
    this.said = h("span.dim", { role: "status" });
    this.head = h("div.section", { hidden: true }, h("h2", null, "Timeline of the last minute"), this.button, this.said);
    this.drawn = h("div");
    fill(place, this.head, this.drawn);
  }

  /** Show the last recorded timeline, once, and the button where it can be pressed. */
  async load(canRecord) {
    this.button.hidden = !canRecord;
    if (canRecord) this.head.hidden = false;
    await once(this);
  }

  async show() {
    const found = await get("recorded", { run: this.run });
    if (this.closed || !found.threads.length) return;
    this.head.hidden = false;
    setText(this.said, `Recorded ${date(found.time)}`);
    this.timeline?.close();
    this.timeline = new Timeline(this.drawn, found);
  }

  async record() {
    this.button.disabled = true;
    setText(this.said, "Recording …");
    try {
      await order("timeline", this.run);
      await this.show();
    } catch (error) { setText(this.said, error.message); }
    this.button.disabled = false;
  }

  close() { this.closed = true; this.timeline?.close(); }
}
