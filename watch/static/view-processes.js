// Processes: what each is doing now, since when, and what it has printed.

import { get, order } from "./api.js";
import { bytes, fill, h, percent, seconds, setText } from "./dom.js";
import { frozen } from "./frozen.js";

const SILENT_S = 10; // a process that gives no sign of life for longer stands out

export class ProcessesView {
  constructor(panel, { run }) {
    this.run = run;
    this.rows = new Map();
    this.note = h("div");
    this.body = h("tbody");
    const columns = [
      ["Process"], ["Host"], ["Pid", "num"], ["State"], ["Phase", "", "what it does, as it reports"], ["For", "num", "how long it has been in the phase"],
      ["Last report", "num", "how long ago its main loop last reported; 10 s or more are marked"],
      ["CPU, of one core", "num", "processor time of all its threads in the last second; more than 100 % are several cores. A process that could work and has no core uses none, while its time still counts as utilization"],
      ["Memory", "num"], ["Restarts", "num", "how often it was started again, its incarnation"],
    ];
    this.table = h("div.scroll", null, h("table", null,
      h("thead", null, h("tr", null, columns.map(([title, kind, about]) => h(kind ? `th.${kind}` : "th", { scope: "col", title: about }, title)))), this.body));
    this.detail = h("div", { "aria-live": "polite" });
    fill(panel, this.note, this.table, this.detail);
  }

  update(now) {
    const status = now.status;
    this.table.hidden = !status.processes.length;
    const why = status.why ?? (status.processes.length ? null : "The supervisor lists no process yet.");
    if (this.why !== why) {
      this.why = why;
      fill(this.note, why && h(status.live ? "p.note.warn" : "p.note", null, why, "."));
      if (!status.processes.length) this.offerLogs();
    }
    const names = new Set(status.processes.map((process) => process.name));
    for (const [name, row] of this.rows) if (!names.has(name)) { row.remove(); this.rows.delete(name); }
    for (const process of status.processes) {
      const row = this.rows.get(process.name) ?? this.addRow(process.name);
      const gone = process.pid === null;
      const silent = process.silent_s > SILENT_S;
      const cells = [
        process.host ?? "", process.pid ?? "–", process.now, gone ? "" : process.phase,
        gone ? "" : seconds(process.phase_for_s), gone ? "" : process.silent_s === null ? "none yet" : `${seconds(process.silent_s)} ago`,
        percent(process.cpu), bytes(process.rss_nbytes), gone ? "" : process.incarnation,
      ];
      cells.forEach((text, i) => setText(row.cells[i + 1], String(text ?? "")));
      row.cells[3].classList.toggle("trouble", !["runs", "ended", "starts", "not started"].includes(process.now));
      row.cells[6].classList.toggle("trouble", silent);
      row.cells[9].classList.toggle("trouble", process.incarnation > 0);
      row.title = (process.threads ?? []).map((thread) => `${thread.name}: ${thread.part ?? "not started"}`).join(", ");
    }
    this.status = status;
  }

  async offerLogs() {
    const { roles } = await get("events", { run: this.run });
    if (roles.length) fill(this.detail, h("div.section", null, h("h2", null, "Logs"), roles.map((role) => h("button", { type: "button", onclick: () => this.open(role) }, role))), h("div"));
  }

  addRow(name) {
    const button = h("button.link", { type: "button", "aria-expanded": "false", onclick: () => this.open(name) }, name);
    const row = h("tr", null, h("td.nowrap", null, button), ["", "num", "", "", "num", "num", "num", "num", "num"].map((kind) => h(kind ? `td.${kind}` : "td")));
    this.body.append(row);
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
      setText(log, found.text ? found.text : "The process has printed nothing.");
      log.scrollTop = log.scrollHeight;
    } catch (error) { setText(log, error.message); }
  }
}
