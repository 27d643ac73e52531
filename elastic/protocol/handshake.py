"""The handshake of a control connection, as the end sees it that calls a driver. Pure; it decides whom to believe."""

from __future__ import annotations

import hmac
from typing import Any

from elastic.protocol.framing import NONCE_BYTES, Wire, proof
from elastic.protocol.messages import VERSION, Accepted, Challenge, ProtocolError, TurnedAway


class Caller:
    """Calls itself ``who``, and is one of ``role``. ``nonce``: NONCE_BYTES of this end, new for this connection."""

    def __init__(self, secret: bytes, role: str, who: str, nonce: bytes) -> None:
        self._secret, self._role, self._who, self.nonce = secret, role, who, nonce
        self._theirs = b""

    def answer(self, challenge: Any) -> bytes:
        """The proof that goes with our nonce. Raises ProtocolError where the other end is no driver of this release."""
        if not isinstance(challenge, Challenge):
            raise ProtocolError("the other end is not a driver of hvd-elastic")
        if challenge.version != VERSION:
            raise ProtocolError(
                f"the driver uses version {challenge.version} of the protocol, this {self._role} {VERSION}: install"
                " the same hvd-elastic on every host"
            )
        if len(challenge.nonce) != NONCE_BYTES:  # a proof's text must have one reading only
            raise ProtocolError("its challenge has an invalid length")
        self._theirs = challenge.nonce
        return proof(self._secret, self._role, self._theirs, self.nonce, self._who)

    def accepted(self, word: Any, wire: Wire) -> None:
        """What it has said to our proof; from here on the wire is sealed. Raises ProtocolError unless it knows the
        secret and lets us in, with its reason if it gives one.
        """
        if isinstance(word, TurnedAway) and self._is_its(word.proof, "turned away", word.reason):
            raise ProtocolError(word.reason)
        if not isinstance(word, Accepted) or not self._is_its(word.proof, "driver", self._who):
            raise ProtocolError("the driver does not know this job's secret")
        wire.seal(self._secret, mine=self.nonce, theirs=self._theirs, caller=True)

    def _is_its(self, given: bytes, role: str, text: str) -> bool:
        own = proof(self._secret, role, self.nonce, self._theirs, text)
        return hmac.compare_digest(given, own)
