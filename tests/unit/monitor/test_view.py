"""The live view of a run: its figures, its lines and its panel."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.configs.sections import StopConfig
from penstock.core.formatting import clock, count, number, reasons
from penstock.core.interfaces import RunEvent
from penstock.monitor.figures import eta_s, evaluated, figures
from penstock.monitor.figures import line as figure_line
from penstock.monitor.view import LineView, LiveView, make_view

METRICS: dict[str, Any] = {
    "time_s": 75.2,
    "env_steps": 1_200_000,
    "env_frames": 4_800_000,
    "learner_steps": 600,
    "steps_per_s": 16_000.4,
    "trained_steps_per_s": 15_900.0,
    "learner_ceiling_steps_per_s": 16_562.5,
    "episode_return_mean": -13.24,
    "episodes": 812,
    "policy_lag_mean": 1.25,
    "policy_lag_max": 3,
    "queue_fill": 0.5,
    "dropped": {"stale": 320, "invalid": 0},
    "actors_alive": 2,
    "actors_restarted": 1,
    "latency_p50_s": 0.0123,
    "latency_p95_s": 2.04,
    "ledger": {"wait_data": 0.04, "compute": 0.9, "publish": 0.004, "other": 0.056},
    "ledgers": {
        "learner-0": {"forward": 0.9, "wait": 0.1},
        "actor-0": {"step": 0.6, "wait": 0.4},
        "actor-1": {"step": 0.4, "infer": 0.6},
    },
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_figures_distinguish_steps_and_frames() -> None:
    assert figures(METRICS, StopConfig(env_steps=1_360_000)) == {
        "time": "1:15, 0:09 to go",
        "steps": "1,200,000, 16,000/s",
        "frames": "4,800,000, 64,002/s",
        "trained": "15,900/s, 600 updates",
        "return": "-13.24 in training, last 100 of 812 episodes",
        "lag": "1.25, at most 3",
        "queue": "50% full",
        "learner": "compute 90%, other 6%, wait_data 4%; 96% of its ceiling of 16,562/s",
        "latency": "12 ms, p95 2.0 s",
        "dropped": "320 (stale 320)",
        "actors": "2 alive, 1 restarted; step 50%, infer 30%, wait 20%",
    }


def test_losses_of_any_name_are_shown() -> None:
    losses = {"policy_loss": -0.012, "value_loss": 0.5, "loss": 2.0, "spare_loss": None}
    assert figures(METRICS | losses, None)["loss"] == "policy -0.012, value 0.5, 2"
    assert "loss" not in figures(METRICS, None)


def test_frames_equal_to_steps_are_not_shown_twice() -> None:
    alike = METRICS | {"env_frames": METRICS["env_steps"]}
    assert figures(METRICS, None).keys() - figures(alike, None).keys() == {"frames"}


def test_returns_are_shown_by_exploration() -> None:
    explored = METRICS | {"episode_return_all_mean": -20.5}
    expected = "-13.24 in training where exploration is least, -20.5 over all environments"
    assert figures(explored, None)["return"] == expected
    assert "training return -13.24 (-20.5 over all environments) |" in figure_line(explored, None)


def test_progress_line_is_short_and_leaves_out_zeros() -> None:
    quiet = METRICS | {"dropped": {"stale": 0}, "actors_restarted": 0, "learners_alive": 2}
    shown = figure_line(quiet | {"eval_return_mean": 17.25}, StopConfig(minutes=2))
    assert shown == (
        "1:15, 0:44 to go | 1,200,000 steps, 16,000/s | training return -13.24 | trained 15,900/s "
        "| lag 1.25 | learner busy 90% | actors 2 | learners 2 | evaluation 17.25"
    )


def test_number_of_learners_is_shown() -> None:
    several = METRICS | {"learners_alive": 3, "learners_restarted": 1}
    assert figures(several, None)["learners"] == "3 alive, 1 restarted"


def test_members_and_win_rates_of_a_league_are_shown() -> None:
    played = METRICS | {"league_members": 5, "league_games": 900, "win_rate": 0.625}
    hardest = {"win_rate_worst": 0.31, "bot_win_rates": {"minimax2": 0.4}}
    shown = "5 members, won 62%, the hardest so far 31%, 40% against minimax2"
    assert figures(played | hardest, None)["league"] == shown
    assert "| 5 members, won 62% |" in figure_line(played, None)

    mirror = METRICS | {"league_members": 1}
    assert figures(mirror, None)["league"] == "1 member"
    assert "members" not in figure_line(mirror, None)
    assert "league" not in figures(METRICS, None)


def test_games_are_shown_in_place_of_actors() -> None:
    played = METRICS | {"games": 2, "actors_alive": 8, "seats_held": 3}
    assert figure_line(played, None).endswith("| 2 games with 8 seats")
    shown = figures(played, None)
    assert shown["games"] == "2 games with 8 seats, 3 of them held"
    assert "actors" not in shown


def test_each_learner_and_each_connector_has_a_row() -> None:
    ranks = [
        {"rank": rank, "trained_steps_per_s": 8_000.0 - rank, "ledger": {"compute": 1.0 - rank / 4}}
        for rank in (0, 1)
    ]
    ledgers = METRICS["ledgers"] | {"connector-1": {"wait": 0.75, "decompress": 0.25}}
    shown = figures(METRICS | {"ranks": ranks, "ledgers": ledgers}, None)
    assert shown["rank 0"] == "8,000/s; compute 100%"
    assert shown["rank 1"] == "7,999/s; compute 75%"
    assert shown["connector-1"] == "wait 75%, decompress 25%"


def test_unknown_figures_are_shown_as_a_dash() -> None:
    early = METRICS | {"env_steps": 0, "episode_return_mean": None, "policy_lag_mean": None}
    shown = figures(early | {"episodes": 0}, None)
    assert (shown["frames"], shown["return"]) == ("4,800,000, -/s", "- in training, no episode yet")
    assert shown["time"] == "1:15"


@pytest.mark.parametrize(
    ("stop", "seconds"),
    [
        (StopConfig(), None),
        (StopConfig.model_validate({"return": 20}), None),
        (StopConfig(minutes=2), 120 - 75.2),
        (StopConfig(learner_steps=1200), 75.2),
        (StopConfig(env_steps=1_200_000), 0.0),
        (StopConfig(minutes=2, learner_steps=1200), 120 - 75.2),
    ],
)
def test_remaining_time_is_that_of_the_nearest_limit(
    stop: StopConfig, seconds: float | None
) -> None:
    assert eta_s(METRICS, stop) == (None if seconds is None else pytest.approx(seconds))


def test_numbers_are_formatted() -> None:
    assert [clock(s) for s in (None, 0.9, 59.9, 3661)] == ["0:00", "0:00", "0:59", "1:01:01"]
    assert [number(n) for n in (None, 0.123456, 475.0, 123456.7)] == [
        "-",
        "0.1235",
        "475",
        "123,457",
    ]
    assert count(1234567.8) == "1,234,568"
    assert reasons({}) == "0"
    assert reasons({"stale": 2, "lag": 10}) == "12 (stale 2, lag 10)"


def test_lines_come_every_few_seconds_and_notes_always() -> None:
    stream = io.StringIO()
    view = make_view(stream, "penstock runs/x: learner, 2 actors", None)
    assert isinstance(view, LineView)
    view.metrics(METRICS)
    view.metrics(METRICS)
    view.note("actor-0 starts again")
    view.close()
    title, line, note = stream.getvalue().splitlines()
    assert title == "penstock runs/x: learner, 2 actors"
    assert line == (
        "1:15 | 1,200,000 steps, 16,000/s | training return -13.24 | trained 15,900/s | lag 1.25 | "
        "learner busy 90% | dropped 320 | actors 2, 1 restarted"
    )
    assert note == "actor-0 starts again"


def test_a_terminal_gets_a_panel() -> None:
    stream = Terminal()
    view = make_view(stream, "penstock runs/[x]: learner", None)
    assert isinstance(view, LiveView)
    view.metrics(METRICS)
    view.note("a note with [brackets]")
    view.close()
    text = stream.getvalue()
    assert "penstock runs/[x]: learner" in text
    assert "15,900/s, 600 updates" in text
    assert "a note with [brackets]" in text


def panel(
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    *metrics: dict[str, Any],
    events: Sequence[RunEvent] = (),
    goal: float | None = None,
) -> list[str]:
    """The lines of the last panel on a terminal of so many columns, without escape sequences."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stop = None if goal is None else StopConfig.model_validate({"return": goal})
    stream = Terminal()
    view = make_view(stream, "penstock runs/x: learner", stop, "ALE/Pong-v5, impala, preset pong")
    for each in metrics:
        view.metrics(each)
    for event in events:
        view.event(event)
    view.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    return plain[plain.rindex("╭") :].splitlines()


