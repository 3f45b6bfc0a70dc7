"""The clients in C and C++, and the game in C++.

That they keep the protocol to the byte is shown by `penstock check-client` (test_check_client.py).
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("uvicorn")

import served_games
from c_games import C_CLIENT, CPP_CLIENT, POLE_GAME, build, needs_compilers
from penstock.serving.rows import RowLayout, describe_layouts
from penstock.serving.service import Service

WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")
SANITIZERS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
WAIT_S = 60

pytestmark = [pytest.mark.system, needs_compilers]


@pytest.mark.parametrize(
    "source",
    [C_CLIENT / "echo_game.c", CPP_CLIENT / "echo_game.cpp", POLE_GAME / "pole.cpp"],
    ids=lambda path: path.name,
)
def test_the_clients_and_their_games_compile_without_a_warning(
    tmp_path: Path, source: Path
) -> None:
    build(tmp_path, source, *WARNINGS)


def test_the_c_client_is_also_cpp(tmp_path: Path) -> None:
    words = ("g++", "-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
    source = C_CLIENT / "penstock_game.c"
    subprocess.run((*words, "-c", source, "-o", tmp_path / "client.o"), check=True)


def test_hostile_messages_neither_crash_the_client_nor_are_read_past_their_end(
    tmp_path: Path,
) -> None:
    program = tmp_path / "fuzz"
    source = Path(__file__).with_name("c_client_fuzz.c")
    words = ("gcc", "-std=c99", *SANITIZERS, f"-I{C_CLIENT}", source, "-o", program)
    subprocess.run(words, check=True)
    observations = RowLayout(served_games.PARTS, "obs")
    layouts = describe_layouts(observations, RowLayout(spaces.Discrete(3), "action"))
    welcome = {"protocol": 1, **layouts, "seats": 3, "learns": True, "policy": {"run": "é"}}
    ended = subprocess.run(
        (program, "100000"),
        input=json.dumps(welcome).encode(),
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    taken = int(ended.stdout.split()[0])
    # An eighth is not changed; of the others, some changes leave a WELCOME that fits.
    assert 14_000 < taken < 50_000


def play(program: Path, port: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the pole game until its end."""
    return subprocess.run(
        (program, "--port", str(port), *options),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_a_game_of_other_spaces_is_refused_with_both(tmp_path: Path) -> None:
    program = build(tmp_path, POLE_GAME / "pole.cpp", *SANITIZERS)
    service = Service(served_games.random_policy(tmp_path / "policy", "CartPole-v1"))
    with served_games.served(service) as port:
        ended = play(program, port, "--episodes", "1")
    assert ended.returncode == 1
    # The bounds of gymnasium's observations are twice those of an episode's end.
    assert "the observations of the game are Box(-1e+30" in ended.stderr
    assert (
        "this policy was trained on CartPole-v1, whose observations are Box([-4.8" in ended.stderr
    )


def test_a_game_in_cpp_waits_for_the_service_and_begins_anew_after_it_has_gone(
    tmp_path: Path,
) -> None:
    program = build(tmp_path, CPP_CLIENT / "echo_game.cpp", *SANITIZERS)
    policy = served_games.random_policy(tmp_path / "policy", "parts")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    game = subprocess.Popen(
        (program, "127.0.0.1", str(port), "3000"), stderr=subprocess.PIPE, text=True
    )
    try:
        for _ in range(3):
            service = Service(policy)
            with served_games.served(service, port=port):
                ends_s = time.monotonic() + WAIT_S
                while service.figures.decisions < 50 and time.monotonic() < ends_s:
                    time.sleep(0.02)
            assert service.figures.decisions >= 50
            assert not service.figures.faults
    finally:
        game.kill()
        _, errors = game.communicate()
    assert errors.count("the service has ended the connection: the service ends") == 3


def test_the_cart_moves_as_the_published_equations_say(tmp_path: Path) -> None:
    """Against a mass matrix: the same mechanics, derived by Lagrange and solved by numpy."""
    program = tmp_path / "trace"
    source = tmp_path / "trace.cpp"
    source.write_text(
        "#define main pole_main\n"
        f'#include "{POLE_GAME / "pole.cpp"}"\n'
        "#undef main\n"
        "int main() {\n"
        "  Cart cart;\n"
        "  cart.angle = 0.05; cart.speed = 0.3; cart.angular_speed = -0.2;\n"
        "  for (int i = 0; i < 100; i++) {\n"
        '    std::printf("%.17g %.17g %.17g %.17g\\n", cart.position, cart.speed, cart.angle,\n'
        "                cart.angular_speed);\n"
        "    cart.push(i % 3 ? PUSH : -PUSH);\n"
        "  }\n"
        "}\n"
    )
    program = build(tmp_path, source)
    lines = subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()
    trace = np.array([line.split() for line in lines], np.float64)

    mass, pole, half, gravity = 1.0, 0.1, 0.5, 9.8
    state = trace[0]
    for i, moved in enumerate(trace[1:]):
        _, speed, angle, spin = state
        force = (10.0 if i % 3 else -10.0) - 0.0005 * np.sign(speed)
        sine, cosine = np.sin(angle), np.cos(angle)
        masses = [
            [mass + pole, pole * half * cosine],
            [pole * half * cosine, 4 / 3 * pole * half**2],
        ]
        forces = [
            force + pole * half * spin**2 * sine,
            pole * gravity * half * sine - 0.000002 * spin,
        ]
        acceleration, angular_acceleration = np.linalg.solve(masses, forces)
        derivative = np.array([speed, acceleration, spin, angular_acceleration])
        state = state + 0.02 * derivative
        np.testing.assert_allclose(moved, state, rtol=1e-9, atol=1e-12)
