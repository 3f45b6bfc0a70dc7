"""A run that is scraped by a real Prometheus, and what its tools say of names and rules."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest

import penstock.monitor
from train_command import SMALL, WAIT_S, Penstock

pytestmark = [pytest.mark.system, pytest.mark.slow]
pytest.importorskip("prometheus_client")
for program in ("prometheus", "promtool"):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed", allow_module_level=True)

FOLDER = Path(penstock.monitor.__file__).parent / "grafana"
RULES, DASHBOARD = FOLDER / "penstock-alerts.yml", FOLDER / "penstock-dashboard.json"
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs: [{{job_name: penstock, static_configs: [{{targets: ["{target}"]}}]}}]
"""


def read(url: str) -> str:
    with urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def until(condition: Callable[[], Any]) -> Any:
    """The first true value of the condition; errors of a connection count as false."""
    ends_s = time.monotonic() + WAIT_S
    while time.monotonic() < ends_s:
        try:
            if found := condition():
                return found
        except (URLError, ConnectionError):
            pass
        time.sleep(0.2)
    raise AssertionError("not within the time")


def address(run_dir: Path) -> str:
    """Host and port of the metrics of a run, by its note; empty before that."""
    events = run_dir / "logs" / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    texts = [text for line in lines if "served at" in (text := json.loads(line)["text"])]
    return texts[0].split("//")[1].removesuffix("/metrics") if texts else ""


def healths(url: str) -> set[str]:
    """Of all alert rules."""
    groups = json.loads(read(url))["data"]["groups"]
    return {rule["health"] for group in groups for rule in group["rules"]}


def filled(expression: str) -> str:
    """An expression of the dashboard with the values of its variables."""
    return expression.replace("$instance", ".*").replace("$__rate_interval", "30s")


def test_alert_rules_are_valid() -> None:
    subprocess.run(["promtool", "check", "rules", str(RULES)], check=True, capture_output=True)


def test_prometheus_scrapes_a_run(tmp_path: Path, penstock: Penstock) -> None:
    run = penstock("train", "cartpole", "--json", *SMALL, "run.dir=run", "run.metrics_port=0")
    target = until(lambda: address(tmp_path / "run"))
    until(lambda: read(f"http://{target}/readyz") == "ok\n")

    scrape = read(f"http://{target}/metrics")
    linted = subprocess.run(
        ["promtool", "check", "metrics"], input=scrape, text=True, capture_output=True
    )
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, "", "")

    (tmp_path / "prometheus.yml").write_text(CONFIG.format(rules=RULES, target=target))
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={listen}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:

        def query(expression: str) -> list[Any]:
            answer = json.loads(read(f"http://{listen}/api/v1/query?query={quote(expression)}"))
            assert answer["status"] == "success"
            return list(answer["data"]["result"])

        [rising] = until(lambda: query("rate(penstock_learner_steps_total[30s]) > 0"))
        assert rising["metric"]["job"] == "penstock"
        assert query('penstock_run_info{env="CartPole-v1"}')
        assert query("histogram_quantile(0.5, penstock_sample_latency_seconds_bucket)")
        assert until(lambda: healths(f"http://{listen}/api/v1/rules") == {"ok"})
        assert query('ALERTS{alertname="PenstockDown"}') == []
        panels = json.loads(DASHBOARD.read_text())["panels"]
        shown = {
            panel["title"]: [query(filled(t["expr"])) for t in panel["targets"]] for panel in panels
        }
        assert all(shown["Time of the learner"] + shown["Latency of samples"] + shown["Losses"])
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(WAIT_S)
    run.process.send_signal(signal.SIGINT)
    code, summary, _ = run.end()
    assert (code, summary["exit_reason"]) == (130, "interrupted")
    with pytest.raises(URLError):
        read(f"http://{target}/healthz")
