"""clients/js/penstock.mjs in Node against `penstock serve`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as library
from javascript import ROOT, WEB_GAME, run_node
from train_command import Penstock, address_of

pytest.importorskip("uvicorn")

pytestmark = pytest.mark.system

AGENT = WEB_GAME / "duel.safetensors"
SEATS = 64
STEPS = 20
TOKEN = "a-token-of-many-characters"

PROLOGUE = """
const { FIRST, TERMINATED, connect } = await import(given.client);
const failureOf = (promise) => promise.then(() => null, ({ name, message, seat, field, actions }) =>
  ({ name, message, seat, field, actions }));
"""


@pytest.fixture
def serve(penstock: Penstock) -> Any:
    """Start a service of the web game's agent: ``serve(*options)`` returns its command and URL."""

    def start(*options: str) -> tuple[Any, str]:
        command = penstock("serve", str(AGENT), "--greedy", "--port", "0", "--json", *options)
        return command, address_of(command).replace("http://", "tcp://").rstrip("/")

    return start


def client(program: str, **given: Any) -> Any:
    """Run a program with the client in Node. Returns what it prints, as JSON."""
    path = (ROOT / "clients" / "js" / "penstock.mjs").as_uri()
    return run_node(PROLOGUE + program, {"client": path, **given})


def test_node_is_answered_with_the_actions_of_the_policy(serve: Any) -> None:
    _, url = serve()
    rng = np.random.default_rng(0)
    observations = rng.uniform(-1, 1, (STEPS, SEATS, 8)).astype(np.float32)
    actions = client(
        """
        const seats = given.observations[0].map((_, seat) => seat);
        const game = await connect({ url: given.url, seats: seats.length });
        const rows = game.rows(seats);
        rows.flags.fill(FIRST);
        const found = [];
        for (const step of given.observations) {
          step.forEach((observation, seat) => rows.views[seat].obs.set(observation));
          found.push(await game.step(rows));
        }
        rows.flags.fill(TERMINATED);
        found.push(await game.step(rows));
        game.close();
        console.log(JSON.stringify(found));
        """,
        url=url,
        observations=observations.tolist(),
    )
    policy = library.load_policy(AGENT, sample=False)
    assert actions[:-1] == [policy(step)[0].tolist() for step in observations]
    assert actions[-1] == [None] * SEATS
    assert len({action for step in actions[:-1] for action in step}) == 3


def test_two_steps_of_different_seats_wait_at_a_time(serve: Any) -> None:
    _, url = serve()
    failure, actions = client(
        """
        const game = await connect({ url: given.url, seats: 3 });
        const [two, one] = [game.rows([0, 2]), game.rows([1])];
        two.flags.fill(FIRST);
        one.flags.fill(FIRST);
        const steps = [game.step(two), game.step(one)];
        const failure = await failureOf(game.step(one));
        console.log(JSON.stringify([failure, await Promise.all(steps)]));
        game.close();
        """,
        url=url,
    )
    assert "seat 1 waits for its action" in failure["message"]
    action, _ = library.load_policy(AGENT, sample=False)(np.zeros(8, np.float32))
    assert actions == [[action, action], [action]]


def test_a_row_with_nan_is_a_fault_of_its_seat_alone(serve: Any) -> None:
    _, url = serve()
    fault, idle, again = client(
        """
        const game = await connect({ url: given.url, seats: 3 });
        const rows = game.rows([0, 1, 2]);
        rows.flags.fill(FIRST);
        rows.views[1].obs[3] = NaN;
        const fault = await failureOf(game.step(rows));
        rows.views[1].obs[3] = 0;
        const idle = await failureOf(game.step(rows));
        rows.flags[1] = FIRST;
        console.log(JSON.stringify([fault, idle, await game.step(rows)]));
        game.close();
        """,
        url=url,
    )
    assert (fault["name"], fault["seat"], fault["field"]) == ("Fault", 1, "observation")
    assert [action is None for action in fault["actions"]] == [False, True, False]
    assert (idle["name"], idle["seat"]) == ("Fault", 1), "it must begin a new episode"
    assert None not in again


@pytest.mark.parametrize(
    ("options", "asked", "field"),
    [
        pytest.param([], {"observation": {"Discrete": [4, 0]}}, "observation", id="spaces"),
        pytest.param([], {"action": {"Discrete": [9, 0]}}, "action", id="actions"),
        pytest.param(["--token", TOKEN], {"token": TOKEN[1:]}, "token", id="token"),
    ],
)
def test_a_game_that_does_not_fit_is_refused_with_the_field(
    serve: Any, options: list[str], asked: dict[str, Any], field: str
) -> None:
    _, url = serve(*options)
    program = "console.log(JSON.stringify(await failureOf(connect(given.asked))));"
    refusal = client(program, asked={"url": url, **asked})
    assert (refusal["name"], refusal["field"], refusal["seat"]) == ("Fault", field, None)


def test_a_service_that_ends_calls_onclose_and_rejects_later_steps(serve: Any) -> None:
    command, url = serve()
    told, later = client(
        """
        const game = await connect({ url: given.url });
        const ended = new Promise((resolve) => { game.onclose = resolve; });
        process.kill(given.pid, "SIGINT");
        const { message } = await ended;
        console.log(JSON.stringify([message, await failureOf(game.step(game.rows([0])))]));
        """,
        url=url,
        pid=command.process.pid,
    )
    assert told
    assert "the connection is closed; connect again" in later["message"]


def test_over_tls_the_client_checks_the_certificate(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, which makes the certificate")
    key = tmp_path / "key.pem"
    certificate = tmp_path / "certificate.pem"
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    _, address = serve("--tls-cert", str(certificate), "--tls-key", str(key), "--token", TOKEN)
    program = """
        const game = await connect({ url: given.url, token: given.token }).catch((error) => error);
        console.log(JSON.stringify(game instanceof Error ? game.message : game.seats));
        if (game.close) game.close();
    """
    given = {"url": address.replace("https://", "tls://"), "token": TOKEN}
    assert "self-signed certificate" in client(program, **given)

    monkeypatch.setenv("NODE_EXTRA_CA_CERTS", str(certificate))
    assert client(program, **given) == 1


def test_where_nobody_serves_connecting_fails_with_the_next_step(tmp_path: Path) -> None:
    program = "console.log(JSON.stringify(await failureOf(connect({ url: given.url }))));"
    failure = client(program, url="tcp://127.0.0.1:1")
    assert "tcp://127.0.0.1:1" in failure["message"]
    assert "start penstock serve or serve-env there" in failure["message"]
