// The page: the list of runs, the head of the chosen one, its views, and what is asked when.

import { Refused, get, order } from "./api.js";
import { release } from "./chart.js";
import { clock, count, date, fill, h, kept, number, percent, remember, remembered, setText, short } from "./dom.js";
import { frozen } from "./frozen.js";
import { AgentView } from "./view-agent.js";
import { FlowView, actorsOf, means } from "./view-flow.js";
import { LearningView } from "./view-learning.js";
import { ProcessesView, wrong } from "./view-processes.js";
import { RunView } from "./view-run.js";
import { TimeView } from "./view-time.js";

const VIEWS = {
  learning: ["Learning", LearningView], flow: ["Flow", FlowView], time: ["Time", TimeView],
  processes: ["Processes", ProcessesView], run: ["Run", RunView], agent: ["Agent", AgentView],
};
const LIVE_MS = 1000, ENDED_MS = 5000, RUNS_MS = 4000, READ_MS = 200;
const $ = (id) => document.getElementById(id);

const REASONS = {
  return: "target return reached", env_steps: "step limit reached", learner_steps: "update limit reached",
  minutes: "time limit reached", callback: "by a callback", stopped: "a learner of another machine reached a limit",
  interrupted: "by the user", terminated: "by a signal", user_error: "an error in the config or in code",
  diverged: "repeated non-finite numbers", fault: "a process failed", profiled: "the profile was complete",
};

/** What is shown, kept in the address after #. */
const state = { run: null, view: "learning", compare: [] };
let runs = [], shown = null, now = null, tick = 0, busy = false, again = false, orders = null;

function readAddress() {
  const query = new URLSearchParams(location.hash.slice(1));
  const all = frozen?.runs.runs.map((run) => run.name) ?? [];
  state.run = query.get("run");
  const isProfile = all.length === 1 && frozen.answers[all[0]].views.profile.profile;
  state.view = VIEWS[query.get("view")] ? query.get("view") : isProfile ? "time" : "learning";
  state.compare = query.has("run") ? query.getAll("with") : all; // a file is written to compare its runs
}

function writeAddress() {
  const query = new URLSearchParams();
  if (state.run !== null) query.set("run", state.run);
  query.set("view", state.view);
  state.compare.forEach((name) => query.append("with", name));
  const hash = `#${query}`;
  if (location.hash !== hash) history.replaceState(null, "", hash);
}

function choose(change) {
  const before = JSON.stringify(state);
  Object.assign(state, change);
  if (change.run !== undefined) state.compare = state.compare.filter((name) => name !== state.run);
  if (JSON.stringify(state) === before) return;
  writeAddress();
  if (change.run !== undefined) { now = null; tick = 0; }
  drawRuns();
  drawTabs();
  openView();
  drawHead();
  turn();
}

// --- the list of runs

async function loadRuns() {
  const found = await get("runs");
  setText($("folder"), found.folder);
  const text = JSON.stringify(found.runs.map(({ written, ...row }) => row));
  const changed = text !== loadRuns.text, first = loadRuns.text === undefined;
  loadRuns.text = text;
  runs = found.runs;
  if (state.run === null || !runs.some((run) => run.name === state.run)) {
    const first = runs.find((run) => run.state === "running") || runs[0];
    if (first) choose({ run: first.name });
    else fill($("panel"), h("p.note", null,
      `No run in ${found.folder} yet. Start one with: penstock train cartpole; it appears here.`));
  }
  if (changed) drawRuns();
  if (first) openView(); // views know the runs from their start
}

