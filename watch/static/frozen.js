// In place of the server, where the page was frozen into a file: its answers, which are part of the document.

const block = document.getElementById("frozen");

/** What `penstock report` has embedded; null on a page that a server has sent. */
export const frozen = block ? JSON.parse(block.textContent) : null;

const POINTS = 600, WHOLE = { ".": 1 };

/** The answer of a view, in the form of the server's. */
export function answerOf(view, parameters) {
  if (view === "curves") return curves(parameters);
  if (view === "events") return events(parameters);
  if (view === "log") return log(parameters.role);
  if (view === "decisions") return { decisions: frozen.decisions[parameters.file] ?? null };
  return frozen.views[view];
}

const log = (role) => ({ role, text: frozen.logs[role] ?? null, left_out: frozen.logs_left_out.includes(role) });

const addresses = new Map();

/** An address of an embedded video, for as long as the page is open. */
export function embedded(file) {
  if (!addresses.has(file)) {
    const { id, kind } = frozen.videos[file];
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (sign) => sign.charCodeAt(0));
    addresses.set(file, URL.createObjectURL(new Blob([bytes], { type: kind })));
  }
  return addresses.get(file);
}

function events({ kind, role, text }) {
  const all = frozen.views.events, wanted = (text ?? "").toLowerCase();
  if (!kind && !role && !wanted) return all;
  const matching = all.events.filter((event) => (!kind || event.kind === kind) && (!role || event.role === role)
    && (!wanted || (event.text ?? "").toLowerCase().includes(wanted)));
  return { ...all, events: matching, matching: matching.length };
}

function curves({ metric, x, smooth, low, high, known }) {
  const version = JSON.stringify([metric, x, smooth, low, high]);
  if (version === known) return { version, unchanged: true, read: WHOLE };
  const { columns, evaluations, every, marks, targets } = frozen.curves;
  const count = Math.max(1, Math.round(smooth / every)), found = {};
  for (const name of metric) {
    const isEvaluated = name in evaluations[x];
    if (!isEvaluated && !(name in columns)) continue;
    const curve = isEvaluated ? [evaluations[x][name].x, evaluations[x][name].y] : points(columns[x], columns[name]);
    if (!curve[0].length) continue;
    const line = { run: ".", ...shown(curve, low, high) };
    if (smooth > 1 && !isEvaluated) line.smooth = shown([curve[0], means(curve[1], count)], low, high);
    found[name] = [line];
  }
  return { version, read: WHOLE, curves: found, marks: { ".": marks[x] }, targets: { ".": targets[x] }, left_out: {} };
}

const shown = ([xs, ys], low, high) => {
  const [x, y] = reduced(...clipped(xs, ys, low, high));
  return { x, y };
};

// The functions below do the same as those of watch/series.py.

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
