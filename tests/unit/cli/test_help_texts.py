"""Help: every command, argument and option is described, and choices that are registered are
listed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from penstock.cli.app import app, main
from penstock.configs.transports import TRANSPORTS, TransportSpec


def commands(command: Any, name: str = "penstock") -> Iterator[tuple[str, Any]]:
    """Each command with its full name, groups included."""
    yield name, command
    for child, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {child}")


COMMANDS = dict(commands(typer.main.get_command(app)))
PARAMETERS = {
    f"{name} {parameter.name}": parameter
    for name, command in COMMANDS.items()
    for parameter in command.params
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_described_in_sentences(name: str) -> None:
    text = COMMANDS[name].help
    assert text[0].isupper()
    assert text.endswith(".")
    assert len(text.split()) > 2


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_is_described_in_sentences(name: str) -> None:
    text = PARAMETERS[name].help
    assert text[0].isupper()
    assert text.endswith(".")
    assert len(text.split()) > 2
    if name.endswith(("seconds", "_s", "_every")):  # the unit
        assert "econds" in text


def test_the_transports_of_an_actor_are_those_that_are_registered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TRANSPORTS.register(TransportSpec("pigeon", "carrier pigeons", "nowhere:Pigeon"))
    try:
        monkeypatch.setattr("sys.argv", ["penstock", "actor", "--help"])
        with pytest.raises(SystemExit):
            main()
    finally:
        TRANSPORTS.unregister("pigeon")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--transport auto|shm|zmq|pigeon" in shown
    assert "shm (shared memory)" in shown
    assert "pigeon (carrier pigeons)" in shown
