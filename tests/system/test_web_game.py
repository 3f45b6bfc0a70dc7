"""The web game: its physics in two languages, its page in a real browser, and its tutorial."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as library
from chromium import chromium
from javascript import ROOT, WEB_GAME, npm_packages, run_node, served
from pages import blocks
from train_command import Command, Penstock, address_of, assert_balanced
from waiting import free_port

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

STEPS = 20_000
WAIT_MS = 30_000

REPLAY = """
const { Court } = await import(given.game);
const court = new Court();
const seen = given.script.map(([left, right, serve]) => {
  const point = court.tick(left, right);
  if (serve) court.serve(...serve);
  return [point, ...court.observe(-1), ...court.observe(1)];
});
console.log(JSON.stringify(seen));
"""


def test_both_files_of_the_game_compute_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WEB_GAME))
    duel = import_module("duel")

    # Players who follow the ball and at times do anything, so there are rallies and points.
    choices = random.Random(3)
    court = duel.Court()
    script = []
    expected = []
    hits = points = 0
    for _ in range(STEPS):
        actions = []
        for paddle in (court.left, court.right):
            follow = duel.UP if court.y > paddle.y else duel.DOWN
            actions.append(follow if choices.random() < 0.4 else choices.randrange(3))
        flies_right = court.speed_x > 0
        point = court.tick(*actions)
        serve = None
        if point:
            serve = [choices.choice([-1, 1]), choices.uniform(-1, 1)]
            court.serve(*serve)
        elif flies_right != (court.speed_x > 0):
            hits += 1
        points += abs(point)
        script.append([*actions, serve])
        expected.append([point, *court.observe(-1), *court.observe(1)])
    assert min(hits, points) > 50, f"{hits} hits and {points} points make no rallies"

    game = (WEB_GAME / "game.mjs").as_uri()
    assert run_node(REPLAY, {"game": game, "script": script}) == expected


def test_the_game_passes_the_checks_of_environments(tmp_path: Path, penstock: Penstock) -> None:
    shutil.copy(WEB_GAME / "duel.py", tmp_path)
    status, _, errors = penstock("check-env", "duel:Duel", "--steps", "2000", "--json").end()
    assert status == 0, errors


def test_the_shipped_agent_wins_most_of_its_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WEB_GAME))
    env = import_module("duel").Duel()
    policy = library.load_policy(WEB_GAME / "duel.safetensors")
    returns = []
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        total = 0.0
        ended = False
        while not ended:
            action, _ = policy(observation)
            observation, reward, terminated, truncated, _ = env.step(action)
            total += reward
            ended = terminated or truncated
        returns.append(total)
    # Random players win less than one match of ten.
    assert np.mean(np.array(returns) > 0) > 0.6


ACTIONS_OF_BOTH = """async ({ url, observations }) => {
  const { PageAgent, ServedAgent } = await import("./agents.mjs");
  const served = await ServedAgent.connect({ url }, 2);
  const inPage = await PageAgent.load("duel.onnx");
  const found = { served: [], inPage: [] };
  for (const pair of observations) {
    found.served.push(await served.act(pair, [0, 0]));
    found.inPage.push(await inPage.act(pair, [0, 0]));
  }
  await served.end(observations[0], [0, 0]);
  served.close();
  inPage.close();
  return found;
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkout's part for the game, with its agent as an ONNX file."""
    pytest.importorskip("onnxscript")
    packages = npm_packages()
    folder = tmp_path_factory.mktemp("checkout")
    game = folder / "examples" / "web_game"
    shutil.copytree(WEB_GAME, game, ignore=shutil.ignore_patterns("node_modules", "*.onnx"))
    (game / "node_modules").symlink_to(packages)
    shutil.copytree(ROOT / "clients", folder / "clients")
    export(game / "duel.safetensors", game / "duel.onnx")
    return folder


def export(policy: Path, file: Path) -> None:
    """Write a policy as an ONNX file."""
    words = ["-m", "penstock", "export", str(policy), str(file)]
    subprocess.run([sys.executable, *words], check=True, timeout=100)


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    """Serves the game as the tutorial does. Returns the address of its page."""
    with served(folder) as origin:
        yield f"{origin}/examples/web_game/"


def start_service(penstock: Penstock, site: str) -> tuple[Command, str]:
    """Start `penstock serve` for the page of the game. Returns it and its WebSocket's address."""
    origin = site.removesuffix("/examples/web_game/")
    agent = str(WEB_GAME / "duel.safetensors")
    command = penstock("serve", agent, "--greedy", "--port", "0", "--origin", origin, "--json")
    return command, address_of(command).replace("http://", "ws://") + "play"


@pytest.fixture
def service(site: str, penstock: Penstock) -> str:
    """Returns the address of the WebSocket of a running service."""
    return start_service(penstock, site)[1]


@contextmanager
def opened(address: str) -> Iterator[Any]:
    """A page in a browser. An error in it fails the test."""
    errors: list[str] = []
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1000, "height": 1000})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        yield page
    assert errors == []


