"""`penstock serve` as a command: games over TCP, WebSocket and TLS, its token, its end."""

from __future__ import annotations

import datetime
import ipaddress
import json
import signal
import socket
import ssl
import struct
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("websockets")

import httpx2
from websockets.sync.client import connect

from game_client import ACT, END, FIRST, HELLO, WELCOME, GameClient, step
from penstock import LoadedPolicy
from served_games import random_policy
from train_command import WAIT_S, Penstock, address_of

pytestmark = pytest.mark.system

TOKEN = "0123456789abcdef"
OBSERVATIONS = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
HELLO_BYTES = struct.pack("<I", HELLO) + b'{"protocol": 1, "seats": 8, "token": "%s"}'


@pytest.fixture
def policy(tmp_path: Path) -> LoadedPolicy:
    """The policy of the run in the folder `run`."""
    return random_policy(tmp_path / "run", "cartpole")


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of this host and its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(pem))
    paths[1].write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


def test_a_run_is_served_until_ctrl_c(penstock: Penstock, policy: LoadedPolicy) -> None:
    command = penstock("serve", "run", "--port", "0", "--json")
    address = address_of(command)
    expected = policy(OBSERVATIONS)[0].tolist()
    port = urlsplit(address).port
    assert port is not None
    with closing(GameClient(port, seats=8)) as game:
        actions = game.act(OBSERVATIONS, [FIRST] * 8)
        assert [actions[seat] for seat in range(8)] == expected
        reply = httpx2.post(f"{address}act", json={"observation": OBSERVATIONS[3].tolist()})
        assert reply.json() == {"action": expected[3], "state": None}

        command.process.send_signal(signal.SIGINT)
        kind, body = game.receive()
        assert (kind, json.loads(body)) == (END, {"reason": "the service ends"})
        assert game.receive() == (0, b"")
    code, figures, errors = command.end()
    assert (code, errors) == (0, "")
    assert (figures["decisions"], figures["batches"]) == (9, 2)
    assert figures["latency_p99_s"] > 0


def test_a_file_is_served_over_tls_to_who_has_the_token(
    penstock: Penstock, policy: LoadedPolicy, tmp_path: Path
) -> None:
    policy.save(tmp_path / "agent.safetensors")
    cert, key = certificate(tmp_path)
    options = ("--token", TOKEN, "--tls-cert", str(cert), "--tls-key", str(key))
    command = penstock("serve", "agent.safetensors", "--port", "0", "--json", *options)
    address = address_of(command)
    assert address.startswith("https://127.0.0.1:")
    port = urlsplit(address).port
    assert port is not None
    tls = ssl.create_default_context(cafile=str(cert))
    expected = policy(OBSERVATIONS)[0].tolist()

    with closing(GameClient(port, tls, seats=8, token=TOKEN)) as game:
        actions = game.act(OBSERVATIONS, [FIRST] * 8)
        assert [actions[seat] for seat in range(8)] == expected
    with pytest.raises(AssertionError, match="the token is missing or wrong"):
        GameClient(port, tls, token="x" * 16)

    with connect(f"wss://127.0.0.1:{port}/play", ssl=tls) as web:
        web.send(HELLO_BYTES % TOKEN.encode())
        assert web.recv(timeout=WAIT_S)[0] == WELCOME
        web.send(step(range(8), OBSERVATIONS.tobytes(), [FIRST] * 8))
        answer = web.recv(timeout=WAIT_S)
        assert isinstance(answer, bytes)
        assert answer[0] == ACT
        assert np.frombuffer(answer, "<i8", 8, len(answer) - 64).tolist() == expected

    with httpx2.Client(base_url=address, verify=tls) as client:
        body = {"observation": OBSERVATIONS[0].tolist()}
        assert client.post("act", json=body).status_code == 401
        bearer = {"authorization": f"Bearer {TOKEN}"}
        assert client.post("act", json=body, headers=bearer).json()["action"] == expected[0]
        page = client.get("/", params={"token": TOKEN}, follow_redirects=True)
        assert page.status_code == 200
        assert client.get("figures").status_code == 200  # by the cookie
    command.process.send_signal(signal.SIGINT)
    assert command.end()[0] == 0


def test_sampled_actions_are_those_of_the_policy_s_distribution(
    penstock: Penstock, policy: LoadedPolicy
) -> None:
    command = penstock("serve", "run", "--port", "0", "--json", "--sample")
    port = urlsplit(address_of(command)).port
    assert port is not None
    with closing(GameClient(port, seats=4000)) as game:
        assert game.welcome["policy"]["play"] == "sampled"
        one = np.tile(OBSERVATIONS[:1], (4000, 1))
        share = np.mean([*game.act(one, [FIRST] * 4000).values()])
    logits = policy.details(OBSERVATIONS[0]).logits
    assert logits is not None
    expected = 1 / (1 + np.exp(logits[0] - logits[1]))
    assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / 4000)


def test_sigterm_ends_the_service_with_its_figures(
    penstock: Penstock, policy: LoadedPolicy
) -> None:
    command = penstock("serve", "run", "--port", "0")
    assert command.process.stdout is not None
    assert "run plays, greedy, at http://127.0.0.1:" in command.process.stdout.readline()
    command.process.terminate()
    out, _ = command.process.communicate(timeout=WAIT_S)
    assert out == "served 0 decisions\n"
    assert command.process.returncode in (143, -signal.SIGTERM)


def test_invalid_serve_arguments_are_refused_in_one_sentence(
    penstock: Penstock, policy: LoadedPolicy
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, reason in (
            (["nowhere"], "nowhere"),
            (["run", "--host", "0.0.0.0"], "reachable from other hosts"),
            (["run", "--token", "short"], "--token has 5 characters"),
            (["run", "--origin", "localhost"], "--origin 'localhost' is no origin"),
            (["run", "--sample", "--greedy"], "two ways to play"),
            (["run", "--port", port], f"127.0.0.1:{port}"),
            (["run", "--tls-cert", "a", "--tls-key", "b"], "cannot be used"),
        ):
            command = penstock("serve", *arguments)
            _, error = command.process.communicate(timeout=WAIT_S)
            assert command.process.returncode == 2, error
            assert error.startswith("penstock: ")
            assert reason in error
            assert len(error.splitlines()) == 1
