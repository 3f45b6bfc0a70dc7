"""A function called in another process returns its result and raises its errors."""

from __future__ import annotations

import ctypes
import os

import pytest

from penstock.configs.errors import UserError
from penstock.launch.alone import call_in_process


def prints(text: str) -> str:
    """Prints as C code does, to both descriptors."""
    os.write(1, b"\xff banner\n")
    os.write(2, b"\xff banner\n")
    ctypes.CDLL(None).printf(b"banner\n")  # is written as the process ends
    print("banner")
    return text


def prints_and_fails() -> None:
    prints("")
    raise UserError("the reason")


def test_output_of_c_code_is_not_part_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
    assert call_in_process("test_alone:prints", {"text": "the result"}) == "the result"
    with pytest.raises(UserError, match=r"^the reason$"):
        call_in_process("test_alone:prints_and_fails", {})
