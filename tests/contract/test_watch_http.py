"""The page of `penstock watch` over HTTP: what it serves and which requests it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from run_folders import ACCOUNTING, LEDGER, STEPS, make_run

pytest.importorskip("starlette")
pytest.importorskip("httpx2")
pytest.importorskip("plotly")

import httpx2
from starlette.testclient import TestClient

from penstock.configs.errors import UserError
from penstock.core.web import connections
from penstock.core.web.guard import HEADERS, ORDER_HEADER, Guard
from penstock.core.web.listen import Listen
from penstock.evaluation.decisions import FORMAT, NBYTES
from penstock.watch import app as app_module
from penstock.watch import catalog as catalog_module
from penstock.watch import server as server_module
from penstock.watch.app import make_app
from penstock.watch.catalog import RunCatalog
from penstock.watch.page_files import STATIC
from penstock.watch.views import Views

BASE = "http://127.0.0.1:8700"
TOKEN = "0123456789abcdef"
HTML = "<img src=x onerror=alert(1)>"
GETS = (
    *("runs", "now", "curves", "metrics", "ledgers", "events", "about", "agent"),
    *("profile", "timeline", "recorded"),
)


def client(folder: Path, guard: Guard | None = None, base: str = BASE) -> TestClient:
    app = make_app(Views(RunCatalog(folder)), guard or Guard(is_own=lambda scope: True))
    return TestClient(app, base_url=base, follow_redirects=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_run(folder / "one", [10.0 * i for i in range(20)], evaluated={500: 40.0, 1500: 90.0})
    make_run(folder / "group/seed-0", [1.0, 2.0, 3.0], "run.seed=0")
    make_run(folder / "group/seed-1", [2.0, 3.0, 4.0], "run.seed=1")
    make_run(folder / "died", [1.0, 2.0], "learner.lr=0.125", ends=False)
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


@pytest.fixture
def page(runs: Path) -> Iterator[TestClient]:
    with client(runs) as found:
        yield found


def get(page: TestClient, view: str, **parameters: Any) -> Any:
    reply = page.get(f"/api/{view}", params=parameters)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_all_runs_are_listed(page: TestClient) -> None:
    rows = {row["name"]: row for row in get(page, "runs")["runs"]}
    assert set(rows) == {"one", "group/seed-0", "group/seed-1", "died"}
    assert rows["one"]["state"] == "ended"
    assert rows["died"]["state"] == "died"
    assert rows["one"]["return_last"] == 190.0
    assert rows["one"]["env"] == "CartPole-v1"
    assert rows["group/seed-1"]["seed"] == "1"
    assert rows["one"]["algorithm"] == "impala"


def test_folder_that_is_itself_a_run_is_listed(runs: Path) -> None:
    with client(runs / "one") as page:
        [row] = get(page, "runs")["runs"]
        assert (row["name"], row["title"]) == (".", "one")
        assert get(page, "now", run=".")["figures"]["env_steps"] == 1900


def test_curves_have_the_measured_points(page: TestClient) -> None:
    found = get(page, "curves", run="one", metric=["episode_return_mean", "eval_return_mean"])
    [line] = found["curves"]["episode_return_mean"]
    assert line["x"] == [STEPS * i for i in range(20)]
    assert line["y"] == [10 * i for i in range(20)]
    [evaluated] = found["curves"]["eval_return_mean"]
    assert evaluated["x"] == [500, 1500]
    assert evaluated["y"] == [41, 91]
    assert found["read"] == {"one": 1.0}


def test_curves_of_several_runs_are_served_by_time_and_smoothed(page: TestClient) -> None:
    names = ["group/seed-0", "group/seed-1"]
    found = get(page, "curves", run=names, metric="episode_return_mean", x="time_s", smooth=2)
    lines = {line["run"]: line for line in found["curves"]["episode_return_mean"]}
    assert lines["group/seed-0"]["x"] == [0, 1, 2]
    assert lines["group/seed-1"]["smooth"]["y"] == [2, 2.5, 3.5]


def test_seeds_are_served_as_mean_and_range(page: TestClient) -> None:
    names = ["group/seed-0", "one", "group/seed-1"]
    asked = {"run": names, "metric": "episode_return_mean", "x": "time_s", "seeds": "together"}
    lines = {
        line["run"]: line for line in get(page, "curves", **asked)["curves"]["episode_return_mean"]
    }
    assert set(lines) == {"group/seed-0", "one"}
    assert lines["one"]["y"] == [10 * i for i in range(20)]
    band = lines["group/seed-0"]
    assert band["count"] == 2
    assert (band["x"][0], band["x"][-1]) == (0, 2)
    assert (band["low"][0], band["y"][0], band["high"][0]) == (1, 1.5, 2)
    assert (band["low"][-1], band["y"][-1], band["high"][-1]) == (3, 3.5, 4)


def test_reply_without_news_is_short(page: TestClient, runs: Path) -> None:
    asked = {"run": "died", "metric": "episode_return_mean"}
    first = get(page, "curves", **asked)
    again = get(page, "curves", **asked, known=first["version"])
    assert again["unchanged"]
    assert "curves" not in again
    with (runs / "died/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"env_steps": 300, "time_s": 3.0, "episode_return_mean": 7.0}) + "\n")
    [line] = get(page, "curves", **asked, known=first["version"])["curves"]["episode_return_mean"]
    assert line["y"] == [1, 2, 7]


def test_curve_request_limits_range_and_number_of_points(page: TestClient) -> None:
    asked = {"run": "one", "metric": "episode_return_mean", "low": 1000, "high": 1200}
    [line] = get(page, "curves", **asked)["curves"]["episode_return_mean"]
    assert line["x"] == [900, 1000, 1100, 1200, 1300]
    [line] = get(page, "curves", run="one", metric="grad_norm", points=10)["curves"]["grad_norm"]
    assert len(line["x"]) <= 11


def test_now_endpoint_describes_the_current_state_of_a_run(page: TestClient) -> None:
    found = get(page, "now", run="one")
    assert found["state"] == "ended"
    assert found["exit_reason"] == "env_steps"
    assert found["figures"]["trained_steps"] == 1900
    assert found["flow"]["environments"]["steps_per_s"] == STEPS
    assert found["flow"]["learner"]["ledger"] == pytest.approx(LEDGER)
    assert found["verdict"]["finding"]
    assert found["verdict"]["next_step"]
    assert found["status"]["live"] is False


def test_accounting_of_samples_is_served(page: TestClient) -> None:
    found = get(page, "about", run="one")["accounting"]
    assert {key: found[key] for key in ACCOUNTING} == ACCOUNTING
    died = get(page, "about", run="died")["accounting"]
    assert died["in_flight"] is None
    assert found["complete"]
    assert not died["complete"]
    assert died["at"] > 0


def test_about_endpoint_marks_options_that_differ_from_the_preset(page: TestClient) -> None:
    found = get(page, "about", run="died")
    differing = {o["name"]: (o["value"], o["preset"]) for o in found["options"] if o["differs"]}
    assert differing["learner.lr"][0] == "0.125"
    assert differing["learner.lr"][1] != "0.125"
    assert "algo.name" not in differing
    assert found["base"]
    assert found["starts"][0]["shown"]["penstock"]


def test_shares_of_each_ledger_add_up(page: TestClient) -> None:
    [learner] = get(page, "ledgers", run="one")["processes"]
    for shares in zip(*learner["parts"].values(), strict=True):
        assert sum(shares) == pytest.approx(1.0)


def test_learner_share_is_the_same_in_all_views(page: TestClient) -> None:
    [learner] = get(page, "ledgers", run="one")["processes"]
    present = get(page, "now", run="one")
    assert learner["computes"] == present["flow"]["learner"]["ledger"]["compute"] == 0.75
    assert get(page, "ledgers", run="one")["seconds"] == present["seconds"]


def test_a_run_that_died_has_its_death_among_the_events(page: TestClient, runs: Path) -> None:
    os.utime(runs / "died/metrics.jsonl", (2e9, 2e9))
    found = get(page, "events", run="died")
    assert found["events"][0]["kind"] == "died"
    assert found["events"][0]["time"] == pytest.approx(2e9)
    assert found["kinds"] == {"start": 1, "died": 1}
    assert "died" not in get(page, "events", run="one")["kinds"]


def test_checkpoints_have_their_steps(page: TestClient, runs: Path) -> None:
    def write(name: str, head: bytes) -> None:
        (runs / "died/checkpoints" / name).mkdir(parents=True)
        (runs / "died/checkpoints" / name / "checkpoint.safetensors").write_bytes(head)

    about = json.dumps({"meta": {"progress": {"trained_steps": 150}}})
    head = json.dumps({"__metadata__": {"penstock": about}}).encode()
    write("last", len(head).to_bytes(8, "little") + head)
    write("huge", (1 << 60).to_bytes(8, "little") + head)
    write("short", b"1")
    write("list", (2).to_bytes(8, "little") + b"[]")
    found = {c["name"]: c["trained_steps"] for c in get(page, "about", run="died")["checkpoints"]}
    assert found == {"last": 150, "huge": None, "short": None, "list": None}


def test_events_are_filtered(page: TestClient) -> None:
    found = get(page, "events", run="one")
    assert found["kinds"] == {"start": 1}
    assert get(page, "events", run="one", kind="start")["events"][0]["role"] == "actor-0"
    assert get(page, "events", run="one", text="WAS start")["matching"] == 1
    assert get(page, "events", run="one", role="actor-9")["events"] == []


def test_log_of_a_process_is_served(page: TestClient, runs: Path) -> None:
    (runs / "died/logs/actor-0.log").write_text(f"{HTML}\nlast words\n")
    assert get(page, "log", run="died", role="actor-0")["text"] == f"{HTML}\nlast words\n"
    assert get(page, "log", run="died", role="learner-0")["text"] is None


def test_videos_are_served_in_parts(page: TestClient, runs: Path) -> None:
    assert get(page, "agent", run="one")["videos"] == []
    (runs / "one/videos").mkdir()
    (runs / "one/videos/a.mp4").write_bytes(bytes(range(200)))
    (runs / "one/videos/b.txt").write_text("no video")
    assert [v["file"] for v in get(page, "agent", run="one")["videos"]] == ["a.mp4"]
    where = {"run": "one", "file": "a.mp4"}
    reply = page.get("/video", params=where, headers={"range": "bytes=10-19"})
    assert reply.status_code == 206
    assert reply.content == bytes(range(10, 20))
    assert reply.headers["content-type"] == "video/mp4"
    assert page.get("/video", params={"run": "one", "file": "b.txt"}).status_code == 404


def test_only_valid_decisions_of_a_video_are_served(page: TestClient, runs: Path) -> None:
    videos = runs / "one/videos"
    videos.mkdir()
    (videos / "a.mp4").touch()
    (videos / ".best-video.part.mp4").touch()
    assert [v["file"] for v in get(page, "agent", run="one")["videos"]] == ["a.mp4"]
    assert get(page, "decisions", run="one", file="a.mp4")["decisions"] is None
    found = {"format": FORMAT, "picture": [0, 1], "value": [1.5, "x"], "names": [HTML]}
    (videos / "a.mp4.json").write_text(json.dumps(found))
    served = get(page, "decisions", run="one", file="a.mp4")["decisions"]
    assert (served["value"], served["names"]) == ([1.5, None], [HTML])
    with (videos / "a.mp4.json").open("a") as file:
        file.write(" " * NBYTES)
    assert get(page, "decisions", run="one", file="a.mp4")["decisions"] is None
    (videos / "a.mp4.json").unlink()
    (runs.parent / "secret.json").write_text(json.dumps(found))
    (videos / "a.mp4.json").symlink_to(runs.parent / "secret.json")
    assert get(page, "decisions", run="one", file="a.mp4")["decisions"] is None
    for name in ("b.mp4", "../a.mp4", "a.mp4.json"):
        reply = page.get("/api/decisions", params={"run": "one", "file": name})
        assert reply.status_code == 400
        assert "has no video" in reply.json()["error"]


def test_recording_order_to_an_ended_run_is_refused(page: TestClient) -> None:
    token = get(page, "session")["token"]
    reply = page.post("/order/record", json={"run": "one"}, headers={ORDER_HEADER: token})
    assert reply.status_code == 400
    assert "has ended" in reply.json()["error"]
    assert page.post("/order/record", json={"run": "one"}).status_code == 403


def test_page_and_its_scripts_are_served(page: TestClient) -> None:
    reply = page.get("/")
    assert reply.status_code == 200
    for name in re.findall(r'(?:src|href)="([^"#:]+)"', reply.text):
        assert page.get(f"/{name}").status_code == 200, name
    script = page.get("/vendor/plotly.min.js")
    assert script.status_code == 200
    assert b"plotly" in script.content[:200].lower()


@pytest.mark.parametrize("path", sorted(STATIC.iterdir()), ids=lambda path: path.name)
def test_scripts_set_text_only_and_ask_no_other_host(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", text)
    assert re.findall(r"https?://[^\s\"'`]+", text) in ([], ["http://www.w3.org/2000/svg"])


# --- attackers


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8700", "127.0.0.1.evil.example", "10.0.0.1:8700", "",
        "127.0.0.1@evil.example", "localhost.", "[::1].evil", "127.0.0.1:8700:1", "0.0.0.0:8700",
    ],
)  # fmt: skip
def test_another_host_is_refused(page: TestClient, host: str) -> None:
    for path in ("/", "/api/runs", "/app.js", "/vendor/plotly.min.js"):
        reply = page.get(path, headers={"host": host})
        assert reply.status_code == 403, path
        assert "one" not in reply.text.split()


@pytest.mark.parametrize("host", ["127.0.0.1:8700", "localhost:9000", "LOCALHOST", "[::1]:1"])
def test_loopback_names_and_forwarded_ports_are_accepted(page: TestClient, host: str) -> None:
    assert page.get("/api/runs", headers={"host": host}).status_code == 200


def test_request_with_two_host_headers_is_refused(page: TestClient) -> None:
    reply = page.get("/api/runs", headers=[("host", "127.0.0.1:8700"), ("host", "evil.example")])
    assert reply.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:8700"},
        {"origin": "http://127.0.0.1:8701"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_origin_is_refused(page: TestClient, headers: dict[str, str]) -> None:
    assert page.get("/api/runs", headers=headers).status_code == 403
    assert order(page, **headers).status_code == 403


def order(page: TestClient, kind: str = "save", **headers: str) -> Any:
    token = get(page, "session")["token"]
    known = {"x-penstock-token": token, "origin": BASE} | headers
    return page.post(f"/order/{kind}", json={"run": "one"}, headers=known)


def test_an_order_needs_the_token_and_json(page: TestClient) -> None:
    assert order(page, **{"x-penstock-token": "wrong"}).status_code == 403
    assert page.post("/order/save", json={"run": "one"}).status_code == 403
    assert order(page, **{"content-type": "text/plain"}).status_code == 415
    token = {"x-penstock-token": get(page, "session")["token"]}
    long = page.post("/order/save", json={"run": "x" * 5000}, headers=token)
    assert long.status_code == 413
    for body in ("[]", "{}", '{"run": 1}', "not json"):
        json_type = {"content-type": "application/json"}
        assert page.post("/order/save", content=body, headers=token | json_type).status_code == 400


def test_orders_to_an_ended_run_are_refused(page: TestClient) -> None:
    for kind in ("save", "stop", "stacks", "timeline"):
        reply = order(page, kind)
        assert reply.status_code == 400
        assert "has ended" in reply.json()["error"]
    assert order(page, "delete").status_code == 400


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_are_refused(page: TestClient, method: str) -> None:
    assert page.request(method, "/api/runs").status_code == 405


def test_get_request_gives_no_order(page: TestClient) -> None:
    assert page.get("/order/stop").status_code in (404, 405)
    token = {"x-penstock-token": get(page, "session")["token"]}
    assert page.post("/api/runs", json={}, headers=token).status_code == 405


@pytest.mark.parametrize(
    "name", ["..", "../one", "one/..", "/etc", "one/../../secret", "one\0", "%2e%2e", "nothing", ""]
)
def test_run_name_outside_the_list_is_refused(page: TestClient, name: str) -> None:
    for view in (*("now", "curves", "ledgers", "events", "about", "agent"), *GETS[-3:]):
        reply = page.get(f"/api/{view}", params={"run": name, "metric": "loss"})
        assert reply.status_code == 400, view
        assert "choose one of the list" in reply.json()["error"]


@pytest.mark.parametrize("role", ["../config", "../../secret", "actor-0.log", "/etc/passwd", "."])
def test_log_outside_the_folder_of_logs_is_refused(page: TestClient, runs: Path, role: str) -> None:
    (runs.parent / "secret.log").write_text("secret")
    assert get(page, "log", run="one", role=role)["text"] is None


@pytest.mark.parametrize("file", ["../config.yaml", "../../../secret.mp4", "/etc/passwd", "l.mp4"])
def test_video_outside_the_folder_of_videos_is_refused(
    page: TestClient, runs: Path, file: str
) -> None:
    (runs.parent / "secret.mp4").write_text("secret")
    (runs / "one/videos").mkdir()
    (runs / "one/videos/l.mp4").symlink_to(runs.parent / "secret.mp4")
    assert page.get("/video", params={"run": "one", "file": file}).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/static/../app.py", "/..%2f..%2fetc%2fpasswd", "//etc/passwd",
        "/app.py", "/%2e%2e/views.py", "/api/../../x", "/vendor/../app.py", "/index.html/",
    ],
)  # fmt: skip
def test_only_the_page_is_served_as_files(page: TestClient, path: str) -> None:
    reply = page.get(path)
    assert reply.status_code == 404
    assert "root:" not in reply.text


def test_links_to_outside_folders_are_not_listed(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "SEARCHED_EVERY_S", 0.0)
    make_run(tmp_path / "outside", [1.0])
    (runs / "link").symlink_to(tmp_path / "outside")
    (runs / "circle").symlink_to(runs)
    (runs / "inside").symlink_to(runs / "one")
    names = RunCatalog(runs).names()
    assert "link" not in names
    assert len(names) == 4  # "one" by one of its names


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_folders_of_other_users_are_not_listed(runs: Path, tmp_path: Path) -> None:
    os.chown(runs / "one", 65534, 65534)
    assert "one" not in RunCatalog(runs).names()
    os.chown(runs, 65534, 65534)
    with pytest.raises(UserError, match="belongs to another user"):
        RunCatalog(runs)


def test_links_within_a_run_are_not_followed(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"kind": "secret", "text": "hidden words"}\n')
    hostile = runs / "hostile"
    (hostile / "logs").mkdir(parents=True)
    (hostile / "metrics.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (hostile / "config.yaml").symlink_to(tmp_path / "secret.jsonl")
    (hostile / "logs/events.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (hostile / "logs/a.log").symlink_to(tmp_path / "secret.jsonl")
    with client(runs) as page:
        for view in (*("now", "ledgers", "events", "about", "agent"), *GETS[-3:]):
            assert "hidden words" not in json.dumps(get(page, view, run="hostile"))
        assert get(page, "log", run="hostile", role="a")["text"] is None


def test_hostile_texts_are_served_as_json(runs: Path) -> None:
    config = (runs / "one/config.yaml").read_text()
    (runs / "one/config.yaml").write_text(config.replace("CartPole-v1", HTML))
    with (runs / "one/logs/events.jsonl").open("a") as file:
        event = {"kind": HTML, "role": HTML, "text": HTML, "time": HTML, "uptime_s": [], "data": 3}
        file.write(json.dumps(event) + "\n[]\n{}\n")
    with client(runs) as page:
        for view in GETS:
            reply = page.get(f"/api/{view}", params={"run": "one", "metric": "grad_norm"})
            assert reply.status_code == 200, reply.text
            assert reply.headers["content-type"] == "application/json"
        assert get(page, "about", run="one")["options"][0]["value"] == HTML
        assert get(page, "events", run="one", kind=HTML)["matching"] == 1


def test_unusual_files_in_a_run_do_not_break_the_page(tmp_path: Path) -> None:
    hostile = tmp_path / "runs/hostile"
    (hostile / "logs").mkdir(parents=True)
    (hostile / "checkpoints").write_text("no folder")
    (hostile / "videos").write_text("no folder")
    lines = [
        {"time_s": "x", "env_steps": True, "ledger": [], "ledgers": {"a": 1, "learner-x": {}}},
        {"time_s": 1e308, "env_steps": -1, "ledger": {"compute": -5}, "dropped": 3, "lost": [1]},
        {"time_s": -1, "ranks": [[[]], 1], "policy_lag_histogram": {"a": 1}, "queue_fill": 1e99},
        {"time_s": 5, "ledger": {"compute": 2.0}, "ledgers": {"actor-0": {"wait": -1}}},
    ]
    (hostile / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (hostile / "evaluations.jsonl").write_text('{"return": 1}\n{"greedy": [], "time_s": []}\n')
    (hostile / "summary.json").write_text('{"accounting": [], "error": 5, "exit_reason": {}}')
    (hostile / "versions.json").write_text('{"starts": [1, {"packages": 2}, {"time": "x"}]}')
    (hostile / "config.yaml").write_text("env: [1, 2]\nalgo: {name: {x: y}}\n")
    (hostile / "supervisor.json").write_text('{"socket": 5, "pid": "x"}')
    with client(tmp_path / "runs") as page:
        for view in GETS:
            reply = page.get(f"/api/{view}", params={"run": "hostile", "metric": "queue_fill"})
            assert reply.status_code == 200, (view, reply.text)


@pytest.mark.parametrize(
    "parameters",
    [
        {"x": "loss"}, {"smooth": "0"}, {"smooth": "-1"}, {"smooth": "1e3"}, {"smooth": "9" * 400},
        {"points": "1"}, {"points": "100000"}, {"low": "nan"}, {"low": "x"}, {"high": "1e999"},
        {"run": ["one"] * 30}, {"metric": ["loss"] * 100}, {"metric": "x" * 2000},
        {"x": ["a", "b"]},
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(page: TestClient, parameters: dict[str, Any]) -> None:
    asked = {"run": "one", "metric": "grad_norm"} | parameters
    reply = page.get("/api/curves", params=asked)
    assert reply.status_code == 400
    assert reply.json()["error"]


def test_a_long_address_is_refused(page: TestClient) -> None:
    assert page.get("/api/runs", params={"x": "y" * 9000}).status_code == 414


def test_every_reply_has_the_security_headers(page: TestClient) -> None:
    replies = [page.get(path) for path in ("/", "/api/runs", "/app.js", "/nothing")]
    replies.append(page.get("/", headers={"host": "evil.example"}))
    for reply in replies:
        for name, value in HEADERS.items():
            assert reply.headers[name] == value
        assert "access-control-allow-origin" not in reply.headers
    assert page.get("/api/runs").headers["cache-control"] == "no-store"


@contextmanager
def served(runs: Path, guard: Guard) -> Iterator[tuple[str, int]]:
    """Where uvicorn serves the page."""
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    app = make_app(Views(RunCatalog(runs)), guard)
    protocol: Any = connections.limited(guard.admits)
    config = uvicorn.Config(
        app,
        log_level="error",
        lifespan="off",
        ws="none",
        http=protocol,
        limit_concurrency=server_module.CONNECTIONS,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        ends_s = time.monotonic() + 20
        while not server.started and time.monotonic() < ends_s:
            time.sleep(0.01)
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@pytest.fixture
def address(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Where the page is served, with time limits of half a second."""
    monkeypatch.setattr(connections, "IDLE_S", 0.5)
    monkeypatch.setattr(app_module, "BODY_S", 0.5)
    with served(runs, Guard(order_token=TOKEN)) as where:
        yield where


