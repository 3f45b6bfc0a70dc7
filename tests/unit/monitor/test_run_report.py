"""The page on a run."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.core.machine import VERSIONS
from penstock.monitor import run_report
from penstock.monitor.curves import load_run
from penstock.monitor.run_report import page, write
from run_folders import make_run

pytest.importorskip("matplotlib")
DATA = re.compile(r'(?:src)="(data:[a-z+/0-9]+;base64,[^"]*)"')


class Parsed(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def pictures(html: str) -> list[str]:
    """The SVGs of a page."""
    found = [text.partition(",")[2] for text in DATA.findall(html) if "svg" in text[:20]]
    return [base64.b64decode(text).decode() for text in found]


def test_a_page_has_curves_evaluations_config_versions_and_accounting(tmp_path: Path) -> None:
    folder = make_run(
        tmp_path / "run", [1.0, 2.0, 3.0], "learner.lr=1e-5", "env.kwargs={max_episode_steps: 7}",
        evaluated={100: 5.0, 200: 6.5},
    )  # fmt: skip
    path = write(str(folder), None)
    assert path == folder / "report.html"
    assert path.stat().st_mode & 0o777 == 0o600, "it contains the config"
    html = path.read_text(encoding="utf-8")
    parsed = Parsed(html)
    for title in ("Episodes in training", "Loss", "Evaluations", "Config", "Accounting", "Events"):
        assert title in parsed.words
    svgs = pictures(html)
    for svg in svgs:
        ElementTree.fromstring(svg)
    together = "".join(svgs)
    for label in ("return, mean of 100 episodes", "policy loss", "gradient norm", "compute"):
        assert f">{label}</text>" in together
    assert "steps_per_s = 100" in " ".join(html.split()), "a constant needs no chart"
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>.*?</tr>", html)]
    assert any(row[:2] == ["100", "10"] and "6" in row for row in rows), "return 5 and 7"
    marked = re.findall(r'<tr class="differs"><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>', html)
    assert ("learner.lr", "1e-05", "0.001") in marked
    assert ("env.kwargs.max_episode_steps", "7", "-") in marked
    assert {name for name, _, _ in marked} == {"learner.lr", "env.kwargs.max_episode_steps"}
    assert "preset cartpole" in html
    assert len(re.findall("<td>run.hang_timeout_s</td>", html)) == 1, "all options are listed"
    for name, value in (("produced", "1,000"), ("dropped: lag", "60"), ("start", "1")):
        assert f"<tr><th>{name}</th><td>{value}</td></tr>" in html
    assert "http" not in re.sub(DATA, "", html), "it needs no network"


def test_what_the_user_has_named_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    folder = make_run(
        tmp_path / "a$x<b>&'$", [1.0, 2.0], f"env.kwargs={{title: {json.dumps(evil)}}}"
    )
    (folder / "videos").mkdir()
    (folder / "videos" / "<i>.mp4").write_bytes(b"film")
    (folder / "logs" / "events.jsonl").write_text(json.dumps({"kind": evil}) + "\n")
    starts = json.loads((folder / VERSIONS).read_text())
    starts["starts"][-1] |= {"commit": evil, "packages": {evil: evil}}
    (folder / VERSIONS).write_text(json.dumps(starts))
    html = page(folder)
    parsed = Parsed(html)
    assert "script" not in parsed.tags
    assert "i" not in parsed.tags
    assert "b" not in parsed.tags
    assert parsed.words.count(evil) >= 5
    assert str(folder) in parsed.words
    for svg in pictures(html):
        ElementTree.fromstring(svg)


def test_the_newest_video_is_part_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "my run", [1.0, 2.0])
    command = f"penstock record {shlex.quote(str(folder))}"
    assert command in Parsed(page(folder)).words
    (folder / "videos").mkdir()
    for at_s, name in enumerate(("new.mp4", "old.mp4", "notes.txt")):
        (folder / "videos" / name).write_bytes(name.encode())
        os.utime(folder / "videos" / name, (1e9 - at_s, 1e9 - at_s))
    html = page(folder)
    data = base64.b64encode(b"new.mp4").decode()
    assert f'<video controls muted loop src="data:video/mp4;base64,{data}">' in html
    assert command not in html
    monkeypatch.setattr(run_report, "MOST_VIDEO_NBYTES", 3)
    html = page(folder)
    assert "videos/new.mp4 is too large" in html
    assert "<video" not in html


def test_a_run_in_progress_and_one_of_an_older_version_have_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0], ends=False)
    for name in (VERSIONS, "config.yaml"):
        (folder / name).unlink()
    html = page(folder)
    assert "did not record them" in html
    assert "The base of this config is unknown" in html
    assert "Known when the run has ended" in html
    assert "100 steps" not in html
    assert "None. eval.every_steps=100000 evaluates the weights at every 100,000" in html
    assert "Dots are evaluations" not in html


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "None. They are due every eval.every_steps = 100000 trained steps, or further apart "
         "where they would take more than eval.share = 0.05 of a core; the run has 100."),
        (("eval.every_s=60",), "None. They are due every eval.every_s = 60.0 seconds."),
        (("eval.every_steps=null",), "None. eval.every_steps=100000 evaluates the weights"),
        (("transport.kind=inproc",), "With transport.kind=inproc only eval.every_s enables them."),
    ],
)  # fmt: skip
def test_a_page_without_evaluations_has_the_reason(
    tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0], *options)
    assert reason in page(folder)
    with (folder / "logs" / "events.jsonl").open("a") as file:
        for role, text in (("evaluator-0", "they lie far apart"), ("learner-0", "it is ready")):
            file.write(json.dumps({"kind": "note", "role": role, "text": text}) + "\n")
    assert "Note: they lie far apart.</p>" in page(folder)


def test_an_evaluation_has_its_way_to_play_and_what_it_confirmed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    line = {
        "play": "greedy", "best": True, "closing": {"solved": False, "estimate": {"mean": 2.5}},
        "env": {"id": "CartPole-v1"},
    }  # fmt: skip
    (folder / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    table = run_report.evaluations(load_run(folder))
    assert table is not None
    assert table.columns == ["play", "best", "closing/solved", "closing/estimate/mean"]
    assert table.rows == [["greedy", "yes", "no", "2.5"]]
    assert "Dots are evaluations" in page(folder)


def test_many_evaluations_are_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_report, "MOST_EVALUATIONS", 3)
    folder = make_run(tmp_path / "run", [1.0, 2.0], evaluated={i: float(i) for i in range(1, 10)})
    table = run_report.evaluations(load_run(folder))
    assert table is not None
    at = table.columns.index("trained_steps")
    assert [row[at] for row in table.rows] == ["1", "5", "9"]
    assert "3 of 9 evaluations" in page(folder)


def test_evaluations_of_another_form_are_shown_as_they_are(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    line = {"env_steps": 10, "greedy": {"return": {"mean": 2.5}}, "sampled": {"mean": 1.5}}
    (folder / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    table = run_report.evaluations(load_run(folder))
    assert table is not None
    assert table.columns == ["env_steps", "greedy/return/mean", "sampled/mean"]
    assert table.rows == [["10", "2.5", "1.5"]]
    page(folder)


@pytest.mark.parametrize("text", ["[]", "{}", '{"accounting": 1}', '{"accounting": {"lost": []}}'])
def test_damaged_files_have_a_page(tmp_path: Path, text: str) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    (folder / "summary.json").write_text(text)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 300, "time_s": 3, "grad_norm": [1], "kl": 1e400, "ledger": 1}\n')
    (folder / VERSIONS).write_text('{"starts": [{"time": 1e200, "packages": 1}]}')
    assert "Config" in Parsed(page(folder)).words


def test_a_run_without_a_measurement_has_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [])
    assert "The run has no measurement; logs/ may have the reason." in page(folder)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics.jsonl, so it is not a run; name a run"):
        write(str(tmp_path), None)
    seed = make_run(tmp_path / "seed-0", [1.0])
    with pytest.raises(UserError, match=f"name one of its runs, such as {seed}"):
        write(str(tmp_path), None)


def test_the_report_of_a_profile_is_not_replaced(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    (folder / "profile.json").touch()
    with pytest.raises(UserError, match=r"belongs to `penstock profile`; .* with --out"):
        write(str(folder), None)
    out = tmp_path / "pages" / "run.html"
    assert write(str(folder), str(out)) == out
    with pytest.raises(UserError, match=r"cannot be written .*; give another --out"):
        write(str(folder), str(out / "below"))