@pytest.mark.parametrize("columns", [60, 80, 120, 200, 300])
def test_the_panel_is_as_wide_as_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    lines = panel(monkeypatch, columns, METRICS)
    assert {len(line) for line in lines if line} == {columns}


def test_a_wide_panel_shows_training_and_data_flow_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    narrow, wide = panel(monkeypatch, 80, METRICS), panel(monkeypatch, 120, METRICS)
    assert len(wide) < len(narrow)
    assert any("time" in line and "lag" in line for line in wide)
    assert not any("time" in line and "lag" in line for line in narrow)
    for value in figures(METRICS, None).values():
        assert any(value in line for line in wide)
    widest = panel(monkeypatch, 200, METRICS)
    assert any("time" in line and "lag" in line and "actors" in line for line in widest)


def test_panel_shows_the_task_and_the_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    early = METRICS | {"episodes": 3, "episode_return_mean": 21.0}
    better = METRICS | {"episode_return_mean": -12.5}
    for columns in (80, 120):
        text = "\n".join(panel(monkeypatch, columns, early, better, METRICS | {"q_loss": 0.25}))
        assert "ALE/Pong-v5, impala, preset pong" in text
        assert "-13.24 in training, last 100 of 812 episodes, best -12.5" in text
        assert re.search(r"loss +q 0\.25", text)


