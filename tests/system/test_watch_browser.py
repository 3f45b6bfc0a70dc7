"""The page of `penstock watch` in a real browser: each view, of runs of several kinds."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from chromium import chromium
from run_folders import make_run
from train_command import SMALL, Penstock, address_of, trained
from watched_runs import LivingRun, lines_like, simulated_processes, with_processes

pytest.importorskip("starlette")
pytest.importorskip("plotly")

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]

VIEWS = ("learning", "flow", "time", "processes", "run", "agent")
WIDTHS = (360, 768, 1600)
WAIT_MS = 30_000
OLD_RUN = Path(__file__).parents[1] / "fixtures/0.1.0/trained/impala"
HTML = "<img src=x onerror=document.title='hacked'>"

# The contrast of every text that is shown with what lies behind it, by WCAG 2; and names.
INSPECT = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; })
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length && (c.length < 4 || c[3] === 1)) return c;
    }
    return [255, 255, 255];
  };
  const problems = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !e.checkVisibility() || e.closest("svg,script,noscript,.skip,:disabled")) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) problems.push(`contrast ${ratio.toFixed(2)}: ${text.slice(0, 40)}`);
  }
  for (const e of document.querySelectorAll("button,a,input,select,video,img,[role=img],[role=meter]")) {
    const name = e.getAttribute("aria-label") || e.textContent.trim() || e.getAttribute("alt") || e.closest("label");
    if (!name) problems.push(`no name: ${e.outerHTML.slice(0, 80)}`);
  }
  for (const e of document.querySelectorAll(".figures dd, .stage .rate, .stage dl, .runs .value, .card > header")) {
    if (e.checkVisibility() && e.scrollWidth > e.clientWidth + 1 && e.clientWidth) problems.push(`cut off: ${e.textContent}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id).filter((id) => !id.startsWith("clip"));
  if (new Set(ids).size !== ids.length) problems.push("an id is repeated");
  if (document.documentElement.scrollWidth > innerWidth) problems.push(`too wide: ${document.documentElement.scrollWidth}`);
  return problems;
}"""  # noqa: E501


# Whether the element with the focus looks different from one without, and what it is.
FOCUSED = """() => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  const style = getComputedStyle(e), box = e.getBoundingClientRect();
  return {
    name: e.id || e.getAttribute('aria-label') || e.textContent.trim().slice(0, 40), tag: e.tagName,
    marked: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1,
    seen: box.width > 0 && box.bottom > 0 && box.top < innerHeight,
  };
}"""
# The findings of axe-core, of any impact: rule, and the first elements.
AXE = """async () => (await axe.run(document, { resultTypes: ['violations'] })).violations
  .map((each) => `${each.id}: ${each.nodes.slice(0, 3).map((node) => node.html.slice(0, 120)).join(' ')}`)
"""  # noqa: E501


def axe_script() -> str:
    """axe-core, as the package axe-playwright-python ships it."""
    found = find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("needs the extra browser")
    return Path(found.origin).with_name("axe.min.js").read_text()


