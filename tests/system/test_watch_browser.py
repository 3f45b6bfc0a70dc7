"""The page of `penstock watch` in a real browser: each view, of runs of several kinds."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from run_folders import make_run
from train_command import SMALL, Penstock, address_of, trained

pytest.importorskip("starlette")
pytest.importorskip("plotly")
playwright_api = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
VIEWS = ("learning", "flow", "time", "processes", "run", "agent")
WAIT_MS = 30_000
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
            for width in (360, 768, 1600):
                self.page.set_viewport_size({"width": width, "height": 900})
                self.page.wait_for_timeout(400)
                found += [f"{scheme} {width}: {text}" for text in self.page.evaluate(INSPECT)]
        self.page.set_viewport_size({"width": 1400, "height": 900})
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    paths = [path for name in BROWSERS if (path := shutil.which(name))]
    with playwright_api.sync_playwright() as playwright:
        with suppress(playwright_api.Error):
            own = playwright.chromium.executable_path
            paths += [own] if Path(own).exists() else []
        if not paths:
            pytest.skip("no Chromium: playwright install chromium, or Debian's chromium")
        found = playwright.chromium.launch(executable_path=paths[0], args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def screen(penstock: Penstock, tmp_path: Path, browser: Any) -> Iterator[Screen]:
    runs = tmp_path / "runs"
    runs.mkdir(exist_ok=True)
    address = address_of(penstock("watch", "runs", "--port", "0", "--json"))
    found = Screen(browser, address)
    yield found
    found._context.close()
    assert found.problems == []


def test_a_living_run(screen: Screen, penstock: Penstock, tmp_path: Path) -> None:
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
    screen.wait_for(".trouble", "1 restarts of actors")

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


def test_every_view_of_runs_of_several_kinds(screen: Screen, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "whole", [10.0 * i for i in range(30)], evaluated={500: 40.0, 2500: 90.0})
    make_run(runs / "crashed", [1.0, 2.0, 3.0], ends=False)
    make_run(runs / "empty", [], ends=False)
    for seed in range(3):
        make_run(runs / f"seeds/seed-{seed}", [seed + i / 2 for i in range(30)], f"run.seed={seed}")
    (runs / "whole/logs/actor-0.log").write_text(f"{HTML}\n")
    with (runs / "whole/logs/events.jsonl").open("a") as file:
        file.write(f'{{"kind": "restart", "role": "{HTML}", "text": "{HTML}", "uptime_s": 1}}\n')
    for run in ("whole", "crashed", "empty", "seeds/seed-0"):
        for view in VIEWS:
            screen.open(run, view)
            screen.wait_until("document.querySelector('#panel').innerText.length > 20")
            screen.page.wait_for_timeout(500)
            assert screen.inspect() == [], (run, view)
    screen.open("crashed", "learning")
    screen.wait_for(".trouble", "died without ending")
    screen.open("crashed", "run")
    screen.wait_for("td", "died without ending")
    screen.wait_for(".balance .dim", "at the last report")
    assert "%" not in screen.page.locator(".balance").inner_text()
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


def test_zooming_asks_for_the_range(screen: Screen, tmp_path: Path) -> None:
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