@pytest.fixture
def page(site: str) -> Iterator[Any]:
    """The page of the game."""
    with opened(site) as page:
        yield page


@pytest.fixture
def train_page(site: str) -> Iterator[Any]:
    """The page that trains."""
    with opened(site + "train.html") as page:
        yield page


# The middle of the right paddle, 0 at the top of the court and 1 at its bottom, from its pixels.
PADDLE = """() => {
  const canvas = document.querySelector("#court");
  const x = Math.round(canvas.width * (0.5 + 0.5 * 1.42 / 1.5));
  const pixels = canvas.getContext("2d").getImageData(x, 0, 1, canvas.height).data;
  const rows = [...Array(canvas.height).keys()].filter((y) => pixels[4 * y + 3] === 255);
  return rows.reduce((sum, y) => sum + y, 0) / rows.length / canvas.height;
}"""


def decisions(page: Any) -> int:
    """Returns how many decisions of the agent the page counts."""
    text = page.text_content("#latency")
    return int(text.partition(" ")[0].replace(",", "")) if text else 0


def test_the_agent_at_a_server_and_in_the_page_choose_the_same_actions(
    page: Any, service: str
) -> None:
    rng = np.random.default_rng(1)
    observations = rng.uniform(-1, 1, (300, 2, 8)).astype(np.float32)
    given = {"url": service, "observations": observations.tolist()}
    found = page.evaluate(ACTIONS_OF_BOTH, given)
    policy = library.load_policy(WEB_GAME / "duel.safetensors", sample=False)
    expected = [policy(pair)[0].tolist() for pair in observations]
    assert {action for pair in expected for action in pair} == {0, 1, 2}
    assert found == {"served": expected, "inPage": expected}


@pytest.mark.parametrize("place", ["page", "server"])
def test_a_person_plays_against_the_agent_for_20_seconds(
    page: Any, service: str, place: str
) -> None:
    page.select_option("#place", place)
    if place == "server":
        page.fill("#url", service)
    page.click("#serve")
    page.wait_for_function("document.body.dataset.state === 'playing'", timeout=WAIT_MS)

    # The person moves up and down; a match that is over is followed by another.
    for key in itertools.islice(itertools.cycle(["ArrowUp", "ArrowDown"]), 20):
        page.keyboard.down(key)
        page.wait_for_timeout(1000)
        page.keyboard.up(key)
        if page.get_attribute("body", "data-state") == "over":
            page.keyboard.press("Space")

    assert page.text_content("#trouble") == ""
    assert page.get_attribute("body", "data-state") == "playing"
    # At most 15 decisions a second; a busy machine draws fewer frames.
    assert 60 < decisions(page) <= 320


@pytest.mark.slow
def test_the_agent_plays_against_itself_until_a_side_wins(page: Any) -> None:
    page.select_option("#players", "agents")
    page.click("#serve")
    page.wait_for_function("document.body.dataset.state === 'over'", timeout=250_000)
    points = sorted(int(page.text_content(side)) for side in ("#left-points", "#right-points"))
    assert points[1] == 5
    assert points[0] < 5
    assert "wins" in page.text_content("#message")


def test_space_pauses_and_r_restarts(page: Any) -> None:
    page.click("#serve")
    page.wait_for_function("document.body.dataset.state === 'playing'", timeout=WAIT_MS)
    page.wait_for_function("document.querySelector('#latency').textContent", timeout=WAIT_MS)
    page.keyboard.press("Space")
    count = decisions(page)
    page.wait_for_timeout(1000)
    assert page.get_attribute("body", "data-state") == "paused"
    assert decisions(page) == count
    page.keyboard.press("KeyR")
    page.wait_for_function("document.body.dataset.state === 'playing'", timeout=WAIT_MS)


def test_another_choice_of_players_begins_anew_while_a_decision_is_awaited(
    page: Any, site: str, penstock: Penstock
) -> None:
    command, url = start_service(penstock, site)
    page.select_option("#place", "server")
    page.fill("#url", url)
    page.click("#serve")
    page.wait_for_function("document.querySelector('#latency').textContent", timeout=WAIT_MS)
    command.process.send_signal(signal.SIGSTOP)
    page.wait_for_timeout(500)
    page.select_option("#players", "agents")
    command.process.send_signal(signal.SIGCONT)
    page.wait_for_timeout(500)
    assert page.text_content("#trouble") == ""
    page.click("#serve")
    page.wait_for_function("document.body.dataset.state === 'playing'", timeout=WAIT_MS)


