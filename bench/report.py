"""The result of `penstock bench reduce` for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

NOTES = """\
B/step: bytes that one learner hands to its sockets; ratio: of fp32's; theory: by the codec's own
reckoning; wire: at the interface without headers. ms: a step in the fastest burst of steps back
to back, and of such with a backward pass of {backward_ms:g} ms that needs no processor (bw). error:
relative, of one step; error100: of the sum of 100 steps."""


def table(result: dict[str, Any]) -> str:
    """All figures, one line for each codec, and what they mean."""
    links = result["links"]
    heading = ["codec", "B/step", "ratio", "theory", "wire", "code ms"]
    heading += [f"ms {link}{suffix}" for link in links for suffix in ("", " bw")]
    heading += ["error", "error100"]
    rows = [heading, *_rows(result["codecs"], links)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    return "\n".join(["", *lines, "", NOTES.format(**result)])


def _rows(codecs: dict[str, dict[str, Any]], links: Sequence[str]) -> Iterator[list[str]]:
    for name, figures in codecs.items():
        row = [name]
        for key in ("bytes_per_step", "bytes_ratio", "bytes_theory", "interface_payload_per_step"):
            row.append(_text(figures.get(key)))
        row.append(_text(figures["code_ms"]))
        for link in links:
            row.append(_text(figures["step_ms"][link]))
            row.append(_text(figures["step_with_backward_ms"][link]))
        yield [*row, _text(figures["relative_error"]), _text(figures["relative_error_100"])]


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
