"""`make pictures`: makes the pictures of the documentation from real runs and trained agents.

    docs/images/watch-VIEW.png    the views of `penstock watch`, while a run trains
    docs/images/terminal.png      the live view of that run in its terminal
    docs/images/front.png         the page on the run of the README, and
    docs/images/front.gif         its agent, as it plays
    docs/images/agents/NAME.gif   each agent of docs/agents, as it plays
    docs/images/web-game.png      the game of examples/web_game, as its agent plays itself

The screenshots show a run of MinAtar's Breakout that has trained for some minutes, and an ended run
of CartPole in the list. They need Chromium. If an environment cannot be rendered on this machine,
its GIF is skipped with a message. `--only` makes the screenshots, the GIFs, the README's or the
game's alone.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from javascript_latency import served, service_of
from penstock.configs.errors import UserError

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
AGENTS = ROOT / "docs" / "agents"
PARTS = ("screens", "agents", "front", "game")
VIEWS = ("learning", "flow", "time", "processes", "run", "agent")
DARK = ("agent",)  # views that are also shown dark
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1200, 820
COLUMNS, ROWS = 112, 34  # of the terminal
RUN = (
    *("minatar_breakout", "run.seed=1", "stop.minutes=10", "stop.env_steps=2e7"),
    "eval.every_steps=100000",
)
FRONT = "lunarlander"  # trained as the README says
FRONT_CLIP = (0, 8, 15, 320)
FRONT_SIZE = {"width": 760, "height": 690}
BESIDE = ("cartpole_ppo", "run.seed=1", "stop.env_steps=400000", "eval.every_steps=50000")
FRAME = re.compile(r"╭.*?╰[^\n]*", re.DOTALL)
NBYTES = 200_000  # of a picture, unless nothing smaller is possible

# Seconds that are left out at the start, and shown; pictures per second; width.
CLIPS = {
    "boxing": (4, 8, 15, 160),
    "car_racing": (3, 5, 12, 200),
    "halfcheetah": (0, 2, 20, 200),  # the camera does not follow it
    "minatar_asterix": (0, 8, 10, 160),
    "minatar_breakout": (0, 10, 10, 160),
    "minatar_freeway": (0, 8, 10, 160),
    "minatar_seaquest": (0, 10, 10, 160),
    "minatar_space_invaders": (0, 8, 10, 160),
    "pong": (4, 8, 15, 160),
}
RECORD_S = 300.0  # for one agent


def main() -> int:
    """Make them; 2 with a sentence where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="by default all")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training, until it is shown")
    args = parser.parse_args()
    parts = args.only or PARTS
    try:
        browser = find_browser() if {"screens", "front", "game"} & {*parts} else ""
        _require("imageio_ffmpeg", "video")
        if "agents" in parts:
            agents(IMAGES / "agents")
        if "screens" in parts:
            screens(browser, args.minutes)
        if "front" in parts:
            front(browser)
        if "game" in parts:
            game(browser)
    except UserError as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 2
    return 0


def find_browser() -> str:
    """The program of Chromium. Raises UserError where it, or playwright, is not installed."""
    _require("playwright", "browser")
    from playwright.sync_api import Error, sync_playwright

    if found := next((path for name in BROWSERS if (path := shutil.which(name))), None):
        return found
    with sync_playwright() as playwright, suppress(Error):
        own = str(playwright.chromium.executable_path)
        if Path(own).exists():
            return own
    raise UserError(
        "screenshots need Chromium, which is not installed: playwright install chromium, or "
        "Debian's package chromium"
    )