def test_keys_and_the_pointer_move_the_paddle(page: Any) -> None:
    page.click("#serve")
    page.wait_for_function("document.body.dataset.state === 'playing'", timeout=WAIT_MS)
    assert page.evaluate(PADDLE) == pytest.approx(0.5, abs=0.05)
    page.keyboard.down("ArrowUp")
    page.wait_for_function(f"({PADDLE})() < 0.2", timeout=WAIT_MS)
    page.keyboard.up("ArrowUp")

    box = page.locator("#court").bounding_box()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 0.7 * box["height"])
    page.wait_for_function(f"Math.abs(({PADDLE})() - 0.7) < 0.03", timeout=WAIT_MS)


@pytest.mark.parametrize("serves", [False, True])
def test_the_page_says_what_to_do_where_no_server_answers_or_one_refuses_its_origin(
    page: Any, site: str, penstock: Penstock, serves: bool
) -> None:
    address = "ws://127.0.0.1:9/"
    if serves:
        agent = str(WEB_GAME / "duel.safetensors")
        address = address_of(penstock("serve", agent, "--port", "0", "--json"))
    page.select_option("#place", "server")
    page.fill("#url", address.replace("http://", "ws://") + "play")
    page.click("#serve")
    page.wait_for_function("document.querySelector('#trouble').textContent", timeout=WAIT_MS)
    origin = site.removesuffix("/examples/web_game/")
    advice = f"start penstock serve or serve-env there with --origin {origin}"
    assert advice in page.text_content("#trouble")
    assert page.get_attribute("body", "data-state") == "ready"


def test_the_page_says_when_the_server_leaves(page: Any, site: str, penstock: Penstock) -> None:
    command, url = start_service(penstock, site)
    page.select_option("#place", "server")
    page.fill("#url", url)
    page.click("#serve")
    page.wait_for_function("document.querySelector('#latency').textContent", timeout=WAIT_MS)
    command.process.send_signal(signal.SIGINT)
    page.wait_for_function("document.querySelector('#trouble').textContent", timeout=WAIT_MS)
    assert page.get_attribute("body", "data-state") == "ready"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index.html", "train.html"])
def test_axe_finds_no_accessibility_problem_in_the_game(
    page: Any, site: str, name: str, scheme: str
) -> None:
    package = find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        pytest.skip("needs the extra browser")
    page.emulate_media(color_scheme=scheme)
    page.goto(site + name)
    if name == "index.html":
        page.select_option("#place", "server")
    page.evaluate(Path(package.origin).with_name("axe.min.js").read_text())
    found = page.evaluate("async () => (await axe.run()).violations.map(({ id }) => id)")
    assert found == []


def test_matches_of_the_page_that_trains_are_decided_by_a_service_until_it_leaves(
    train_page: Any, site: str, penstock: Penstock
) -> None:
    command, url = start_service(penstock, site)
    train_page.fill("#url", url)
    train_page.fill("#seats", "7")
    train_page.click("#train")
    played = "Number(document.querySelector('#played').textContent) >= 7"
    train_page.wait_for_function(played, timeout=WAIT_MS)
    # The shipped agent beats beginners; random play loses to them by more than two points.
    assert float(train_page.text_content("#return")) > 1
    assert "does not learn: start penstock serve-env" in train_page.text_content("#trouble")

    command.process.send_signal(signal.SIGINT)
    waits = "document.querySelector('#trouble').textContent.includes('goes on trying')"
    train_page.wait_for_function(waits, timeout=WAIT_MS)
    train_page.click("#train")
    assert train_page.get_attribute("body", "data-state") == "stopped"


def test_the_page_that_trains_ends_where_the_token_is_wrong(
    train_page: Any, site: str, penstock: Penstock
) -> None:
    origin = site.removesuffix("/examples/web_game/")
    words = ["--port", "0", "--origin", origin, "--token", "a-token-of-many-characters", "--json"]
    command = penstock("serve", str(WEB_GAME / "duel.safetensors"), *words)
    train_page.fill("#url", address_of(command).replace("http://", "ws://") + "play")
    train_page.click("#train")
    train_page.wait_for_function("document.querySelector('#trouble').textContent", timeout=WAIT_MS)
    assert "token" in train_page.text_content("#trouble")
    assert train_page.get_attribute("body", "data-state") == "stopped"


