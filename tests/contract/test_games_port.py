"""The port of `penstock serve` over real sockets: answers, faults, and games that do harm."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("websockets")

import httpx2
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from game_client import (
    ACT,
    END,
    FAULT,
    FIRST,
    HELLO,
    LEAVES,
    STEP,
    TERMINATED,
    TRUNCATED,
    WELCOME,
    GameClient,
    step,
)
from penstock import LoadedPolicy
from penstock.core.web.guard import Guard
from penstock.serving.port import Game, Port, Wire
from penstock.serving.service import MOST_FAULTS, Service
from penstock.serving.web_socket import WebSocketProtocol
from served_games import RECURRENT, random_policy, served, wait_for_end

AT_REST = np.zeros((1, 4), np.float32)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    return random_policy(tmp_path_factory.mktemp("run"), "cartpole", *RECURRENT)


@pytest.fixture
def service(policy: LoadedPolicy) -> Service:
    return Service(policy, "a_run")


@pytest.fixture
def port(service: Service) -> Iterator[int]:
    with served(service) as number:
        yield number


@pytest.fixture
def game(port: int) -> Iterator[GameClient]:
    with closing(GameClient(port, seats=4)) as client:
        yield client


def framed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def hello(**fields: Any) -> bytes:
    return struct.pack("<I", HELLO) + json.dumps({"protocol": 1} | fields).encode()


def answer_to(port: int, content: bytes) -> Any:
    """The FAULT that ends a connection which sent this."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as connection:
        connection.sendall(content)
        received = wait_for_end(connection)
    length, kind = struct.unpack_from("<II", received)
    assert (length + 4, kind) == (len(received), FAULT), received
    return json.loads(received[8:])


# ------------------------------------------------------------------------------- what is answered


def test_welcome_says_the_layout_of_rows(game: GameClient) -> None:
    welcome = game.welcome
    assert welcome["row"] == [["obs", "<f4", [4], 0]]
    assert welcome["action_row"] == [["action", "<i8", [], 0]]
    assert (welcome["row_nbytes"], welcome["action_nbytes"]) == (16, 8)
    assert (welcome["seats"], welcome["learns"]) == (4, False)
    assert welcome["policy"] == {"run": "a_run", "env": "CartPole-v1", "play": "greedy"}
    assert welcome["observation"]["Box"][1][1] == 1e30  # JSON has no infinity


def test_games_of_several_seats_get_the_actions_of_the_loaded_policy(
    port: int, policy: LoadedPolicy
) -> None:
    rng = np.random.default_rng(0)
    games = [GameClient(port, seats=seats) for seats in (1, 3, 8)]
    states: dict[tuple[int, int], Any] = {}
    for turn in range(20):
        for number, game in enumerate(games):
            seats = rng.permutation(game.welcome["seats"]).tolist()
            begins = [turn == 0 or rng.random() < 0.2 for _ in seats]
            observations = rng.standard_normal((len(seats), 4)).astype(np.float32)
            flags = [FIRST if first else 0 for first in begins]
            actions = game.act(observations, flags, seats)
            for seat, first, observation in zip(seats, begins, observations, strict=True):
                state = None if first else states[number, seat]
                expected, states[number, seat] = policy(observation, state)
                assert actions[seat] == expected
    for game in games:
        game.close()


def test_one_message_for_each_seat_is_answered_as_one_message_for_all(port: int) -> None:
    observations = np.random.default_rng(1).standard_normal((64, 4)).astype(np.float32)
    with closing(GameClient(port, seats=64)) as one, closing(GameClient(port, seats=64)) as other:
        expected = one.act(observations, [FIRST] * 64)
        rows = other.rows(observations)
        other.send(*(step([i], rows[16 * i : 16 * i + 16], [FIRST]) for i in range(64)))
        actions: dict[int, int] = {}
        while len(actions) < 64:
            acts = other.read_acts()
            actions |= zip(acts.seats, acts.actions["action"], strict=True)
        assert actions == expected


def test_bytes_that_arrive_one_by_one_are_messages(port: int) -> None:
    with closing(GameClient(port)) as game:
        expected = game.act(AT_REST, [FIRST])
        for byte in framed(step([0], game.rows(AT_REST), [FIRST])):
            game.socket.sendall(bytes([byte]))
            time.sleep(0.001)
        assert game.read_acts().actions["action"].tolist() == [*expected.values()]