function drawRuns() {
  const wanted = $("filter").value.trim().toLowerCase();
  const matching = runs.filter((run) =>
    !wanted || `${run.title} ${run.env} ${run.algorithm} ${run.state}`.toLowerCase().includes(wanted));
  const living = runs.filter((run) => run.state === "running").length;
  setText($("runs-title"), `Runs (${runs.length}${living ? `, ${living} running` : ""})`);
  const focused = document.activeElement?.dataset?.key;
  fill($("runs"), matching.map((run) => {
    const current = run.name === state.run;
    const box = h("input", {
      type: "checkbox", "data-key": `box ${run.name}`, title: "Compare in the view Learning",
      "aria-label": `Compare ${run.title}`,
      onchange: (event) => choose({
        compare: event.target.checked ? [...state.compare, run.name] : state.compare.filter((name) => name !== run.name),
      }),
    });
    box.checked = current || state.compare.includes(run.name);
    box.disabled = current || (!box.checked && state.compare.length >= 23);
    const figures = [run.return_last === null ? null : `return ${number(run.return_last)}`, run.seconds === null ? null : clock(run.seconds)];
    return h(current ? "li.current" : "li", null, box,
      h("a", {
        href: `#${new URLSearchParams({ run: run.name, view: state.view })}`, "data-key": `run ${run.name}`,
        "aria-current": current ? "true" : null, title: run.title,
        onclick: (event) => { event.preventDefault(); choose({ run: run.name }); },
      },
      h("span.title", null, run.title),
      h("span.about", null, h("span", null, [run.env, run.algorithm].filter(Boolean).join(", ") || "no config")),
      h("span.about", null, h(`span.state.${run.state}`, null, run.state), h("span.value", { title: "mean return in training; time of training" }, figures.filter(Boolean).join(", ")))));
  }));
  if (focused) $("runs").querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

// --- the head of the run

function drawHead() {
  const head = $("head");
  if (!now) { fill(head, h("div.titleline", null, h("h1", null, state.run ?? "")), h("div.reading")); return; }
  if (head.dataset.run !== now.name || !head.querySelector(".figures")) {
    head.dataset.run = now.name;
    orders = { save: orderButton("save", "Save now"), stop: orderButton("stop", "Stop"), said: h("span.dim", { role: "status" }) };
    fill(head,
      h("div.titleline", null, h("h1"), h("span.about.dim"), h("span.state"), !frozen && h("span.orders", null, orders.said, orders.save, orders.stop)),
      h("dl.figures"), h("p.window.dim"), h("p.limits"), h("div.trouble", { role: "alert" }), h("div.reading"));
  }
  const title = runs.find((run) => run.name === state.run)?.title ?? state.run;
  setText(head.querySelector("h1"), title);
  setText(head.querySelector(".about"), [now.env, now.algorithm, now.seed === null ? null : `seed ${now.seed}`].filter(Boolean).join(", "));
  const chip = head.querySelector(".state");
  chip.className = `state ${now.state}`;
  const why = now.state !== "running" && now.exit_reason ? `: ${REASONS[now.exit_reason] ?? now.exit_reason}` : "";
  setText(chip, `${now.state}${why}`);
  const running = now.state === "running";
  if (!frozen) for (const button of [orders.save, orders.stop]) button.hidden = !running;
  const f = now.figures, { learner, weights, environments } = now.flow;
  const restarted = f.actors_restarted ? `${count(f.actors_restarted)} restarted` : "none restarted";
  const rows = [
    ["Return", number(f.episode_return_mean), !f.episodes ? "no episode yet" : now.halfway === null ? `${count(f.episodes)} episodes` : `halfway ${number(now.halfway)}`,
      `Mean of the last 100 of ${count(f.episodes)} episodes${now.halfway === null ? "" : `; at half of the time so far it was ${number(now.halfway)}`}`],
    ["Evaluated", number(f.eval_return_mean), f.eval_play ? `${f.eval_play}, best ${number(f.eval_return_best)}` : "no evaluation"],
    ["Agent steps", short(f.env_steps), `${short(environments.steps_per_s)}/s`, count(f.env_steps)],
    ["Updates", short(f.learner_steps), rateOf(now), count(f.learner_steps)],
    ["Utilization", percent(learner.ledger.compute), `waits ${percent(learner.ledger.wait_data)}`,
      "Share of the learner's wall clock in forward, backward and optimizer; also while it has no core"],
    ["Policy lag", number(weights.lag_mean), "updates"],
    ["Actors", count(actorsOf(now)), running ? restarted : f.actors_restarted ? `ended, ${restarted}` : "ended"],
    ["Time", clock(f.time_s), "of training"],
  ];
  fill(head.querySelector(".figures"), rows.map(([label, value, small, exact]) =>
    h("div", null, h("dt", null, label), h("dd", { title: exact }, value), h("dd.small", { title: small }, small || "\u00a0"))));
  setText(head.querySelector(".window"), [
    // The view Learning has its own note of that.
    now.read < 1 && state.view !== "learning" && `${percent(now.read)} of the metrics are read; until all are, what is shown is of a sample of the lines.`,
    now.flow.seconds && `Rates, utilization and lag: ${means(now)}.`,
  ].filter(Boolean).join(" "));
  const limits = head.querySelector(".limits"), said = limitOf(now);
  if (limits.dataset.text !== said) {
    limits.dataset.text = said;
    fill(limits, said ? [h("strong", null, "Limit: "), kept(said)] : null);
  }
  const troubles = troublesOf(now);
  const box = head.querySelector(".trouble");
  if (box.dataset.text !== JSON.stringify(troubles)) {
    box.dataset.text = JSON.stringify(troubles);
    fill(box, troubles.map(([kind, text]) => h(`p.note.${kind}`, null, kept(text))));
  }
  head.querySelector(".reading").style.width = now.read < 1 ? `${100 * now.read}%` : "0";
}

const rateOf = (run) => (run.flow?.learner.updates_per_s ? `${short(run.flow.learner.updates_per_s)}/s` : "");

/** What limits a run, where the view does not show the whole verdict. */
function limitOf({ verdict }) {
  if (!verdict || state.view === "flow" || state.view === "time") return "";
  return `${verdict.finding}. Next: ${verdict.next_step}.`;
}

/** What is wrong with a run, as sentences. */
function troublesOf(run) {
  const found = [], f = run.figures;
  if (run.state === "died") found.push(["bad", run.error || "The run died without ending: its supervisor was killed, or the machine stopped. Resume it with --resume auto."]);
  else if (run.error) found.push(["bad", run.error]);
  if (run.state === "running" && run.status && !run.status.live) found.push(["warn", run.status.why]);
  else if (run.status?.why && run.state === "running") found.push(["warn", run.status.why]);
  if (f.updates_skipped) found.push(["bad", `${count(f.updates_skipped)} updates were skipped, because a loss or gradient was not finite.`]);
  if (f.rollbacks) found.push(["bad", `Training was rolled back ${count(f.rollbacks)} times.`]);
  const restarts = [["learners", f.learners_restarted], ["actors", f.actors_restarted]].filter(([, n]) => n);
  if (restarts.length) {
    const counts = restarts.map(([roles, n]) => `${count(n)} ${n === 1 ? "restart" : "restarts"} of ${roles}`).join(", ");
    found.push(["warn", `${counts}. ${run.restart ? `The last: ${date(run.restart.time)}, ${run.restart.text}. ` : ""}The view Run lists the events.`]);
  }
  const bad = run.state === "running" ? run.status.processes.filter((process) => wrong(process)) : []; // no figure that grows: a reader would announce each
  if (bad.length) {
    const named = bad.slice(0, 3).map((process) => `${process.name}: ${wrong(process, false)}`).join("; ");
    found.push(["bad", `${named}${bad.length > 3 ? `; and ${count(bad.length - 3)} more` : ""}. The view Processes shows logs and stacks.`]);
  }
  const silent = run.now - run.written;
  if (run.stops) found.push(["plain", `The run ends: ${REASONS[run.stops] ?? run.stops}. Its last weights are saved, and evaluated where that is due.`]);
  else if (run.state === "running" && silent > 60 && f.time_s) found.push(["warn", `No new figures for ${clock(silent)}: the view Processes shows where the processes are.`]);
  return found;
}

function orderButton(kind, label) {
  return h(kind === "stop" ? "button.danger" : "button", { type: "button", hidden: true, onclick: async (event) => {
    const button = event.currentTarget, run = state.run;
    if (kind === "stop" && !await confirmed(run)) return;
    button.disabled = true;
    setText(orders.said, kind === "save" ? "saving …" : "stopping …");
    try {
      const reply = await order(kind, run);
      setText(orders.said, kind === "save" ? `saved at ${count(reply.trained_steps)} steps` : "the run saves a checkpoint and ends");
    } catch (error) {
      setText(orders.said, error.message);
    }
    button.disabled = kind === "stop" ? !/^(no|another)/.test(orders.said.textContent) && orders.said.textContent.startsWith("the run saves") : false;
  } }, label);
}

function confirmed(run) {
  return new Promise((resolve) => {
    const done = (answer) => { dialog.close(); dialog.remove(); resolve(answer); };
    const dialog = h("dialog", { "aria-label": "Stop the run", oncancel: () => done(false) },
      h("p", null, kept(`Stop ${run === "." ? "this run" : run}? It saves a checkpoint and ends; penstock train RUN --resume must continues it.`)),
      h("div.orders", null,
        h("button", { type: "button", onclick: () => done(false) }, "Keep running"),
        h("button.danger", { type: "button", onclick: () => done(true) }, "Stop the run")));
    document.body.append(dialog);
    dialog.showModal();
  });
}

// --- the views

function drawTabs() {
  const tabs = $("tabs");
  if (!tabs.children.length) {
    fill(tabs, Object.entries(VIEWS).map(([key, [label]]) => h("button", {
      type: "button", role: "tab", id: `tab-${key}`, "aria-controls": "panel", onclick: () => choose({ view: key }),
    }, label)));
    tabs.addEventListener("keydown", (event) => {
      const keys = Object.keys(VIEWS), at = keys.indexOf(state.view);
      const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: keys.length - 1 }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      choose({ view: keys[(next + keys.length) % keys.length] });
      $(`tab-${state.view}`).focus();
    });
  }
  for (const tab of tabs.children) {
    const selected = tab.id === `tab-${state.view}`;
    tab.setAttribute("aria-selected", selected);
    tab.tabIndex = selected ? 0 : -1;
  }
  $("panel").setAttribute("aria-labelledby", `tab-${state.view}`);
  document.title = `${state.run ?? ""} – ${VIEWS[state.view][0]} – Penstock`;
}

