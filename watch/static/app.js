// The page: the list of runs, the head of the chosen one, its views, and what is asked when.

import { Refused, get, order } from "./api.js";
import { release } from "./chart.js";
import { clock, count, date, fill, h, kept, moment, number, percent, remember, remembered, setText, short } from "./dom.js";
import { frozen } from "./frozen.js";
import { AgentView } from "./view-agent.js";
import { FlowView, actorsOf, means } from "./view-flow.js";
import { LearningView } from "./view-learning.js";
import { ProcessesView } from "./view-processes.js";
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
  countRuns();
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
    const [shownState, figures] = listed(run);
    return h(current ? "li.current" : "li", null, box,
      h("a", {
        href: `#${new URLSearchParams({ run: run.name, view: state.view })}`, "data-key": `run ${run.name}`,
        "aria-current": current ? "true" : null, title: run.title,
        onclick: (event) => { event.preventDefault(); choose({ run: run.name }); },
      },
      h("span.title", null, run.title),
      h("span.about", null, h("span", null, [run.env, run.algorithm].filter(Boolean).join(", ") || "no config")),
      h("span.about", null, h(`span.state.${shownState}`, null, shownState), h("span.value", { title: "mean return of the last 100 training episodes; time of training in m:ss or h:mm:ss" }, figures))));
  }));
  if (focused) $("runs").querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

function countRuns() {
  const states = runs.map((run) => listed(run)[0]);
  const counts = ["running", "stalled"].map((what) => [states.filter((state) => state === what).length, what]);
  setText($("runs-title"), `Runs (${runs.length}${counts.filter(([n]) => n).map(([n, what]) => `, ${n} ${what}`).join("")})`);
}

/** State and figures of a run in the list; of the chosen run those of its head, which are read more often. */
function listed(run) {
  const own = run.name === state.run && now?.name === run.name ? now : null;
  const returned = own ? own.figures.episode_return_mean : run.return_last, lasted = own ? own.figures.time_s : run.seconds;
  const figures = [returned === null ? null : `return ${number(returned)}`, lasted === null ? null : clock(lasted)];
  return [(own ? own.stall : run.stalled) ? "stalled" : (own ?? run).state, figures.filter(Boolean).join(", ")];
}