def test_an_ended_episode_is_not_answered_and_the_next_one_is(game: GameClient) -> None:
    row = game.rows(AT_REST)
    game.act(AT_REST.repeat(2, 0), [FIRST, FIRST])
    game.send(step([0], row, [TERMINATED]), step([0], row, [FIRST]), step([1], row, [TRUNCATED]))
    assert game.read_acts().seats == [0]
    game.send(step([0, 1], row + row, [0, FIRST]))
    assert sorted(game.read_acts().seats) == [0, 1]
    game.send(step([0, 1], row + row, [LEAVES, 0]))
    assert game.read_acts().seats == [1]


def test_a_game_that_says_end_is_closed(game: GameClient) -> None:
    game.send(struct.pack("<I", END) + b"{}")
    assert game.receive() == (0, b"")


def test_seats_of_a_closed_connection_are_free_for_the_next(policy: LoadedPolicy) -> None:
    with served(Service(policy, most_seats=8)) as port:
        for _ in range(5):
            game = GameClient(port, seats=8)
            game.act(AT_REST.repeat(8, 0), [FIRST] * 8)
            game.send(struct.pack("<I", END) + b"{}")
            assert game.receive() == (0, b"")
            game.close()


def test_the_bytes_of_the_page_are_the_bytes_of_the_port(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/games-protocol.md").read_text()
    blocks = re.findall(r"```hex\n(.*?)```", page, re.DOTALL)
    hello_bytes, first, act, second, next_act = [bytes.fromhex(block) for block in blocks]

    # A policy that pushes to where the pole leans, as that of the page.
    observations = np.frombuffer(first[36:] + second[36:52], "<f4").reshape(3, 4)
    policies = (random_policy(tmp_path, "cartpole", seed=seed) for seed in range(99))
    leaning = next(found for found in policies if found(observations)[0].tolist() == [1, 0, 1])
    with served(Service(leaning)) as port, closing(socket.socket()) as connection:
        connection.settimeout(20)
        connection.connect(("127.0.0.1", port))
        stream = connection.makefile("rb")
        connection.sendall(hello_bytes)
        length, kind = struct.unpack("<II", stream.read(8))
        assert kind == WELCOME
        assert json.loads(stream.read(length - 4))["seats"] == 2
        connection.sendall(first)
        assert stream.read(len(act)) == act
        connection.sendall(second)
        assert stream.read(len(next_act)) == next_act
        stream.close()


# ------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("flags", "reward", "value", "field"),
    [
        (0, np.nan, 0.0, "reward"),
        (TERMINATED, 2e6, 0.0, "reward"),
        (0, 0.0, np.nan, "observation"),
        (TERMINATED, 0.0, np.inf, "observation"),
        (128, 0.0, 0.0, "flags"),
        (FIRST | TERMINATED, 0.0, 0.0, "flags"),
    ],
)
def test_a_fault_names_seat_and_field_and_the_other_seats_go_on(
    game: GameClient, flags: int, reward: float, value: float, field: str
) -> None:
    observations = np.zeros((3, 4), np.float32)
    game.act(observations, [FIRST] * 3)
    observations[1, 2] = value
    game.send(step([0, 2, 1], game.rows(observations), [0, flags, 0], [0.0, reward, 0.0]))
    if flags == TERMINATED:  # the answer to the next row says it
        assert game.read_acts().seats == [0, 1]
        game.send(step([2], game.rows(AT_REST), [FIRST]))
    fault = game.read_fault()
    assert (fault["seat"], fault["field"]) == (2, field)
    if flags != TERMINATED:
        assert game.read_acts().seats == [0, 1]

    # The seat goes on with a new episode.
    assert [*game.act(AT_REST, [FIRST], [2])] == [2]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("reward", "value"), [(np.nan, 0.0), (0.0, np.nan)])
def test_a_fault_of_a_last_row_is_the_one_answer_to_the_first_row_behind_it(
    game: GameClient, reward: float, value: float, together: bool
) -> None:
    game.act(AT_REST, [FIRST])
    last = step([0], game.rows(np.full((1, 4), value, np.float32)), [TERMINATED], [reward])
    first = step([0], game.rows(AT_REST), [FIRST])
    if together:
        game.send(last, first)
    else:
        game.send(last)
        game.act(AT_REST, [FIRST], [1])  # a turn has passed
        game.send(first)
    assert game.read_fault()["field"] == ("observation" if value else "reward")

    # No other answer comes, which the game would take for that to its next row.
    for flags in (FIRST, 0, 0):
        game.send(step([0], game.rows(AT_REST), [flags]))
        assert game.read_acts().seats == [0]


