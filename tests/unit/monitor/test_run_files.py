"""Reading run folders that grow, are replaced, or are hostile."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.monitor.run_folder import lines as lines_file
from penstock.monitor.run_folder.files import names_in, open_in, read_json, read_tail, read_text
from penstock.monitor.run_folder.lines import JsonLines, read_sample


def read_all(lines: JsonLines) -> list[dict[str, Any]]:
    return [value for chunk in lines.chunks() for value in chunk]


def test_only_appended_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    lines = JsonLines(tmp_path, "m.jsonl")
    assert read_all(lines) == [{"a": 1}, {"a": 2}]
    before = lines.offset
    with path.open("a") as file:
        file.write(': 3}\n{"a": 4}\n')
    assert read_all(lines) == [{"a": 3}, {"a": 4}]
    assert lines.offset - before == len(': 3}\n{"a": 4}\n')
    assert read_all(lines) == []


@pytest.mark.parametrize("how", ["replaced", "truncated"])
def test_replaced_file_is_read_from_its_start(tmp_path: Path, how: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    lines = JsonLines(tmp_path, "m.jsonl")
    assert len(read_all(lines)) == 2
    if how == "replaced":
        (tmp_path / "new").write_text('{"a": 9}\n')
        (tmp_path / "new").replace(path)
    else:
        path.write_text('{"a": 9}\n')
    seen = [(lines.replaced, chunk) for chunk in lines.chunks()]
    assert seen == [(True, [{"a": 9}])]


def test_damaged_and_overlong_lines_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_file, "LINE_NBYTES", 100)
    monkeypatch.setattr(lines_file, "CHUNK_NBYTES", 64)
    long = json.dumps({"a": "x" * 500})
    deep = "[" * 40
    text = f'{{"a": 1}}\nnot json\n{long}\n{deep}\n[1]\n{{"a": 2}}\n'
    (tmp_path / "m.jsonl").write_text(text)
    lines = JsonLines(tmp_path, "m.jsonl")
    assert read_all(lines) == [{"a": 1}, {"a": 2}]
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write("y" * 300)
    assert read_all(lines) == []
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write('\n{"a": 3}\n')
    assert read_all(lines) == [{"a": 3}]


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    line = '{"a": 1}\n'
    path.write_text(line * 10)
    lines = JsonLines(tmp_path, "m.jsonl", most=2 * len(line) + 4)
    assert len(read_all(lines)) == 2, "the line that is cut is left out"
    with path.open("a") as file:
        file.write(line * 2)
    assert len(read_all(lines)) == 2
    with path.open("a") as file:
        file.write(line * 5)
    assert len(read_all(lines)) == 2


def test_links_pipes_and_folders_are_not_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"key": 1}')
    run = tmp_path / "run"
    (run / "real").mkdir(parents=True)
    (run / "link.json").symlink_to(secret)
    (run / "logs").symlink_to(tmp_path)
    os.mkfifo(run / "pipe")
    for parts in (("link.json",), ("logs", "secret"), ("pipe",), ("real",)):
        with pytest.raises(OSError):  # noqa: PT011
            open_in(run, *parts)
    assert read_json(run, "link.json") == {}
    assert names_in(run, "logs", 10) == []
    assert read_all(JsonLines(run, "link.json")) == []


@pytest.mark.parametrize("part", ["..", ".", "", "a/b", "../secret", "a\0b"])
def test_file_name_that_is_a_path_is_not_read(tmp_path: Path, part: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("x")
    assert read_text(tmp_path / "a", part) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_the_file_of_another_user_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").write_text("x")
    os.chown(tmp_path / "theirs", 65534, 65534)
    assert read_text(tmp_path, "theirs") is None


def test_a_tail_begins_with_a_whole_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {i}\n" for i in range(100)))
    assert read_tail(tmp_path, "log", most=20) == "line 98\nline 99\n"
    assert (read_tail(tmp_path, "log", most=10_000) or "").startswith("line 0\n")
    assert read_tail(tmp_path, "none", most=10) is None


def test_sample_is_spread_over_the_file_and_includes_its_end(tmp_path: Path) -> None:
    lines = [json.dumps({"i": i, "text": "x" * (i % 50)}) for i in range(100_000)]
    (tmp_path / "m.jsonl").write_text("\n".join(lines) + '\n{"i": ')
    found = [row["i"] for row in read_sample(tmp_path, "m.jsonl", nbytes=1 << 17)]
    assert found == sorted({*found})
    assert found[0] == 0
    assert found[-50:] == list(range(99_950, 100_000))
    gaps = [after - before for before, after in pairwise(found)]
    assert max(gaps) < 100_000 / 100
    assert 300 < len(found) < 5000
    assert read_sample(tmp_path, "none", nbytes=1 << 17) == []


@pytest.mark.parametrize("grows", [True, False])
def test_sample_of_growing_lines_covers_all_parts(tmp_path: Path, grows: bool) -> None:
    lengths = [10] * 20_000 + [2000] * 2000
    lines = [
        json.dumps({"i": i, "text": "x" * n})
        for i, n in enumerate(lengths if grows else lengths[::-1])
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(lines) + "\n")
    found = [row["i"] for row in read_sample(tmp_path, "m.jsonl", nbytes=1 << 17)]
    assert found == sorted({*found})
    long = [i for i in found if lengths[i if grows else -1 - i] > 10]
    assert len(long) >= 20
    assert max(after - before for before, after in pairwise(long)) < 2000 / 10


def test_a_sample_of_a_short_file_repeats_no_line(tmp_path: Path) -> None:
    lines = [json.dumps({"i": i}) for i in range(100)]
    (tmp_path / "m.jsonl").write_text("\n".join(lines) + "\n")
    found = [row["i"] for row in read_sample(tmp_path, "m.jsonl", nbytes=1 << 12)]
    assert found == sorted({*found})
    assert found[-1] == 99


@pytest.mark.parametrize("text", ["", "x" * 100_000, "\n" * 100_000, '{"a": 1}', "[1]\n" * 9999])
def test_sample_of_a_file_without_objects_is_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.jsonl").write_text(text)
    assert read_sample(tmp_path, "m.jsonl", nbytes=1 << 12) == []
