"""Roles that do one thing each, for tests of the supervisor: main functions by name."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from penstock.configs.errors import UserError
from penstock.core.control import Message
from penstock.core.loading import import_module
from penstock.core.role import EXIT_REJOIN, RoleContext
from penstock.profiling.ledger import Part
from penstock.profiling.status import Phase

TURN_S = 0.01


def _turns(ctx: RoleContext, until: Callable[[], bool]) -> None:
    ctx.report("ready")
    print(f"incarnation {ctx.incarnation} works", flush=True)
    while not until():
        ctx.status.beat()
        time.sleep(TURN_S)


def work(ctx: RoleContext) -> None:
    """A good actor: produces ten steps a turn until it is asked to stop."""
    ctx.status.phase = Phase.ENVIRONMENT

    def turn() -> bool:
        ctx.status.produced_steps += 10
        ctx.status.sequence += 1
        return ctx.stopping()

    _turns(ctx, turn)


def measure(ctx: RoleContext) -> None:
    """Keeps a ledger, of ten thousand pairs of spans."""
    ledger = ctx.ledger
    for _ in range(10_000):
        ledger.switch(Part.STEP)
        ledger.switch(Part.WAIT)
    _turns(ctx, ctx.stopping)


def learn(ctx: RoleContext) -> None:
    """A good learner: hears of its actors' ends, saves once it may finish."""
    heard: list[Message] = []

    def turn() -> bool:
        heard.extend(ctx.messages())
        ctx.report("metrics", time_s=1.0, env_steps=7, env_frames=7, steps_per_s=7.0)
        return ctx.stopping()

    _turns(ctx, turn)
    heard.extend(ctx.messages())
    (ctx.run_dir / "saved").write_text("saved")
    ctx.report("final", heard=heard, accounting={"produced": 3, "trained": 3, "in_flight": 0})


def learn_together(ctx: RoleContext) -> None:
    """One of several learners: writes down who is in its group, and what it hears when."""
    ctx.report("join")
    ctx.status.phase = Phase.REDUCING
    print(f"pid {os.getpid()}", flush=True)

    alive = 1

    def turn() -> bool:
        nonlocal alive
        for message in ctx.messages():
            alive = message.get("alive", alive)
            if message["kind"] == "group" and ctx.learner in message["members"]:
                ctx.report("entered")
            if message["kind"] != "actors":
                print(f"heard {time.monotonic()} {json.dumps(message)}", flush=True)
        ctx.status.produced_steps, ctx.status.trained_steps = 50, 40
        if alive:
            ctx.report("metrics", time_s=1.0, steps_per_s=10.0, learner_wait_fraction=0.25)
        return ctx.stopping()

    _turns(ctx, turn)
    accounting = {"produced": 50, "trained": 50, "dropped": {}, "lost": {}, "in_flight": 0}
    ctx.report("final", accounting=accounting)


def learn_together_until_told(ctx: RoleContext) -> None:
    """One of several learners that dies, again and again, as soon as it works."""
    if ctx.incarnation > 1:
        raise ValueError(f"crash of incarnation {ctx.incarnation}")
    learn_together(ctx)


def follow(ctx: RoleContext) -> None:
    """An actor that writes down whom it plays for: one unroll of ten steps for each."""
    ctx.report("ready")
    while not ctx.stopping():
        ctx.follow()
        print(f"pid {os.getpid()} plays for {ctx.learner} as {ctx.incarnation}", flush=True)
        ctx.status.begin_stream(ctx.incarnation, 0)
        ctx.status.sequence, ctx.status.produced_steps = 1, 10
        ctx.status.played_steps += 10
        while not ctx.leaving():
            ctx.status.beat()
            time.sleep(TURN_S)


def log_and_stop(ctx: RoleContext) -> None:
    """A learner whose game logs a sentence, by a thread of its own."""
    logger = logging.getLogger("penstock.game")
    thread = threading.Thread(target=logger.info, args=("%d boards are loaded", 3))
    thread.start()
    thread.join()
    ctx.report("stop", reason="return")
    _turns(ctx, ctx.stopping)


def stop_soon(ctx: RoleContext) -> None:
    """A learner that reaches its goal once two actors are alive."""
    alive = 0

    def turn() -> bool:
        nonlocal alive
        for message in ctx.messages():
            alive = message.get("alive", alive)
        if alive == 2:
            ctx.report("stop", reason="return")
        return ctx.stopping()

    _turns(ctx, turn)
    accounting = {"produced": 3, "trained": 3, "in_flight": 0}
    ctx.report("final", solved_at_s=0.5, accounting=accounting)