/** Write the state and figures of the chosen run anew. Its entry stays: one that is replaced while it is pressed gets no click. */
function refreshCurrent() {
  const item = $("runs").querySelector("li.current"), run = runs.find((each) => each.name === state.run);
  if (!item || !run) return;
  const [what, figures] = listed(run), chip = item.querySelector(".state");
  chip.className = `state ${what}`;
  setText(chip, what);
  setText(item.querySelector(".value"), figures);
  countRuns();
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
      h("dl.figures"), h("p.window.dim"), h("div.trouble", { role: "alert" }), h("p.learning"), h("p.limits"), h("div.past"), h("div.reading"));
  }
  const title = runs.find((run) => run.name === state.run)?.title ?? state.run;
  setText(head.querySelector("h1"), title);
  setText(head.querySelector(".about"), [now.env, now.algorithm, now.seed === null ? null : `seed ${now.seed}`].filter(Boolean).join(", "));
  const chip = head.querySelector(".state");
  chip.className = `state ${now.stall ? "stalled" : now.state}`;
  setText(chip, stateOf(now));
  const running = now.state === "running";
  if (!frozen) for (const button of [orders.save, orders.stop]) button.hidden = !running;
  const f = now.figures, { learner, weights, environments } = now.flow;
  const computes = learner.ledger.compute, lacks = learner.cpu > 0 && computes - learner.cpu > 0.1;
  const actors = count(actorsOf(now));
  const restarted = f.actors_restarted ? `${count(f.actors_restarted)} restarted` : "none restarted";
  const rows = [
    ["Return", number(f.episode_return_mean), typeof f.episode_return_all_mean === "number" ? `least exploring; all ${number(f.episode_return_all_mean)}` : !f.episodes ? "no episode yet" : f.episodes > 100 ? "last 100 episodes" : `${count(f.episodes)} episodes`,
      typeof f.episode_return_all_mean === "number"
        ? `Mean return in training of the last 25 episodes of the quarter of environments that explore least, and of the last 100 of all ${count(f.episodes)} episodes`
        : `Mean return in training of the last 100 of ${count(f.episodes)} episodes`],
    ["Evaluated", number(f.eval_return_mean), f.eval_play ? `${f.eval_play}${f.eval_half === null ? "" : ` ± ${number(f.eval_half)}`}, best ${number(f.eval_best_of_kind ?? f.eval_return_best)}` : "no evaluation",
      `The last evaluation, by ${f.eval_play ?? "no"} actions in ${count(f.eval_episodes)} episodes, ± half the 95 % confidence interval of the mean; best: of the evaluations of this kind. Of both kinds it is ${number(f.eval_return_best)}`],
    ["Agent steps", short(f.env_steps), now.stall ? "" : `${short(environments.steps_per_s)}/s`, count(f.env_steps)],
    ["Updates", short(f.learner_steps), now.stall ? "" : rateOf(now), count(f.learner_steps)],
    ["Utilization", percent(computes), lacks ? `gets ${learner.cpu.toFixed(2)} of a core` : `waits ${percent(learner.ledger.wait_data)}`,
      "Share of the learner's wall clock in forward, backward and optimizer. It includes the time in which these wait for a core that another process uses; the processor time of the learner does not"],
    ["Policy lag", number(weights.lag_mean), "updates"],
    now.flow.actors.games !== null ? ["Games", count(now.flow.actors.games), `${actors} seats`] : ["Actors", actors, running ? restarted : now.state === "died" ? "died with the run" : f.actors_restarted ? `ended, ${restarted}` : "ended"],
    ["Time", clock(f.time_s), `of training, ${f.time_s >= 3600 ? "h:mm:ss" : "m:ss"}`],
  ];
  const windowed = new Set(["Utilization", "Policy lag"]);
  fill(head.querySelector(".figures"), rows.map(([label, value, small, exact]) =>
    h(now.stall && windowed.has(label) ? "div.old" : "div", null, h("dt", null, label), h("dd", { title: exact }, value), h("dd.small", { title: small }, small || "\u00a0"))));
  setText(head.querySelector(".window"), [
    // The view Learning has its own note of that.
    now.read < 1 && state.view !== "learning" && `${percent(now.read)} of the metrics are read; until all are, what is shown is of a sample of the lines.`,
    now.flow.seconds && (now.stall ? `Utilization and lag: means of the last ${now.flow.seconds.toFixed(0)}\u00a0s before it stalled.` : `Rates, utilization and lag: ${means(now)}.`),
  ].filter(Boolean).join(" "));
  sentence(head.querySelector(".learning"), "Learning", now.figures.episodes ? now.learning.text : "");
  sentence(head.querySelector(".limits"), now.state === "running" ? "Limit" : "Limit while it ran", limitOf(now));
  const ends = now.stops ? [{ kind: "plain", text: `The run ends: ${REASONS[now.stops] ?? now.stops}. Its last weights are saved, and evaluated where that is due.` }] : [];
  const all = [...now.troubles, ...ends];
  messages(head.querySelector(".trouble"), all.filter((each) => each.kind !== "past"), "p.note");
  messages(head.querySelector(".past"), all.filter((each) => each.kind === "past"), "p.dim");
  head.querySelector(".reading").style.width = now.read < 1 ? `${100 * now.read}%` : "0";
}

const rateOf = (run) => (run.flow?.learner.updates_per_s ? `${short(run.flow.learner.updates_per_s)}/s` : "");

/** The state of a run, with the reason and the time of its end or of its last update. */
function stateOf(run) {
  const at = (value) => moment(value, run.now);
  if (run.stall) return `stalled: ${run.stall.why}${run.stall.since ? `; no update since ${at(run.stall.since)}, for ${clock(run.now - run.stall.since)}` : ""}`;
  if (run.state === "died" && run.seen) return `died: last report at ${at(run.seen)}`;
  return run.state !== "running" && run.exit_reason ? `${run.state}: ${REASONS[run.exit_reason] ?? run.exit_reason}` : run.state;
}

/** What limits a run, where the view does not show the whole verdict. Of a run that is over only what limited it. */
function limitOf(run) {
  if (run.stall) return `${run.stall.why}; nothing is trained until that ends.`;
  if (!run.verdict || state.view === "flow" || state.view === "time") return "";
  return run.state === "running" ? `${run.verdict.finding}. Next: ${run.verdict.next_step}.` : `${run.verdict.finding}.`;
}

function sentence(element, title, text) {
  if (element.dataset.text === title + text) return;
  element.dataset.text = title + text;
  fill(element, text ? [h("strong", null, `${title}: `), kept(text)] : null);
}

/** What went wrong, each with its time, and the command that continues the run. Filled only if it differs: a reader announces it. */
function messages(box, found, what) {
  const text = JSON.stringify(found);
  if (box.dataset.text === text) return;
  box.dataset.text = text;
  fill(box, found.map(({ kind, time, text, command }) => h(`${what}.${kind}`, null, time ? h("strong.nowrap", null, `${date(time)}: `) : null, kept(text),
    command ? [" Continue it by: ", h("code", null, command)] : null)));
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
      button.disabled = kind === "stop"; // a second order would end the run without its checkpoint
    } catch (error) {
      setText(orders.said, error.message);
      button.disabled = false;
    }
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
        refreshCurrent();
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
