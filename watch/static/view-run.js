// Run: how it was configured, where it ran, the balance of its samples, checkpoints and events.

import { get } from "./api.js";
import { bytes, count, date, fill, h, kept, percent, setText, table, total } from "./dom.js";
import { meter } from "./view-flow.js";

const SHOWN = ["penstock", "commit", "python", "cpu", "cores", "gpus", "system"];
const BAD = new Set(["restart", "hang", "kill", "lost", "rollback", "rejected", "refused", "drop", "died"]);

export class RunView {
  constructor(panel, { run }) {
    this.run = run;
    this.turns = 0;
    this.balance = h("div");
    this.about = h("div.two");
    this.onlyDiffering = true;
    this.kind = h("select", { onchange: () => this.loadEvents() });
    this.role = h("select", { onchange: () => this.loadEvents() });
    this.text = h("input", { type: "search", oninput: () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.loadEvents(), 250); } });
    this.events = h("div");
    this.matching = h("span.dim", { role: "status" });
    this.config = h("div");
    fill(panel,
      h("div.section", null, h("h2", null, "Balance of samples")), this.balance, this.about,
      h("div.section", null, h("h2", null, "Events"), this.matching),
      h("div.controls", null, h("label", null, "Kind", this.kind), h("label", null, "Process", this.role), h("label", null, "Text", this.text)),
      this.events, this.config);
  }

  async update(now) {
    if (this.turns++ % 5 && now.state === "running") return;
    const found = await get("about", { run: this.run });
    fill(this.balance, balance(found.accounting, now.state === "running"));
    fill(this.about, checkpoints(found.checkpoints, now), machine(found.starts, found.folder));
    this.options = found;
    this.drawConfig();
    await this.loadEvents();
  }

  drawConfig() {
    const { options, base } = this.options;
    const text = JSON.stringify([options, base, this.onlyDiffering]);
    if (text === this.drawn) return;
    this.drawn = text;
    const differing = options.filter((option) => option.differs).length;
    const rows = options.filter((option) => !this.onlyDiffering || option.differs || base === null);
    const all = h("input", { type: "checkbox", onchange: (event) => { this.onlyDiffering = !event.target.checked; this.drawConfig(); } });
    all.checked = !this.onlyDiffering;
    fill(this.config,
      h("div.section", null, h("h2", null, "Config"),
        h("span.dim", null, base === null ? "compared with nothing: this version knows no base for it" : `${differing} of ${options.length} options differ from ${base}`),
        base !== null && h("label.dim", null, all, " show all options")),
      rows.length ? table([
        ["Option", (row) => h("code", null, row.name)], ["Value", (row) => h("code", null, row.value)], ["Preset", (row) => (row.differs ? h("code", null, row.preset ?? "–") : "")],
      ], rows, { rowClass: (row) => (row.differs && !this.onlyDiffering ? "differs" : "") }) : h("p.dim", null, "None differs."));
  }

  async loadEvents() {
    const found = await get("events", { run: this.run, kind: this.kind.value, role: this.role.value, text: this.text.value });
    choices(this.kind, Object.entries(found.kinds).map(([kind, n]) => [kind, `${kind} (${n})`]));
    choices(this.role, found.roles.map((role) => [role, role]));
    setText(this.matching, `${count(found.matching)} match${found.matching > found.events.length ? `, the newest ${found.events.length} are shown` : ""}`);
    const text = JSON.stringify(found.events);
    if (text === this.eventsDrawn) return;
    this.eventsDrawn = text;
    fill(this.events, found.events.length ? table([
      ["Time", (event) => date(event.time), "nowrap"], ["Kind", (event) => h(BAD.has(event.kind) ? "span.bad" : "span", null, event.kind)], ["Process", (event) => event.role?.slice(0, 40) ?? "", "nowrap"],
      ["Event", (event) => kept(event.text ?? "")], ["Count", (event) => (event.count > 1 ? count(event.count) : ""), "num"],
    ], found.events) : h("p.dim", null, "None."));
  }
}

