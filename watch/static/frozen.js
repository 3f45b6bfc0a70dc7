// In place of the server, where the page was frozen into a file: its answers, which are part of the document.

const block = document.getElementById("frozen");

/** What `penstock report` has embedded; null on a page that a server has sent. */
export const frozen = block ? JSON.parse(block.textContent) : null;

const POINTS = 600;

/** The answer of a view, in the form of the server's. */
export function answerOf(view, parameters) {
  if (view === "runs") return frozen.runs;
  if (view === "curves") return curves(parameters);
  if (view === "metrics") return metrics(parameters.run);
  const run = frozen.answers[parameters.run];
  if (view === "events") return events(run.views.events, parameters);
  if (view === "log") return log(run, parameters.role);
  if (view === "decisions") return { decisions: run.decisions[parameters.file] ?? null };
  return run.views[view];
}

const log = (run, role) => ({ role, text: run.logs[role] ?? null, left_out: run.logs_left_out.includes(role) });

const addresses = new Map();

/** An address of an embedded video, for as long as the page is open. */
export function embedded(run, file) {
  const { id, kind } = frozen.answers[run].videos[file];
  if (!addresses.has(id)) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (sign) => sign.charCodeAt(0));
    addresses.set(id, URL.createObjectURL(new Blob([bytes], { type: kind })));
  }
  return addresses.get(id);
}

function events(all, { kind, role, text }) {
  const wanted = (text ?? "").toLowerCase();
  if (!kind && !role && !wanted) return all;
  const matching = all.events.filter((event) => (!kind || event.kind === kind) && (!role || event.role === role)
    && (!wanted || (event.text ?? "").toLowerCase().includes(wanted)));
  return { ...all, events: matching, matching: matching.length };
}

function metrics(names) {
  const groups = {};
  for (const name of names) {
    for (const [group, found] of Object.entries(frozen.answers[name].views.metrics.groups)) {
      groups[group] = [...new Set([...(groups[group] ?? []), ...found])];
    }
  }
  return { groups };
}

function curves({ run: names, metric, x, smooth, low, high, known, seeds }) {
  const version = JSON.stringify([names, metric, x, smooth, low, high, seeds]);
  const read = Object.fromEntries(names.map((name) => [name, 1]));
  if (version === known) return { version, unchanged: true, read };
  const groups = seeds === "together" ? byFolder(names) : names.map((name) => [name]), found = {};
  for (const each of metric) {
    const lines = groups.map((group) => (group.length > 1 ? band : line)(group, each, x, smooth, low, high)).filter(Boolean);
    if (lines.length) found[each] = lines;
  }
  const of = (key) => Object.fromEntries(names.map((name) => [name, frozen.answers[name].curves[key][x]]));
  return { version, read, curves: found, marks: of("marks"), targets: of("targets"), left_out: {} };
}

/** A curve of one run, and the smoothed one if there is one; null without points. */
function line([run], metric, x, smooth, low, high) {
  const curve = whole(run, metric, x);
  if (!curve) return null;
  const found = { run, ...shown(curve, low, high) }, soft = softened(curve, run, metric, smooth);
  return soft === curve ? found : { ...found, smooth: shown(soft, low, high) };
}

/** The mean of several runs, each smoothed, with the lowest and the highest of them. */
function band(group, metric, x, smooth, low, high) {
  const curves = group.map((run) => [run, whole(run, metric, x)]).filter(([, curve]) => curve)
    .map(([run, curve]) => clipped(...softened(curve, run, metric, smooth), low, high));
  const found = spread(curves);
  return found && { run: group[0], ...found, count: curves.length };
}

const isEvaluated = (run, metric) => metric in frozen.answers[run].curves.evaluations.env_steps;

/** All points of a metric of a run; null if there are none. */
function whole(run, metric, x) {
  const { columns, evaluations } = frozen.answers[run].curves;
  const evaluated = evaluations[x][metric];
  const curve = evaluated ? [evaluated.x, evaluated.y] : metric in columns ? points(columns[x], columns[metric]) : [[]];
  return curve[0].length ? curve : null;
}

