"""The options and results of stages."""

from __future__ import annotations

from typing import Any, NamedTuple


class Options(NamedTuple):
    """Options of the benchmark that concern stages."""

    device: str
    """`cuda` or `cpu`. On a CPU each stage takes its smallest form, which only shows that it
    runs."""
    seconds: float
    """Of each measurement."""
    train: bool = False
    """Whether Pong is trained to a return of 18."""

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    @property
    def place(self) -> str:
        """The name of the torch device, for a GPU with its index, as `penstock.device` needs it."""
        return "cpu" if self.small else "cuda:0"


class Finding(NamedTuple):
    """One figure, or the answer to one question, of a stage."""

    name: str
    value: float | bool | str | None
    note: str = ""
    data: Any = None
    """What else was measured, as JSON, for the result alone."""
