"""Sending to peers that do not read, over real sockets."""

from __future__ import annotations

from functools import partial

import zmq

from penstock.transport.zmq.keys import KeyPair, LearnerKeys
from penstock.transport.zmq.sockets import WasWritten, router, send_to
from waiting import wait_until

LARGE = bytes(16 << 20)  # more than the system's buffers of a connection hold


def test_encrypted_message_is_not_written_for_a_peer_that_does_not_read() -> None:
    own = KeyPair(*zmq.curve_keypair())
    keys = LearnerKeys(own, frozenset())
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as peer,
        router(context, "tcp://127.0.0.1:*", keys, 1000) as server,
    ):
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
        peer.curve_serverkey = own.public
        peer.connect(server.getsockopt_string(zmq.LAST_ENDPOINT))
        peer.send(b"hello")
        name, _ = server.recv_multipart()
        send_next = partial(send_to, server, name, [b""], tracked=True)

        for _ in range(2):  # the first one waits in the peer's socket
            _, is_released = send_to(server, name, [b"", b"", LARGE])
            was_written = WasWritten(is_released, send_next)
            wait_until(is_released)
        assert not was_written()

        def reads_until_written() -> bool:
            while peer.poll(0):
                peer.recv_multipart()
            return was_written()

        wait_until(reads_until_written)