function softened(curve, run, metric, smooth) {
  if (smooth <= 1 || isEvaluated(run, metric)) return curve;
  return [curve[0], means(curve[1], Math.max(1, Math.round(smooth / frozen.answers[run].curves.every)))];
}

const shown = ([xs, ys], low, high) => {
  const [x, y] = reduced(...clipped(xs, ys, low, high));
  return { x, y };
};

// The functions below do the same as those of watch/series.py and watch/views.py.

/** The points with both coordinates, by rising x: what a resume repeats replaces what was before. */
function points(xs = [], ys) {
  const kept = [];
  let lowest = Infinity;
  for (let i = xs.length - 1; i >= 0; i--) {
    if (xs[i] === null || ys[i] === null || xs[i] >= lowest) continue;
    lowest = xs[i];
    kept.push(i);
  }
  kept.reverse();
  return [kept.map((i) => xs[i]), kept.map((i) => ys[i])];
}

/** Each value's mean with the `count` - 1 values before it, or with all if there are fewer. */
function means(ys, count) {
  // Each sum is made anew: in a running one a value such as 1e18 would leave its rounding error.
  return ys.map((_, i) => {
    const first = Math.max(0, i - count + 1);
    let sum = 0;
    for (let k = first; k <= i; k++) sum += ys[k];
    return sum / (i - first + 1);
  });
}

/** The points within a range of x, and one beyond either end. */
function clipped(xs, ys, low, high) {
  const above = low === null ? 0 : xs.findIndex((x) => x >= low);
  const beyond = high === null ? -1 : xs.findIndex((x) => x > high);
  const first = Math.max(0, (above < 0 ? xs.length : above) - (low === null ? 0 : 1));
  const last = beyond < 0 ? xs.length : beyond + 1;
  return [xs.slice(first, last), ys.slice(first, last)];
}

/** The lowest and the highest point of each bucket, and the last point. */
function reduced(xs, ys) {
  if (xs.length <= POINTS) return [xs, ys];
  const size = Math.ceil(2 * xs.length / POINTS), kept = new Set();
  for (let start = 0; start < xs.length; start += size) {
    let least = start, most = start;
    for (let i = start; i < Math.min(start + size, xs.length); i++) {
      if (ys[i] < ys[least]) least = i;
      if (ys[i] > ys[most]) most = i;
    }
    kept.add(Math.min(least, most)).add(Math.max(least, most));
  }
  const chosen = [...kept.add(xs.length - 1)];
  return [chosen.map((i) => xs[i]), chosen.map((i) => ys[i])];
}

/** Names in groups: the runs seed-N of one folder, and each of the others. */
function byFolder(names) {
  const groups = new Map();
  for (const name of names) {
    const at = name.lastIndexOf("/"), isSeed = name.slice(at + 1).startsWith("seed-");
    const key = isSeed ? name.slice(0, Math.max(0, at)) : `/${name}`;
    groups.set(key, [...(groups.get(key) ?? []), name]);
  }
  return [...groups.values()];
}

/** The mean of several curves, the lowest and the highest, over the range that all of them have; null without one. */
function spread(curves) {
  const start = Math.max(...curves.map(([xs]) => xs[0])), end = Math.min(...curves.map(([xs]) => xs.at(-1)));
  if (!curves.length || !(start <= end)) return null;
  const most = end > start ? POINTS / 2 : 1, step = most > 1 ? (end - start) / (most - 1) : 0;
  const x = Array.from({ length: most }, (_, i) => (i === most - 1 ? end : start + step * i));
  const values = curves.map((curve) => between(...curve, x));
  const at = (combine) => x.map((_, i) => combine(values.map((ys) => ys[i])));
  return {
    x, y: at((ys) => ys.reduce((sum, y) => sum + y, 0) / ys.length), low: at((ys) => Math.min(...ys)), high: at((ys) => Math.max(...ys)),
  };
}

/** The values of a curve at rising places within it. */
function between(xs, ys, places) {
  let i = 0;
  return places.map((place) => {
    while (i < xs.length - 2 && xs[i + 1] <= place) i++;
    const next = Math.min(i + 1, xs.length - 1);
    return next === i ? ys[i] : ys[i] + ((ys[next] - ys[i]) * (place - xs[i])) / (xs[next] - xs[i]);
  });
}