function openView() {
  shown?.close?.();
  release($("panel"));
  $("panel").replaceChildren();
  shown = state.run === null ? null : new VIEWS[state.view][1]($("panel"), {
    ...state, runs, add: (names) => choose({ compare: [...new Set([...state.compare, ...names])].filter((name) => name !== state.run).slice(0, 23) }),
  });
}

// --- asking

async function turn() {
  if (busy) { again = frozen !== null; return; } // a page with a server asks again at the next tick
  if (document.hidden && !frozen) return;
  busy = true;
  let replied = false;
  try {
    if (!(tick % (RUNS_MS / LIVE_MS))) await loadRuns();
    const living = now === null || now.state === "running" || now.read < 1;
    if (state.run !== null && (frozen || living || !(tick % (ENDED_MS / LIVE_MS)))) {
      const run = state.run;
      const found = await get("now", { run });
      if (run === state.run) {
        now = { ...found, name: run };
        drawHead();
        await shown?.update(now);
      }
    } else if (state.compare.length && state.view === "learning" && now) {
      await shown?.update(now);
    }
    setText($("connection"), "");
    replied = true;
  } catch (error) {
    setText($("connection"), error instanceof Refused ? error.message : frozen ? `a part of this file cannot be shown: ${error.message}` : "no connection to penstock watch");
    if (frozen || !(error instanceof Refused) && !(error instanceof TypeError) && error.name !== "TimeoutError") console.warn(error);
  } finally {
    busy = false;
    tick += 1;
    if (replied && now?.read < 1) setTimeout(turn, READ_MS);
    if (again) { again = false; turn(); }
  }
}

