"""The bytes of a control connection: frames, their limit, and a seal that nobody else can make. Pure.

    4 bytes  length of the body, big endian
    body     one message as MessagePack
    16 bytes tag, once both sides have proved that they know the job's secret

The tag is an HMAC-SHA256, cut to 16 bytes, over the frame's number in its direction and the body. Each direction of
each connection has a key of its own, made of the job's secret and of both nonces, so that a frame can be forged,
changed, repeated, left out, sent back or moved to another connection only by who knows the secret. It is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from typing import Any

import msgspec

from elastic.protocol.messages import HANDSHAKE_LIMIT, RELAY_LIMIT, ProtocolError, encoded

TAG_BYTES = 16
NONCE_BYTES = 32  # of each end, new for every connection
SHOWN = 200  # characters of what a stranger says, where an error repeats it


def proof(secret: bytes, role: str, challenge: bytes, own: bytes, who: str) -> bytes:
    """HMAC-SHA256 over both nonces, the role and the caller's name, so that no proof can be reflected or moved (32
    bytes).
    """
    text = b"|".join((b"hvd-elastic", role.encode(), challenge, own, who.encode()))
    return hmac.digest(secret, text, hashlib.sha256)


class Wire:
    """Both directions of one connection, as one of its ends sees them.

    ``decoder`` is for what the other end says. Until `seal` only ``limit`` bytes are taken for a frame.
    """

    def __init__(
        self, decoder: msgspec.msgpack.Decoder[Any], *, limit: int = HANDSHAKE_LIMIT
    ) -> None:
        self._decoder = decoder
        self._limit = limit
        self._buffer = bytearray()
        self._key_in = self._key_out = b""
        self._heard = self._said = 0  # sealed frames

    def seal(self, secret: bytes, *, mine: bytes, theirs: bytes, caller: bool) -> None:
        """From here on frames are sealed, and may be large. ``mine`` and ``theirs`` are the nonces of the handshake;
        ``caller``: this end opened the connection.
        """
        nonces = mine + theirs if caller else theirs + mine
        from_caller, to_caller = (
            hmac.digest(secret, b"hvd-elastic seal|" + direction + nonces, hashlib.sha256)
            for direction in (b"from caller|", b"to caller|")
        )
        self._key_out, self._key_in = (
            (from_caller, to_caller) if caller else (to_caller, from_caller)
        )
        self._limit = RELAY_LIMIT

    def frame(self, message: msgspec.Struct) -> bytes:
        """Raises ProtocolError where it would exceed FRAME_LIMIT. Send frames in the order in which they are made."""
        return self.frame_of(encoded(message))

    def frame_of(self, body: bytes) -> bytes:
        """Of a message that is encoded already."""
        head = len(body).to_bytes(4, "big")
        if not self._key_out:
            return head + body
        self._said += 1
        return head + body + _tag(self._key_out, self._said, body)

    def feed(self, data: bytes) -> None:
        """Bytes as they come, cut anywhere."""
        self._buffer += data

    def next(self) -> Any | None:
        """The next message that is complete. Raises ProtocolError on anything that is none."""
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        length = int.from_bytes(buffer[:4], "big")
        if length > self._limit:
            raise ProtocolError(f"a frame of {length} bytes; the limit is {self._limit}")
        end = 4 + length + (TAG_BYTES if self._key_in else 0)
        if len(buffer) < end:
            return None
        body = bytes(buffer[4 : 4 + length])
        if self._key_in:
            self._heard += 1
            tag = bytes(buffer[4 + length : end])
            if not hmac.compare_digest(tag, _tag(self._key_in, self._heard, body)):
                raise ProtocolError("a frame that does not carry this connection's seal")
        del buffer[:end]
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"no message of this protocol: {_shown(error)}") from error

    @property
    def unread(self) -> int:
        """Bytes that came after the last message."""
        return len(self._buffer)

    def receive(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete now, one by one: who hears one may `seal` before the next is read."""
        self.feed(data)
        while (message := self.next()) is not None:
            yield message


def _shown(error: Exception) -> str:
    """Part of it are the words of whoever sent the frame: on one line, short, and nothing a terminal obeys."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error)[:SHOWN])


def _tag(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, hashlib.sha256)[:TAG_BYTES]
