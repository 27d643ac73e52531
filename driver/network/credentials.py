"""How a process reaches what it must not reach without permission: etcd, and the other side of a TLS connection. Pure.

These are values of the command line and of the bootstrap of an agent. What is secret is not in their repr.
"""

from __future__ import annotations

import msgspec


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: who we are, and whose signature we take for good. Both ends of a connection show theirs.

    To etcd, which may let others in by name and password, ``cert`` and ``key`` may be empty.
    """

    cert: str
    key: str
    ca: str


class EtcdAccess(msgspec.Struct, frozen=True):
    """Where etcd is, and as whom we talk to it. ``tls`` None: in the clear."""

    endpoints: list[str]  # host:port, any member of the cluster; tried in turn
    tls: TlsFiles | None = None
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"EtcdAccess({', '.join(self.endpoints)}, user={self.user!r}, tls={self.tls})"
