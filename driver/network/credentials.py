"""Credentials for etcd and for TLS connections. Pure: no I/O, no clock.

They come from the command line or from an agent's bootstrap. Their ``repr`` contains no secrets.
"""

from __future__ import annotations

import msgspec


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: this side's certificate and key, and the trusted CA.

    Both sides of a connection present certificates.

    For etcd, ``cert`` and ``key`` may be empty, because etcd can also authenticate clients by user and password.
    """

    cert: str
    key: str
    ca: str


class EtcdAccess(msgspec.Struct, frozen=True):
    """Endpoints and credentials of etcd.

    Args:
        tls: TLS files. None means an unencrypted connection.
    """

    # host:port of one or more members of the etcd cluster; they are tried in order
    endpoints: list[str]
    tls: TlsFiles | None = None
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"EtcdAccess({', '.join(self.endpoints)}, user={self.user!r}, tls={self.tls})"
