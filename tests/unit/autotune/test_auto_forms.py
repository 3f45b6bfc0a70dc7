"""Forms of networks are timed by real passes, and cached by machine and network."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.autotune import forms as form_tuner
from penstock.autotune.forms import Task, cached_timings, passes, race, time_forms
from penstock.configs.model import ModelConfig
from penstock.core import machine, user_cache
from penstock.core.machine import Processor
from penstock.models.actions import discrete
from penstock.models.compute_form import (
    ComputeForm,
    Options,
    UpdateSize,
    acting_forms,
    training_forms,
)
from penstock.models.layout import CnnShape, DenseShape, QCnnShape, SingleHead

SHAPE = CnnShape(1, 36, 36, discrete(2), 1 / 255, normalize=True)
TASK = Task(SHAPE, ((1, 36, 36), "|u1"), ModelConfig(), learns=True, threads=1, most_rows=8)
OPEN = Options("auto", "auto", None)
FORMS = training_forms(SHAPE, OPEN, UpdateSize(8), has_bf16=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "forms"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Counter[ComputeForm]:
    """How often each form was timed; each takes as long as `SECONDS` says."""
    calls: Counter[ComputeForm] = Counter()

    def made(task: Task) -> Any:
        def time_pass(form: ComputeForm) -> float:
            calls[form] += 1
            return SECONDS[form[:2]]

        return time_pass

    monkeypatch.setattr(form_tuner, "passes", made)
    return calls


SECONDS = {
    ("fp32", "channels_last"): 3e-3,
    ("fp32", "contiguous"): 4e-3,
    ("bf16", "channels_last"): 1e-3,
    ("bf16", "contiguous"): 2e-3,
}


def test_fastest_form_is_chosen_and_cached(timed: Counter[ComputeForm], cache: Path) -> None:
    first = time_forms(TASK, FORMS)
    assert (first.form, first.cached) == (("bf16", "channels_last", 256), False)
    assert set(timed) == set(FORMS)
    timed.clear()
    again = time_forms(TASK, FORMS)
    assert again == first._replace(cached=True)
    assert not timed
    assert len(list(cache.glob("*.json"))) == 1
    [text] = cached_timings().values()
    assert text.startswith(
        "nature_cnn of [1, 36, 36], training, 1 thread: bf16, channels_last, 256"
    )
    assert "fp32, channels_last, 256: 3,000" in text


@pytest.mark.usefixtures("timed")
def test_the_cache_is_bounded_and_lists_the_newest_first(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_cache, "KEPT", 3)
    for threads in range(1, 6):
        time_forms(TASK._replace(threads=threads), FORMS)
        for path in cache.glob("*.json"):  # older than what comes next, whatever the clock
            times = path.stat().st_mtime_ns - 10**9
            os.utime(path, ns=(times, times))
    assert len(list(cache.glob("*.json"))) == 3
    found = [text.partition(":")[0] for text in cached_timings().values()]
    assert found == [TASK._replace(threads=threads).name for threads in (5, 4, 3)]


@pytest.mark.parametrize(
    "other",
    [
        {"threads": 2},
        {"learns": False},
        {"most_rows": 9},
        {"shape": CnnShape(1, 36, 36, discrete(3), 1 / 255)},
    ],
)
def test_another_task_is_timed_again(timed: Counter[ComputeForm], other: dict[str, Any]) -> None:
    time_forms(TASK, FORMS)
    timed.clear()
    assert not time_forms(TASK._replace(**other), FORMS).cached
    assert timed


@pytest.mark.parametrize(
    "own", [Processor("another", machine.processor().flags), Processor("x", frozenset({"a"}))]
)
def test_another_processor_is_timed_again(
    timed: Counter[ComputeForm], own: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_forms(TASK, FORMS)
    monkeypatch.setattr(user_cache, "processor", lambda: own)
    assert not time_forms(TASK, FORMS).cached
    assert len(cached_timings()) == 1


def spoiled(value: Any) -> list[Any]:
    """Contents of a cache file that must not be used, of one that may."""
    first, *rest = value["seconds"]
    return [
        value | {"seconds": []},
        value | {"seconds": rest},  # without the form by rule
        value | {"seconds": [first, ["fp16", "contiguous", 256, 1e-9]]},
        value | {"seconds": [first, ["bf16", "contiguous", 128, 1e-9]]},  # not asked for
        value | {"seconds": [[*first[:-1], math.nan], *rest]},
        value | {"seconds": [[*first[:-1], -1.0], *rest]},
        value | {"seconds": [[*first[:-1], "1"], *rest]},
        value | {"seconds": [first, []]},
        value | {"seconds": {"a": 1}},
    ]


@pytest.mark.parametrize("number", range(9))
def test_damaged_cache_file_is_replaced(
    number: int, timed: Counter[ComputeForm], cache: Path
) -> None:
    found = time_forms(TASK, FORMS)
    [path] = cache.glob("*.json")
    whole = path.read_text()
    contents = spoiled(json.loads(whole))
    assert len(contents) == 9
    path.write_text(json.dumps(contents[number]))
    cached_timings()
    timed.clear()
    assert time_forms(TASK, FORMS) == found
    assert timed
    assert path.read_text() == whole


def test_times_of_a_foreign_file_choose_among_the_allowed_forms_only(
    timed: Counter[ComputeForm], cache: Path
) -> None:
    time_forms(TASK, FORMS)
    [path] = cache.glob("*.json")
    value = json.loads(path.read_text())
    value["seconds"] = [[*form, 1.0 - 0.1 * i] for i, form in enumerate(FORMS)]
    path.write_text(json.dumps(value))
    assert time_forms(TASK, FORMS).form in FORMS


def test_unwritable_cache_folder_does_not_prevent_a_choice(
    timed: Counter[ComputeForm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert not time_forms(TASK, FORMS).cached
    assert cached_timings() == {}


def test_timing_stays_within_its_budget_and_includes_the_default_form() -> None:
    now = [0.0]

    def time_pass(form: ComputeForm) -> float:
        now[0] += 0.1 * min(form.rows, 100)
        return 0.1

    forms = training_forms(SHAPE, OPEN, UpdateSize(300), has_bf16=True)
    found = race(forms, time_pass, 100, lambda: now[0], budget_s=1.0)
    assert list(found) == [forms[0]]
    assert now[0] == pytest.approx(20.0)  # two passes
    found = race(forms, time_pass, 100, lambda: now[0], budget_s=1000.0)
    assert next(iter(found)) == forms[0]
    assert {form.rows for form in found} == {256, 100, 60}


def test_formats_of_long_passes_are_timed_by_short_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: Counter[int] = Counter()
    now = [0.0]

    def made(task: Task) -> Any:
        def time_pass(form: ComputeForm) -> float:
            rows[task.most_rows] += 1
            seconds = 4 * SECONDS[form[:2]]
            now[0] += task.most_rows * seconds
            return seconds

        return time_pass

    monkeypatch.setattr(form_tuner, "passes", made)
    monkeypatch.setattr(form_tuner, "clock_of", lambda task: lambda: now[0])
    task = TASK._replace(most_rows=512)
    forms = training_forms(SHAPE, OPEN, UpdateSize(512), has_bf16=True)
    found = time_forms(task, forms)
    assert len(found.seconds) > 2
    assert found.form == ("bf16", "channels_last", 256)
    assert max(rows) < 16
    assert now[0] < 1.5 * form_tuner.BUDGET_S


def test_timing_ends_when_other_programs_use_the_processor() -> None:
    def time_pass(form: ComputeForm) -> float:
        time.sleep(0.02)  # no processor time passes
        return 1e-6

    began_s = time.monotonic()
    found = race(FORMS, time_pass, 8, lambda: 0.0, budget_s=0.02)
    assert next(iter(found)) == FORMS[0]
    assert len(found) < len(FORMS)
    assert time.monotonic() - began_s < 5.0


def test_form_with_a_slow_first_pass_is_dropped() -> None:
    calls: Counter[ComputeForm] = Counter()

    def time_pass(form: ComputeForm) -> float:
        calls[form] += 1
        return 1.0 if form.precision == "fp32" else 0.1

    race(FORMS, time_pass, 8, lambda: 0.0, budget_s=100.0)
    assert calls[ComputeForm("fp32", "contiguous", 256)] == 1
    assert calls[FORMS[0]] > 1


NETWORKS = {
    "actor-critic": SHAPE,
    "one head": QCnnShape(1, 36, 36, SingleHead(3, duelling=True), 1 / 255),
    "mlp": DenseShape(36, SingleHead(3), (8,), "tanh", 1.0, normalize=True),
}


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_real_passes_of_each_network_are_timed(name: str, learns: bool) -> None:
    shape: Any = NETWORKS[name]
    size = ((36,), "<f4") if name == "mlp" else ((1, 36, 36), "|u1")
    task = Task(shape, size, ModelConfig(), learns, threads=1, most_rows=8)
    forms = acting_forms(shape, OPEN, 8, has_bf16=True)
    if learns:
        forms = training_forms(shape, OPEN, UpdateSize(8), has_bf16=True)
    before = torch.get_rng_state()
    time_pass = passes(task)
    assert all(0 < time_pass(form) < 1 for form in forms)
    assert torch.equal(torch.get_rng_state(), before)
