"""Options of `penstock bench reduce`, and the errors for invalid ones."""

from __future__ import annotations

import os

import pytest

from penstock.configs.errors import UserError
from penstock.configs.reduce import CODECS
from reduce import ReducePlan, make_plan, measure


def plan(**changes: object) -> ReducePlan:
    options: dict[str, object] = {
        "count": 4, "parameters": "1.7M", "codecs": "all", "links": None, "seconds": 3.0,
    }  # fmt: skip
    return make_plan(**(options | changes))  # type: ignore[arg-type]


def test_by_default_every_codec_is_measured_fp32_first() -> None:
    made = plan()
    assert made.codecs[0] == "none"
    assert sorted(made.codecs) == sorted(CODECS.names)
    assert made.links is None


def test_fp32_is_always_measured_and_no_codec_twice() -> None:
    assert plan(codecs="int8,dgc,int8").codecs == ("none", "int8", "dgc")
    assert plan(codecs="dgc,none").codecs == ("none", "dgc")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"codecs": "int7"}, "--codecs int7: 'int7' is not one of none, auto, fp16"),
        ({"codecs": ""}, "--codecs : '' is not one of"),
        ({"links": "10mbit"}, "--links 10mbit: '10mbit' is not one of 100mbit, 1gbit, unlimited"),
        ({"links": "1gbit,"}, "--links 1gbit,: '' is not one of 100mbit"),
        ({"count": 1}, "--learners 1: it must be from 2, as one reduces nothing, to 250"),
        ({"count": 251}, "--learners 251: it must be from 2"),
        ({"seconds": 0.0}, "--seconds 0: it must be above 0 and at most 600"),
        ({"seconds": float("nan")}, "--seconds nan: it must be above 0"),
        ({"parameters": "much"}, "--parameters much: it must be a number such as 1.7M"),
    ],
)
def test_invalid_bench_reduce_options_are_refused_in_one_sentence(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UserError) as error:
        plan(**changes)
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


def test_requested_links_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError) as error:
        measure(plan(links="100mbit,1gbit"), print)
    assert str(error.value) == (
        "--links 100mbit,1gbit: links need network namespaces, and network namespaces need root; "
        "leave --links out to measure on loopback"
    )
