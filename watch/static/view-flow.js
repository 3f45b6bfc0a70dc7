// Flow: the way of the samples, with rates, fills and losses, and the stage that limits it.

import { bytes, count, fill, h, kept, number, percent, seconds, short, svg, total } from "./dom.js";

export class FlowView {
  constructor(panel) { this.panel = panel; }

  update(now) {
    const f = now.flow;
    if (!f) return;
    const running = now.state === "running";
    const share = f.actors.shares, limit = now.stall || now.state === "died" ? null : f.limit;
    const rate = f.environments.steps_per_s, trained = f.learner.steps_per_s;
    const moving = running && !now.stall && rate > 0;
    const frames = f.environments.frames_per_s;
    const stages = [
      stage("environments", "Environments", [short(rate), "steps/s"], [
        frames && rate && Math.abs(frames - rate) > 1 ? ["frames/s", short(frames)] : null,
        ["episodes", count(f.environments.episodes)],
        ["in step", percent(share.step)],
      ]),
      f.actors.games !== null ? stage("actors", "Games", [count(f.actors.games), "connected"], [
        ["seats", count(f.actors.alive)],
      ]) : stage("actors", "Actors", [count(actorsOf(now)), running ? (typeof f.actors.count === "number" ? `of ${f.actors.count} alive` : "alive") : now.state === "died" ? "died with the run" : "ended"], [
        ["inference", percent(share.infer)],
        ["wait", percent(share.wait)],
        share.compress || share.send ? ["compress, send", percent(share.compress + share.send)] : null,
        ["restarted", count(f.actors.restarted), f.actors.restarted > 0],
      ]),
      stage("transport", "Transport", f.transport.wire ? [`${bytes(f.transport.coded_nbytes_per_s)}/s`, "sent"] : ["in place", ""], [
        f.transport.wire ? ["raw", `${bytes(f.transport.raw_nbytes_per_s)}/s`] : ["memory", "shared"],
        ["lost", short(total(f.transport.lost)), total(f.transport.lost) > 0],
        ["rejected", short(total(f.transport.rejected)), total(f.transport.rejected) > 0],
      ]),
      stage("store", "Store", f.store.replay_size === null ? [percent(f.store.queue_fill), "of the queue"] : [short(f.store.replay_size), "steps kept"], [
        f.store.replay_size === null ? null : ["draws per step", number(f.store.samples_per_insert)],
        ["latency, median", seconds(f.store.latency_p50_s)],
        ["latency, p95", seconds(f.store.latency_p95_s)],
        ["dropped", short(total(f.store.dropped)), total(f.store.dropped) > 0],
      ], f.store.replay_size === null ? f.store.queue_fill : null),
      stage("learner", "Learner", [short(trained), "steps/s"], [
        ["updates/s", number(f.learner.updates_per_s)],
        ["computes", percent(f.learner.ledger.compute ?? null)],
        ["waits", percent(f.learner.ledger.wait_data ?? null), f.learner.ledger.wait_data > 0.3],
        f.learner.alive !== null ? ["alive", count(f.learner.alive)] : null,
      ]),
      stage("weights", "Weights", [number(f.weights.lag_mean), "updates of lag"], [
        ["at most", number(f.weights.lag_max)],
        ["limit", count(f.weights.lag_limit)],
        ["publish", percent(f.weights.publish_share)],
      ]),
    ];
    const nodes = stages.map((each, i) => each(limit, i < stages.length - 1 && moving, i < stages.length - 1));
    const losses = [
      ...rows("dropped", f.store.dropped), ...rows("lost", f.transport.lost), ...rows("rejected", f.transport.rejected),
    ];
    const produced = now.figures.env_steps;
    const isHost = limit === "host";
    fill(this.panel,
      h("p.dim", null, f.seconds ? `Rates, shares and the verdict: ${means(now)}. Counts: since the start.` : "No interval yet."),
      h(isHost ? "div.host.limit" : "div.host", null,
        isHost && h("p.badge", null, "The cores of this host limit the run, not one of its stages."),
        h(now.stall ? "div.flow.old" : "div.flow", { role: "list", "aria-label": "Stages from environments to weights" }, nodes,
          h("div.back", { role: "listitem" }, h("span", null, "weights return to the actors")))),
      verdict(now),
      h("div.section", null, h("h2", null, "Dropped, lost and rejected")),
      losses.length ? h("div.scroll", null, h("table", null,
        h("thead", null, h("tr", null, ["What", "Reason"].map((t) => h("th", { scope: "col" }, t)), h("th.num", { scope: "col" }, "Number"), h("th.num", { scope: "col" }, "Of the steps produced"))),
        h("tbody", null, losses.map(([what, reason, n]) => h("tr", null, h("td", null, what), h("td", null, REASONS[reason] ?? reason),
          h("td.num.trouble", null, count(n)), h("td.num", null, what === "rejected" ? "–" : percent(produced ? n / produced : null)))))))
        : h("p.dim", null, "None."));
  }
}

