"""The headline of the page: whether a run is stalled or learns, and what went wrong."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.monitor.intervals import Floats
from penstock.watch.headline import (
    ReturnCurve,
    end,
    is_silent,
    learning,
    restart,
    stall,
    wrong,
)

STEPS: Floats = np.arange(100, dtype=np.float64) * 1e4
NOISE = np.random.default_rng(0).normal(0, 1, 100)
RISE: Floats = 172.5 * (1 - np.exp(-np.arange(600) / 150))  # ever slower


def judged(
    steps: Floats, returns: Floats, *, episodes: float = 100.0, live: bool = False
) -> dict[str, Any]:
    """The verdict on measurements a second apart, with as many episodes each."""
    seconds = np.arange(1.0, len(returns) + 1)
    return learning(ReturnCurve(steps, returns, episodes * seconds, seconds), live=live)


@pytest.mark.parametrize(
    ("returns", "kind", "text"),
    [
        (STEPS / 1e4, "rising", "rising: 49.5 halfway, 94.5 in the last tenth of the run"),
        (-STEPS / 1e4, "falling", "falling: -4.5 at 0 steps, -94.5 in the last tenth"),
        (np.minimum(500.0, STEPS / 1e3), "flat", "flat at 500 at least since 460,000 steps"),
        (np.full(100, 7.0), "flat", "flat at 7 since the start"),
        (20 + 3 * NOISE, "flat", "since the start"),
        (20 + 3 * NOISE + STEPS / 2e4, "rising", "rising"),
        (np.where(STEPS < 8e5, STEPS / 1e3, 30.0), "falling", "falling: 745 at 700,000 steps, 30"),
        (STEPS[:19], "early", "too early to tell: 19 measurements of the return, 20 are needed"),
    ],
)
def test_headline_states_whether_a_run_learns(returns: Any, kind: str, text: str) -> None:
    found = judged(STEPS[: len(returns)], returns)
    assert found["kind"] == kind
    assert text in found["text"]


@pytest.mark.parametrize("seed", range(5))
def test_a_return_that_rises_with_noise_is_not_flat_and_then_rising_again(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 1, len(RISE))
    noisy, steps = RISE + noise, np.arange(float(len(RISE)))
    kinds = [judged(steps[:n], noisy[:n], live=True)["kind"] for n in range(20, len(noisy) + 1)]
    changes = [kind for before, kind in pairwise(kinds) if kind != before]
    assert kinds[0] == "rising"
    assert changes in ([], ["flat"])


def test_headline_keeps_its_sentence_between_thresholds() -> None:
    texts = [judged(STEPS[:n], STEPS[:n], live=True)["text"] for n in range(20, 91)]
    assert [texts.count(text) for text in dict.fromkeys(texts)] == [15, 15, 15, 15, 11]
    assert judged(STEPS[:90], STEPS[:90])["text"] != texts[-1], "an ended run is judged at its end"


@pytest.mark.parametrize(
    ("episodes", "text"),
    [
        (0.5, "too early to tell: 50 episodes, 100 are needed"),
        (3.0, "too early to tell: 74 episodes in the last quarter of the run, 100 are needed"),
        (5.0, "flat at 7 since the start"),
    ],
)
def test_a_return_of_few_episodes_is_not_flat(episodes: float, text: str) -> None:
    assert judged(STEPS, np.full(100, 7.0), episodes=episodes)["text"] == text


@pytest.mark.parametrize(
    ("silent_s", "began_ago_s", "interval_s", "seconds", "silent"),
    [
        (20.0, 100.0, 1.0, 50.0, False),
        (31.0, 100.0, 1.0, 50.0, True),
        (31.0, 100.0, None, None, True),
        (90.0, 900.0, 10.0, 800.0, False),
        (101.0, 900.0, 10.0, 800.0, True),
        (121.0, 1e6, 1.0, 604_800.0, False),  # in a week lines are two minutes apart
        (1211.0, 1e6, 1.0, 604_800.0, True),
        (900.0, 200.0, 1.0, 50.0, False),  # resumed, without a line so far
        (900.0, 301.0, 1.0, 50.0, True),
    ],
)
def test_run_without_lines_for_many_intervals_is_silent(
    silent_s: float,
    began_ago_s: float,
    interval_s: float | None,
    seconds: float | None,
    silent: bool,
) -> None:
    now_s = 1e9
    row = {"written": now_s - silent_s, "interval_s": interval_s, "seconds": seconds}
    assert is_silent(now_s, now_s - began_ago_s, row) == silent


def process(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "pid": 7, "state": "sleeping", "now": "runs", "silent_s": 0.1, **more}


STOPPED = {"state": "stopped", "now": "stopped by a signal"}


def test_a_stopped_learner_stalls_the_run_at_once() -> None:
    found = stall([process("learner-0", **STOPPED), process("actor-0")], 5.0, silent=False)
    assert found == {
        "why": "learner-0 is stopped by a signal", "names": ["learner-0"], "since": 5.0,
        "command": "kill -CONT 7",
    }  # fmt: skip


def test_stopped_process_on_another_host_has_no_continue_command() -> None:
    found = stall([process("learner-0", host="b", **STOPPED)], 5.0, silent=False, host="a")
    assert found is not None
    assert found["why"] == "learner-0 is stopped by a signal on b"
    assert found["command"] is None


@pytest.mark.parametrize("value", [0.1, -0.7, 200.3, 9.8])
def test_a_constant_return_is_flat(value: float) -> None:
    for count in range(20, 200):
        assert judged(np.arange(float(count)), np.full(count, value))["kind"] == "flat"


def test_halfway_is_half_of_the_steps_with_any_line_spacing() -> None:
    steps = np.concatenate([np.arange(0.0, 1e3, 1.0), np.arange(1e3, 1e4, 100.0)])
    found = judged(steps, steps / 100)
    assert found["kind"] == "rising"
    assert found["text"].startswith("rising: 49.5 halfway")


def test_stopped_learner_of_several_stalls_the_run_only_without_new_lines() -> None:
    processes = [process("learner-0", **STOPPED), process("learner-1")]
    assert stall(processes, 5.0, silent=False) is None
    found = stall(processes, 5.0, silent=True)
    assert found is not None
    assert found["why"] == "learner-0 is stopped by a signal"


def test_stall_without_a_stopped_learner_names_silent_processes() -> None:
    assert stall([process("actor-0", **STOPPED)], 5.0, silent=False) is None
    processes = [process("learner-0", silent_s=42.0), process("actor-0", **STOPPED)]
    found = stall(processes, 0.0, silent=True)
    assert found == {
        "why": "no new line of metrics (learner-0: no report for more than 10 s; actor-0: stopped "
        "by a signal)",
        "names": ["learner-0", "actor-0"],
        "since": None,
        "command": None,
    }
    assert wrong(process("actor-0", pid=None, now="ended")) is None


def test_headline_of_an_ended_run_has_time_cause_and_command() -> None:
    found = end("died", None, seen_s=5.0, trained_steps=1200.0, folder=Path("/runs/my run"))
    assert found == {
        "kind": "bad",
        "time": 5.0,
        "text": "It died without ending: its supervisor was killed, or the machine stopped. Its "
        "newest checkpoint has 1,200 trained steps.",
        "command": "penstock train '/runs/my run' --resume auto",
    }
    of_games = end("died", None, seen_s=5.0, trained_steps=None, folder=Path("a"), games_play=True)
    assert of_games["command"] == "penstock serve-env a --resume auto"
    failed = end("died", "no memory.", seen_s=None, trained_steps=None, folder=Path("a"))
    assert failed["text"] == "no memory. It has no checkpoint that can be read, so it begins anew."
    stopped = end("stopped", None, seen_s=5.0, trained_steps=7.0, folder=Path("a"))
    assert stopped["kind"] == "plain"


def test_repeated_restarts_are_counted_in_one_line() -> None:
    data = {"cause": "failed: ValueError: x; y, possibly z"}
    event = {"role": "learner-0", "time": 5.0, "text": "learner-0: failed", "data": data}
    assert restart(event, 3.0)["text"] == (
        "learner-0 failed: ValueError: x; y, possibly z, restarted. 3 restarts in all."
    )


@pytest.mark.parametrize("data", [None, {"delay_s": 0.1}, {"cause": 7}])
def test_a_restart_without_a_cause_is_shown_as_its_event(data: object) -> None:
    event = {"role": "actor-1", "time": 5.0, "text": "actor-1: failed; it is restarted"}
    assert restart(event | {"data": data}, 1.0)["text"] == "actor-1: failed; it is restarted."
    assert restart({"role": "actor-1", "data": data}, 1.0)["text"] == "actor-1 ended."