def test_the_panel_has_the_return_as_a_sparkline_with_best_and_goal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rising = [METRICS | {"episode_return_mean": float(n)} for n in range(16)]
    lines = panel(monkeypatch, 100, *rising, METRICS | {"episode_return_mean": 3.5}, goal=18)
    [row] = [i for i, line in enumerate(lines) if "return" in line]
    assert "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██▃" in lines[row].replace(" ", "")
    assert "3.5 in training, last 100 of 812 episodes, best 15, goal 18" in lines[row + 1]


def test_panel_has_the_learner_time_as_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = panel(monkeypatch, 116, METRICS)  # 100 columns for the bar
    [row] = [i for i, line in enumerate(lines) if "│ learner" in line]
    assert [lines[row].count(fill) for fill in "█░▒"] == [90, 4, 6]
    assert "compute 90%" in lines[row + 1]


def test_the_panel_lists_the_last_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "40")
    events = [
        RunEvent("start", "was started", "actor-7", 0),
        RunEvent("hang", "gave no sign of life", "actor-0", 0),
        RunEvent("note", "is above the panel", "actor-0", 0),
        RunEvent("checkpoint", "a/long/path was written", "learner-0", 0, {"trained_steps": 1234}),
        RunEvent("exit", "has ended " + "x" * 200, "actor-0", 0),
        RunEvent("restart", "actor-0: \x1b[2JValue\nError", "actor-0", 1),
    ]
    shown = [line for line in panel(monkeypatch, 80, METRICS, events=events) if ":" in line]
    texts = [re.split(r"\d\d:\d\d:\d\d ", line)[-1].rstrip(" │") for line in shown[-4:]]
    assert texts[:2] == ["actor-0 gave no sign of life", "checkpoint at 1,234 steps"]
    assert texts[2].startswith("actor-0 has ended xxx")
    assert texts[2].endswith("…")
    assert texts[3] == r"actor-0: \x1b[2JValue Error"
    monkeypatch.setenv("LINES", "24")
    fewer = "\n".join(panel(monkeypatch, 80, METRICS, events=events))
    assert "checkpoint at" not in fewer


