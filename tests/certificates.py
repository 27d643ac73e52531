"""Certificates for tests, made by the openssl program: an authority, and what it signs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from harness.program import output_of

OPENSSL = shutil.which("openssl")


@dataclass(frozen=True)
class Authority:
    """Its own certificate and key, in a folder where it also puts what it signs."""

    folder: Path
    name: str = "ca"

    @property
    def ca(self) -> str:
        return str(self.folder / f"{self.name}.pem")

    @property
    def key(self) -> str:
        return str(self.folder / f"{self.name}.key")

    def sign(
        self, name: str, *, days: int = 2, usage: str = "", names: str = ""
    ) -> tuple[str, str, str]:
        """A new key and its certificate: the paths of certificate, key and authority."""
        key, request, cert = (self.folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        more = []
        if usage or names:
            extensions = self.folder / f"{name}.ext"
            lines = {"extendedKeyUsage": usage, "subjectAltName": names}
            extensions.write_text("".join(f"{key}={text}\n" for key, text in lines.items() if text))
            more = ["-extfile", extensions]
        openssl(
            *("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.key),
            *("-CAcreateserial", "-days", days, "-out", cert, *more),
        )
        return str(cert), str(key), self.ca


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def new_authority(folder: Path, name: str = "ca") -> Authority:
    made = Authority(folder, name)
    openssl(
        *("req", "-x509", *_NEW_KEY, "-keyout", made.key, "-out", made.ca),
        *("-days", 2, "-subj", f"/CN={name} of a test"),
    )
    return made


def openssl(*words: object) -> None:
    assert OPENSSL is not None, "the openssl program is missing"
    output_of(OPENSSL, *words, timeout=60)