# The mean return of an agent in the page, by its file, in matches against beginners.
RETURN_IN_PAGE = """async ({ file, matches }) => {
  const { PageAgent } = await import("./agents.mjs");
  const { Practice, RIVALS } = await import("./practice.mjs");
  const agent = await PageAgent.load(file);
  const running = Array.from({ length: matches }, () => new Practice(RIVALS.beginner));
  const isEnded = (match) => match.isOver || match.isCut;
  while (!running.every(isEnded)) {
    const actions = await agent.act(running.map((match) => match.observe()));
    running.forEach((match, i) => { if (!isEnded(match)) match.step(actions[i]); });
  }
  agent.close();
  return running.reduce((sum, match) => sum + match.return, 0) / matches;
}"""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_game_trains_in_a_page_and_the_exported_agent_plays_in_one(
    folder: Path, site: str, train_page: Any, penstock: Penstock
) -> None:
    port = free_port()
    options = ["algo.name=ppo", "algo.discount=0.98", "learner.lr=2e-3"]
    options += ["learner.updates_per_batch=4", "run.seed=1", "run.dir=run"]
    options += ["stop.return=2.5", "stop.env_steps=1_000_000"]
    origin = site.removesuffix("/examples/web_game/")
    words = ["--bind", f"tcp://127.0.0.1:{port}", "--origin", origin, "--json"]
    run = penstock("serve-env", *options, *words)
    train_page.fill("#url", f"ws://127.0.0.1:{port}/play")
    train_page.click("#train")
    out, errors = run.process.communicate(timeout=300)
    assert run.process.returncode == 0, errors
    summary = json.loads(out.splitlines()[-1])
    assert summary["exit_reason"] == "return", summary
    assert_balanced(summary)

    # Random play loses to beginners by 2.5 points, and 5 is the best possible.
    assert float(train_page.text_content("#return")) > 2
    file = folder / "examples" / "web_game" / "trained.onnx"
    export(run.folder / "run", file)
    mean = train_page.evaluate(RETURN_IN_PAGE, {"file": file.name, "matches": 100})
    assert mean > 2

    train_page.route("**/duel.onnx", lambda route: route.fulfill(path=file))
    train_page.goto(site)
    train_page.select_option("#players", "agents")
    train_page.click("#serve")
    train_page.wait_for_function("document.querySelector('#latency').textContent", timeout=WAIT_MS)
    train_page.wait_for_timeout(2000)
    assert train_page.text_content("#trouble") == ""
    assert decisions(train_page) > 20


def test_the_code_of_the_tutorial_for_a_page_and_for_node_decides_as_the_policy(
    page: Any, folder: Path
) -> None:
    in_page, in_node, _ = blocks("ship-the-agent.md", "js")
    game = folder / "examples" / "web_game"
    (game / "in_page.mjs").write_text(in_page)
    (game / "in_node.mjs").write_text(in_node)
    observations = np.random.default_rng(2).uniform(-1, 1, (50, 8)).astype(np.float32)
    expected = library.load_policy(WEB_GAME / "duel.safetensors", sample=False)(observations)[0]

    # Both read duel.onnx from the folder where they run.
    one_by_one = """async (observations) => {
      const { decide } = await import("./in_page.mjs");
      const found = [];
      for (const observation of observations) found.push(await decide(observation));
      return found;
    }"""
    assert page.evaluate(one_by_one, observations.tolist()) == expected.tolist()
    at_once = """
        process.chdir(given.folder);
        const { decide } = await import(`file://${given.folder}/in_node.mjs`);
        console.log(JSON.stringify(await decide(given.observations)));
    """
    given = {"folder": str(game), "observations": observations.tolist()}
    assert run_node(at_once, given) == expected.tolist()


def test_the_code_of_the_tutorial_and_of_the_readme_for_a_service_runs(
    folder: Path, service: str
) -> None:
    url = service.replace("ws://", "tcp://").removesuffix("/play")
    readme = (ROOT / "clients" / "js" / "README.md").read_text()
    programs = [blocks("ship-the-agent.md", "js")[2], readme.split("```js\n")[1].split("```")[0]]
    for number, program in enumerate(programs):
        name = f"program_{number}.mjs"
        text = re.sub(r"tcp://127\.0\.0\.1:\d+", url, program)
        assert url in text
        (folder / "clients" / "js" / name).write_text(text)
        path = (folder / "clients" / "js" / name).as_uri()
        run_node("await import(given); console.log(null);", path)
