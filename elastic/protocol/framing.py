"""Frames of a connection: their encoding, size limit and authentication tag. Pure: no I/O, no clock.

    4 bytes  length of the body, big endian
    body     one message as MessagePack; empty in a sealed frame: a heartbeat
    16 bytes tag, once the connection is sealed

The tag is an HMAC-SHA256, truncated to 16 bytes, over the frame's number in its direction and the frame's body. Each
direction of each connection has a separate key, derived from a secret and the nonces of both ends. Without the secret,
a frame cannot be forged, changed, repeated, dropped, reflected or moved without detection. Frames are not encrypted.

Control connections are sealed after a challenge. On connections between ranks, for the store of a generation and for
the negotiation of named collectives, the caller sends its nonce of NONCE_BYTES, followed by sealed frames: the tag of
the caller's first frame proves that it has the secret. Each kind of connection has a separate secret, see `derived`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from typing import Any

import msgspec

from elastic.protocol.messages import HANDSHAKE_LIMIT, RELAY_LIMIT, ProtocolError, encoded

TAG_BYTES = 16
NONCE_BYTES = 32  # length of a nonce in bytes; each end creates a new nonce for every connection
SHOWN = 200  # maximum number of characters that an error quotes from an unauthenticated peer


def proof(secret: bytes, role: str, challenge: bytes, own: bytes, identity: str) -> bytes:
    """Return a proof that this end has the secret.

    The proof is an HMAC-SHA256 (32 bytes) over both nonces, the role and the caller's name. Because of these inputs, a
    peer cannot reflect a proof or reuse it on another connection.
    """
    text = b"|".join((b"hvd-elastic", role.encode(), challenge, own, identity.encode()))
    return hmac.digest(secret, text, hashlib.sha256)


def derived(secret: bytes, purpose: str, generation: int) -> bytes:
    """Derive a secret (32 bytes) for one kind of connection in one generation.

    Frames sealed with another secret are rejected.
    """
    text = f"hvd-elastic {purpose}|{generation}"
    return hmac.digest(secret, text.encode(), hashlib.sha256)


class FramedConnection:
    """Encoder of outgoing frames and decoder of incoming ones, at one end of a connection.

    Args:
        decoder: decoder of the peer's messages.
        limit: maximum size of a frame in bytes, until `seal` sets another.
    """

    def __init__(
        self, decoder: msgspec.msgpack.Decoder[Any], *, limit: int = HANDSHAKE_LIMIT
    ) -> None:
        self._decoder = decoder
        self._limit = limit
        self._buffer = bytearray()
        self._key_in = self._key_out = b""
        self._frames_in = self._frames_out = 0  # number of sealed frames in each direction

    def seal(
        self, secret: bytes, *, mine: bytes, theirs: bytes, caller: bool, limit: int = RELAY_LIMIT
    ) -> None:
        """Seal all frames from now on, in both directions.

        Args:
            secret: secret that both ends have.
            mine: nonce of this end. One of the two nonces may be empty.
            theirs: nonce of the other end.
            caller: whether this end opened the connection.
            limit: maximum size of a frame in bytes.
        """
        nonces = mine + theirs if caller else theirs + mine
        from_caller, to_caller = (
            hmac.digest(secret, b"hvd-elastic seal|" + direction + nonces, hashlib.sha256)
            for direction in (b"from caller|", b"to caller|")
        )
        self._key_out, self._key_in = (
            (from_caller, to_caller) if caller else (to_caller, from_caller)
        )
        self._limit = limit

    def expect(self, decoder: msgspec.msgpack.Decoder[Any], limit: int) -> None:
        """Set the type of the peer's messages from now on."""
        self._decoder, self._limit = decoder, limit

    def frame(self, message: msgspec.Struct) -> bytes:
        """Encode a message as a frame. Send frames in the order of these calls.

        Raises ProtocolError if the message exceeds FRAME_LIMIT.
        """
        return self.frame_of(encoded(message))

    def frame_of(self, body: bytes) -> bytes:
        """Return the complete frame of an encoded message."""
        head, tag = self.around(body)
        return b"".join((head, body, tag))

    def around(self, body: bytes) -> tuple[bytes, bytes]:
        """Return the header and the tag of an encoded message's frame. Send frames in the order of these calls."""
        head = len(body).to_bytes(4, "big")
        if not self._key_out:
            return head, b""
        self._frames_out += 1
        return head, _tag(self._key_out, self._frames_out, body)

    def feed(self, data: bytes) -> None:
        """Add received bytes, which may end in the middle of a frame."""
        self._buffer += data

    def next(self) -> Any | None:
        """Return the next complete message, or None. Raises ProtocolError if the bytes are invalid."""
        body = self._next_body()
        while body == b"" and self._key_in:
            body = self._next_body()  # An empty frame is a heartbeat, so skip it.
        if body is None:
            return None
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(
                f"a frame contains an invalid message: {_shown(error)}. Install the same hvd-elastic"
                " on both ends"
            ) from error

    def _next_body(self) -> bytes | None:
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        length = int.from_bytes(buffer[:4], "big")
        if length > self._limit:
            raise ProtocolError(
                f"a frame has {length} bytes, but the limit is {self._limit}: install the same"
                " hvd-elastic on both ends"
            )
        end = 4 + length + (TAG_BYTES if self._key_in else 0)
        if len(buffer) < end:
            return None
        body = bytes(buffer[4 : 4 + length])
        if self._key_in:
            self._frames_in += 1
            tag = bytes(buffer[4 + length : end])
            if not hmac.compare_digest(tag, _tag(self._key_in, self._frames_in, body)):
                raise ProtocolError(
                    "a frame has no valid authentication code for this connection: check that both"
                    " ends use the same secret"
                )
        del buffer[:end]
        return body

    @property
    def unread(self) -> int:
        """Return the number of received bytes after the last complete message."""
        return len(self._buffer)

    def receive(self, data: bytes) -> Iterator[Any]:
        """Add received bytes, and yield the messages that are now complete.

        The caller may call `seal` after a message, before it takes the next one.
        """
        self.feed(data)
        while (message := self.next()) is not None:
            yield message


class AcceptedConnection(FramedConnection):
    """Accepting end of a connection on which the caller sends its nonce first.

    Args:
        secret: secret for this kind of connection, see `derived`.
        mine: nonce of this end. Empty unless the caller has received one.
        limit: maximum size of a frame in bytes. A frame with an invalid tag ends the connection, so this also limits
            how much an unauthenticated peer can send.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Any],
        secret: bytes,
        *,
        mine: bytes = b"",
        limit: int = HANDSHAKE_LIMIT,
    ) -> None:
        super().__init__(decoder, limit=limit)
        self._secret = secret
        self._mine = mine

    def next(self) -> Any | None:
        if not self._key_in:
            if len(self._buffer) < NONCE_BYTES:
                return None
            theirs = bytes(self._buffer[:NONCE_BYTES])
            del self._buffer[:NONCE_BYTES]
            self.seal(self._secret, mine=self._mine, theirs=theirs, caller=False, limit=self._limit)
        return super().next()


def _shown(error: Exception) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error)[:SHOWN])


def _tag(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, hashlib.sha256)[:TAG_BYTES]