class Screen:
    """A browser with one page. `problems` collects errors of the console, and other hosts."""

    def __init__(self, browser: Any, address: str) -> None:
        self.address = address
        self.problems: list[str] = []
        self._context = browser.new_context(viewport={"width": 1400, "height": 900})
        self.page = self._context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("request", self._on_request)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.problems.append(f"asks another host: {request.url}")

    def open(self, run: str, view: str, more: str = "") -> None:
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}#run={run}&view={view}{more}")
        self.page.wait_for_selector(f"#tab-{view}[aria-selected=true]")
        self.page.wait_for_selector(".figures dd", timeout=WAIT_MS)

    def wait_for(self, selector: str, text: str = "") -> Any:
        found = self.page.locator(selector).filter(has_text=text).first
        found.wait_for(timeout=WAIT_MS)
        return found

    def wait_until(self, expression: str) -> None:
        """As `wait_for_function`, which the page's content security policy does not allow."""
        ends_s = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < ends_s, expression
            self.page.wait_for_timeout(50)

    def inspect(self) -> list[str]:
        """What a user with a small screen, a keyboard or weak eyes would stumble over."""
        found = []
        for scheme in ("light", "dark"):
            self.page.emulate_media(color_scheme=scheme)
            for width in WIDTHS:
                self.page.set_viewport_size({"width": width, "height": 900})
                problems = ["not inspected"]
                for wait_ms in (50, 200, 1000):  # charts follow the size of the page with a delay
                    if problems:
                        self.page.wait_for_timeout(wait_ms)
                        problems = self.page.evaluate(INSPECT)
                found += [f"{scheme} {width}: {text}" for text in problems]
        self.page.set_viewport_size({"width": 1400, "height": 900})
        return found

    def axe(self) -> list[str]:
        """Findings of axe-core, light and dark."""
        self.page.evaluate(axe_script())  # by the debugger: the page's own policy stays as it is
        found = []
        for scheme in ("light", "dark"):
            self.page.emulate_media(color_scheme=scheme)
            self.page.wait_for_timeout(100)
            found += [f"{scheme}: {text}" for text in self.page.evaluate(AXE)]
        return found

    def tabbed(self, most: int = 150) -> list[dict[str, Any]]:
        """What the key Tab reaches, from the start of the page to its end."""
        self.page.evaluate("document.querySelector('.skip').focus()")
        found: list[dict[str, Any]] = []
        for _ in range(most):
            self.page.keyboard.press("Tab")
            element = self.page.evaluate(FOCUSED)
            if element is None or element in found[:1]:
                break
            found.append(element)
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def screen(penstock: Penstock, tmp_path: Path, browser: Any) -> Iterator[Screen]:
    runs = tmp_path / "runs"
    runs.mkdir(exist_ok=True)
    address = address_of(penstock("watch", "runs", "--port", "0", "--json"))
    found = Screen(browser, address)
    yield found
    found._context.close()
    assert found.problems == []


def test_live_run_is_shown_and_updated(screen: Screen, penstock: Penstock, tmp_path: Path) -> None:
    options = ("run.dir=runs/live", "stop.minutes=10", "eval.every_s=2", "eval.video=false",
               "run.interval_s=0.5")  # fmt: skip
    run = penstock("train", "cartpole", *SMALL[:2], "stop.return=null", *options)
    run.wait_until(lambda: trained(tmp_path / "runs/live"))
    screen.open("live", "learning")
    screen.wait_for(".state.running")
    screen.wait_for(".js-plotly-plot .scatterlayer path.js-line")
    steps = screen.page.locator(".figures dd").nth(4)
    before = steps.inner_text()
    run.wait_until(lambda: steps.inner_text() != before)  # it is updated

    psutil.Process(run.pid_of("actor-1")).send_signal(signal.SIGKILL)
    screen.wait_for(".past", "actor-1 was killed by SIGKILL, restarted 0.1 s later.")
    learner = psutil.Process(run.pid_of("learner-0"))
    learner.suspend()
    screen.wait_for(".runhead .state.stalled", "stalled: learner-0 is stopped by a signal; no upd")
    screen.wait_for(".limits", "nothing is trained until that ends")
    screen.wait_for(".trouble code", f"kill -CONT {learner.pid}")
    screen.wait_for(".runs .state.stalled")
    assert screen.inspect() == []
    learner.resume()
    screen.wait_for(".runhead .state.running")

    screen.open("live", "flow")
    screen.wait_for(".stage .arrow.moving, .stage")
    screen.wait_for(".verdict .finding")
    assert screen.page.locator(".stage").count() == 6

    screen.open("live", "time")
    screen.wait_for(".card", "actor-0")
    screen.wait_for(".js-plotly-plot .scatterlayer path.js-fill")

    screen.open("live", "processes")
    assert screen.wait_for("tbody tr", "learner-0").locator("td").nth(3).inner_text() == "runs"
    screen.wait_for("tbody tr", "actor-1").get_by_role("button").click()
    screen.wait_for("button", "Show its stacks").click()
    screen.wait_for("pre", 'File "')

    screen.open("live", "run")
    screen.wait_for("#panel td", "was killed")
    screen.page.get_by_label("Kind").select_option("restart")
    screen.wait_for("[role=status]", "1 match")
    screen.wait_for("td", "run.interval_s")

    screen.open("live", "agent")
    screen.wait_for(".note", "penstock record")

    for view in VIEWS:
        screen.open("live", view)
        screen.wait_until("document.querySelector('#panel').innerText.length > 20")
        assert screen.inspect() == [], view
    reached = {element["name"] for element in screen.tabbed()}
    assert {"theme", "filter", "Save now", "Stop", "tab-agent", "panel"} <= reached

    screen.page.get_by_role("button", name="Save now").click()
    screen.wait_for(".orders", "saved at")
    screen.page.get_by_role("button", name="Stop", exact=True).click()
    screen.page.get_by_role("button", name="Keep running").click()
    assert run.process.poll() is None
    screen.page.get_by_role("button", name="Stop", exact=True).click()
    screen.page.get_by_role("button", name="Stop the run").click()
    run.process.communicate(timeout=60)
    assert run.process.returncode == 130
    screen.wait_for(".runhead .state.stopped")