// --- theme

const THEMES = ["auto", "light", "dark"];
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme(redraw) {
  const theme = remembered("theme") || "auto";
  document.documentElement.dataset.theme = theme === "auto" ? (prefersDark.matches ? "dark" : "light") : theme;
  setText($("theme"), `Theme: ${theme}`);
  if (redraw && state.run !== null) { openView(); if (now) shown?.update(now); }
}

$("theme").addEventListener("click", () => {
  const at = THEMES.indexOf(remembered("theme") || "auto");
  remember("theme", THEMES[(at + 1) % THEMES.length]);
  applyTheme(true);
});
prefersDark.addEventListener("change", () => applyTheme(true));
$("filter").addEventListener("input", drawRuns);
window.addEventListener("hashchange", () => { readAddress(); now = null; drawRuns(); drawTabs(); openView(); turn(); });
if (!frozen) document.addEventListener("visibilitychange", turn);
if (matchMedia("(max-width: 900px)").matches) $("runs-box").open = false;

applyTheme(false);
readAddress();
drawTabs();
turn();
if (frozen) {
  document.documentElement.classList.toggle("alone", frozen.runs.runs.length === 1);
  $("main").append(h("footer.dim", null, h("p", null, `As of ${date(frozen.written)}, written by penstock report ${frozen.version}.`),
    frozen.notes.map((note) => h("p", null, note))));
} else setInterval(turn, LIVE_MS);
