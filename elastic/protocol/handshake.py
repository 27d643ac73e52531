"""Client side of a control connection's handshake, in which client and driver authenticate each other.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import hmac
from typing import Any

from elastic.protocol.framing import NONCE_BYTES, FramedConnection, proof
from elastic.protocol.messages import VERSION, Accepted, Challenge, ProtocolError, TurnedAway


class ClientHandshake:
    """Client side of the handshake, for a client with the name ``identity`` and the role ``role``.

    Args:
        nonce: NONCE_BYTES random bytes, new for this connection.
    """

    def __init__(self, secret: bytes, role: str, identity: str, nonce: bytes) -> None:
        self._secret, self._role, self._identity, self.nonce = secret, role, identity, nonce
        self._theirs = b""

    @property
    def answered(self) -> bool:
        return bool(self._theirs)

    def answer(self, challenge: Any) -> bytes:
        """Return the proof that answers the driver's challenge.

        Raises ProtocolError unless the driver has the same version.
        """
        if not isinstance(challenge, Challenge):
            raise ProtocolError(
                "the peer is not a driver of hvd-elastic: check the address of the driver"
            )
        if challenge.version != VERSION:
            raise ProtocolError(
                f"the driver uses protocol version {challenge.version}, this {self._role} version {VERSION}: install"
                " the same hvd-elastic on every host"
            )
        # Require the exact length: otherwise the HMAC's input, which joins both nonces, would be ambiguous.
        if len(challenge.nonce) != NONCE_BYTES:
            raise ProtocolError(
                f"the driver's challenge has {len(challenge.nonce)} bytes instead of {NONCE_BYTES}: check the address"
                " of the driver"
            )
        self._theirs = challenge.nonce
        return proof(self._secret, self._role, self._theirs, self.nonce, self._identity)

    def accepted(self, reply: Any, wire: FramedConnection) -> None:
        """Check the driver's answer to the client's proof, and seal all further frames.

        Raises ProtocolError unless the driver has the secret and accepts this client. The error contains the driver's
        reason, if it gave one.
        """
        if isinstance(reply, TurnedAway) and self._is_its(reply.proof, "turned away", reply.reason):
            raise ProtocolError(reply.reason)
        if not isinstance(reply, Accepted) or not self._is_its(
            reply.proof, "driver", self._identity
        ):
            raise ProtocolError(
                "the driver does not know this job's secret: check that the address is that of this job's driver, and"
                " that both have the same secret"
            )
        wire.seal(self._secret, mine=self.nonce, theirs=self._theirs, caller=True)

    def _is_its(self, given: bytes, role: str, text: str) -> bool:
        own = proof(self._secret, role, self.nonce, self._theirs, text)
        return hmac.compare_digest(given, own)