def older_run(folder: Path) -> None:
    """An ended run of 0.1.0: its config and checkpoints, and lines without later figures."""
    make_run(folder, [10.0 * i for i in range(30)])
    for name in ("config.yaml", "versions.json"):
        (folder / name).unlink()
    shutil.copy(OLD_RUN / "config.yaml", folder / "config.yaml")
    shutil.copytree(OLD_RUN / "checkpoints", folder / "checkpoints")
    later = ("interval_s", "ledger", "policy_lag_mean", "learner_compute_fraction")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k not in later} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    summary = {"exit_reason": "env_steps", "solved_at_s": 12.0, "env_steps": 2900}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "logs/events.jsonl").write_text('{"kind": "start", "text": "was started"}\n')


def newer_run(folder: Path) -> None:
    """An ended run of a version to come: options, figures and events that are unknown."""
    make_run(folder, [10.0 * i for i in range(30)], evaluated={500: 40.0})
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("env:\n", "env:\n  future: {a: [1, 2]}\n", 1))
    with (folder / "metrics.jsonl").open("a") as file:
        figures = {"time_s": 30.0, "env_steps": 3000, "future": {"a": [{"b": 1}]}, "ledger": 3}
        file.write(json.dumps(figures) + "\n")
    with (folder / "logs/events.jsonl").open("a") as file:
        file.write('{"kind": "future", "role": ["x"], "text": {}, "uptime_s": "3"}\n')
    with (folder / "evaluations.jsonl").open("a") as file:
        file.write('{"time_s": 1, "trained_steps": 900, "return": [1, 2]}\n')


@pytest.fixture
def kinds(tmp_path: Path) -> list[str]:
    """Runs of several kinds, by name."""
    runs = tmp_path / "runs"
    make_run(runs / "whole", [10.0 * i for i in range(30)], evaluated={500: 40.0, 2500: 90.0})
    make_run(runs / "crashed", [1.0, 2.0, 3.0], ends=False)
    make_run(runs / "empty", [], ends=False)
    for seed in range(3):
        make_run(runs / f"seeds/seed-{seed}", [seed + i / 2 for i in range(30)], f"run.seed={seed}")
    older_run(runs / "older")
    newer_run(runs / "newer")
    return ["whole", "crashed", "empty", "seeds/seed-0", "older", "newer"]


