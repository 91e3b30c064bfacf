"""The first words of a connection: both ends prove that they know the secret of the run, which neither tells.

    process -> server   what this is, and a nonce
    server -> process   the same, and a nonce of its own
    process -> server   a proof: an HMAC of both nonces by the secret
    server -> process   a verdict, and its own proof

Whoever has not proved to know the secret has learned nothing that helps to guess it. The keys of what follows are made
of secret and nonces, so that nothing of one connection means anything on another. Imports no JAX.
"""

from __future__ import annotations

import hmac
import os
import socket

from redco_cli.runtime.peers.wire import Wire, receive_exactly, send_all

MAGIC = b"redco meeting 2\n"
"""What every connection begins with; its number is that of this way to speak."""
_NONCE = _PROOF = 32
_RIGHT, _WRONG = b"\x01", b"\x00"


class HandshakeError(Exception):
    """What is at the other end did not prove to be a process of this run."""


class UnansweredError(HandshakeError):
    """The other end closed the connection, or said nothing: it may be overwhelmed, and answer the next time."""


class OtherSecretError(HandshakeError):
    """The other end has another secret than this one, or none."""


class SessionKeys:
    """The proofs and keys of one connection."""

    def __init__(self, secret: bytes, nonces: bytes) -> None:
        session = hmac.digest(secret, b"redco session" + nonces, "sha256")
        self.process_proof = hmac.digest(session, b"process", "sha256")
        self.server_proof = hmac.digest(session, b"server", "sha256")
        self.messages = (hmac.digest(session, b"to server", "sha256"), hmac.digest(session, b"to process", "sha256"))


class Admission:
    """The server's side, fed with what comes: it waits for nobody.

    Attributes:
        wanted: how many more bytes are to come now.
        keys: for the messages that follow, once the other end has proved itself.
    """

    def __init__(self, secret: bytes) -> None:
        self.wanted = len(MAGIC) + _NONCE
        self.keys: tuple[bytes, bytes] | None = None
        self._secret, self._heard = secret, b""
        self._session: SessionKeys | None = None

    def feed(self, data: bytes) -> bytes:
        """What to answer to some bytes, at most `wanted`.

        Raises:
            OtherSecretError: the other end has another secret; it carries the answer.
            HandshakeError: it speaks something else.
        """
        self._heard, self.wanted = self._heard + data, self.wanted - len(data)
        if self._session is None and not self._heard.startswith(MAGIC[: len(self._heard)]):
            raise HandshakeError("it speaks something else")
        if self.wanted:
            return b""
        if self._session is None:
            nonce, self.wanted = os.urandom(_NONCE), _PROOF
            self._session = SessionKeys(self._secret, self._heard[len(MAGIC) :] + nonce)
            self._heard = b""
            return MAGIC + nonce
        if not hmac.compare_digest(self._heard, self._session.process_proof):
            raise OtherSecretError(_WRONG + bytes(_PROOF))
        self.keys = self._session.messages
        return _RIGHT + self._session.server_proof


def introduce(connection: socket.socket, secret: bytes, deadline: float) -> Wire:
    """The process's side: proves itself, and lets the server prove itself.

    Args:
        connection: to the server, just opened.
        secret: of the run; empty for none.
        deadline: by `time.monotonic()`.

    Raises:
        HandshakeError: what is there is not process 0 of this run.
    """
    connection.setblocking(False)
    nonce = os.urandom(_NONCE)
    answer = _exchanged(connection, MAGIC + nonce, len(MAGIC) + _NONCE, deadline)
    if answer == MAGIC + nonce:  # a port that nobody listens at may be given to the connection that asks for it
        raise UnansweredError("it is this end itself")
    if not answer.startswith(MAGIC):
        raise HandshakeError("it speaks something else")
    session = SessionKeys(secret, nonce + answer[len(MAGIC) :])
    answer = _exchanged(connection, session.process_proof, len(_RIGHT) + _PROOF, deadline)
    if answer[:1] == _WRONG or not hmac.compare_digest(answer[1:], session.server_proof):
        raise OtherSecretError("it has another secret")
    return Wire(connection, session.messages, is_server=False)


def _exchanged(connection: socket.socket, words: bytes, count: int, deadline: float) -> bytes:
    """The answer to some words. What begins with other bytes than it must is not waited for to its end."""
    try:
        send_all(connection, words, deadline)
        first = receive_exactly(connection, 1, deadline)
        if first is not None and first not in (MAGIC[:1], _RIGHT, _WRONG):
            raise HandshakeError("it speaks something else")
        rest = None if first is None else receive_exactly(connection, count - 1, deadline)
    except OSError:
        raise UnansweredError("it said nothing") from None
    if first is None or rest is None:
        raise UnansweredError("it closed the connection")
    return first + rest
