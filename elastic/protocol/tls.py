"""TLS of a control connection: creates contexts from PEM files, and encrypts and decrypts bytes.

This module opens no socket.

Both ends present a certificate signed by the job's CA. Host names are not checked, since hosts change. TLS does not
replace the challenge of `elastic.protocol.framing`, which proves that the peer belongs to this job.
"""

from __future__ import annotations

import ssl

from elastic.errors import Invalid
from elastic.protocol.messages import ProtocolError

FLAGS = "--tls-cert, --tls-key and --tls-ca"
_PIECE = 1 << 16  # maximum number of decrypted bytes per read
_RECORDS = range(20, 24)  # possible first bytes of a TLS record
# OpenSSL's names for alerts that the peer has sent
_ALERTS = ("SSLV3_ALERT_", "TLSV1_ALERT_", "TLSV13_ALERT_")
_TOO_OLD = ("UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "ALERT_PROTOCOL_VERSION")


class TlsFailed(ProtocolError):
    """Error raised when the peer does not use TLS, or when one end rejects the other's certificate."""


def context(cert: str, key: str, ca: str, *, server: bool) -> ssl.SSLContext:
    """Create the TLS context of one end, from paths of PEM files. Raises Invalid if a file cannot be used."""
    for flag, path in (("--tls-cert", cert), ("--tls-key", key), ("--tls-ca", ca)):
        try:
            with open(path, "rb") as file:
                file.read(1)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise Invalid(
                f"{flag} {path} can't be read: {why}. Pass the path of a PEM file"
            ) from None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    if server:
        # Connections last as long as the job, so session tickets would never be used.
        made.num_tickets = 0
    try:
        made.load_verify_locations(ca)
    except ssl.SSLError:
        raise Invalid(
            f"--tls-ca {ca} contains no certificate: pass a PEM file with at least one certificate"
        ) from None
    try:
        made.load_cert_chain(cert, key, password=_no_passphrase)
    except _Passphrase:
        raise Invalid(
            f"--tls-key {key} is protected by a passphrase, which elasticrun can't ask for: pass a key without a"
            " passphrase, in a file that only you can read"
        ) from None
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise Invalid(
                f"--tls-key {key} does not belong to --tls-cert {cert}: pass a matching pair"
            ) from None
        raise Invalid(
            f"--tls-cert {cert} and --tls-key {key} are not a certificate and its key: pass two PEM files"
        ) from None
    return made


def check(cert: str, key: str, ca: str) -> None:
    """Raise Invalid unless two ends with these files would currently accept each other."""
    client = TlsEndpoint(context(cert, key, ca, server=False), server=False)
    server = TlsEndpoint(context(cert, key, ca, server=True), server=True)
    try:
        for _ in range(8):
            server.feed(client.due())
            client.feed(server.due())
    except TlsFailed as failure:
        error = failure.__cause__
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else failure
        raise Invalid(
            f"--tls-cert {cert} is not valid for --tls-ca {ca}: {why}. Have this CA sign the certificate for use"
            " by servers and clients"
        ) from None


class TlsEndpoint:
    """TLS state of one end of a connection.

    Received bytes are passed to `feed`, and `due` returns the bytes to send. Not thread-safe.

    Data that is passed for sending before the handshake completes is sent afterwards.
    """

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=server)
        self._waiting = bytearray()
        self._begun = False
        self.established = False
        if not server:
            self.feed(b"")

    def feed(self, data: bytes) -> bytes:
        """Decrypt received bytes.

        Returns:
            The decrypted bytes, possibly none.

        Raises:
            TlsFailed: the peer sent invalid data. Afterwards, `due` may return an alert to send.
        """
        if data and not self._begun:
            self._begun = True
            if data[0] not in _RECORDS:
                raise TlsFailed(f"the peer does not use TLS: pass {FLAGS} to the peer")
        self._arrived.write(data)
        parts = []
        try:
            if not self.established:
                self._tls.do_handshake()
                self.established = True
                waiting, self._waiting = self._waiting, bytearray()
                self.send(waiting)
            while part := self._tls.read(_PIECE):
                parts.append(part)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass  # SSLZeroReturnError: the peer has ended the stream.
        except ssl.SSLError as error:
            raise TlsFailed(_explained(error)) from error
        return b"".join(parts)

    def send(self, data: bytes | bytearray) -> None:
        if not self.established:
            self._waiting += data
            return
        view = memoryview(data)
        try:
            while view:
                view = view[self._tls.write(view) :]  # Each write produces one TLS record.
        except ssl.SSLError as error:
            raise TlsFailed(_explained(error)) from error

    def due(self) -> bytes:
        """Return the bytes to send now. Each byte is returned once."""
        return self._leaving.read()


class _Passphrase(Exception):
    pass


def _no_passphrase() -> str:
    raise _Passphrase


def _explained(error: ssl.SSLError) -> str:
    reason = error.reason or ""
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return f"the peer does not use TLS: pass {FLAGS} to the peer"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is rejected: {error.verify_message}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return f"it sends no certificate: pass it {FLAGS}"
    if any(word in reason for word in _TOO_OLD):
        return "it does not use TLS 1.2 or later"
    for alert in _ALERTS:
        if reason.startswith(alert):
            what = reason.removeprefix(alert).lower().replace("_", " ")
            return f"it rejects this certificate or TLS: {what}"
    return f"TLS handshake with it failed: {_reason(error)}"


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