def test_peer_of_another_user_is_refused_without_occupying_a_connection(runs: Path) -> None:
    with served(runs, Guard(is_own=lambda scope: False)) as address, ExitStack() as stack:
        for _ in range(70):
            other = stack.enter_context(socket.create_connection(address, timeout=20))
            assert other.recv(1 << 16).startswith(b"HTTP/1.1 403")
            assert other.recv(1) == b""


def test_seventy_silent_connections_do_not_block_the_owner(runs: Path) -> None:
    with served(runs, Guard()) as address, ExitStack() as stack:
        for _ in range(70):
            stack.enter_context(socket.create_connection(address, timeout=20))
        with httpx2.Client(base_url=f"http://127.0.0.1:{address[1]}", trust_env=False) as own:
            assert own.get("/api/runs").status_code == 200


def test_own_connection_is_recognised_as_of_this_user(address: tuple[str, int]) -> None:
    """Through uvicorn, as `is_own_peer` reads the addresses of its connections."""
    with httpx2.Client(base_url=f"http://127.0.0.1:{address[1]}", trust_env=False) as own:
        assert own.get("/api/runs").status_code == 200


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: 127.0",
        b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\nG",  # the next one is begun
    ],
)
def test_a_client_that_completes_no_request_is_closed(
    address: tuple[str, int], begun: bytes
) -> None:
    with socket.create_connection(address, timeout=20) as slow:
        slow.sendall(begun)
        while slow.recv(1 << 16):
            pass


