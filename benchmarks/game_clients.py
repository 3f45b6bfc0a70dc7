"""What a decision costs in the clients of games: JavaScript in Node, Python, and Godot's script.

    python benchmarks/game_clients.py [--seconds 3] [--rounds 3] [--json] [--save]

Each client plays the agent of the web game at `penstock serve`: it writes what all seats of its one
connection see, sends them as one message, and waits for their actions. They take turns. The
processor time for a decision is the figure to compare: the service uses most of the rest. Godot is
left out where `godot3-server` is not installed.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from common import compile_package, finish, parser

ROOT = Path(__file__).parents[1]
AGENT = ROOT / "examples" / "web_game" / "duel.safetensors"
SEATS = (1, 64, 256)

IN_NODE = """
const [client, port, seats, seconds] = process.argv.slice(1);
const { FIRST, connect } = await import(client);
const game = await connect({ url: `tcp://127.0.0.1:${port}`, seats: Number(seats) });
const rows = game.rows([...Array(Number(seats)).keys()]);
const observation = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8];
async function play(seconds) {
  const began = performance.now();
  let steps = 0;
  for (; performance.now() - began < 1000 * seconds; steps++) {
    for (const { obs } of rows.views) obs.set(observation);
    await game.step(rows);
  }
  return [steps * rows.seats.length, (performance.now() - began) / 1000];
}
rows.flags.fill(FIRST);
await play(0.3);
const before = process.cpuUsage();
const [decisions, s] = await play(Number(seconds));
const { user, system } = process.cpuUsage(before);
console.log(JSON.stringify({ decisions, seconds: s, processor_s: (user + system) / 1e6 }));
game.close();
"""

IN_PYTHON = """
import json, sys, time
import numpy as np
client, port, seats, seconds = sys.argv[1:]
sys.path.insert(0, client)
from penstock_game import FIRST, Game
game = Game("127.0.0.1", int(port), seats=int(seats))
rows = game.rows(range(int(seats)))
observation = np.linspace(0.1, 0.8, 8, dtype=np.float32)
def play(seconds):
    began = time.perf_counter()
    steps = 0
    while time.perf_counter() - began < seconds:
        rows.obs["obs"][:] = observation
        game.step(rows)
        steps += 1
    return steps * int(seats), time.perf_counter() - began
rows.flags[:] = FIRST
play(0.3)
before = time.process_time()
decisions, s = play(float(seconds))
spent = time.process_time() - before
print(json.dumps({"decisions": decisions, "seconds": s, "processor_s": spent}))
game.close()
"""

# GDScript does not know the processor time, so this reads it from the system.
IN_GODOT = """
extends SceneTree
const PenstockGame = preload("penstock_game.gd")
const OBSERVATION = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
var game = PenstockGame.new()
var seats = 0

func _initialize():
	var arguments = Array(OS.get_cmdline_args()).slice(-3, -1)
	seats = int(arguments[1])
	game.open("127.0.0.1", int(arguments[0]), {"seats": seats})
	while not game.poll():
		OS.delay_msec(1)
	play(0.3)
	var before = processor_s()
	var played = play(float(arguments[2]))
	var spent = processor_s() - before
	print(JSON.print({"decisions": played[0], "seconds": played[1], "processor_s": spent}))
	game.close()
	quit()

func play(seconds):
	var began = OS.get_ticks_usec()
	var steps = 0
	while OS.get_ticks_usec() - began < 1e6 * seconds:
		for seat in seats:
			var flags = PenstockGame.FIRST if game.is_idle(seat) else 0
			game.write(seat, OBSERVATION, flags)
		game.send()
		game.wait()
		for seat in seats:
			var _action = game.action_of(seat)
		steps += 1
	return [steps * seats, (OS.get_ticks_usec() - began) / 1e6]

func processor_s():
	var file = File.new()
	file.open("/proc/self/stat", File.READ)
	var fields = file.get_line().split(" ")
	return (float(fields[13]) + float(fields[14])) / 100
"""


class Played(NamedTuple):
    """What a client did in its turn."""

    decisions_per_s: float
    client_us: float
    """Its processor time for a decision."""
    service_us: float
    """That of the service."""


def main() -> None:
    """Measure all clients in turns."""
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    arguments.add_argument("--rounds", type=int, default=3, help="turns of each client")
    args = arguments.parse_args()
    if shutil.which("node") is None:
        raise SystemExit("this needs Node 20 or newer")
    compile_package()

    with tempfile.TemporaryDirectory() as folder:
        clients = _clients(Path(folder))
        measured: dict[tuple[str, int], list[Played]] = {}
        service, port = _start_service()
        try:
            for _ in range(args.rounds):
                for seats in SEATS:
                    for name, command in clients.items():
                        played = _play(command, service, port, seats, args.seconds)
                        measured.setdefault((name, seats), []).append(played)
        finally:
            service.terminate()
            service.wait()

    rows: list[list[Any]] = [["client", "seats", "decisions/s", "client us", "service us"]]
    found: dict[str, dict[str, Any]] = {}
    for (name, seats), turns in measured.items():
        medians = [statistics.median(figures) for figures in zip(*turns, strict=True)]
        rows.append([name, seats, *medians])
        found.setdefault(name, {})[str(seats)] = dict(zip(Played._fields, medians, strict=True))
    finish("game_clients", {"clients": found}, rows, args)


def _clients(folder: Path) -> dict[str, Sequence[str]]:
    """Returns the command of each client; port, seats and seconds follow it."""
    clients = ROOT / "clients"
    node = [(clients / "js" / "penstock.mjs").as_uri()]
    commands: dict[str, Sequence[str]] = {
        "JavaScript": ["node", "--input-type=module", "--eval", IN_NODE, *node],
        "Python": [sys.executable, "-c", IN_PYTHON, str(clients / "python")],
    }
    if shutil.which("godot3-server"):
        shutil.copy(clients / "godot" / "penstock_game.gd", folder)
        (folder / "play.gd").write_text(IN_GODOT)
        commands["Godot"] = ["godot3-server", "--path", str(folder), "-s", "play.gd"]
    return commands


def _start_service() -> tuple[psutil.Popen, int]:
    """Start `penstock serve`. Returns its process and its port."""
    words = ["-m", "penstock", "serve", str(AGENT), "--port", "0", "--json"]
    service = psutil.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    address = json.loads(service.stdout.readline())["address"]
    return service, int(address.rstrip("/").rpartition(":")[2])


def _play(
    command: Sequence[str], service: psutil.Popen, port: int, seats: int, seconds: float
) -> Played:
    """Have a client play."""
    words = [*command, str(port), str(seats), str(seconds)]
    before = service.cpu_times()
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    after = service.cpu_times()
    # Godot prints its name first.
    played = json.loads(done.stdout.splitlines()[-1])
    spent_s = after.user + after.system - before.user - before.system
    decisions = played["decisions"]
    # The service has also decided in the moments before the client began to count.
    share = seconds / (seconds + 0.3)
    return Played(
        decisions_per_s=decisions / played["seconds"],
        client_us=1e6 * played["processor_s"] / decisions,
        service_us=1e6 * spent_s * share / decisions,
    )


if __name__ == "__main__":
    main()
