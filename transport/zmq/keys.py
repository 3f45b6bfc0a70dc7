"""CURVE keys: they restrict the connections to a learner over the network, and encrypt traffic.

A folder of keys, as `penstock keys new` makes it:

    learner.key_secret   stays on the learner's host
    learner.key          public; each actor's host needs it to authenticate the learner
    actor.key_secret     for the actors' hosts
    allowed/*.key        public keys of the actors that the learner accepts; use one per host to
                         be able to revoke it alone

The files are those of pyzmq's `zmq.auth`. Without an allow list CURVE accepts every client that has
the learner's public key, so there always is one.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth
from zmq.utils import z85

from penstock.configs.errors import UserError
from penstock.core.files import open_private

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"penstock"
KEY_NBYTES = 32


@dataclass(frozen=True)
class KeyPair:
    """Z85 text of a public and a secret key."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class LearnerKeys:
    """The learner's keys: its own pair, and the public keys that it accepts."""

    own: KeyPair
    allowed: frozenset[bytes]


@dataclass(frozen=True)
class ActorKeys:
    """An actor's keys: its own pair, and the learner's public key."""

    own: KeyPair
    learner: bytes


class _KeyFile(NamedTuple):
    """The keys in a file; ``secret`` is None in a file of a public key."""

    public: bytes
    secret: bytes | None


def make_keys(folder: Path) -> list[Path]:
    """Make the keys of a run in ``folder``, and return the new files.

    Raises UserError if the folder has keys already, or cannot be written.
    """
    require_curve()
    allowed = folder / "allowed"
    if any(folder.glob("*.key*")) or any(allowed.glob("*.key*")):
        raise UserError(f"{folder} holds keys already; name a new folder, or delete them first")

    try:
        allowed.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        return _make(folder, allowed)
    except OSError as error:
        raise UserError(
            f"no keys can be made in {folder}: {error.strerror}; name a folder that you may write"
        ) from error


def read_keys(folder: Path) -> dict[str, str]:
    """Return the texts of the key files in a folder, by their names in it."""
    paths = [*folder.glob("*.key"), *folder.glob("*.key_secret"), *folder.glob("allowed/*.key")]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def write_keys(folder: Path, keys: Mapping[str, str]) -> None:
    """Write the result of `read_keys` into files that only this user can read.

    Files that are there already with the same text stay.

    Raises:
        OSError: the folder has a file of that name with another text, or cannot be written.
    """
    for name, text in keys.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():
            if path.read_text() != text:
                raise OSError(
                    f"{path} on {socket.gethostname()} is of another run; choose another run.dir"
                )
            continue

        # The file appears as a whole: several processes may write the same keys into one folder.
        temporary = path.with_name(f".{secrets.token_hex(8)}")
        try:
            with open(temporary, "w", opener=open_private) as file:
                file.write(text)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _make(folder: Path, allowed: Path) -> list[Path]:
    """Make the pairs of the learner and of its actors; return their files."""
    learner_public, learner_secret = _make_pair(folder, "learner")
    actor_public, actor_secret = _make_pair(folder, "actor")
    actor_public = actor_public.rename(allowed / "actor.key")
    return [learner_public, learner_secret, actor_public, actor_secret]


def _make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Make the files ``name``.key and ``name``.key_secret, of which only this user reads the
    second."""
    public, secret = map(Path, zmq.auth.create_certificates(str(folder), name))
    secret.chmod(0o600)
    return public, secret


def load_learner(folder: Path) -> LearnerKeys:
    """Read the learner's keys. Raises UserError naming a missing file."""
    require_curve()
    allowed_files = sorted((folder / "allowed").glob("*.key"))
    allowed = frozenset(_load(path).public for path in allowed_files)
    if not allowed:
        raise UserError(
            f"{folder / 'allowed'} holds no public key, so no actor could connect; make keys with "
            "`penstock keys new`, or copy an actor's .key file there"
        )
    return LearnerKeys(_load_pair(folder / "learner.key_secret"), allowed)


def load_actor(folder: Path) -> ActorKeys:
    """Read an actor's keys. Raises UserError naming a missing file."""
    require_curve()
    pair = _load_pair(folder / "actor.key_secret")
    return ActorKeys(pair, learner=_load(folder / "learner.key").public)


def load_learners(folder: Path) -> tuple[LearnerKeys, ActorKeys]:
    """Return the keys for a server and its clients, where all of them are learners' roles.

    Both sides need the learner's secret key, so an actor's host is not let in. Raises UserError
    naming a missing file.
    """
    require_curve()
    pair = _load_pair(folder / "learner.key_secret")
    server_keys = LearnerKeys(pair, allowed=frozenset((pair.public,)))
    client_keys = ActorKeys(pair, learner=pair.public)
    return server_keys, client_keys


def require_curve() -> None:
    """Raise UserError if libzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise UserError(
            "this libzmq was built without CURVE, so it cannot encrypt; install pyzmq's own wheel"
        )


def answer_zap(socket: zmq.Socket[bytes], allowed: frozenset[bytes]) -> None:
    """Accept or reject the peer that waits at ``socket`` (a REP socket bound to ZAP_ADDRESS).

    Its key, as Z85 text, becomes the property "User-Id" of all its messages. The fields of request
    and answer are those of ZAP (ZeroMQ RFC 27).
    """
    version, request_id, _domain, _address, _identity, mechanism, *keys = socket.recv_multipart()
    key = z85.encode(keys[0]) if mechanism == b"CURVE" and len(keys) == 1 else b""

    if key in allowed:
        status, text, user_id = b"200", b"OK", key
    else:
        status, text, user_id = b"400", b"key not in the allow list", b""
    metadata = b""
    socket.send_multipart([version, request_id, status, text, user_id, metadata])


def _load(path: Path) -> _KeyFile:
    """Read a key file of pyzmq. Raises UserError where it cannot be read."""
    try:
        public, secret = zmq.auth.load_certificate(path)
        for key in (public, secret):
            if key is not None and len(z85.decode(key)) != KEY_NBYTES:
                raise ValueError(f"a key has {KEY_NBYTES} bytes, in Z85")
        return _KeyFile(public, secret)
    except (OSError, ValueError, LookupError, struct.error) as error:
        raise UserError(
            f"the key file {path} cannot be read ({error}); make keys with `penstock keys new` "
            "and copy learner.key and actor.key_secret to the actors' hosts"
        ) from error


def _load_pair(path: Path) -> KeyPair:
    """Read a file of a secret key, which holds the public one too. Raises UserError."""
    public, secret = _load(path)
    if secret is None:
        raise UserError(f"{path} holds no secret key; copy the .key_secret file, not the .key file")
    return KeyPair(public, secret)
