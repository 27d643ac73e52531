"""The bytes of a connection: frames, their limit, and a seal that nobody else can make. Pure.

    4 bytes  length of the body, big endian
    body     one message as MessagePack; empty in a sealed frame: the sender lives
    16 bytes tag, once the connection is sealed

The tag is an HMAC-SHA256, cut to 16 bytes, over the frame's number in its direction and the body. Each direction of
each connection has a key of its own, made of a secret and of the nonces of both ends, so that a frame can be forged,
changed, repeated, left out, sent back or moved to another connection only by who knows the secret. It is not encrypted.

Control connections are sealed after a challenge. Between ranks (the store of a generation, the negotiation of named
collectives) the caller sends its nonce, NONCE_BYTES, and goes on with sealed frames: the tag of the first one proves
that it knows the secret. Each use has a secret of its own, see `derived`.
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


def derived(secret: bytes, purpose: str, generation: int) -> bytes:
    """A secret for one use in one generation (32 bytes), so that nothing that was said in another counts here."""
    text = f"hvd-elastic {purpose}|{generation}"
    return hmac.digest(secret, text.encode(), hashlib.sha256)


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

    def seal(
        self, secret: bytes, *, mine: bytes, theirs: bytes, caller: bool, limit: int = RELAY_LIMIT
    ) -> None:
        """From here on frames are sealed, and may have ``limit`` bytes. ``mine`` and ``theirs`` are the nonces of both
        ends, one of which may be empty; ``caller``: this end opened the connection.
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
        """What the other end says from here on."""
        self._decoder, self._limit = decoder, limit

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
        body = self._next_body()
        while body == b"" and self._key_in:
            body = self._next_body()  # the other end lives, and has nothing to say
        if body is None:
            return None
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message of this protocol: {_shown(error)}") from error

    def _next_body(self) -> bytes | None:
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
                raise ProtocolError("a frame without the seal of this connection")
        del buffer[:end]
        return body

    @property
    def unread(self) -> int:
        """Bytes that came after the last message."""
        return len(self._buffer)

    def receive(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete now, one by one: who hears one may `seal` before the next is read."""
        self.feed(data)
        while (message := self.next()) is not None:
            yield message


class CalledWire(Wire):
    """The end that is called where the caller begins with its nonce. ``secret`` is that of this use, see `derived`;
    ``mine``: this end's nonce, if the caller was told one. All that comes before a frame with the right seal is dropped
    with the connection, so ``limit`` bounds what a stranger may say.
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
    """Part of it are the words of whoever sent the frame: on one line, short, and nothing a terminal obeys."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error)[:SHOWN])


def _tag(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, hashlib.sha256)[:TAG_BYTES]
