"""How an actor handles a learner's messages, without a connection."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import __version__
from penstock.configs.errors import UserError, printable
from penstock.core.specs import SlotSpec
from penstock.transport import wire
from penstock.transport.wire import Header, MessageKind
from penstock.transport.zmq import sockets
from penstock.transport.zmq.client import MAX_SLOT_NBYTES, Client
from transport_world import LAYOUT, RUN_ID, SPEC, context


def answered(
    folder: Path,
    patch: pytest.MonkeyPatch,
    kind: MessageKind,
    meta: Any,
    spec: SlotSpec | None = None,
) -> Client:
    """A client that has taken in one message."""
    coming = [wire.encode(Header(kind, run_id=RUN_ID, generation=1), meta)]
    patch.setattr(sockets, "receive", lambda _: coming.pop() if coming else None)
    client = Client(context(folder), "ipc:///nowhere/socket", spec=spec)
    try:
        client.pump(0)
    finally:
        client.close()
    return client


def welcome(**changes: Any) -> dict[str, Any]:
    spec = SPEC.to_dict() | changes
    return {
        "spec": spec,
        "layout": LAYOUT.to_list(),
        "config": {},
        "boot_id": "",
        "unix_path": "",
    }


def test_actor_without_a_spec_uses_that_of_the_welcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = answered(tmp_path, monkeypatch, MessageKind.WELCOME, welcome())
    assert client.welcome.spec == client.spec == SPEC


@pytest.mark.parametrize("changes", [{"unroll": 2**40}, {"envs": 2**40}])
def test_welcome_that_needs_too_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    with pytest.raises(UserError, match=f"an actor makes at most {MAX_SLOT_NBYTES}"):
        answered(tmp_path, monkeypatch, MessageKind.WELCOME, welcome(**changes))


def test_actor_with_a_spec_refuses_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unroll = SPEC.unroll + 1
    with pytest.raises(UserError, match=f"unroll: learner {unroll}, actor {SPEC.unroll}"):
        answered(tmp_path, monkeypatch, MessageKind.WELCOME, welcome(unroll=unroll), SPEC)
    assert (
        answered(tmp_path, monkeypatch, MessageKind.WELCOME, welcome(), SPEC).welcome.spec == SPEC
    )


def test_a_refusal_is_shown_without_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"error": "no\x1b]0;owned\x07 \u202eway" + "!" * 10_000}
    with pytest.raises(UserError) as caught:
        answered(tmp_path, monkeypatch, MessageKind.REFUSE, said)
    assert str(caught.value).startswith(r"no\x1b]0;owned\x07 \u202eway!!!")
    assert len(str(caught.value)) < 2100


def test_actor_is_redirected_once_and_only_within_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"error": "not here", "connector": "ipc:///elsewhere/socket-1"}
    coming = [wire.encode(Header(MessageKind.REFUSE), said) for _ in range(2)]
    monkeypatch.setattr(sockets, "receive", lambda _: coming.pop() if coming else None)
    client = Client(context(tmp_path), "ipc:///nowhere/socket")
    endpoints: list[tuple[str, str]] = []
    own = client.socket
    monkeypatch.setattr(
        client,
        "socket",
        SimpleNamespace(
            connect=lambda address: endpoints.append(("connect", address)),
            disconnect=lambda address: endpoints.append(("disconnect", address)),
        ),
    )
    with pytest.raises(UserError, match="not here"):  # the second one
        client.pump(0)
    assert endpoints == [
        ("disconnect", "ipc:///nowhere/socket"),
        ("connect", "ipc:///nowhere/socket-1"),
    ]
    monkeypatch.setattr(client, "socket", own)
    client.close()


@pytest.mark.parametrize("connector", ["tcp://10.0.0.9:7700", "", "ipc:///", "\x1b]0;owned\x07", 7])
def test_redirect_to_another_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connector: object
) -> None:
    said = {"error": "not here", "connector": connector}
    with pytest.raises(UserError, match="none of its connectors can be") as caught:
        answered(tmp_path, monkeypatch, MessageKind.REFUSE, said)
    assert str(caught.value).isprintable()


def test_text_of_any_language_is_printable() -> None:
    assert printable("Zürich 東京 'a\\b'") == "Zürich 東京 'a\\b'"
    assert printable("a\nb\ud800") == r"a\nb\ud800"


@pytest.mark.parametrize("policy_id", [7, -1, 2**31, 2**64 - 1, True, "7", [7], None])
def test_refusal_of_an_unrequested_policy_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_id: Any
) -> None:
    said = {"error": "no such policy", "policy_id": policy_id}
    client = answered(tmp_path, monkeypatch, MessageKind.REFUSE, said)
    assert client.take_weights() is None
    assert client.take_weights(7) is None


def test_learner_of_another_protocol_is_refused_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, *rest = wire.encode(Header(MessageKind.REFUSE), {"error": "anything"})
    coming = [[bytes(head[:4]) + b"\x07" + bytes(head[5:]), *rest]]
    monkeypatch.setattr(sockets, "receive", lambda _: coming.pop() if coming else None)
    client = Client(context(tmp_path), "ipc:///nowhere/socket")
    with pytest.raises(UserError) as caught:
        client.pump(0)
    client.close()
    assert str(caught.value) == (
        "the learner at ipc:///nowhere/socket speaks version 7 of the protocol instead of "
        f"{wire.PROTOCOL_VERSION}, and this actor has Penstock {__version__}; use the same release "
        "on both sides"
    )


@pytest.mark.parametrize(
    ("release", "taken"),
    [("1.2.3", "1.2.3"), ("1\x1b[2J", ""), ("9" * 41, ""), (3, ""), (None, "")],
)
def test_only_plausible_release_names_are_read(release: object, taken: str) -> None:
    assert wire.release_of({"release": release}) == taken