def test_a_row_before_the_first_one_is_a_fault(game: GameClient) -> None:
    game.send(step([1], game.rows(AT_REST), [0]))
    assert game.read_fault() | {"error": ""} == {"seat": 1, "field": "flags", "error": ""}


def test_a_seat_that_does_not_exist_is_a_fault(game: GameClient) -> None:
    game.send(step([0, 4], game.rows(AT_REST.repeat(2, 0)), [FIRST, FIRST]))
    fault = game.read_fault()
    assert (fault["seat"], fault["field"]) == (4, "seat")
    assert "this game has 0 to 3" in fault["error"]
    assert game.read_acts().seats == [0]


def test_a_seat_twice_in_a_step_is_a_fault(game: GameClient) -> None:
    game.send(step([1, 1], game.rows(AT_REST.repeat(2, 0)), [FIRST, FIRST]))
    fault = game.read_fault()
    assert (fault["seat"], fault["field"]) == (1, "seat")


def test_a_seat_that_does_not_await_its_action_is_at_fault(game: GameClient) -> None:
    game.send(*[step([1], game.rows(AT_REST), [flags]) for flags in (FIRST, 0)])
    fault = game.read_fault()
    assert (fault["seat"], fault["field"]) == (1, "seat")


def test_more_faults_than_a_turn_may_have_close_the_connection(port: int) -> None:
    with closing(GameClient(port, seats=1000)) as game:
        game.send(step(range(1000), game.rows(AT_REST.repeat(1000, 0)), [64] * 1000))
        content = wait_for_end(game.socket)
    assert content.count(b'"seat": null') == 1
    assert content.count(b'"field": "flags"') == MOST_FAULTS + 1


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (framed(step([0], bytes(16), [FIRST])), "hello"),
        (framed(hello(protocol=3)), "protocol"),
        (framed(hello(seats=100_000)), "seats"),
        (framed(hello(action={"Discrete": [3, 0]})), "action"),
        (framed(hello()) * 2, "hello"),
        (framed(hello()) + framed(struct.pack("<II", STEP, 0)), "message"),
        (framed(hello()) + framed(struct.pack("<I", STEP)), "message"),
        (framed(hello()) + framed(step([0], bytes(15), [FIRST])), "message"),
        (framed(hello()) + framed(step([0, 0], bytes(32), [FIRST] * 2)), "message"),
        (framed(hello()) + framed(struct.pack("<I", 77)), "message"),
        (framed(hello()) + framed(struct.pack("<I", WELCOME)), "message"),
        (framed(hello()) + struct.pack("<I", 1 << 17), "message"),
        (struct.pack("<I", 0xFFFFFFFF), "message"),
        (struct.pack("<I", 3) + b"abc", "message"),
    ],
)
def test_a_message_of_another_form_ends_its_connection_with_the_field(
    port: int, content: bytes, field: str
) -> None:
    with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as connection:
        connection.sendall(content)
        received = wait_for_end(connection)
    _, _, last = received.rpartition(struct.pack("<I", FAULT))
    fault = json.loads(last)
    assert (fault["seat"], fault["field"]) == (None, field)


# ----------------------------------------------------------------------------------- doing harm


class HonestGame:
    """A game of several seats whose answers are checked, and timed."""

    def __init__(self, port: int, policy: LoadedPolicy) -> None:
        self.client = GameClient(port, seats=16)
        self.observations = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
        expected, _ = policy(self.observations)
        self.expected = dict(enumerate(expected.tolist()))
        self.slowest_s = 0.0

    def play(self, steps: int = 20) -> None:
        for _ in range(steps):
            began_s = time.perf_counter()
            assert self.client.act(self.observations, [FIRST] * 16) == self.expected
            self.slowest_s = max(self.slowest_s, time.perf_counter() - began_s)


@pytest.fixture
def honest(port: int, policy: LoadedPolicy) -> Iterator[HonestGame]:
    game = HonestGame(port, policy)
    game.play()
    yield game
    game.play()
    assert game.slowest_s < 5  # also on a machine that does much else
    game.client.close()


def test_a_game_that_does_not_read_is_closed_and_delays_nobody(
    port: int, honest: HonestGame, service: Service
) -> None:
    with closing(GameClient(port, seats=2048)) as deaf:
        message = framed(step(range(2048), bytes(16 * 2048), [FIRST] * 2048))
        deaf.socket.settimeout(0.2)
        closed = False
        for _ in range(2000):
            try:
                deaf.socket.sendall(message)
            except TimeoutError:
                continue  # the service is slower than this loop
            except OSError:
                closed = True
                break
            if service.figures.batches % 8 == 0:
                honest.play(1)
        assert closed


