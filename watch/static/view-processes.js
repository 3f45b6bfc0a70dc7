// Processes: what each is doing now, since when, and what it has printed; of many hosts, first what is wrong.

import { get, order } from "./api.js";
import { bytes, count, fill, h, percent, seconds, setText } from "./dom.js";
import { frozen } from "./frozen.js";

const SILENT_S = 10; // a process that gives no sign of life for longer stands out
const FEW = 24; // as many processes are all shown; of more, those of a host are shown on request
const MOST_NAMED = 12;
const GOOD = new Set(["runs", "ended", "starts", "not started"]);
const NO_HOST = "without a host";
const KINDS = ["", "num", "", "", "num", "num", "num", "num", "num"];

const isGone = (process) => process.pid === null;
const isSilent = (process) => !isGone(process) && process.silent_s > SILENT_S;

const isWrong = (process) => !GOOD.has(process.now) || isSilent(process);

export class ProcessesView {
  constructor(panel, { run }) {
    this.run = run;
    this.rows = new Map();
    this.hosts = new Map();
    this.places = new Map(); // the last host of each process; one that does not run has none
    this.note = h("div");
    this.summary = h("div.note");
    this.summary.hidden = true;
    const columns = [
      ["Process"], ["Host"], ["Pid", "num"], ["State"], ["Phase", "", "what it does, as it reports"], ["For", "num", "how long it has been in the phase"],
      ["Last report", "num", "how long ago its main loop last reported; 10 s or more are marked"],
      ["CPU, of one core", "num", "processor time of all its threads in the last second; more than 100 % are several cores. A process that could work and has no core uses none, while its time still counts as utilization"],
      ["Memory", "num"], ["Restarts", "num", "how often it was started again, its incarnation"],
    ];
    this.body = h("table.processes", null,
      h("thead", null, h("tr", null, columns.map(([title, kind, about]) => h(kind ? `th.${kind}` : "th", { scope: "col", title: about }, title)))));
    this.table = h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Table of the processes" }, this.body);
    this.detail = h("div", { "aria-live": "polite" });
    fill(panel, this.note, this.summary, this.table, this.detail);
  }

  update(now) {
    const status = this.status = now.status;
    const all = status.processes;
    this.table.hidden = !all.length;
    const why = status.why ?? (all.length ? null : "The supervisor lists no process yet.");
    if (this.why !== why) {
      this.why = why;
      fill(this.note, why && h(status.live ? "p.note.warn" : "p.note", null, why, "."));
      if (!all.length) this.offerLogs();
    }
    const groups = new Map();
    for (const process of all) {
      if (process.host) this.places.set(process.name, process.host);
      const host = this.places.get(process.name) ?? NO_HOST;
      if (!groups.has(host)) groups.set(host, []);
      groups.get(host).push(process);
    }
    for (const [host, group] of this.hosts) if (!groups.has(host)) { group.body.remove(); this.hosts.delete(host); }
    const names = new Set(all.map((process) => process.name));
    for (const [name, row] of this.rows) if (!names.has(name)) { row.remove(); this.rows.delete(name); }
    this.many = groups.size > 1 && all.length > FEW;
    for (const [host, processes] of groups) this.updateHost(this.hosts.get(host) ?? this.addHost(host), processes);
    // Hosts where something is wrong come first; the others keep the order of their first process.
    const order = this.many ? [...groups].sort(([, a], [, b]) => b.some(isWrong) - a.some(isWrong)) : [...groups];
    order.forEach(([host], i) => {
      const { body } = this.hosts.get(host);
      if (this.body.tBodies[i] !== body) this.body.insertBefore(body, this.body.tBodies[i] ?? null);
    });
    this.summarize(all, groups.size - groups.has(NO_HOST));
  }

  updateHost(group, processes) {
    const isOpen = !this.many || group.open;
    const bad = processes.filter(isWrong);
    group.head.hidden = !this.many;
    setText(group.button, `${isOpen ? "▾" : "▸"} ${group.host}`);
    if (this.many) {
      group.button.setAttribute("aria-expanded", isOpen);
      const sum = (key) => processes.reduce((total, each) => total + (each[key] ?? 0), 0);
      const restarts = sum("incarnation"), memory = sum("rss_nbytes"), { cells } = group.head;
      const texts = ["", "", bad.length ? `${bad.length} of ${processes.length} not healthy` : `${processes.length} healthy`, "", "", "",
        percent(sum("cpu")), memory ? bytes(memory) : "–", count(restarts)];
      texts.forEach((text, i) => setText(cells[i + 1], text));
      cells[3].classList.toggle("trouble", bad.length > 0);
      cells[9].classList.toggle("trouble", restarts > 0);
    }
    for (const process of processes) {
      const row = this.rows.get(process.name) ?? this.addRow(process.name);
      if (row.parentNode !== group.body) group.body.append(row);
      row.hidden = !isOpen && !isWrong(process);
      if (!row.hidden) this.updateRow(row, process);
    }
  }