def test_every_view_shows_runs_of_several_kinds(
    screen: Screen, kinds: list[str], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    (runs / "whole/logs/actor-0.log").write_text(f"{HTML}\n")
    with (runs / "whole/logs/events.jsonl").open("a") as file:
        file.write(f'{{"kind": "restart", "role": "{HTML}", "text": "{HTML}", "uptime_s": 1}}\n')
    for run in kinds:
        for view in VIEWS:
            screen.open(run, view)
            screen.wait_until("document.querySelector('#panel').innerText.length > 20")
            screen.page.wait_for_timeout(200)
            assert screen.inspect() == [], (run, view)
            assert screen.page.locator("#connection").inner_text() == "", (run, view)
    screen.open("crashed", "learning")
    screen.wait_for(".runhead .state.died", "died: last report at")
    screen.wait_for(".trouble", "died without ending")
    screen.wait_for(".trouble code", "--resume auto")
    screen.wait_for(".limits", "Limit while it ran")
    screen.wait_for(".figures div", "Actors").filter(has_text="died with the run")
    screen.open("crashed", "run")
    screen.wait_for("td", "died without ending")
    screen.wait_for(".balance .dim", "at the last report")
    assert "%" not in screen.page.locator(".balance").inner_text()
    screen.open("older", "learning")
    screen.wait_for(".card.wide .scatterlayer path.js-line")
    screen.open("older", "run")
    screen.wait_for("td", "last")  # of its checkpoints
    screen.open("whole", "flow")
    screen.wait_for(".figures div", "Actors").filter(has_text="ended")
    screen.wait_for(".state", "ended: step limit reached")
    screen.open("whole", "processes")
    screen.wait_for("button", "actor-0").click()
    screen.wait_for("pre", HTML)
    screen.open("whole", "run")
    screen.wait_for("td", HTML)
    assert screen.page.title() != "hacked"
    assert screen.page.locator("img").count() == 0


def test_runs_are_compared_by_keyboard(screen: Screen, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed in range(3):
        options = f"run.seed={seed}", "stop.return=null"  # without the line of a target
        make_run(runs / f"seed-{seed}", [seed + i / 2 for i in range(30)], *options)
    screen.open("seed-0", "learning")
    screen.wait_for(".js-plotly-plot .scatterlayer path.js-line")
    lines = ".card.wide .scatterlayer path.js-line"
    assert screen.page.locator(lines).count() == 1
    screen.page.get_by_label("Compare seed-1").focus()
    screen.page.keyboard.press("Space")
    screen.wait_until(f"document.querySelectorAll('{lines}').length === 2")
    assert "with=seed-1" in screen.page.url
    screen.page.get_by_label("Smoothing").select_option("10")
    screen.wait_until(f"document.querySelectorAll('{lines}').length === 4")
    screen.page.get_by_role("button", name="Time", exact=True).click()
    screen.page.locator("#tab-learning").focus()
    screen.page.keyboard.press("ArrowRight")
    screen.wait_for("#tab-flow[aria-selected=true]")
    assert screen.page.evaluate("document.activeElement.id") == "tab-flow"
    screen.page.keyboard.press("End")
    screen.wait_for("#tab-agent[aria-selected=true]")


def test_zooming_requests_the_visible_range(screen: Screen, tmp_path: Path) -> None:
    make_run(tmp_path / "runs/a", [float(i % 7) for i in range(300)])
    screen.open("a", "learning")
    plot = screen.wait_for(".card.wide .js-plotly-plot .nsewdrag")
    box = plot.bounding_box()
    with screen.page.expect_request(lambda request: "low=" in request.url):
        screen.page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
        screen.page.mouse.down()
        screen.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 55, steps=5)
        screen.page.mouse.up()
    screen.page.get_by_role("button", name="Show all").click()
    screen.wait_until("!document.querySelector('.controls > button').checkVisibility()")


def test_axe_finds_no_accessibility_problem(screen: Screen, kinds: list[str]) -> None:
    for run in kinds[:3]:
        for view in VIEWS:
            screen.open(run, view)
            screen.wait_until("document.querySelector('#panel').innerText.length > 20")
            screen.page.wait_for_timeout(200)
            assert screen.axe() == [], (run, view)


def test_keyboard_reaches_all_controls(screen: Screen, kinds: list[str]) -> None:
    screen.open(kinds[0], VIEWS[0])
    screen.wait_for(".js-plotly-plot .scatterlayer path.js-line")
    for view in VIEWS:
        screen.wait_for(f"#tab-{view}[aria-selected=true]")
        screen.wait_until("document.querySelector('#panel').innerText.length > 20")
        found = screen.tabbed()
        assert [each for each in found if not each["marked"] or not each["seen"]] == []
        names = [each["name"] for each in found]
        assert {"theme", "filter", f"tab-{view}"} <= {*names}
        inside = screen.page.locator(
            "#panel :is(button, select, input, a[href], video):not(:disabled):visible"
        )
        assert len(found) >= inside.count() + names.index(f"tab-{view}")
        screen.page.locator(f"#tab-{view}").focus()
        screen.page.keyboard.press("ArrowRight")


def test_processes_of_many_hosts_are_shown(screen: Screen, tmp_path: Path) -> None:
    processes = simulated_processes(300, 40)
    made = make_run(tmp_path / "made", [1.0, 2.0, 3.0, 4.0], ends=False)
    lines = [with_processes(line, [*processes]) for line in islice(lines_like(made), 30)]
    with LivingRun(tmp_path / "runs/many", made, processes) as run:
        run.feed(lines)
        screen.open("many", "processes")
        screen.wait_for(".note", "300 processes on 40 hosts; 1 not healthy:")
        rows = screen.page.locator("tbody tr:visible")
        assert rows.count() == 41  # a row for each host, and the silent process
        assert screen.page.locator("tbody tr:visible").nth(1).inner_text().startswith("actor-99")
        run.gone.add("actor-7")
        ended = {"kind": "exit", "role": "actor-7", "text": "", "data": {"expected": False}}
        (run.folder / "logs/events.jsonl").write_text(json.dumps(ended) + "\n")
        screen.wait_for(".note", "actor-7")
        screen.wait_for("tbody tr", "node-08").get_by_role("button").first.click()
        screen.wait_for("tbody tr", "actor-7")
        assert rows.count() == 41 + 1 + 7
        for view in VIEWS:
            screen.open("many", view)
            screen.wait_until("document.querySelector('#panel').innerText.length > 20")
            assert screen.inspect() == [], view
            assert screen.axe() == [], view


def test_flow_view_states_that_it_shows_a_sample(screen: Screen, tmp_path: Path) -> None:
    made = make_run(tmp_path / "runs/long", [1.0, 2.0, 3.0, 4.0], ends=False)
    with (made / "metrics.jsonl").open("a") as file:
        for line in islice(lines_like(made), 30_000):
            file.write(json.dumps(line) + "\n")
    screen.open("long", "flow")
    screen.wait_for(".window", "what is shown is of a sample of the lines")
    screen.wait_until("!document.querySelector('.window').textContent.includes('sample')")
    assert screen.inspect() == []


def test_long_run_is_shown_before_all_lines_are_read(screen: Screen, tmp_path: Path) -> None:
    made = make_run(tmp_path / "runs/long", [1.0, 2.0, 3.0, 4.0], ends=False)
    with (made / "metrics.jsonl").open("a") as file:
        for line in islice(lines_like(made), 30_000):
            file.write(json.dumps(line) + "\n")
    screen.open("long", "learning")
    screen.wait_for(".loading span", "until all are, curves are drawn from a sample")
    screen.wait_for(".card.wide .scatterlayer path.js-line")
    screen.wait_until("document.querySelector('.loading').hidden")
    assert screen.inspect() == []