def refuse(ctx: RoleContext) -> None:
    raise UserError("the game Pong-v9 does not exist; the nearest is Pong-v5")


def crash(ctx: RoleContext) -> None:
    raise ValueError(f"crash of incarnation {ctx.incarnation}")


def crash_once(ctx: RoleContext) -> None:
    """Dies without a word after a hundred steps, the first time."""
    if ctx.incarnation:
        return work(ctx)
    ctx.report("ready")
    ctx.status.produced_steps, ctx.status.sequence = 100, 4
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(ctx: RoleContext) -> None:
    """A learner that the kernel ends."""
    ctx.report("ready")
    print("about to fall", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def rejoin_twice(ctx: RoleContext) -> None:
    if ctx.incarnation < 2:
        sys.exit(EXIT_REJOIN)
    work(ctx)


def hang_once(ctx: RoleContext) -> None:
    """Beats, and then hangs in its environment, the first time."""
    if ctx.incarnation:
        return work(ctx)
    ctx.report("ready")
    ctx.status.phase = Phase.ENVIRONMENT
    ctx.status.beat()
    _step_of_an_environment()


def _step_of_an_environment() -> None:
    time.sleep(600)


def start_in_parts(ctx: RoleContext) -> None:
    """A good actor with a start of three parts of a second each."""
    for phase in (Phase.IMPORTING, Phase.ENVIRONMENT, Phase.STARTING):
        ctx.status.begin(phase)
        time.sleep(1.0)
    work(ctx)


def never_ready(ctx: RoleContext) -> None:
    time.sleep(600)


def deaf(ctx: RoleContext) -> None:
    """Works, and ignores that it is asked to stop."""
    _turns(ctx, lambda: False)


def with_a_child(ctx: RoleContext) -> None:
    """An environment with a process of its own, which nobody tells to end."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    work(ctx)


def save_late(ctx: RoleContext) -> None:
    """A learner that takes a while to save."""
    _turns(ctx, ctx.stopping)
    time.sleep(0.5)
    (ctx.run_dir / "saved").write_text("saved")


def stuck(ctx: RoleContext) -> None:
    """A learner whose main thread never comes back to run a signal's handler."""
    ctx.report("ready")
    print("stuck", flush=True)
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def stuck_in_c(ctx: RoleContext) -> None:
    """An actor whose environment never comes back from C, and holds the interpreter meanwhile."""
    ctx.report("ready")
    ctx.status.beat()
    ctx.status.phase = Phase.ENVIRONMENT
    print("stuck", flush=True)
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def import_from_here(ctx: RoleContext) -> None:
    """A role that needs a module of the current folder."""
    word: str = import_module("module_of_the_user", "the role").WORD
    (ctx.run_dir / "saved").write_text(word)
    work(ctx)


HIDDEN = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
with open(sys.argv[1] + ".tmp", "w") as file: file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
os.closerange(0, 100)
time.sleep(600)
"""


def with_a_daemon(ctx: RoleContext) -> None:
    """An environment whose program hides: two forks away, in a session of its own, with nothing
    open and no environment. The role then does not end when it is asked to."""
    command = [sys.executable, "-I", "-S", "-c", HIDDEN, str(ctx.run_dir / "daemon")]
    subprocess.run(command, env={}, check=True)
    ctx.holds_state = True  # a learner's
    deaf(ctx)


def with_a_marked_daemon(ctx: RoleContext) -> None:
    """`with_a_daemon`, which keeps its environment."""
    command = [sys.executable, "-I", "-S", "-c", HIDDEN, str(ctx.run_dir / "daemon")]
    subprocess.run(command, check=True)
    deaf(ctx)


def talk(ctx: RoleContext) -> None:
    """Writes twice as much as its log may hold."""
    for n in range(20_000):
        print(f"line {n} " + "." * 1000)
    print("the last line", flush=True)
    os._exit(7)


def talk_when_asked(ctx: RoleContext) -> None:
    """A learner that has much to say when its shim dies."""
    ctx.holds_state = True
    print("ready", flush=True)
    while not ctx.shim_died:
        time.sleep(TURN_S)
    time.sleep(0.3)
    talk(ctx)