def test_incomplete_order_request_gets_a_timeout_reply(address: tuple[str, int]) -> None:
    head = (
        f"POST /order/save HTTP/1.1\r\nHost: localhost\r\nX-Penstock-Token: {TOKEN}\r\n"
        "Content-Type: application/json\r\nContent-Length: 20\r\n\r\n{"
    )
    with socket.create_connection(address, timeout=20) as slow:
        slow.sendall(head.encode())
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408")


def test_a_token_in_the_address_becomes_a_cookie(runs: Path) -> None:
    with client(runs, Guard(token=TOKEN, is_own=lambda scope: False)) as page:
        assert page.get("/api/runs").status_code == 401
        assert page.get("/", params={"token": "wrong"}).status_code == 401
        assert page.get("/api/runs", params={"token": TOKEN}).status_code == 401
        evil = page.get("/", params={"token": TOKEN}, headers={"host": "evil.example"})
        assert evil.status_code == 403
        reply = page.get("/", params={"token": TOKEN})
        assert reply.status_code == 303
        assert reply.headers["location"] == "/"
        for part in ("HttpOnly", "SameSite=Strict"):
            assert part in reply.headers["set-cookie"]
        assert page.get("/api/runs").status_code == 200
        page.cookies.clear()
        bearer = {"authorization": f"Bearer {TOKEN}"}
        assert page.get("/api/runs", headers=bearer).status_code == 200
        assert page.get("/api/runs", headers={"authorization": "Bearer x"}).status_code == 401
        assert page.get("/api/runs", headers={"cookie": "penstock_watch=x"}).status_code == 401


