"""`penstock report`: the page on a run with its data inside."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from penstock.configs.errors import UserError
from penstock.core.machine import VERSIONS
from penstock.evaluation.decisions import FORMAT
from penstock.monitor.run_folder.files import open_in
from penstock.watch import freeze
from penstock.watch.catalog import RunCatalog
from penstock.watch.freeze import report_page, write_report
from penstock.watch.views import Views
from run_folders import STEPS, make_run

pytest.importorskip("plotly")
BLOCK = re.compile(r'<script type="text/plain" id="([\w-]+)">([^<]*)</script>')


def frozen(*targets: Path) -> dict[str, Any]:
    """What the page on runs has in place of a server."""
    found: dict[str, Any] = json.loads(dict(BLOCK.findall(report_page(*targets)))["frozen"])
    return found


def answers(folder: Path) -> dict[str, Any]:
    """The answers of the page on one run, with the notes of the page."""
    found = frozen(folder)
    return {**found["answers"]["."], "notes": found["notes"]}


def test_report_answers_equal_those_of_the_server(tmp_path: Path) -> None:
    folder = make_run(
        tmp_path / "run", [1.0, 2.0, 3.0], "learner.lr=1e-5", "stop.return=2",
        evaluated={100: 5.0, 200: 6.5},
    )  # fmt: skip
    (folder / "logs" / "actor-0.log").write_text("printed\n")
    found, server = answers(folder), Views(RunCatalog(folder))
    for name in ("about", "agent", "events", "ledgers"):
        assert found["views"][name] == getattr(server, name)("."), name
    assert frozen(folder)["runs"] == server.runs()
    now = server.now(".")
    for name in ("state", "figures", "flow", "verdict", "status"):
        assert found["views"]["now"][name] == now[name], name
    assert found["logs"] == {"actor-0": "printed\n"}
    assert found["notes"] == []
    assert found["views"]["profile"] == {"profile": None}
    curves = found["curves"]
    assert curves["every"] == 1
    assert curves["columns"]["env_steps"] == [0, STEPS, 2 * STEPS]
    assert curves["columns"]["episode_return_mean"] == [1, 2, 3]
    assert curves["columns"]["ledger/compute"] == [0.75] * 3
    assert curves["targets"]["time_s"]["value"] == 2
    embedded = {name for names in found["views"]["metrics"]["groups"].values() for name in names}
    assert {name for name in curves["columns"] if name not in embedded} == set()


def test_report_file_is_private_and_may_be_placed_elsewhere(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    path = write_report(str(folder))
    assert path == folder / "report.html"
    assert path.stat().st_mode & 0o777 == 0o600, "it contains the config"
    out = tmp_path / "pages" / "run.html"
    assert write_report(str(folder), out=str(out)) == out
    with pytest.raises(UserError, match=r"cannot be written .*; give another --out"):
        write_report(str(folder), out=str(out / "below"))


def test_user_defined_names_are_escaped_in_the_report(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    folder = make_run(
        tmp_path / "a$x<b>&'$", [1.0, 2.0], f"env.kwargs={{title: {json.dumps(evil)}}}"
    )
    (folder / "videos").mkdir()
    (folder / "videos" / "<i>.mp4").write_bytes(b"film")
    (folder / "logs" / "events.jsonl").write_text(json.dumps({"kind": evil, "role": evil}) + "\n")
    (folder / "logs" / f"{evil.replace('/', '_')}.log").write_text(evil)
    (folder / "profile.json").write_text(json.dumps({"target": evil}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"env_steps": 300, "time_s": 3, evil: 1.0}) + "\n")
    starts = json.loads((folder / VERSIONS).read_text())
    starts["starts"][-1] |= {"commit": evil, "packages": {evil: evil}}
    (folder / VERSIONS).write_text(json.dumps(starts))
    text = report_page(folder)
    scripts = re.findall(r"<script[ >]", text, re.IGNORECASE)
    assert len(re.findall("</script", text, re.IGNORECASE)) == len(scripts) == 4
    assert evil not in text
    found = answers(folder)
    assert evil in found["curves"]["columns"]
    assert found["views"]["events"]["events"][0]["kind"] == evil
    assert found["videos"] == {"<i>.mp4": {"id": "video-0", "kind": "video/mp4"}}


def test_videos_are_embedded_up_to_a_size_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "my run", [1.0, 2.0])
    command = f"penstock record {shlex.quote(str(folder))}"
    assert answers(folder)["views"]["agent"]["record"] == command
    (folder / "videos").mkdir()
    for at_s, name in enumerate(("new.mp4", "old.gif", "notes.txt", "older.webm")):
        (folder / "videos" / name).write_bytes(name.encode())
        os.utime(folder / "videos" / name, (1e9 - at_s, 1e9 - at_s))
    blocks = dict(BLOCK.findall(report_page(folder)))
    assert [base64.b64decode(blocks[f"video-{i}"]).decode() for i in range(3)] == [
        "new.mp4", "old.gif", "older.webm",
    ]  # fmt: skip
    monkeypatch.setattr(freeze, "MOST_VIDEO_NBYTES", 15)
    found = answers(folder)
    assert list(found["videos"]) == ["new.mp4", "old.gif"]
    assert [video["file"] for video in found["views"]["agent"]["videos"]] == ["new.mp4", "old.gif"]
    assert found["notes"] == ["videos/older.webm is too large to be part of this file."]


def decided(video: Path) -> None:
    found = {"format": FORMAT, "picture": [0, 1], "value": [1.5, 2.5]}
    video.with_name(f"{video.name}.json").write_text(json.dumps(found))


def test_decisions_are_embedded_with_their_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    (folder / "videos").mkdir()
    for at_s, name in enumerate(("new.mp4", "old.mp4")):
        (folder / "videos" / name).write_bytes(b"film")
        decided(folder / "videos" / name)
        os.utime(folder / "videos" / name, (1e9 - at_s, 1e9 - at_s))
    found = answers(folder)
    assert [each["value"] for each in found["decisions"].values()] == [[1.5, 2.5]] * 2
    nbytes = 4 + len(json.dumps(found["decisions"]["new.mp4"]))
    monkeypatch.setattr(freeze, "MOST_VIDEO_NBYTES", 2 * nbytes - 1)
    assert list(answers(folder)["videos"]) == ["new.mp4"]


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_run_that_changes_its_videos_during_the_report_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    (folder / "videos").mkdir()
    video = folder / "videos" / "now.mp4"
    video.write_bytes(b"film")
    decided(video)
    opened = open_in

    def then_change(place: Path, *parts: str) -> BinaryIO:
        file = opened(place, *parts)
        if parts[0] == "videos":
            video.unlink()
            if how == "replaced":
                video.write_bytes(b"another film")
        return file

    monkeypatch.setattr(freeze, "open_in", then_change)
    found = answers(folder)
    assert (list(found["videos"]), found["decisions"]) == (["now.mp4"], {"now.mp4": None})
    video.unlink(missing_ok=True)
    video.write_bytes(b"film")

    def gone(place: Path, *parts: str) -> BinaryIO:
        video.unlink(missing_ok=True)
        return opened(place, *parts)

    monkeypatch.setattr(freeze, "open_in", gone)
    found = answers(folder)
    assert (found["videos"], found["notes"]) == ({}, [])


def test_actor_logs_are_left_out_when_there_are_many(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    roles = [*(f"actor-{i}" for i in range(60)), "learner-0", "server-0", "connector-0", "relay-1"]
    for role in (*roles, "evaluator-0"):
        (folder / "logs" / f"{role}.log").write_text("printed\n")
    found = answers(folder)
    first = ["learner-0", "connector-0", "relay-1", "evaluator-0", "server-0"]
    assert list(found["logs"]) == [*first, *(f"actor-{i}" for i in range(35))]
    assert found["logs_left_out"] == [f"actor-{i}" for i in range(35, 60)]
    assert found["notes"] == ["Of 65 logs 40 are part of this file: learners first, actors last."]


def test_a_long_run_is_thinned_to_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", [float(i) for i in range(10)])
    whole = answers(folder)["curves"]
    monkeypatch.setattr(freeze, "MOST_VALUES", 4 * len(whole["columns"]))
    found = answers(folder)
    curves = found["curves"]
    assert curves["every"] == 3
    assert curves["columns"]["episode_return_mean"] == [1, 4, 7, 9]
    assert curves["columns"]["env_steps"] == [2 * STEPS, 5 * STEPS, 8 * STEPS, 9 * STEPS]
    assert found["notes"] == ["Each point of a curve is the mean of 3 of the 10 measurements."]


def test_process_shares_are_only_in_the_time_view(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0], ends=False)
    with (folder / "metrics.jsonl").open("a") as file:
        line = {"env_steps": 200, "time_s": 2, "ledgers": {"actor-0": {"step": 0.5, "wait": 0.5}}}
        file.write(json.dumps(line) + "\n")
    found = answers(folder)
    assert not [name for name in found["curves"]["columns"] if name.startswith("ledgers/")]
    assert "ledgers/actor-0/step" not in json.dumps(found["views"]["metrics"])
    assert "actor-0" in {each["name"] for each in found["views"]["ledgers"]["processes"]}


def test_killed_run_and_run_of_an_older_version_have_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0], ends=False)
    found = answers(folder)["views"]
    assert found["now"]["state"] == "died"
    assert found["about"]["accounting"]["complete"] is False
    assert found["events"]["events"][0]["kind"] == "died"
    for name in (VERSIONS, "config.yaml"):
        (folder / name).unlink()
    found = answers(folder)["views"]
    assert found["about"]["starts"] == []
    assert found["about"]["base"] is None
    assert found["agent"]["why_none"].startswith("None. eval.every_steps=100000 evaluates")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "None. The first is due after 45 seconds of training, and the next every "
         "eval.every_steps = 100000 trained steps, or further apart where they would take more "
         "than eval.share = 0.05 of a core; the run has 100."),
        (("eval.every_s=60",), "None. They are due every eval.every_s = 60.0 seconds."),
        (("eval.every_steps=null",), "None. eval.every_steps=100000 evaluates the weights"),
        (("transport.kind=inproc",), "With transport.kind=inproc only eval.every_s enables them."),
    ],
)  # fmt: skip
def test_run_without_evaluations_states_the_reason(
    tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0], *options)
    assert reason in answers(folder)["views"]["agent"]["why_none"]
    with (folder / "logs" / "events.jsonl").open("a") as file:
        for role, text in (("evaluator-0", "they lie far apart"), ("learner-0", "it is ready")):
            file.write(json.dumps({"kind": "note", "role": role, "text": text}) + "\n")
    why = answers(folder)["views"]["agent"]["why_none"]
    assert why.endswith(" Note: they lie far apart.")


@pytest.mark.parametrize("text", ["[]", "{}", '{"accounting": 1}', '{"accounting": {"lost": []}}'])
def test_damaged_files_have_a_page(tmp_path: Path, text: str) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    (folder / "summary.json").write_text(text)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 300, "time_s": 3, "grad_norm": [1], "kl": 1e400, "ledger": 1}\n')
    (folder / VERSIONS).write_text('{"starts": [{"time": 1e200, "packages": 1}]}')
    (folder / "evaluations.jsonl").write_text('{"greedy": 1}\n[]\n{"return": {"mean": 1e999}}\n')
    assert answers(folder)["curves"]["columns"]["time_s"] == [0, 1, 3]


def test_a_run_without_a_measurement_has_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [])
    found = answers(folder)
    assert found["curves"]["columns"] == {}
    assert found["views"]["metrics"] == {"groups": {}}


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"is not a run, .* and contains none; name a run, or"):
        write_report(str(tmp_path / "empty"))
    make_run(tmp_path / "runs" / "a", [1.0])
    with pytest.raises(UserError, match=r"empty is not a run"):
        write_report(str(tmp_path / "runs"), str(tmp_path / "empty"))


def test_folder_of_seeds_becomes_one_page(tmp_path: Path) -> None:
    for seed in range(2):
        folder = make_run(tmp_path / "five" / f"seed-{seed}", [1.0 + seed], f"run.seed={seed}")
        (folder / "videos").mkdir()
        (folder / "videos" / "best.mp4").write_bytes(b"film %d" % seed)
        (folder / "logs" / "actor-0.log").write_text(f"printed {seed}\n")
    assert write_report(str(tmp_path / "five")) == tmp_path / "five" / "report.html"
    blocks = dict(BLOCK.findall(report_page(tmp_path / "five")))
    found = json.loads(blocks["frozen"])
    assert found["runs"]["folder"] == str(tmp_path / "five")
    assert [row["name"] for row in found["runs"]["runs"]] == ["seed-0", "seed-1"]
    for seed in range(2):
        run = found["answers"][f"seed-{seed}"]
        assert run["curves"]["columns"]["episode_return_mean"] == [1 + seed]
        assert run["logs"] == {"actor-0": f"printed {seed}\n"}
        video = base64.b64decode(blocks[run["videos"]["best.mp4"]["id"]])
        assert video == b"film %d" % seed


def test_several_runs_are_named_below_their_common_folder_in_command_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = make_run(tmp_path / "runs" / "b", [float(i) for i in range(20)])
    a = make_run(tmp_path / "runs" / "more" / "a", [1.0])
    monkeypatch.setattr(freeze, "MOST_VALUES", 20 * len(answers(b)["curves"]["columns"]))
    found = frozen(b, a, b)
    assert [row["name"] for row in found["runs"]["runs"]] == ["b", "more/a"]
    assert [row["title"] for row in found["runs"]["runs"]] == ["b", "more/a"]
    assert found["runs"]["folder"] == str(tmp_path / "runs")
    assert set(found["answers"]) == {"b", "more/a"}
    assert found["answers"]["b"]["curves"]["every"] == 2, "the runs share the room"
    assert found["notes"] == ["b: Each point of a curve is the mean of 2 of the 20 measurements."]
    monkeypatch.chdir(tmp_path)
    assert write_report("runs/b", "runs/more") == Path("report.html")
    monkeypatch.setattr(freeze, "MOST_COMPARED", 1)
    with pytest.raises(UserError, match=r"2 runs are named; a page has at most 1: name some"):
        report_page(a, b)


def test_missing_plotly_is_named_with_its_install_command(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0])
    script = f"""
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name == "plotly" else find(name, *rest)
)
sys.argv = ["penstock", "report", {str(folder)!r}]
from penstock.cli.app import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "need the package plotly, which is not installed: pip install 'penstock[watch]'" in (
        " ".join(done.stderr.split())
    )
    assert not (folder / "report.html").exists()
