"""Every metric of a run has a group."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from lockstep_run import of_kind, train_in_lockstep
from penstock.algos.diagnostics import FIGURES, MOMENTS
from penstock.configs.load import resolve
from penstock.monitor.metric_groups import FALLBACK, GROUPS, SECTIONS, group, scalars, tag
from penstock.monitor.run_folder.columns import MetricColumns

ROOT = Path(__file__).parents[3]
FAST = (
    *("transport.kind=inproc", "actors.count=1", "actors.envs=8", "actors.unroll=8"),
    *("stop.return=null", "stop.learner_steps=10", "learner.device=cpu", "run.interval_s=0.01"),
)


def page() -> str:
    return (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def documented() -> set[str]:
    """The metrics in the tables of docs/metrics.md: those of a line of `metrics.jsonl`."""
    of_lines = page().partition("The parts of the learner's `ledger`:")[0]
    of_several = page().partition("Additional fields:")[2]
    rows = re.findall(r"^\| (`.*?) \|", of_lines + of_several, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_documented_metric_has_a_group() -> None:
    names = documented()
    assert len(names) > 50
    assert {name for name in names if group(name) == FALLBACK} == set()


def test_documented_groups_exist() -> None:
    table = page().partition("## Groups")[2].partition("## The summary")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*GROUPS, FALLBACK}


def test_metrics_of_a_learner_keep_their_name_when_another_ends() -> None:
    both = {"ranks": [{"rank": 0, "queue_fill": 0.1}, {"rank": 1, "queue_fill": 0.9}]}
    one = {"ranks": [{"rank": 1, "queue_fill": 0.9}]}
    columns = MetricColumns()
    columns.extend([both, one])
    np.testing.assert_array_equal(columns.column("ranks/0/queue_fill"), [0.1, np.nan])
    np.testing.assert_array_equal(columns.column("ranks/1/queue_fill"), [0.9, 0.9])
    assert dict(scalars(one)) == {"ranks/1/rank": 1.0, "ranks/1/queue_fill": 0.9}
    odd = {"of_a_plugin": [{"rank": 3, "a": 1}, {"rank": 3, "a": 2}], "b": [{"rank": "x", "a": 3}]}
    assert {name: n for name, n in scalars(odd) if name.endswith("/a")} == {
        "of_a_plugin/0/a": 1.0, "of_a_plugin/1/a": 2.0, "b/0/a": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "home",
    [
        "impala.algorithm",
        "ppo.algorithm",
        "pqn.algorithm",
        "dqn.update",
        "sac.update",
        "td3.update",
    ],
)
def test_every_statistic_of_an_algorithm_has_a_group(home: str) -> None:
    names = {*import_module(f"penstock.algos.{home}").STATISTICS, *FIGURES} - {*MOMENTS}
    assert [name for name in names if group(name) == FALLBACK] == []


@pytest.mark.parametrize("target", ["cartpole", "cartpole_ppo", "cartpole_dqn"])
def test_every_metric_that_a_run_writes_has_a_group(tmp_path: Path, target: str) -> None:
    small = ("replay.min_size=64", "replay.batch_size=32") if target == "cartpole_dqn" else ()
    heard = train_in_lockstep(tmp_path, resolve(target, [*FAST, *small]))
    messages = of_kind(heard, "metrics")
    names = {path.partition("/")[0] for line in messages for path, _ in scalars(line)}
    assert {"env_steps", "grad_norm", "ledger"} <= names
    assert [name for name in sorted(names) if group(name) == FALLBACK] == []


def test_custom_statistics_are_grouped_by_their_name() -> None:
    assert (group("curiosity_loss"), tag("curiosity_loss")) == ("loss", "train/curiosity_loss")
    assert (group("curiosity"), tag("curiosity")) == (FALLBACK, "train/curiosity")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("episode_return_mean", "train/episode_return_mean"),
        ("eval_return_greedy", "eval/eval_return_greedy"),
        ("value_loss", "train/value_loss"),
        ("explained_variance", "train/explained_variance"),
        ("learning_rate", "train/learning_rate"),
        ("ledgers/actor-0/step", "time/ledgers/actor-0/step"),
        ("received/steps", "flow/received/steps"),
        ("ranks/0/ledger/compute", "system/ranks/0/ledger/compute"),
    ],
)
def test_tag_of_a_metric_has_its_section(path: str, expected: str) -> None:
    assert tag(path) == expected


def test_each_group_is_in_exactly_one_section() -> None:
    assert FALLBACK not in GROUPS
    assert sorted(name for groups in SECTIONS.values() for name in groups) == sorted(
        [*GROUPS, FALLBACK]
    )


def test_numbers_are_named_by_their_path() -> None:
    metrics = {
        "env_steps": 640,
        "episode_return_mean": None,
        "ledger": {"compute": 0.75, "wait_data": 0.25},
        "ledgers": {"actor-0": {"step": 0.5}},
        "ranks": [{"rank": 0, "ledger": {"compute": 0.5}}],
        "policy_lag_histogram": {"0": 12},
        "exit_reason": "return",
        "solved": True,
    }
    assert dict(scalars(metrics)) == {
        "env_steps": 640.0,
        "ledger/compute": 0.75,
        "ledger/wait_data": 0.25,
        "ledgers/actor-0/step": 0.5,
        "ranks/0/rank": 0.0,
        "ranks/0/ledger/compute": 0.5,
    }