def test_an_address_of_more_than_eight_fields_is_refused(runs: Path) -> None:
    eight = {"token": TOKEN} | {f"field{number}": "x" for number in range(7)}
    with client(runs, Guard(token=TOKEN, is_own=lambda scope: False)) as page:
        assert page.get("/", params=eight).status_code == 303
        page.cookies.clear()
        reply = page.get("/", params=eight | {"ninth": "x"})
    assert reply.status_code == 400
    assert reply.text == "penstock: the address has 9 fields; at most 8 are read\n"


def test_cookie_is_secure_with_tls(runs: Path) -> None:
    guard = Guard(token=TOKEN, secure=True)
    with client(runs, guard, "https://127.0.0.1:8700") as page:
        assert "Secure" in page.get("/", params={"token": TOKEN}).headers["set-cookie"]


def test_exposed_page_accepts_its_addresses_and_host_name(runs: Path) -> None:
    guard = Listen("0.0.0.0", token=TOKEN, insecure=True).guard()
    bearer = {"authorization": f"Bearer {TOKEN}"}
    with client(runs, guard) as page:
        for host in ("192.0.2.7:8700", "[2001:db8::1]:8700", socket.gethostname()):
            assert page.get("/api/runs", headers=bearer | {"host": host}).status_code == 200, host
        assert page.get("/api/runs", headers=bearer | {"host": "a.example"}).status_code == 403
        assert page.get("/api/runs", headers={"host": "192.0.2.7:8700"}).status_code == 401