  updateRow(row, process) {
    const gone = isGone(process);
    const cells = [
      process.host ?? "", process.pid ?? "–", process.now, gone ? "" : process.phase,
      gone ? "" : seconds(process.phase_for_s), gone ? "" : process.silent_s === null ? "none yet" : `${seconds(process.silent_s)} ago`,
      percent(process.cpu), bytes(process.rss_nbytes), gone ? "" : process.incarnation,
    ];
    cells.forEach((text, i) => setText(row.cells[i + 1], String(text ?? "")));
    row.cells[3].classList.toggle("trouble", !GOOD.has(process.now));
    row.cells[6].classList.toggle("trouble", isSilent(process));
    row.cells[9].classList.toggle("trouble", process.incarnation > 0);
    row.title = (process.threads ?? []).map((thread) => `${thread.name}: ${thread.part ?? "not started"}`).join(", ");
  }

  /** How many there are, and those with which something is wrong. */
  summarize(all, hosts) {
    const bad = all.filter(isWrong);
    const text = JSON.stringify([all.length, hosts, bad.map((process) => [process.name, process.now])]);
    this.summary.hidden = !this.many;
    if (text === this.summarized || !this.many) return;
    this.summarized = text;
    this.summary.className = bad.length ? "note bad" : "note";
    fill(this.summary, h("p", null, `${count(all.length)} processes on ${count(hosts)} hosts; `, bad.length ? `${count(bad.length)} not healthy:` : "all are healthy."),
      bad.length ? h("ul.plain", null, bad.slice(0, MOST_NAMED).map((process) => h("li", null,
        h("button.link", { type: "button", onclick: () => this.open(process.name) }, process.name), ` ${this.places.has(process.name) ? `on ${this.places.get(process.name)}` : NO_HOST}: ${isSilent(process) ? "reports nothing" : process.now}`)),
      bad.length > MOST_NAMED && h("li", null, `and ${count(bad.length - MOST_NAMED)} more`)) : null);
  }

  async offerLogs() {
    const { roles } = await get("events", { run: this.run });
    if (roles.length) fill(this.detail, h("div.section", null, h("h2", null, "Logs"), roles.map((role) => h("button", { type: "button", onclick: () => this.open(role) }, role))), h("div"));
  }

  addHost(host) {
    const group = { host, open: false };
    group.button = h("button.link", { type: "button", onclick: () => {
      group.open = !group.open;
      this.update({ status: this.status });
    } });
    group.head = h("tr.hosthead", null, h("th.nowrap", { scope: "rowgroup" }, group.button), KINDS.map((kind) => h(kind ? `td.${kind}` : "td")));
    group.body = h("tbody", null, group.head);
    this.body.append(group.body);
    this.hosts.set(host, group);
    return group;
  }

  addRow(name) {
    const button = h("button.link", { type: "button", "aria-expanded": "false", onclick: () => this.open(name) }, name);
    const row = h("tr", null, h("td.nowrap", null, button), KINDS.map((kind) => h(kind ? `td.${kind}` : "td")));
    this.rows.set(name, row);
    return row;
  }

  async open(name) {
    const process = this.status?.processes.find((each) => each.name === name);
    for (const [each, row] of this.rows) row.querySelector("button").setAttribute("aria-expanded", each === name);
    const log = h("pre", { tabindex: 0, "aria-label": `Log of ${name}` }, "Reading …");
    const stacks = h("pre", { tabindex: 0, "aria-label": `Stacks of ${name}`, hidden: true });
    const ask = h("button", { type: "button", onclick: async () => {
      ask.disabled = true;
      stacks.hidden = false;
      setText(stacks, "Asking …");
      try {
        const found = (await order("stacks", this.run)).processes.find((each) => each.name === name);
        setText(stacks, found?.stacks ?? found?.why_not ?? "The process has ended.");
      } catch (error) { setText(stacks, error.message); }
      ask.disabled = false;
    } }, "Show its stacks");
    const threads = (process?.threads ?? []).map((thread) => h("tr", null, h("td.nowrap", null, thread.name), h("td", null, thread.part ?? "not started"),
      h("td.num", null, thread.part === null ? "" : seconds(thread.for_s)),
      h("td", null, Object.entries(thread.ledger ?? {}).filter(([, share]) => share >= 0.005).sort((a, b) => b[1] - a[1]).map(([part, share]) => `${part} ${percent(share)}`).join(", "))));
    fill(this.detail,
      h("div.section", null, h("h2", null, name), process && !frozen && ask),
      threads.length ? h("div.scroll", null, h("table", null,
        h("thead", null, h("tr", null, h("th", { scope: "col" }, "Thread"), h("th", { scope: "col" }, "In"), h("th.num", { scope: "col" }, "For"), h("th", { scope: "col" }, "Shares of the last second"))),
        h("tbody", null, threads))) : null,
      stacks, h("h3.section", null, "Log"), log);
    try {
      const found = await get("log", { run: this.run, role: name });
      setText(log, found.left_out ? `This log is not part of the file; it is logs/${name}.log in the run's folder.` : found.text || "The process has printed nothing.");
      log.scrollTop = log.scrollHeight;
    } catch (error) { setText(log, error.message); }
  }
}
