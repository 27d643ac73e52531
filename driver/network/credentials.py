"""Credentials for etcd and for TLS connections. Pure: no I/O, no clock.

The credentials come from the command line or from an agent's bootstrap. Their repr does not contain secrets.
"""

from __future__ import annotations

import msgspec


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: this side's certificate and key, and the trusted CA. Both sides of a connection present
    certificates.

    For etcd, which can also authenticate clients by user and password, ``cert`` and ``key`` may be empty.
    """

    cert: str
    key: str
    ca: str


class EtcdAccess(msgspec.Struct, frozen=True):
    """Endpoints and credentials of etcd.

    Args:
        tls: TLS files. None means an unencrypted connection.
    """

    endpoints: list[str]  # host:port of one or more members of the cluster, tried in turn
    tls: TlsFiles | None = None
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"EtcdAccess({', '.join(self.endpoints)}, user={self.user!r}, tls={self.tls})"
