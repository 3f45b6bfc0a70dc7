// The page of `penstock serve`: shows GET /figures, once a second.

const PERIOD_MS = 1000;
const KINDS = { Box: "numbers", Discrete: "choices", MultiDiscrete: "several choices", MultiBinary: "switches" };

const byId = (id) => document.getElementById(id);

function milliseconds(seconds) {
  if (seconds === null) return "–";
  const ms = 1000 * seconds;
  return `${ms < 10 ? ms.toFixed(2) : ms.toFixed(0)} ms`;
}

function whole(value) {
  return value === null ? "–" : Math.round(value).toLocaleString("en");
}

// Elements with texts as their content: nothing that a game or a file says becomes markup.
function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function rowsOf(header, rows) {
  const cells = (name, values) => element("tr", ...values.map((value) => element(name, String(value))));
  return [element("thead", cells("th", header)), element("tbody", ...rows.map((row) => cells("td", row)))];
}

function describe(space) {
  const [kind, content] = Object.entries(space)[0];
  if (kind === "Dict") return `parts: ${content.map(([key, part]) => `${key}: ${describe(part)}`).join("; ")}`;
  if (kind === "Tuple") return `parts: ${content.map(describe).join("; ")}`;
  return `${KINDS[kind] ?? kind} ${JSON.stringify(content).replaceAll("1e+30", "∞")}`;
}

function columns(id, layout, nbytes) {
  const rows = layout.map(([name, dtype, shape, offset]) => [name, dtype, `[${shape.join(", ")}]`, offset]);
  byId(id).replaceChildren(...rowsOf(["column", "dtype", "shape", "offset"], [...rows, ["whole row", "", "", nbytes]]));
}

// What stays the same as long as the service runs.
function showPolicy(now) {
  const { run, env, play } = now.policy;
  byId("policy").textContent = `version ${now.version}`;
  byId("title").textContent = `${run} plays ${env}, ${play}`;
  document.title = `${run} – Penstock serve`;
  byId("observation").textContent = describe(now.observation);
  byId("action").textContent = describe(now.action);
  columns("row", now.row, now.row_nbytes);
  columns("action-row", now.action_row, now.action_nbytes);

  const secure = location.protocol === "https:";
  byId("tcp").textContent = `${location.host}${secure ? ", inside TLS" : ""}`;
  byId("web-socket").textContent = `${secure ? "wss" : "ws"}://${location.host}/play`;
  byId("act").textContent = `POST ${location.origin}/act {"observation": …, "state": null}`;
}

function showFigures(now) {
  const figures = [
    ["games", whole(now.games)],
    ["seats", `${whole(now.seats)} of ${whole(now.most_seats)}`],
    ["decisions/s", whole(now.decisions_per_s)],
    ["decisions", whole(now.decisions)],
    ["mean batch", now.mean_batch === null ? "–" : now.mean_batch.toFixed(1)],
    ["p50 latency", milliseconds(now.latency_p50_s)],
    ["p99 latency", milliseconds(now.latency_p99_s)],
    ...(now.learns ? [
      ["slots learned from", whole(now.learns.slots)],
      ["agent steps in them", whole(now.learns.steps)],
      ["steps in unrolls that go on", whole(now.learns.playing)],
      ["seats that wait for the learner", whole(now.learns.held)],
    ] : []),
  ];
  byId("figures").replaceChildren(
    ...figures.map(([name, value]) => element("div", element("dt", name), element("dd", value))),
  );

  const faults = Object.entries(now.faults).sort((one, other) => other[1] - one[1]);
  byId("no-faults").hidden = faults.length > 0;
  byId("faults").hidden = faults.length === 0;
  byId("faults").replaceChildren(...rowsOf(["field", "faults"], faults));
}

let isShown = false;

async function update() {
  try {
    const reply = await fetch("figures");
    if (!reply.ok) throw new Error(await reply.text());
    const now = await reply.json();
    if (!isShown) showPolicy(now);
    isShown = true;
    showFigures(now);
    byId("connection").textContent = "";
  } catch (error) {
    byId("connection").textContent = "The service does not answer.";
  }
  setTimeout(update, PERIOD_MS);
}

update();