def test_half_sent_messages_delay_nobody(port: int, honest: HonestGame) -> None:
    half = framed(step(range(16), bytes(256), [FIRST] * 16))[:-1]
    games = [GameClient(port, seats=16) for _ in range(20)]
    for game in games:
        game.socket.sendall(half)
    honest.play()
    for game in games:
        game.close()


def test_silent_connections_are_closed_and_delay_nobody(
    port: int, honest: HonestGame, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(20)]
    begun = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(20)]
    for connection in begun:
        connection.sendall(framed(hello())[:9])
    honest.play()
    for connection in silent:
        assert wait_for_end(connection) == b""
        connection.close()
    for connection in begun:
        assert b"no HELLO came within" in wait_for_end(connection)
        connection.close()


def test_more_connections_than_there_is_room_for_take_the_place_of_nameless_ones(
    port: int, honest: HonestGame
) -> None:
    flood = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(300)]
    for connection in flood:
        connection.sendall(framed(hello())[:9])
    honest.play()
    with closing(GameClient(port)) as late:
        assert late.act(AT_REST, [FIRST])
    for connection in flood:
        connection.close()


def test_no_game_takes_the_place_of_one_that_plays(policy: LoadedPolicy) -> None:
    with served(Service(policy), most_games=3) as port:
        games = [GameClient(port) for _ in range(3)]
        assert answer_to(port, framed(hello()))["field"] == "connection"
        for game in games:
            assert game.act(AT_REST, [FIRST])
            game.close()


# --------------------------------------------------------------------------------------- WebSocket


def read(web: ClientConnection) -> tuple[int, bytes]:
    """The kind and the body of the next message."""
    content = web.recv(timeout=20)
    assert isinstance(content, bytes)
    return int.from_bytes(content[:4], "little"), content[4:]


def test_a_game_over_web_socket_gets_the_same_actions(port: int, game: GameClient) -> None:
    observations = np.random.default_rng(2).standard_normal((4, 4)).astype(np.float32)
    expected = game.act(observations, [FIRST] * 4)
    message = step(range(4), observations.tobytes(), [FIRST] * 4)
    with connect(f"ws://127.0.0.1:{port}/play") as web:
        web.send(hello(seats=4))
        kind, body = read(web)
        assert kind == WELCOME
        assert json.loads(body) == game.welcome
        web.send(message)
        kind, body = read(web)
        assert (kind, body[:20]) == (ACT, struct.pack("<I4I", 4, *range(4)))
        assert np.frombuffer(body, "<i8", 4, 20).tolist() == [*expected.values()]
        web.send([message[:7], message[7:40], message[40:]])  # in fragments
        assert read(web) == (ACT, body)


@pytest.mark.parametrize("content", ["text", b"", b"abc", struct.pack("<I", 9), bytes(70_000)])
def test_what_is_no_message_ends_the_web_socket(port: int, content: str | bytes) -> None:
    with connect(f"ws://127.0.0.1:{port}/play") as web:
        web.send(content)
        kinds: list[int] = []
        with suppress(ConnectionClosed):
            kinds += [message[0] for message in web if isinstance(message, bytes)]
        assert kinds in ([], [FAULT])
        assert web.close_code in (1000, 1003, 1009)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/play", {"origin": "http://evil.example"}, 403),
        ("/play", {"origin": "http://localhost:9"}, 403),
        ("/play", {"origin": "null"}, 403),
        ("/other", {}, 404),
    ],
)
def test_an_upgrade_from_elsewhere_is_refused(
    port: int, path: str, headers: dict[str, str], status: int
) -> None:
    with (
        pytest.raises(InvalidStatus) as refusal,
        connect(f"ws://127.0.0.1:{port}{path}", additional_headers=headers),
    ):
        pass
    assert refusal.value.response.status_code == status