const REASONS = {
  lag: "lag: older than transport.max_policy_lag", stale: "stale: replaced by newer ones (overflow=drop_stale)",
  group_lost: "group_lost: a learner died in their step", disconnect: "disconnect: a gap in a stream", learner: "learner: held by a learner that died",
};
const rows = (what, counts) => Object.entries(counts).map(([reason, n]) => [what, reason, n]);

export function meter(value, label = "fill") {
  const inner = h("i"), outer = h("div.meter", { role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 1, "aria-valuenow": value ?? 0 }, inner);
  inner.style.width = `${100 * Math.max(0, Math.min(1, value ?? 0))}%`;
  return outer;
}

const stage = (key, title, [value, unit], figures, filled = null) => (limit, moving, arrow) => h(limit === key ? "div.stage.limit" : "div.stage", { role: "listitem" },
  limit === key && h("span.badge", null, "limits"),
  h("h2", null, title),
  h("div.rate", null, value, " ", h("small", null, unit)), filled === null ? null : meter(filled),
  h("dl", null, figures.filter(Boolean).map(([label, text, isBad]) => [h("dt", null, label), h(isBad ? "dd.bad" : "dd", null, text)])),
  arrow && line(moving));

const line = (moving) => svg("svg", { class: moving ? "arrow moving" : "arrow", viewBox: "0 0 24 12", "aria-hidden": "true" },
  svg("path", { class: "line", d: "M2 6h18" }), svg("path", { class: "tip", d: "M17 2l5 4-5 4" }));

/** The window of rates and shares, the same in all views. */
export const means = (now) => (now.state === "running" ? `means of the last ${now.flow.seconds.toFixed(0)}\u00a0s${now.stall ? " before it stalled" : ""}` : "means of the whole run");

/** The actors of a run; after its end those that it had. */
export const actorsOf = (now) => (now.state !== "running" && typeof now.flow.actors.count === "number" ? now.flow.actors.count : now.flow.actors.alive);

/** What costs the run most throughput, and what to do; of a stalled or dead run only what limited it. */
export function verdict(now) {
  const found = now.verdict;
  const before = now.stall ? "Before it stalled: " : now.state === "running" ? "" : "While it ran: ";
  if (!found) return h("p.note", null, "No verdict yet: it needs two intervals of training.");
  return h("section.verdict", { "aria-label": "Verdict" },
    h("p.finding", null, kept(before ? `${before}${found.finding}` : capital(found.finding))),
    h("p", null, kept(capital(found.reason)), "."),
    now.stall || now.state === "died" ? null : h("p", null, h("strong", null, before ? "For another run: " : "Next: "), kept(found.next_step), "."),
    now.also.length && !now.stall && now.state !== "died" ? h("ul", null, now.also.map((each) => h("li", null, kept(further(each)), "."))) : null,
    h("p.dim", null, `Over ${now.seconds.toFixed(0)}\u00a0s, by the rules of penstock profile, which measures more.`));
}

// A learner that is slow while something else costs throughput is the limit only after that.
const further = (each) => `${each.kind === "slow_learner" ? `Once that is solved, ${each.finding}` : capital(each.finding)}. ${capital(each.next_step)}`;
export const capital = (text) => (text && !PROCESS.test(text) ? text[0].toUpperCase() + text.slice(1) : text);
const PROCESS = /^[a-z]+-\d/; // a name keeps its form
