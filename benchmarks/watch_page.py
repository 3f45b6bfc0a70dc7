"""The page of `penstock watch` in Chromium: first paint, a zoom, 300 processes, memory over hours.

- 50 ended runs of 100,000 lines of metrics. First paint is from the request of the page until the
  list has all runs and the curve of the return of the opened run is drawn with its axes, with an
  empty cache of the browser; each time another run is opened, which the server has not read. Charts
  by plotly.js, which can be zoomed, follow (`chart_s`). Then the time until all lines are read, and
  a zoom: from the relayout by the mouse until the chart of the return, and all charts in sight, are
  drawn from the reply of the server.
- A living run of 300 processes on 40 hosts, with a simulated status behind the real socket: from
  the request of an update until the page has changed for the last time.
- Memory of the server over 8 simulated hours of three running runs: the script appends the lines
  of metrics of 8 hours within minutes and requests each view meanwhile. Measured after each eighth.

    python benchmarks/watch_page.py [--runs 50] [--lines 100000] [--times 5] [--hours 8] [--json]

Needs penstock[watch,browser] and Chromium. On a loaded machine the processor times are the
better figures.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from common import compile_package, finish, parser
from penstock.core.interfaces import Json, MetricSink
from penstock.monitor.run_folder.record import Thinned
from watched_runs import (
    Line,
    LivingRun,
    lines_like,
    long_runs,
    simulated_processes,
    train,
    with_processes,
)

ASKED = {"first_paint_s": 1.5, "chart_s": 1.5, "zoom_ms": 100.0, "update_ms": 200.0}
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WAIT_S = 300.0
UPDATES = 10
PROCESSES, HOSTS = 300, 40
LIVING = 3
EIGHTHS = 8
POLL_S = 300  # of simulated time
VIEWS = ("runs", "now", "curves", "metrics", "ledgers", "events", "about", "agent")
METRIC = "episode_return_mean"

# Runs before the page's own scripts: notes when the list and the chart of the return are drawn.
WATCH_PAINT = """
window.painted = {};
const look = () => {
  const now = performance.now(), runs = document.querySelectorAll('#runs li').length;
  if (runs) window.painted.list ??= now;
  if (document.querySelector('.figures dd')) window.painted.head ??= now;
  if (document.querySelector('.card.wide :is(.sketch polyline, path.js-line)')) window.painted.curve ??= now;
  if (document.querySelector('.card.wide :is(.sketch .up, .ytick)')) window.painted.axes ??= now;
  if (document.querySelector('.card.wide path.js-line')) window.painted.chart ??= now;
  requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""  # noqa: E501
PAINTED = "() => ['list', 'head', 'curve', 'axes', 'chart'].every((name) => name in window.painted)"
IS_READ = """() => {
  const bar = document.querySelector('.loading');
  return Boolean(document.querySelector('.card.wide .js-line')) && Boolean(bar) && bar.hidden;
}"""
# As plotly.js does at the end of a drag. Answers once nothing was drawn for a while.
ZOOM = """async ([low, high]) => {
  const plots = [...document.querySelectorAll('.js-plotly-plot')], first = plots[0];
  const drawn = { first: 0, last: 0 };
  for (const plot of plots) plot.on('plotly_afterplot', () => {
    drawn.last = performance.now();
    if (plot === first) drawn.first = drawn.last;
  });
  performance.clearResourceTimings();
  const began = performance.now();
  window.Plotly.relayout(first, { 'xaxis.range[0]': low, 'xaxis.range[1]': high });
  const reply = () => performance.getEntriesByType('resource').find((e) => e.name.includes('low='));
  while (!reply()?.responseEnd || drawn.first < reply().responseEnd || performance.now() - drawn.last < 300)
    await new Promise((resolve) => setTimeout(resolve, 20));
  for (const plot of plots) plot.removeAllListeners('plotly_afterplot');
  return { request: reply().duration, first: drawn.first - began, all: drawn.last - began };
}"""  # noqa: E501
UPDATE = """async (count) => {
  let last = 0;
  new MutationObserver(() => { last = performance.now(); })
    .observe(document.body, { subtree: true, childList: true, characterData: true });
  performance.clearResourceTimings();
  const asked = () => performance.getEntriesByType('resource').filter((e) => e.name.includes('api/now'));
  const found = [];
  for (let n = 1; n <= count; n += 1) {
    while (asked().length < n || performance.now() - last < 300)
      await new Promise((resolve) => setTimeout(resolve, 20));
    const entry = asked()[n - 1];
    found.push({ request: entry.duration, all: Math.max(last, entry.responseEnd) - entry.startTime });
  }
  return found;
}"""  # noqa: E501


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--runs", type=int, default=50)
    args.add_argument("--lines", type=int, default=100_000)
    args.add_argument("--times", type=int, default=5, help="repetitions; each opens another run")
    args.add_argument("--hours", type=int, default=8, help="simulated time of the living runs")
    args.add_argument("--keep", help="folder for the runs, which are made if it has none")
    options = args.parse_args()
    if missing := [n for n in ("playwright", "starlette", "plotly") if find_spec(n) is None]:
        raise SystemExit(f"{', '.join(missing)} is missing; pip install 'penstock[watch,browser]'")
    compile_package()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        real = train(folder / "real")
        kept = Path(options.keep) if options.keep else folder / "long"
        if not kept.exists():
            print(f"making {options.runs} runs in {kept}", file=sys.stderr)
            long_runs(kept, real, options.runs, options.lines)
        browser = stack.enter_context(chromium())
        result: dict[str, Any] = {"asked": ASKED}
        result["long"] = long_page(browser, kept, options.times)
        result["many"] = many_processes(browser, folder / "many", real)
        result["memory"] = memory(folder / "living", real, options.hours)
    finish("watch_page", result, rows_of(result), options)


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser. Exits with a sentence if there is none."""
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        paths = [path for name in BROWSERS if (path := shutil.which(name))]
        with suppress(Error):
            paths += [p for p in [playwright.chromium.executable_path] if Path(p).exists()]
        if not paths:
            raise SystemExit("there is no Chromium; run: playwright install chromium")
        browser = playwright.chromium.launch(executable_path=paths[0], args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Server:
    """`penstock watch` on a folder."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "watch", str(folder), "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = str(json.loads(self._process.stdout.readline())["address"])
        self._about = psutil.Process(self._process.pid)

    @property
    def cpu_s(self) -> float:
        """Processor time so far."""
        times = self._about.cpu_times()
        return float(times.user + times.system)

    @property
    def rss_nbytes(self) -> int:
        return int(self._about.memory_info().rss)

    def get(self, view: str, **parameters: Any) -> Any:
        """The JSON of a view."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        with urllib.request.urlopen(f"{self.address}api/{view}?{query}", timeout=WAIT_S) as reply:
            return json.load(reply)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


def long_page(browser: Any, folder: Path, times: int) -> list[dict[str, float]]:
    """First paint, time until all is read, and zooms, of ``times`` runs."""
    found = []
    names = sorted(path.name for path in folder.iterdir())
    with Server(folder) as server:
        for name in names[:times]:
            context = browser.new_context(viewport={"width": 1400, "height": 900})
            context.add_init_script(WATCH_PAINT)
            page = context.new_page()
            before_s, browser_s, began_s = server.cpu_s, cpu_of_browser_s(), time.perf_counter()
            page.goto(f"{server.address}#run={name}&view=learning")
            until(page, PAINTED)
            painted = page.evaluate("() => window.painted")
            count = page.locator("#runs li").count()
            assert count == len(names), count
            first_cpu_s = server.cpu_s - before_s
            first_browser_s = cpu_of_browser_s() - browser_s
            until(page, IS_READ)
            read_s, read_cpu_s = time.perf_counter() - began_s, server.cpu_s - before_s
            end = server.get("now", run=name)["figures"]["env_steps"]
            zooms = [page.evaluate(ZOOM, [end * 0.1 * n, end * (0.1 * n + 0.3)]) for n in range(5)]
            best = min(zooms, key=lambda zoom: float(zoom["all"]))
            context.close()
            found.append(
                {
                    "list_s": painted["list"] / 1e3,
                    "first_paint_s": max(painted[n] for n in ("list", "head", "curve", "axes"))
                    / 1e3,
                    "chart_s": painted["chart"] / 1e3,
                    "chart_server_cpu_s": first_cpu_s,
                    "chart_browser_cpu_s": first_browser_s,
                    "all_read_s": read_s,
                    "all_read_server_cpu_s": read_cpu_s,
                    "zoom_request_ms": best["request"],
                    "zoom_ms": best["first"],
                    "zoom_all_charts_ms": best["all"],
                    "server_mib": server.rss_nbytes / 2**20,
                }
            )
    return found


def many_processes(browser: Any, folder: Path, real: Path) -> dict[str, float]:
    """Updates of the view Processes, with a run of many processes on many hosts."""
    folder.mkdir()
    processes = simulated_processes(PROCESSES, HOSTS)
    lines = (with_processes(line, [*processes]) for line in lines_like(real))
    before = list(islice(lines, 600))
    with LivingRun(folder / "run", real, processes, lines) as run, Server(folder) as server:
        run.feed(before)
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        page = context.new_page()
        page.goto(f"{server.address}#run=run&view=processes")
        until(page, "() => document.querySelectorAll('.hosthead').length > 1")
        server.get("now", run="run")
        before_s, began_s = server.cpu_s, time.perf_counter()
        found = page.evaluate(UPDATE, UPDATES)
        cpu_s = (server.cpu_s - before_s) / (time.perf_counter() - began_s)
        context.close()
    return {
        "update_ms": sorted(each["all"] for each in found)[len(found) // 2],
        "update_least_ms": min(each["all"] for each in found),
        "request_ms": sorted(each["request"] for each in found)[len(found) // 2],
        "server_cpu_s_per_s": cpu_s,
    }


def memory(folder: Path, real: Path, hours: int) -> list[dict[str, float]]:
    """The server's memory after each eighth of the time. The runs report once a second, and the
    record thins their lines as those of any run."""
    folder.mkdir()
    found = []
    with ExitStack() as stack:
        runs = [
            stack.enter_context(LivingRun(folder / f"run-{n}", real, simulated_processes(8, 1)))
            for n in range(LIVING)
        ]
        kept = [Kept() for _ in runs]
        thinned = [Thinned(sink) for sink in kept]
        sources = [lines_like(real, seed) for seed in range(LIVING)]
        server = stack.enter_context(Server(folder))
        for eighth in range(EIGHTHS):
            for _ in range(hours * 3600 // EIGHTHS // POLL_S):
                for run, source, thin, sink in zip(runs, sources, thinned, kept, strict=True):
                    for line in islice(source, POLL_S):
                        thin.metrics(line)
                    run.feed(sink.take())
                    for view in VIEWS:
                        server.get(view, run=run.folder.name, metric=METRIC)
            found.append(
                {
                    "eighth": eighth + 1,
                    "mib": server.rss_nbytes / 2**20,
                    "lines": sum(sink.count for sink in kept),
                }
            )
    return found


class Kept(MetricSink):
    """Keeps the lines that a `Thinned` sink passes on."""

    def __init__(self) -> None:
        self.count = 0
        self._lines: list[Line] = []

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        self._lines.append({**metrics})
        self.count += 1

    def take(self) -> list[Line]:
        """The lines since the last call."""
        found, self._lines = self._lines, []
        return found


def cpu_of_browser_s() -> float:
    """Processor time of all processes below this one but the server, so far."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "penstock" not in process.cmdline():
                times = process.cpu_times()
                total += times.user + times.system
    return total


def until(page: Any, condition: str) -> None:
    """As playwright's `wait_for_function`, which the page's content security policy forbids."""
    ends_s = time.monotonic() + WAIT_S
    while not page.evaluate(condition):
        if time.monotonic() > ends_s:
            raise SystemExit(f"the page did not get there within {WAIT_S:.0f} s: {condition}")
        page.wait_for_timeout(20)


def rows_of(result: dict[str, Any]) -> list[list[Any]]:
    """The table: least and median of the repetitions."""
    rows: list[list[Any]] = [["what", "least", "median", "asked"]]
    for name in result["long"][0]:
        values = sorted(each[name] for each in result["long"])
        rows.append([name, values[0], values[len(values) // 2], ASKED.get(name)])
    many = result["many"]
    rows.append(["update_ms", many["update_least_ms"], many["update_ms"], ASKED["update_ms"]])
    rows.append(["… of it the request", None, many["request_ms"], None])
    rows.append(["… processor time of the server, s/s", None, many["server_cpu_s_per_s"], None])
    for each in result["memory"]:
        lines = f"{each['lines']:,} lines"
        rows.append([f"MiB after {each['eighth']}/{EIGHTHS}, {lines}", each["mib"], None, "flat"])
    return rows


if __name__ == "__main__":
    main()