function choices(select, entries) {
  const value = select.value, text = JSON.stringify(entries);
  if (select.dataset.text === text) return;
  select.dataset.text = text;
  fill(select, h("option", { value: "" }, "all"), entries.map(([key, label]) => h("option", { value: key }, label)));
  select.value = value;
}

function balance(found, running) {
  const whole = found.produced || 0;
  const rows = [["Produced", found.produced, whole ? 1 : 0], ["= Trained", found.trained]];
  for (const term of ["dropped", "lost"]) {
    const reasons = Object.entries(found[term]);
    rows.push([`+ ${term[0].toUpperCase()}${term.slice(1)}`, total(found[term]), null, true]);
    for (const [reason, n] of reasons) rows.push([`   ${reason}`, n, null, true]);
  }
  rows.push(["+ In flight", found.in_flight]);
  const open = !found.complete || found.in_flight === null || found.produced === null;
  const sum = found.trained + found.in_flight + total(found.dropped) + total(found.lost);
  const at = `at the last report, ${date(found.at)}`;
  const text = open ? (running ? `These are the counts ${at}. Samples in flight are counted at the end of the run.`
    : `These are the counts ${at}. The learner did not report at its end: what was in flight or lost since then is unknown, so the balance is not complete.`)
    : sum === found.produced ? `Balanced: every sample${found.resumed ? " since the resume" : ""} is accounted for.` : `The terms differ by ${count(found.produced - sum)}; this is a bug, please report it.`;
  return [
    h("div.balance", null, rows.map(([label, value, share, isLoss]) => {
      const part = share ?? (whole && value !== null ? value / whole : 0);
      const isBad = isLoss && value > 0;
      return [h("span", null, label), open ? h("span.dim", null, value === null ? "" : "at the last report") : meter(part, label), h(isBad ? "span.num.bad" : "span.num", null, value === null ? "unknown" : count(value)), h("span.num.dim.part", null, value === null || open ? "" : percent(part))];
    })),
    h(open || sum === found.produced ? "p.dim" : "p.note.bad", null, text),
  ];
}

function checkpoints(found, now) {
  const saved = Math.max(...found.map((row) => row.trained_steps ?? -1)), last = now.figures.trained_steps;
  const lost = now.state === "died" && saved >= 0 && last > saved;
  return h("div", null, h("div.section", null, h("h2", null, "Checkpoints")), found.length ? table([
    ["Name", (row) => row.name, "nowrap"], ["Trained steps", (row) => count(row.trained_steps), "num"], ["Written", (row) => date(row.written), "nowrap"], ["Size", (row) => bytes(row.nbytes), "num"],
  ], found) : h("p.dim", null, now.state === "running" ? "None yet." : "None."),
  lost && h("p.note.warn", null, `At the last report ${count(last)} steps were trained; the newest checkpoint has ${count(saved)}. A resume repeats the ${count(last - saved)} in between.`));
}

function machine(starts, folder) {
  const [last, ...earlier] = starts;
  return h("div", null, h("div.section", null, h("h2", null, "Versions and machine"), earlier.length > 0 && h("span.dim", null, `${starts.length} starts with different ones; the last`)),
    last ? versions(last.shown) : h("p.dim", null, "Not recorded."),
    earlier.map((start) => h("details", null, h("summary", null, `Start of ${date(start.time)}`), versions(start.shown))),
    h("p.dim", null, "Folder: ", h("code", null, folder)));
}

function versions(last) {
  const names = [...SHOWN.filter((name) => name in last), ...Object.keys(last).filter((name) => !SHOWN.includes(name))];
  return table([["", (name) => h("span.dim", null, name)], ["", (name) => (last[name] === "[]" || last[name] === "" ? "none" : last[name])]], names, { noHead: true });
}