@pytest.mark.parametrize(
    ("listen", "reason"),
    [
        (Listen("0.0.0.0"), "add --token"),
        (Listen("10.0.0.1", token=TOKEN), "--tls-cert and --tls-key, or --insecure"),
        (Listen("0.0.0.0", insecure=True), "add --token"),
        (Listen(token="short"), "16 or more"),
        (Listen(token="x" * 20 + "\n"), "16 or more"),
        (Listen(tls_cert="a.pem"), "belong together"),
    ],
)
def test_contradictory_options_are_refused(listen: Listen, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        listen.check()


@pytest.mark.parametrize(
    "listen",
    [
        Listen(),
        Listen("::1", token=TOKEN),
        Listen("0.0.0.0", token=TOKEN, insecure=True),
        Listen("0.0.0.0", token=TOKEN, tls_cert="a", tls_key="b"),
    ],
)
def test_compatible_options_are_accepted(listen: Listen) -> None:
    listen.check()


def test_runs_of_many_lines_are_read_in_parts(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {f"metric_{i}": i / 7 for i in range(50)}
    with (runs / "died/metrics.jsonl").open("w") as file:
        for i in range(20_000):
            file.write(json.dumps({"env_steps": i, "time_s": i, "interval_s": 1.0, **line}) + "\n")
    with client(runs) as page:
        shares = []
        for _ in range(100):
            found = get(page, "curves", run="died", metric="metric_7")
            shares.append(found["read"]["died"])
            if shares[-1] == 1.0:
                break
        assert shares == sorted(shares)
        assert len(shares) > 1
        assert shares[-1] == 1.0
        [line] = found["curves"]["metric_7"]
        assert len(line["x"]) <= 601
        assert line["x"][-1] == 19_999
