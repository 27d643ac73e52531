"""Certificates of this machine for tests, for servers and clients. Needs ``openssl``."""

from __future__ import annotations

from pathlib import Path

from certificates import new_authority
from elastic.driver.network.credentials import TlsFiles

NAMES = "DNS:localhost,IP:127.0.0.1,IP:::1"


def make_certificates(folder: Path, *, names: str = NAMES) -> TlsFiles:
    """A new authority, and a certificate for either end of a connection under these names."""
    folder.mkdir(parents=True, exist_ok=True)
    cert, key, ca = new_authority(folder).sign("trainer", names=names)
    return TlsFiles(cert=cert, key=key, ca=ca)
