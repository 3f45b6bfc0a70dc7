"""The summary that a run prints at its end."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from penstock.core.interfaces import RunEvent
from penstock.monitor.run_folder.record import Record
from penstock.monitor.sinks import FanOut
from penstock.monitor.summary import accounting, rows, show

BALANCED = {"produced": 100, "trained": 80, "dropped": {"stale": 10}, "lost": {}, "in_flight": 10}
SUMMARY: dict[str, Any] = {
    "exit_reason": "return",
    "env_steps": 1_200_000,
    "env_frames": 4_800_000,
    "time_s": 75.0,
    "episodes": 812,
    "episode_return_mean": -13.2415,
    "solved_at_s": 0.912,
    "utilization": 0.912,
    "accounting": BALANCED,
}


def test_summary_shows_progress_and_sample_accounting() -> None:
    assert rows(SUMMARY, Path("nowhere")) == [
        ("ended by", "return"),
        ("steps", "1,200,000 agent steps in 1:15, 16,000/s (4,800,000 frames, 64,000/s)"),
        ("return", "-13.24 in training, over the last 100 of 812 episodes"),
        ("solved", "by the return in training, after 0.91 s; no evaluation confirmed it"),
        ("samples", "produced 100 = trained 80 + dropped 10 (stale 10) + lost 0 + in flight 10"),
        ("learner", "91% of the time in forward, backward and optimizer"),
        ("folder", "nowhere"),
    ]


def test_summary_shows_the_return_of_the_least_exploring_beside_that_of_all() -> None:
    found = dict(rows(SUMMARY | {"episode_return_all_mean": -20.5}, Path("nowhere")))
    assert found["return"] == (
        "-13.24 in training where exploration is least, -20.5 over the last 100 of 812 episodes"
    )


def test_summary_of_a_resume_at_its_limit_states_that_no_step_was_trained() -> None:
    none = {"produced": 0, "trained": 0, "dropped": {}, "lost": {}, "in_flight": 0}
    again = {"exit_reason": "env_steps", "accounting": none, "episode_return_mean": None}
    found = dict(rows(SUMMARY | again, Path("nowhere")))
    expected = "env_steps, which was reached before; raise stop.env_steps to train on"
    assert found["ended by"] == expected
    assert found["return"] == "unknown, after 812 episodes of training"


def test_solved_means_confirmed_by_an_evaluation() -> None:
    by = {"mean": 251.3, "se": 4.123, "episodes": 100}
    closing = {"goal": 200.0, "solved": True, "estimate": by, "play": "sampled"}
    found = dict(rows(SUMMARY | {"closing_evaluation": closing}, Path("nowhere")))
    assert found["solved"] == (
        "stop.return 200 is confirmed by evaluation, after 0.91 s of training: sampled 251.3, "
        "standard error 4.123, over 100 episodes"
    )
    closing = closing | {"solved": False, "estimate": None}
    reached = {"solved_at_s": None, "return_reached_at_s": 0.5, "closing_evaluation": closing}
    found = dict(rows(SUMMARY | reached, Path("nowhere")))
    assert found["solved"] == (
        "no: the return in training reached stop.return after 0.50 s, and no evaluation "
        "confirmed it"
    )


RESUME = "penstock train {} --resume must"
REACHED = "the return in training reached stop.return after 0.50 s"
SHORT = {"mean": 0.8279, "se": 0.0085 / 1.96, "episodes": 100}


@pytest.mark.parametrize(
    ("exit_reason", "goal", "estimate", "text"),
    [
        ("env_steps", 0.82, None, f"no: {REACHED}, and no evaluation confirmed it"),
        (
            "env_steps",
            0.82,
            SHORT,
            f"no: {REACHED}, and the last evaluation did not confirm it: sampled 0.8279 ± 0.0085 "
            "(95 %), whose lower end 0.8194 must reach 0.82, over 100 episodes",
        ),
        ("env_steps", 0.81941, SHORT, "lower end 0.8194 must reach 0.81941"),
    ],
)
def test_unconfirmed_return_is_shown_with_the_rule(
    exit_reason: str, goal: float, estimate: dict[str, float] | None, text: str
) -> None:
    closing = {"goal": goal, "solved": False, "estimate": estimate, "play": "sampled"}
    reached = {"solved_at_s": None, "return_reached_at_s": 0.5, "closing_evaluation": closing}
    found = dict(rows(SUMMARY | reached | {"exit_reason": exit_reason}, Path("nowhere")))
    assert text in found["solved"]


def test_in_a_game_of_several_sides_a_goal_is_reached_in_an_evaluation() -> None:
    matches = {"eval_win_rates": {"bot:random": 0.9}}
    found = dict(rows(SUMMARY | matches, Path("nowhere")))
    assert found["solved"].startswith("by an evaluation, after 0.91 s")
    reached = {"solved_at_s": None, "return_reached_at_s": 0.5}
    found = dict(rows(SUMMARY | matches | reached, Path("nowhere")))
    assert found["solved"].startswith("no: an evaluation reached stop.return after 0.50 s")


def test_rank_without_evaluations_refers_to_rank_0() -> None:
    stopped = {"exit_reason": "stopped", "solved_at_s": None, "return_reached_at_s": 0.5}
    found = dict(rows(SUMMARY | stopped, Path("nowhere")))
    assert (
        found["ended by"] == "stopped, because the learner of another machine has reached a limit"
    )
    assert found["solved"] == (
        f"{REACHED}; rank 0 evaluates, and its summary says whether that was confirmed"
    )


def test_counts_since_a_resume_are_marked() -> None:
    found = dict(rows(SUMMARY | {"resumed": True}, Path("nowhere")))
    assert found["samples"].startswith("since the resume: produced 100 = trained 80")
    assert found["learner"].startswith("91% of the time since the resume in forward")


@pytest.mark.parametrize(
    ("episodes", "text"),
    [
        (None, "none, because no episode has ended"),
        (0, "none, because no episode has ended"),
        (1, "-13.24 in training, over the only episode"),
        (12, "-13.24 in training, over all 12 episodes"),
        (100, "-13.24 in training, over all 100 episodes"),
        (1101, "-13.24 in training, over the last 100 of 1,101 episodes"),
    ],
)
def test_return_is_shown_with_its_number_of_episodes(episodes: int | None, text: str) -> None:
    found = dict(rows(SUMMARY | {"episodes": episodes}, Path("nowhere")))
    assert found["return"] == text


def test_restarts_are_shown_only_if_there_were_any() -> None:
    found = dict(rows(SUMMARY | {"actors_restarted": 10}, Path("nowhere")))
    assert found["restarts"] == "10 of failed actors; the causes are in logs"
    both = SUMMARY | {"actors_restarted": 10, "learners_restarted": 1}
    text = "10 of failed actors, 1 of failed learners; the causes are in logs"
    assert dict(rows(both, Path("nowhere")))["restarts"] == text
    assert "restarts" not in dict(rows(SUMMARY | {"actors_restarted": 0}, Path("nowhere")))


def test_unbalanced_accounting_is_reported() -> None:
    shown = accounting(BALANCED | {"trained": 70})
    assert shown["defect"] == "the terms differ by 10; this is a bug, please report it"


def test_next_commands_include_eval_of_a_saved_and_resume_of_an_interrupted_run(
    tmp_path: Path,
) -> None:
    last = tmp_path / "checkpoints" / "last"
    last.mkdir(parents=True)
    summary = SUMMARY | {"exit_reason": "interrupted", "solved_at_s": None}
    assert "next" not in dict(rows(summary, tmp_path)), "the disk was full at the first save"
    (last / "checkpoint.safetensors").touch()
    found = rows(summary, tmp_path)
    commands = [text for label, text in found[-4:]]
    assert commands == [
        f"penstock eval {tmp_path}",
        f"penstock record {tmp_path}",
        f"penstock plot {tmp_path}",
        f"penstock train {tmp_path} --resume must",
    ]
    assert [label for label, _ in found[-4:]] == ["next", "", "", ""]

    of_games = [text for _, text in rows(summary, tmp_path, games_play=True)[-3:]]
    assert of_games == [
        f"penstock serve {tmp_path}",
        f"penstock plot {tmp_path}",
        f"penstock serve-env {tmp_path} --resume must",
    ]


@pytest.mark.parametrize(
    ("exit_reason", "saved", "commands"),
    [
        ("fault", True, ["correct the cause, {}", RESUME]),
        ("user_error", False, ["correct the cause, {}"]),
        ("diverged", True, ["penstock plot {} --metric grad_norm", RESUME]),
        ("profiled", True, []),
        ("minutes", False, []),
    ],
)
def test_suggested_command_fits_the_end_of_the_run(
    tmp_path: Path, exit_reason: str, saved: bool, commands: list[str]
) -> None:
    run = tmp_path / "my run"
    if saved:
        (run / "checkpoints" / "last").mkdir(parents=True)
        (run / "checkpoints" / "last" / "checkpoint.safetensors").touch()
    found = rows(SUMMARY | {"exit_reason": exit_reason}, run)
    texts = [text for label, text in found[[label for label, _ in found].index("folder") + 1 :]]
    cause = f"which the error names; the logs are in {run / 'logs'}"
    assert texts == [text.format(cause if "cause" in text else f"'{run}'") for text in commands]


def test_a_folder_that_is_gone_is_not_named() -> None:
    labels = [label for label, _ in rows(SUMMARY, Path("/tmp/bench-penstock-x1/run"))]
    assert {"folder", "next"}.isdisjoint(labels)


def test_run_without_steps_has_a_summary_without_suggestions(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    (tmp_path / "checkpoints" / "last" / "checkpoint.safetensors").touch()
    nothing = {"produced": 0, "trained": 0, "dropped": {}, "lost": {}, "in_flight": 0}
    found = dict(rows({"exit_reason": "fault", "accounting": nothing}, tmp_path))
    assert "next" not in found
    assert found["steps"] == "0 agent steps in 0:00, -/s"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_summary_is_lines_in_a_file_and_a_panel_on_a_terminal() -> None:
    shown = [("return", "3"), ("next", "penstock eval runs/[a]"), ("", "penstock plot")]
    plain, terminal = io.StringIO(), Terminal()
    show(shown, plain)
    assert plain.getvalue() == "return  3\nnext    penstock eval runs/[a]\n        penstock plot\n"
    show(shown, terminal)
    assert "penstock eval runs/[a]" in terminal.getvalue()
    assert "summary" in terminal.getvalue()


def test_utilization_is_the_mean_over_the_time_of_the_run(tmp_path: Path) -> None:
    record = Record(tmp_path)
    for time_s, share in ((1.0, 0.1), (2.0, 0.5), (5.0, 0.9)):
        record.metrics({"time_s": time_s, "learner_compute_fraction": share})
    assert record.summary("return", None)["utilization"] == (0.5 * 1 + 0.9 * 3) / 4


def test_evaluation_is_added_to_later_metrics(tmp_path: Path) -> None:
    record = Record(tmp_path)
    sinks = FanOut([record])
    sinks.metrics({"time_s": 1.0})
    evaluation = {
        "return": {"mean": 5.0},
        "length": {"mean": 9.0},
        "trained_steps": 640,
        "best_return_mean": 6.0,
    }
    sinks.event(RunEvent("evaluation", "", result=evaluation))
    sinks.metrics({"time_s": 2.0})
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "eval" not in first
    assert second == (
        '{"time_s": 2.0, "eval_return_mean": 5.0, "eval_return_best": 6.0, '
        '"eval_length_mean": 9.0, "eval_trained_steps": 640}'
    )
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 1
    found = dict(
        rows({**SUMMARY, **record.summary("return", None), "accounting": BALANCED}, tmp_path)
    )
    assert found["evaluation"] == "5 at 640 steps, best 6"