def test_an_upgrade_with_the_name_of_another_host_is_refused(port: int) -> None:
    with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as connection:
        connection.sendall(
            b"GET /play HTTP/1.1\r\nHost: evil.example\r\nConnection: upgrade\r\nUpgrade: websocket"
            b"\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert wait_for_end(connection).startswith(b"HTTP/1.1 403 ")


def test_a_page_of_an_admitted_origin_may_play_and_ask(policy: LoadedPolicy) -> None:
    origin = "http://localhost:8000"
    with served(Service(policy), origins=(origin,)) as port:
        address = f"127.0.0.1:{port}"
        with connect(f"ws://{address}/play", additional_headers={"origin": origin}) as web:
            web.send(hello())
            assert read(web)[0] == WELCOME

        headers = {"origin": origin}
        asked = {"access-control-request-method": "POST"}
        preflight = httpx2.options(f"http://{address}/act", headers=headers | asked)
        assert preflight.status_code == 204
        assert "content-type" in preflight.headers["access-control-allow-headers"]
        reply = httpx2.post(
            f"http://{address}/act", json={"observation": [0, 0, 0, 0]}, headers=headers
        )
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == origin
        assert httpx2.options(f"http://{address}/act", headers=asked).status_code == 405


def test_many_small_frames_are_read_in_several_turns(policy: LoadedPolicy) -> None:
    request = (
        b"GET /play HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket"
        b"\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    # A masked and empty frame begins a message, and 40,000 go on with it.
    frames = b"\x02\x80\0\0\0\0" + b"\0\x80\0\0\0\0" * 40_000

    async def count_turns() -> int:
        server_end, client_end = socket.socketpair()
        with closing(client_end):
            protocol = WebSocketProtocol(Port(Service(policy), token=None), Guard())
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, server_end)
            protocol.data_received(request)
            protocol.data_received(frames)
            turns = 1
            while not transport.is_reading():
                await asyncio.sleep(0)  # the other games have their turn
                turns += 1
            transport.abort()
            return turns

    assert asyncio.run(count_turns()) > 50


def test_bytes_of_a_closed_game_are_not_kept(policy: LoadedPolicy) -> None:
    port = Port(Service(policy), token=None)

    async def receive() -> Game | None:
        class Sent(Wire):
            def send(self, message: bytes) -> None:
                """A peer that reads nothing."""

            def close(self) -> None:
                """Its connection stays open for a while."""

        game = port.open(Sent(port))
        assert game is not None
        port.receive(game, framed(struct.pack("<I", 99)))
        await asyncio.sleep(0)
        assert game.is_closed
        port.lose(game)
        assert game.is_read
        port.receive(game, bytes(1 << 20))
        return game

    game = asyncio.run(receive())
    assert game is not None
    assert game.is_read


# -------------------------------------------------------------------------------------------- HTTP


def post(port: int, body: Any, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    media_type = {"content-type": "application/json"}
    return httpx2.post(
        f"http://127.0.0.1:{port}/act", content=content, headers=media_type | headers, timeout=20
    )


def test_post_act_returns_the_action_and_the_next_state(port: int, policy: LoadedPolicy) -> None:
    state: Any = None
    expected_state: Any = None
    for observation in np.random.default_rng(5).standard_normal((6, 4)).astype(np.float32):
        reply = post(port, {"observation": observation.tolist(), "state": state})
        assert reply.status_code == 200, reply.text
        expected, expected_state = policy(observation, expected_state)
        assert reply.json()["action"] == expected
        state = reply.json()["state"]
        np.testing.assert_allclose(state, expected_state, rtol=1e-6, atol=1e-7)


def test_post_act_takes_the_reward_that_a_policy_reads(tmp_path: Path) -> None:
    policy = random_policy(tmp_path, "cartpole", *RECURRENT, "model.core_inputs=[action,reward]")
    state: Any = None
    expected_state: Any = None
    rng = np.random.default_rng(5)
    with served(Service(policy)) as port:
        for _ in range(4):
            observation = rng.standard_normal(4).astype(np.float32)
            reward: Any = None if state is None else float(rng.normal())
            body = {"observation": observation.tolist(), "state": state, "reward": reward}
            reply = post(port, body)
            assert reply.status_code == 200, reply.text
            expected, expected_state = policy(observation, expected_state, reward)
            assert reply.json()["action"] == expected
            state = reply.json()["state"]
            np.testing.assert_allclose(state, expected_state, rtol=1e-6, atol=1e-7)

        for reward, reason in ((None, "reads the last reward"), ("much", "does not fit")):
            refused = post(port, {"observation": [0] * 4, "state": state, "reward": reward})
            assert refused.status_code == 400
            assert reason in refused.json()["error"]


@pytest.mark.parametrize(
    ("target", "observation"),
    [
        ("paired", [[[0, 255], [7, 8]], 2]),
        (
            "parts",
            {
                "place": 2,
                "inner": {"speed": [0.5, 0, -1]},
                "flags": [0, 1, 1, 0, True],
                "lamps": [0, 1, 0],
                "ways": [1, 1],
                "action_mask": [0, 1, 0],
            },
        ),
    ],
)
def test_post_act_takes_observations_of_parts(
    target: str, observation: Any, tmp_path: Path
) -> None:
    policy = random_policy(tmp_path, target)
    with served(Service(policy)) as port:
        reply = post(port, {"observation": observation})
        assert reply.status_code == 200, reply.text
        action = reply.json()["action"]
        assert policy.action_space.contains(np.array(action, policy.action_space.dtype))
        if target == "parts":
            assert action == 6  # the only one that the mask allows
        too_few = observation[:1] if target == "paired" else {"place": 2}
        assert post(port, {"observation": too_few}).status_code == 400


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "the body is no"),
        (b"[" * 5000, "the body is no"),
        ({}, "the body is no"),
        ({"observation": [1, 2, 3]}, "does not fit"),
        ({"observation": [[0] * 4] * 3}, "does not fit"),
        ({"observation": [0, "x", 0, 0]}, "does not fit"),
        ({"observation": [0, [1], 0, 0]}, "does not fit"),
        ({"observation": [0, 1e999, 0, 0]}, "inf at"),
        ({"observation": [0] * 4, "state": [1.0]}, "state has shape"),
        ({"observation": [0] * 4, "state": [1e999] * 32}, "not finite"),
    ],
)
def test_post_act_refuses_what_is_no_observation(port: int, body: Any, reason: str) -> None:
    reply = post(port, body)
    assert reply.status_code == 400
    assert reason in reply.json()["error"]


