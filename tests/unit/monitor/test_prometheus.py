"""The metrics for Prometheus and the answers to probes, from a run's figures."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.interfaces import RunEvent
from penstock.core.notes import notes_to
from penstock.monitor import prometheus
from penstock.monitor.prometheus import LABELS, PrometheusSink, RunState, exposition, make
from penstock.monitor.sinks import check_libraries

pytest.importorskip("prometheus_client")
FOLDER = Path(prometheus.__file__).parent / "grafana"
ABOUT = {"run": 'a "run"\n', "env": "CartPole-v1"}
METRICS: dict[str, Any] = {
    "env_steps": 1000, "trained_steps": 900, "learner_steps": 7, "time_s": 2.5,
    "episode_return_mean": -13.5, "steps_per_s": 400.0, "queue_fill": 0.5,
    "ledger": {"compute": 0.75, "wait_data": 0.25}, "policy_lag_histogram": {"0": 10, "4": 30},
    "latency_histogram": {"0": 1.0, "16": 2.5}, "dropped": {"lag": 64}, "actors_alive": 2,
    "actors_restarted": 1, "policy_loss": -0.1, "loss": None, "solved_at_s": None,
    "ledgers": {"actor-0": {"step": 0.5}, "actor-11": {"step": 0.25}, "learner-0": {"wait": 1.0}},
    "cpu": {"actor-0": 0.5, "actor-11": 0.75}, "eval_return_greedy": 20.0, "eval_play": "greedy",
    "received": {"slots": 2, "steps": 128, "raw_nbytes": 4096, "coded_nbytes": 512},
}  # fmt: skip


def scraped(*intervals: dict[str, Any]) -> dict[str, float]:
    state = RunState()
    for metrics in intervals:
        state.add_interval(metrics)
    return series(exposition(state, ABOUT).decode())


def series(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_counters_and_gauges_have_base_units_and_labels_by_role_and_reason() -> None:
    found = scraped(METRICS)
    for name, value in {
        "penstock_env_steps_total": 1000.0,
        "penstock_training_seconds_total": 2.5,
        "penstock_episode_return_mean": -13.5,
        "penstock_queue_fill_ratio": 0.5,
        'penstock_learner_time_ratio{part="compute"}': 0.75,
        'penstock_dropped_steps_total{reason="lag"}': 64.0,
        'penstock_restarts_total{role="actor"}': 1.0,
        'penstock_restarts_total{role="learner"}': 0.0,
        'penstock_processes_alive{role="actor"}': 2.0,
        'penstock_role_time_ratio{part="step",role="actor"}': 0.375,
        'penstock_role_cpu_cores{role="actor"}': 1.25,
        'penstock_received_bytes_total{form="coded"}': 512.0,
        'penstock_evaluation_return_mean{play="greedy"}': 20.0,
        'penstock_statistic{name="policy_loss"}': -0.1,
        'penstock_events_total{kind="hang"}': 0.0,
        "penstock_ready": 1.0,
    }.items():
        assert found[name] == value, name
    assert 'penstock_statistic{name="loss"}' not in found
    assert not any("actor-" in name for name in found)


def test_counters_do_not_fall_when_a_learner_resumes_from_a_checkpoint() -> None:
    """Prometheus would take a smaller one for a new one, and its value for growth."""
    older = {**METRICS, "env_steps": 400, "time_s": 1.0, "dropped": {"lag": 2}}
    found = scraped(METRICS, older)
    assert found["penstock_env_steps_total"] == 1000.0
    assert found["penstock_training_seconds_total"] == 2.5
    assert found['penstock_dropped_steps_total{reason="lag"}'] == 2.0, "it counts from 0"
    assert scraped(METRICS, older, {"env_steps": 1001})["penstock_env_steps_total"] == 1001.0


def test_counters_do_not_fall_in_a_new_process_of_a_run(tmp_path: Path) -> None:
    """It continues from a checkpoint that is older than the last scrape."""
    (tmp_path / "metrics.jsonl").write_text('{"env_steps": 900}\n{"env_steps": 1000}\n')
    (tmp_path / "summary.json").write_text('{"env_steps": 800, "time_s": 2.5, "episodes": null}')
    sink = make(resolve("cartpole", ["run.metrics_port=0"]), tmp_path)
    assert isinstance(sink, PrometheusSink)
    try:
        for _ in range(2):
            found = series(answer(sink, "/metrics")[1])
            assert found["penstock_env_steps_total"] == 1000.0
            assert found["penstock_training_seconds_total"] == 2.5
            sink.metrics({**METRICS, "env_steps": 400, "time_s": 1.0})
        sink.metrics({**METRICS, "env_steps": 1001})
        assert series(answer(sink, "/metrics")[1])["penstock_env_steps_total"] == 1001.0
    finally:
        sink.close()


def test_histograms_add_up_all_intervals() -> None:
    found = scraped(METRICS, METRICS)
    assert found['penstock_policy_lag_bucket{le="0"}'] == 20
    assert found['penstock_policy_lag_bucket{le="3"}'] == 20
    assert found['penstock_policy_lag_bucket{le="5"}'] == 80
    assert (found["penstock_policy_lag_count"], found["penstock_policy_lag_sum"]) == (80, 240)
    # Bin 16 ends at 1.6 ms, which is a bound, too.
    assert found['penstock_sample_latency_seconds_bucket{le="0.0008"}'] == 2
    assert found['penstock_sample_latency_seconds_bucket{le="0.0016"}'] == 7
    assert found['penstock_sample_latency_seconds_bucket{le="+Inf"}'] == 7


def test_the_number_of_series_is_limited() -> None:
    own = {f"curiosity_{n}": 1.0 for n in range(10 * LABELS)}
    many = {f"reason-{n}": 1 for n in range(10 * LABELS)}
    cpu = {f"role{n}-0": 1.0 for n in range(10 * LABELS)}
    found = scraped({**METRICS, **own, "rejected": many, "cpu": cpu})
    for family in ("statistic", "rejected_messages_total", "role_cpu_cores"):
        assert sum(name.startswith(f"penstock_{family}{{") for name in found) == LABELS


def test_a_run_without_figures_is_not_ready() -> None:
    found = scraped()
    assert found["penstock_ready"] == 0.0
    assert "penstock_env_steps_total" not in found
    waiting = {"learner_steps": 500, "ledger": {"compute": 0.0, "wait_data": 1.0}}
    assert scraped(waiting)["penstock_ready"] == 0.0  # resumed, and without a batch so far


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    made = PrometheusSink("127.0.0.1", 0, ABOUT)
    yield made
    made.close()


def answer(sink: PrometheusSink, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(sink.url.replace("/metrics", path), timeout=10) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_probes_follow_the_loop_and_the_first_step(
    sink: PrometheusSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(sink, "/healthz") == (200, "ok\n")
    assert answer(sink, "/readyz") == (503, "the learner has not taken a step yet\n")
    sink.metrics(METRICS)
    assert answer(sink, "/readyz") == (200, "ok\n")
    monkeypatch.setattr(prometheus, "HEALTHY_S", -1.0)
    code, text = answer(sink, "/healthz")
    assert (code, text[:37]) == (503, "the supervisor's loop has not turned ")
    assert answer(sink, "/other")[0] == 404


def test_a_scrape_has_the_newest_figures_and_events(sink: PrometheusSink) -> None:
    sink.metrics(METRICS)
    assert series(answer(sink, "/metrics")[1])["penstock_env_steps_total"] == 1000
    sink.metrics({**METRICS, "env_steps": 2000})
    sink.event(RunEvent("hang", "actor-0 hangs", "actor-0", 3))
    sink.event(RunEvent("a_word_of_a_role", "", "actor-0", 3, reported=True))
    sink.event(RunEvent("checkpoint", "was written", "learner-0", 0, result={}))
    found = series(answer(sink, "/metrics")[1])
    assert found["penstock_env_steps_total"] == 2000
    assert found['penstock_events_total{kind="hang"}'] == 1
    assert found['penstock_events_total{kind="other"}'] == 1
    assert found["penstock_last_checkpoint_timestamp_seconds"] > 1e9


def test_a_note_names_the_address_once(sink: PrometheusSink) -> None:
    notes: list[str] = []
    with notes_to(notes.append):
        sink.tick()
        sink.tick()
    assert notes == [f"metrics are served at {sink.url}"]


def test_taken_port_is_a_user_error(sink: PrometheusSink, tmp_path: Path) -> None:
    port = re.findall(r":(\d+)/", sink.url)[0]
    config = resolve("cartpole", [f"run.metrics_port={port}"])
    with pytest.raises(UserError, match=rf"run\.metrics_port={port} cannot be used on 127.* port"):
        make(config, tmp_path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "node7", "10.0.0.1"])
def test_address_open_to_other_hosts_needs_explicit_consent(host: str) -> None:
    options = ["run.metrics_port=9200", f"run.metrics_host='{host}'"]
    with pytest.raises(UserError, match=r"can be reached from other hosts.*metrics_insecure=true"):
        resolve("cartpole", options)
    resolve("cartpole", [*options, "run.metrics_insecure=true"])
    resolve("cartpole", options[1:])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_an_address_of_this_host_needs_no_consent(host: str) -> None:
    check_libraries(resolve("cartpole", ["run.metrics_port=0", f"run.metrics_host='{host}'"]))


def test_invalid_port_is_refused() -> None:
    with pytest.raises(UserError, match=r"run\.metrics_port is 70000; it must be a port from 0"):
        resolve("cartpole", ["run.metrics_port=70000"])


@pytest.mark.parametrize("file", ["penstock-dashboard.json", "penstock-alerts.yml"])
def test_dashboard_and_rules_use_existing_metrics(file: str) -> None:
    text = (FOLDER / file).read_text()
    if file.endswith(".json"):
        panels = json.loads(text)["panels"]
        text = "\n".join(t["expr"] for panel in panels for t in panel["targets"])
    state = RunState()
    known = {**METRICS, "updates_skipped": 0, "learner_ceiling_steps_per_s": 1.0}
    state.add_interval({**known, "policy_lag_mean": 1.0, "policy_lag_max": 1})
    state.on_event(RunEvent("checkpoint", "was written"))
    offered = exposition(state, ABOUT).decode()
    exists = set(re.findall(r"^# TYPE (\w+) ", offered, re.MULTILINE))
    used = {re.sub("_bucket$", "", name) for name in re.findall(r"\bpenstock_\w+", text)}
    assert len(used) > 5
    assert used - exists == set()


def test_documentation_names_every_metric() -> None:
    page = (Path(__file__).parents[3] / "docs" / "prometheus.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`penstock_.*?) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(penstock_\w+)`", row)}
    everything = {figure.key: 1.0 for figure in (*prometheus.COUNTERS, *prometheus.GAUGES)}
    state = RunState()
    state.add_interval({**METRICS, **everything})
    state.on_event(RunEvent("checkpoint", "was written"))
    offered = exposition(state, ABOUT).decode()
    assert named == set(re.findall(r"^# TYPE (\w+) ", offered, re.MULTILINE))
