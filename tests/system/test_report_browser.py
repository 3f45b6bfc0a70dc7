"""The file of `penstock report` in a real browser, and timelines in it and in the page."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import chromium
from penstock.watch.catalog import RunCatalog
from penstock.watch.freeze import write_report
from penstock.watch.views import Views
from run_folders import STEPS, make_run
from train_command import SMALL, Penstock, address_of, trained
from watched_runs import LivingRun

pytest.importorskip("starlette")
pytest.importorskip("plotly")

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]

VIEWS = ("learning", "flow", "time", "processes", "run", "agent")
ORDERS = ("Save now", "Stop", "Show its stacks", "Record a timeline", "Record a video now")
WAIT_MS = 30_000
SPANS = 60_000
WINDOW_US = 6_000_000
PICTURE = "document.querySelector('.timeline canvas').toDataURL()"
# A GIF of one pixel.
GIF = bytes.fromhex(
    "47494638396101000100800000000000ffffff21f90401000000002c00000000010001000002024401003b"
)
TOO_WIDE = """() => [document.documentElement, ...document.querySelectorAll('.scroll')]
  .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.innerText.slice(0, 60))"""


class File:
    """A page that shows a file. `problems` has what the console says, and every request but that of
    the file."""

    def __init__(self, browser: Any, address: str) -> None:
        self.address, self.problems = address, list[str]()
        self.context = browser.new_context(viewport={"width": 1400, "height": 900})
        self.page = self.context.new_page()
        self.page.on("console", lambda said: self.problems.append(f"console: {said.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("request", self._on_request)

    def _on_request(self, request: Any) -> None:
        is_own = request.url.partition("#")[0].startswith(self.address)
        if not is_own and not request.url.startswith(("data:", "blob:")):
            self.problems.append(f"request: {request.url}")

    def open(self, view: str, run: str = ".") -> None:
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}#run={run}&view={view}")
        self.page.wait_for_selector(f"#tab-{view}[aria-selected=true]")
        self.page.wait_for_selector(".figures dd", timeout=WAIT_MS)

    def wait_for(self, selector: str, text: str = "") -> Any:
        found = self.page.locator(selector).filter(has_text=text).first
        found.wait_for(timeout=WAIT_MS)
        return found

    def wait_until(self, expression: str) -> None:
        for _ in range(WAIT_MS // 50):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(expression)

    def curve(self, title: str) -> dict[str, Any]:
        """The x and y of the last line that the chart with this title shows."""
        found: dict[str, Any] = self.page.evaluate(
            """(title) => {
              const card = [...document.querySelectorAll('.card')].find((e) => e.querySelector('h2').innerText === title);
              const line = card.querySelector('.js-plotly-plot')?.data.filter((e) => e.mode === 'lines' && e.hovertemplate).at(-1);
              return line ? { x: [...line.x], y: [...line.y] } : {};
            }""",  # noqa: E501
            title,
        )
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def opened(browser: Any, path: Path) -> File:
    return File(browser, path.resolve().as_uri())


def profiled(folder: Path, spans: int = SPANS) -> None:
    """The files of a profile, whose learner has ``spans`` spans, and 24 parts of a ledger."""
    shares = {f"part_{i}": 1 / 24 for i in range(24)}
    profile = {
        "target": "cartpole", "seconds": 6.0, "cores": 2.0, "device": "cpu",
        "learner": [{"name": "learner-0", "ledger": {"compute": 1.0}, "parts": shares,
                     "threads": {"feeder": {"wait": 1.0}}}],
        "actors": [{"name": f"actor-{i}", "ledger": {"step": 0.5, "wait": 0.5}} for i in range(8)],
        "connectors": [], "others": [],
        "flow": {"produced_steps_per_s": 1.0, "trained_steps_per_s": 1.0, "dropped": {}, "lost": {},
                 "latency_s": {"p50": 0.1, "p95": 0.2, "p99": None},
                 "policy_lag": {"mean": 1.0, "max": 2}, "queue_fill": 0.5, "stages": []},
        "verdict": {"finding": "the learner is the limit", "reason": "it is", "next_step": "rest"},
        "also": [], "notes": ["a note of the profile"],
    }  # fmt: skip
    (folder / "profile.json").write_text(json.dumps(profile))
    us = WINDOW_US / spans
    lines = ['{"displayTimeUnit":"ms","otherData":{"holds":"the trace has all"},"traceEvents":[']
    lines += [
        json.dumps({"ph": "M", "name": f"{kind}_name", "pid": 1, "tid": 0, "args": {"name": name}})
        for kind, name in (("process", "learner-0"), ("thread", "main"))
    ]
    for i in range(spans):
        part = "backward" if i % 2 else "forward"
        lines.append(f'{{"ph":"X","name":"{part}","pid":1,"tid":0,"ts":{i * us},"dur":{us}}}')
    (folder / "trace.json").write_text(lines[0] + "\n" + ",\n".join(lines[1:]) + "\n]}\n")


def test_every_view_of_a_report_shows_without_a_network_request(
    browser: Any, tmp_path: Path
) -> None:
    returns = [10.0 * i for i in range(30)]
    whole = make_run(tmp_path / "whole", returns, evaluated={500: 40.0, 2500: 90.0})
    (whole / "videos").mkdir()
    (whole / "videos" / "a.gif").write_bytes(GIF)
    profiled(whole)
    killed = make_run(tmp_path / "killed", [1.0, 2.0, 3.0], ends=False)
    other = make_run(tmp_path / "other", [1.0, 2.0])
    (other / "versions.json").unlink()
    (other / "config.yaml").write_text("env:\n  id: CartPole-v1\nremoved: {option: 1}\n")
    (other / "profile.json").write_text('{"learners": []}')
    texts = {
        "whole": {"time": "Timeline", "agent": "a.gif", "run": "every sample is accounted for"},
        "killed": {"learning": "died without ending", "agent": "None. They are due"},
        "other": {"run": "removed.option", "time": "does not have the form of this release"},
    }
    for folder in (whole, killed, other):
        file = opened(browser, write_report(str(folder)))
        for view in VIEWS:
            file.open(view)
            file.wait_until("document.querySelector('#panel').innerText.length > 20")
            file.wait_for("main", texts[folder.name].get(view, ""))
            for width in (360, 1600) if view == "time" else (360,):
                file.page.set_viewport_size({"width": width, "height": 900})
                file.page.wait_for_timeout(300)
                if view == "time":
                    assert file.page.evaluate(TOO_WIDE) == [], (folder.name, width)
                is_wide = f"document.documentElement.scrollWidth > {width}"
                assert not file.page.evaluate(is_wide), (folder.name, view)
            for name in ORDERS:
                assert not file.page.get_by_role("button", name=name, exact=True).count()
        file.wait_for("footer", "written by penstock report")
        file.open("time")
        file.page.wait_for_timeout(500)
        assert not file.page.get_by_text("Timeline of the last minute").is_visible()
        file.context.close()
        assert file.problems == [], folder.name


def test_an_embedded_picture_is_shown(browser: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0])
    (folder / "videos").mkdir()
    (folder / "videos" / "a.gif").write_bytes(GIF)
    file = opened(browser, write_report(str(folder)))
    file.open("agent")
    file.wait_until("document.querySelector('.gif')?.naturalWidth === 1")
    file.context.close()
    assert file.problems == []


def test_curves_of_a_report_equal_those_of_the_server(browser: Any, tmp_path: Path) -> None:
    """Also smoothed, over a part of the run, and where a resume has repeated steps."""
    folder = make_run(tmp_path / "run", [float(i * 37 % 101) for i in range(3000)], ends=False)
    with (folder / "metrics.jsonl").open("a") as lines:
        for i in range(2900, 3100):
            norm = 1e18 if i == 2950 else i % 7  # after a spike the means are exact again
            line = {"env_steps": STEPS * i, "time_s": i, "interval_s": 1.0, "grad_norm": norm}
            lines.write(json.dumps({**line, "episode_return_mean": float(i % 13)}) + "\n")
    views = Views(RunCatalog(folder))
    while views.catalog.run(".").read(1.0) < 1.0:
        pass  # a view reads only for a part of a second
    file = opened(browser, write_report(str(folder)))
    file.open("learning")
    file.wait_until("document.querySelectorAll('.js-plotly-plot').length > 1")

    def drawn_as(
        metric: str, title: str, count: int = 1, low: Any = None, high: Any = None
    ) -> None:
        [line] = views.curves(["."], [metric], "env_steps", count, low=low, high=high)["curves"][
            metric
        ]
        wanted = line["smooth"] if count > 1 else line
        for _ in range(WAIT_MS // 50):
            found = file.curve(title)
            if found.get("x") == wanted["x"]:
                break
            file.page.wait_for_timeout(50)
        assert found["x"] == wanted["x"]
        assert found["y"] == pytest.approx(wanted["y"], rel=1e-5, abs=1e-5)

    drawn_as("episode_return_mean", "Return")
    drawn_as("grad_norm", "Gradient norm")
    file.page.get_by_label("Smoothing").select_option("30")
    drawn_as("episode_return_mean", "Return", 30)
    drawn_as("grad_norm", "Gradient norm", 30)
    low, high = 100_050.0, 140_050.0
    file.page.evaluate(
        "([low, high]) => Plotly.relayout(document.querySelector('.js-plotly-plot'),"
        " {'xaxis.range[0]': low, 'xaxis.range[1]': high})",
        [low, high],
    )
    drawn_as("episode_return_mean", "Return", 30, low, high)
    file.page.get_by_role("button", name="Show all").click()
    drawn_as("episode_return_mean", "Return", 30)
    file.context.close()
    assert file.problems == []


def test_one_report_compares_several_runs(browser: Any, tmp_path: Path) -> None:
    """Curves of all runs from the start; seeds as mean and range, as the server has them; each run
    with its views."""
    runs = tmp_path / "five"
    for seed in range(3):
        returns = [float((i * 37 + 11 * seed) % 101) for i in range(900 + 10 * seed)]
        folder = make_run(runs / f"seed-{seed}", returns, f"run.seed={seed}")
        (folder / "videos").mkdir()
        (folder / "videos" / "a.gif").write_bytes(GIF)
    views = Views(RunCatalog(runs))
    names = [f"seed-{seed}" for seed in range(3)]
    for name in names:
        while views.catalog.run(name).read(1.0) < 1.0:
            pass
    file = opened(browser, write_report(str(runs)))
    file.page.goto(file.address)
    lines = ".card.wide .js-plotly-plot .scatterlayer path.js-line"
    file.wait_until(f"document.querySelectorAll('{lines}').length === 4")  # and the target
    file.page.get_by_label("Smoothing").select_option("10")
    file.page.get_by_label("Seeds as mean and range").check()
    file.wait_for(".legend", "mean, lowest and highest of its seeds")
    asked = (names, ["episode_return_mean"], "env_steps", 10)
    [wanted] = views.curves(*asked, by_seed=False)["curves"]["episode_return_mean"]
    for _ in range(WAIT_MS // 50):
        found = file.curve("Return")
        if len(found.get("x", [])) == len(wanted["x"]):
            break
        file.page.wait_for_timeout(50)
    assert found["x"] == pytest.approx(wanted["x"], rel=1e-6)
    assert found["y"] == pytest.approx(wanted["y"], rel=1e-5, abs=1e-5)
    edges = file.page.evaluate(
        "() => document.querySelector('.card.wide .js-plotly-plot').data.slice(0, 2)"
        ".map((each) => [...each.y])"
    )
    assert edges[0] == pytest.approx(wanted["low"], rel=1e-5, abs=1e-5)
    assert edges[1] == pytest.approx(wanted["high"], rel=1e-5, abs=1e-5)
    for name in reversed(names):
        file.page.locator("#runs a", has_text=name).click()
        file.wait_for("h1", name)
        for view in VIEWS:
            file.page.locator(f"#tab-{view}").click()
            file.wait_until("document.querySelector('#panel').innerText.length > 20")
        file.wait_until("document.querySelector('.gif')?.naturalWidth === 1")
    for width in (360, 1600):
        file.page.set_viewport_size({"width": width, "height": 900})
        file.page.wait_for_timeout(300)
        assert not file.page.evaluate(f"document.documentElement.scrollWidth > {width}")
    file.context.close()
    assert file.problems == []


def test_report_opens_with_the_run_in_progress_compared_with_all(
    browser: Any, tmp_path: Path
) -> None:
    """The file opens with the run in progress, which need not be the first of the list."""
    runs = tmp_path / "runs"
    for name in ("a", "c"):
        make_run(runs / name, [1.0, 2.0, 3.0])
    lines = [json.loads(line) for line in (runs / "a/metrics.jsonl").read_text().splitlines()]
    with LivingRun(runs / "b", runs / "a", {}) as run:
        run.feed(lines)
        for name in ("a", "c"):  # the list has the run that was written last first
            (runs / name / "metrics.jsonl").touch()
        ends_s = time.monotonic() + 30
        while RunCatalog(runs).run("b").state != "running":
            assert time.monotonic() < ends_s
            time.sleep(0.05)
        file = opened(browser, write_report(str(runs)))
    file.page.goto(file.address)
    file.wait_for("h1", "b")
    checked = "[...document.querySelectorAll('#runs input:checked')].length"
    file.wait_until(f"{checked} === 3")


def test_large_constant_figures_have_axes(browser: Any, penstock: Penstock, tmp_path: Path) -> None:
    """Beside them the distance of two lines of an axis is below that of two numbers."""
    make_run(tmp_path / "runs/large", [5e14] * 3, "stop.return=null")
    page = File(browser, address_of(penstock("watch", "runs", "--port", "0", "--json")))
    page.page.goto(page.address)
    page.wait_for(".card.wide .js-plotly-plot")


def test_the_timeline_of_a_profile_zooms(browser: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    profiled(folder)
    file = opened(browser, write_report(str(folder)))
    file.open("time")
    canvas = file.wait_for(".timeline canvas")
    canvas.scroll_into_view_if_needed()
    file.wait_until(f"{PICTURE}.length > 1000")
    file.page.wait_for_timeout(300)
    whole = file.page.evaluate(PICTURE)
    box = canvas.bounding_box()
    y = box["y"] + 45  # within the bar of the first thread
    for _ in range(2):
        file.page.mouse.move(box["x"] + 0.50 * box["width"], y)
        file.page.mouse.down()
        file.page.mouse.move(box["x"] + 0.52 * box["width"], y, steps=3)
        file.page.mouse.up()
    file.page.mouse.move(box["x"] + 0.3 * box["width"], y)
    said = file.wait_for("p.dim", "learner-0/main: ").inner_text()
    assert "100 µs from 3.0" in said, said
    assert said.split(": ")[1].split(",")[0] in ("forward", "backward")
    assert file.page.evaluate(PICTURE) != whole
    canvas.focus()
    file.page.keyboard.press("ArrowRight")
    file.page.keyboard.press("+")
    file.page.get_by_role("button", name="Show all of the timeline").click()
    file.page.mouse.move(box["x"], box["y"] - 60)
    file.wait_until(f"{PICTURE}.length === {len(whole)}")
    assert file.page.evaluate(PICTURE) == whole
    file.context.close()
    assert file.problems == []


def test_a_timeline_of_a_living_run_is_recorded_on_a_click(
    browser: Any, penstock: Penstock, tmp_path: Path
) -> None:
    options = ("run.dir=runs/live", "stop.minutes=10", "run.interval_s=0.5")
    run = penstock("train", "cartpole", *SMALL[:2], "stop.return=null", *options)
    run.wait_until(lambda: trained(tmp_path / "runs/live"))
    page = File(browser, address_of(penstock("watch", "runs", "--port", "0", "--json")))
    page.open("time", "live")
    page.wait_for("button", "Record a timeline").click()
    page.wait_for(".timeline canvas")
    page.wait_for("[role=status]", "Recorded")
    assert "learner-0/main" in page.wait_for(".timeline canvas").get_attribute("aria-label")
    first = (tmp_path / "runs/live/timeline.json").stat().st_mtime_ns
    page.wait_for("button", "Record a timeline").click()
    run.wait_until(lambda: (tmp_path / "runs/live/timeline.json").stat().st_mtime_ns > first)
    assert run.process.poll() is None
    file = opened(
        browser, write_report(str(tmp_path / "runs/live"), out=str(tmp_path / "live.html"))
    )
    file.open("time")
    file.wait_for("h2", "Timeline of the last minute")
    file.wait_for(".timeline canvas")
    file.wait_for(".runhead .state", "running")
    for name in ORDERS:
        assert not file.page.get_by_role("button", name=name, exact=True).count()
    file.page.wait_for_timeout(1500)  # a living run's file asks nothing either
    run.process.terminate()
    run.process.communicate(timeout=60)
    assert run.process.returncode == 143
    for each in (page, file):
        each.context.close()
        assert each.problems == []