def test_post_act_of_a_page_of_another_site_is_refused(port: int) -> None:
    body = {"observation": [0] * 4}
    assert post(port, body, origin="http://evil.example").status_code == 403
    assert post(port, body, host="evil.example").status_code == 403
    assert post(port, body, **{"content-type": "text/plain"}).status_code == 415


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("content-length: 1048576", 413),
        ("content-length: 5\r\ntransfer-encoding: chunked", 411),  # chunks come before the length
        ("transfer-encoding: chunked", 411),
    ],
)
def test_a_body_of_any_length_is_refused_before_it_arrives(
    port: int, header: str, status: int
) -> None:
    with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as connection:
        connection.sendall(
            f"POST /act HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{header}"
            "\r\n\r\n".encode()
        )
        assert wait_for_end(connection).startswith(f"HTTP/1.1 {status} ".encode())


def test_figures_count_what_was_served(port: int, game: GameClient) -> None:
    game.act(AT_REST.repeat(4, 0), [FIRST] * 4)
    game.act(AT_REST.repeat(4, 0), [0] * 4)
    game.send(step([1], game.rows(AT_REST), [64]))
    game.read_fault()
    figures = httpx2.get(f"http://127.0.0.1:{port}/figures").json()
    assert (figures["games"], figures["seats"], figures["decisions"]) == (1, 4, 8)
    assert (figures["batches"], figures["mean_batch"]) == (2, 4)
    assert figures["faults"] == {"flags": 1}
    assert 0 < figures["latency_p50_s"] <= figures["latency_p99_s"] < 20


def test_the_token_is_asked_of_games_and_requests(policy: LoadedPolicy) -> None:
    token = "0123456789abcdef"
    with served(Service(policy), token=token) as port:
        for wrong in ({}, {"token": "x" * 16}, {"token": "é"}):
            assert answer_to(port, framed(hello(**wrong)))["field"] == "token"
        with closing(GameClient(port, token=token)) as game:
            assert game.act(AT_REST, [FIRST])

        body = {"observation": [0] * 4}
        assert post(port, body).status_code == 401
        assert post(port, body, authorization="Bearer " + "x" * 16).status_code == 401
        assert post(port, body, authorization=f"Bearer {token}").status_code == 200
        assert httpx2.get(f"http://127.0.0.1:{port}/figures").status_code == 401


def test_a_refusal_reaches_a_client_whose_body_comes_late(policy: LoadedPolicy) -> None:
    """Otherwise the connection is closed with unread bytes, which resets it."""
    with (
        served(Service(policy), token="0123456789abcdef") as port,
        closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as connection,
    ):
        connection.sendall(
            b"POST /act HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 4096\r\n\r\n"
        )
        for _ in range(4):
            time.sleep(0.05)
            connection.sendall(b" " * 1024)
        assert wait_for_end(connection).startswith(b"HTTP/1.1 401 ")