def _require(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise UserError(f"{module} is not installed: pip install 'penstock[{extra}]'")


def agents(folder: Path) -> None:
    """A short GIF of each agent, as `penstock record` shows it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        for agent, clip in CLIPS.items():
            start, seconds, _, _ = clip
            video = Path(name) / f"{agent}.mp4"
            source = str(AGENTS / f"{agent}.safetensors")
            steps = str(int((start + seconds) * 60))  # more than are shown, of each environment
            command = _penstock("record", source, "--out", str(video), "--max-episode-steps", steps)
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=RECORD_S)
            except subprocess.TimeoutExpired:
                print(f"{agent}: left out, as drawing it takes more than {RECORD_S:g} s here")
                continue
            if done.returncode:
                print(f"{agent}: left out: {done.stderr.strip().splitlines()[-1:]}")
                continue
            _make_gif(video, folder / f"{agent}.gif", *clip)


def _make_gif(video: Path, gif: Path, start: int, seconds: int, fps: int, width: int) -> None:
    """With fewer and fewer colours, until it is small enough."""
    import imageio_ffmpeg

    for colours in (64, 32, 16, 8):
        steps = (
            f"fps={fps},scale={width}:-2:flags=area,split[a][b];"
            f"[a]palettegen=max_colors={colours}:stats_mode=diff[p];"
            "[b][p]paletteuse=dither=none:diff_mode=rectangle"
        )
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", "-ss", str(start)]
        command += ["-t", str(seconds), "-i", str(video), "-vf", steps, str(gif)]
        subprocess.run(command, check=True)
        if gif.stat().st_size <= NBYTES:
            break
    print(f"{gif.relative_to(ROOT)}: {gif.stat().st_size:,} bytes")


def screens(browser: str, minutes: float) -> None:
    """Train, and show the page and the terminal after ``minutes``."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = _penstock("train", *BESIDE, "run.dir=runs/cartpole")
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        terminal = stack.enter_context(
            Terminal.running(folder, "train", *RUN, "run.dir=runs/breakout")
        )
        page = stack.enter_context(_page(folder))
        ends_s = time.monotonic() + 60 * minutes
        while time.monotonic() < ends_s:
            if terminal.process.poll() is not None:
                raise UserError(f"the run has ended early: {terminal.text()[-500:]}")
            time.sleep(0.5)
        _shoot(browser, page, terminal.frame())


def front(browser: str) -> None:
    """Train the agent of the README; show it, and the page on its run."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run = f"runs/{FRONT}"
        for command in (
            ("train", FRONT, f"run.dir={run}"),
            ("record", run, "--episodes", "3", "--out", f"{run}/videos/agent.mp4"),
        ):
            subprocess.run(_penstock(*command), cwd=folder, check=True, capture_output=True)
        _make_gif(folder / run / "videos" / "agent.mp4", IMAGES / "front.gif", *FRONT_CLIP)
        address = stack.enter_context(_page(folder))
        with _browser_page(browser) as page:
            page.set_viewport_size(FRONT_SIZE)
            _open_view(page, address, FRONT, "learning")
            _save(page, IMAGES / "front.png")


class Terminal:
    """A run in a pseudo-terminal; a thread reads its output."""

    def __init__(self, folder: Path, arguments: tuple[str, ...]) -> None:
        self._fd, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.process = subprocess.Popen(
            _penstock(*arguments), cwd=folder, env=env, stdin=child, stdout=child, stderr=child
        )
        os.close(child)
        self._said = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @classmethod
    @contextmanager
    def running(cls, folder: Path, *arguments: str) -> Iterator[Terminal]:
        """A run that is ended afterwards, not by SIGINT: background jobs of a shell ignore that."""
        terminal = cls(folder, arguments)
        try:
            yield terminal
        finally:
            if terminal.process.poll() is None:
                terminal.process.terminate()
            terminal.process.wait(60)
            terminal._thread.join(5)
            os.close(terminal._fd)

    def text(self) -> str:
        """All that was printed."""
        return self._said.decode(errors="replace")

    def frame(self) -> str:
        """The last whole panel, with its colours. Raises UserError where there is none."""
        found = FRAME.findall(self.text().replace("\r", ""))
        if not found:
            raise UserError(f"the run has shown no panel: {self.text()[-500:]}")
        return str(found[-1])

    def _read(self) -> None:
        with suppress(OSError):  # its other end is closed
            while select.select([self._fd], [], [])[0]:
                self._said += os.read(self._fd, 1 << 16)


@contextmanager
def _page(folder: Path) -> Iterator[str]:
    """The address of `penstock watch` on the runs in ``folder``."""
    command = _penstock("watch", "runs", "--port", "0", "--json")
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["address"])
    finally:
        process.terminate()
        process.wait(20)


def _shoot(program: str, address: str, panel: str) -> None:
    with _browser_page(program) as page:
        for scheme, views in (("light", VIEWS), ("dark", DARK)):
            page.emulate_media(color_scheme=scheme)
            for view in views:
                _open_view(page, address, "breakout", view)
                suffix = "-dark" if scheme == "dark" else ""
                _save(page, IMAGES / f"watch-{view}{suffix}.png")
        page.set_content(_as_html(panel))
        _save(page.locator("pre"), IMAGES / "terminal.png")


def game(browser: str) -> None:
    """A screenshot of the web game: its agent plays itself at `penstock serve`."""
    agent = ROOT / "examples" / "web_game" / "duel.safetensors"
    with ExitStack() as stack:
        origin = stack.enter_context(served(ROOT))
        address = stack.enter_context(service_of(agent, origin))
        page = stack.enter_context(_browser_page(browser))
        page.goto(f"{origin}/examples/web_game/")
        page.select_option("#players", "agents")
        page.select_option("#place", "server")
        page.fill("#url", f"ws://{address}/play")
        page.click("#serve")
        page.wait_for_function("document.querySelector('#left-points').value >= 2", timeout=200_000)
        page.wait_for_timeout(2500)  # the ball flies again
        _save(page.locator(".board"), IMAGES / "web-game.png")


@contextmanager
def _browser_page(program: str) -> Iterator[Any]:
    """An empty page of a new browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
        yield context.new_page()
        browser.close()


def _open_view(page: Any, address: str, run: str, view: str) -> None:
    """Show a view of a run, with its charts drawn."""
    page.goto("about:blank")
    page.goto(f"{address}#run={run}&view={view}")
    page.wait_for_selector(".figures dd")
    if view == "agent":
        _play(page)
    page.wait_for_timeout(3000)  # charts are drawn


def _play(page: Any) -> None:
    """Let the video play for a moment, and stop within it."""
    if page.locator("video").count() or page.locator(".player video").count():
        page.evaluate("document.querySelector('video').play()")
        page.wait_for_timeout(2500)
        page.evaluate("document.querySelector('video').pause()")


def _as_html(panel: str) -> str:
    """The text of a terminal, with its colours."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(panel))
    style = "padding:12px;display:inline-block;font:13px/1.25 'DejaVu Sans Mono',monospace"
    layout = f'<pre style="{style};background:#0c0c0c;color:#d9d9d9">{{code}}</pre>'
    return console.export_html(theme=MONOKAI, inline_styles=True, code_format=layout)


def _save(shown: Any, path: Path) -> None:
    shown.screenshot(path=str(path))
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def _penstock(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock", *arguments]


if __name__ == "__main__":
    sys.exit(main())