def test_the_panel_is_drawn_once_a_second_and_at_the_end() -> None:
    stream, now_s = Terminal(), [100.0]
    view = LiveView(stream, "a run", None, clock=lambda: now_s[0])
    drawn = [stream.getvalue().count("╭")]
    for _ in range(30):
        now_s[0] += 0.1
        view.tick()
        view.metrics(METRICS)
        drawn.append(stream.getvalue().count("╭"))
    assert drawn[-1] - drawn[0] in (2, 3)
    for _ in range(3):
        now_s[0] += 5.0
        view.tick()  # nothing has changed after the first one
    assert stream.getvalue().count("╭") <= drawn[-1] + 1
    view.metrics(METRICS | {"learner_steps": 700})
    view.metrics(METRICS | {"learner_steps": 777})
    view.close()
    assert "777 updates" in stream.getvalue()


def test_a_stream_of_ascii_gets_a_panel_of_ascii() -> None:
    raw = io.BytesIO()

    class Ascii(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    stream = Ascii(raw, encoding="ascii")
    view = make_view(stream, "a run of Zürich", None)
    for mean in (1.0, 2.0, 3.0):
        view.metrics(METRICS | {"episode_return_mean": mean})
    view.event(RunEvent("exit", "has ended " + "x" * 300, "actor-0", 0))
    view.close()
    stream.flush()
    assert b"_+#" in raw.getvalue()
    assert b"######" in raw.getvalue()


def test_first_line_names_the_task() -> None:
    stream = io.StringIO()
    make_view(stream, "penstock runs/x: learner", None, "ALE/Pong-v5, impala, preset pong")
    assert stream.getvalue() == ("penstock runs/x: learner; ALE/Pong-v5, impala, preset pong\n")


@pytest.mark.parametrize(
    ("episodes", "shown", "brief"),
    [
        # Student's t is 2.093 for 20 episodes, and 12.706 for two.
        (
            20,
            "greedy -2 ± 0.5232, sampled 4 ± 1.046 (20 episodes each)",
            "evaluation 4 ± 1.046 over 20 episodes",
        ),
        (
            2,
            "greedy -2 ± 3.176, sampled 4 ± 6.353 (2 episodes each)",
            "evaluation 4 ± 6.353 over 2 episodes",
        ),
        (1, "greedy -2, sampled 4 (1 episode each)", "evaluation 4 over 1 episode"),
    ],
)
def test_an_evaluation_is_shown_with_its_interval_and_its_episodes(
    episodes: int, shown: str, brief: str
) -> None:
    metrics = METRICS | {
        **{"eval_return_mean": 4.0, "eval_return_greedy": -2.0, "eval_return_sampled": 4.0},
        **{"eval_return_greedy_se": 0.25, "eval_return_sampled_se": 0.5, "eval_play": "sampled"},
        **{"eval_episodes": episodes, "eval_trained_steps": 640, "eval_return_best": 5.0},
    }
    assert evaluated(metrics) == f"{shown} at 640 steps, best 5"
    assert figure_line(metrics, None).endswith(f" | {brief}")
    matches = {"eval_win_rates": {"bot:random": 0.934, "initial": None}}
    rates = ", win rate 93% against bot:random, - against initial"
    assert evaluated(metrics | matches) == f"{shown} at 640 steps, best 5{rates}"
