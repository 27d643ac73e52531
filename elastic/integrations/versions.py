"""Tested versions of trainer libraries, and a warning for other versions."""

from __future__ import annotations

import importlib.metadata
import warnings

TRIED = {
    "lightning": ("2.6.0", "2.6.6"),
    "transformers": ("5.24.0", "5.24.0"),
    "accelerate": ("1.15.0", "1.15.0"),
}


def check(package: str, *, installed: str | None = None) -> None:
    """Warn, once per call site, if the installed version was not tested."""
    oldest, newest = TRIED[package]
    found = installed or importlib.metadata.version(package)
    if not _minor(oldest) <= _minor(found) <= _minor(newest):
        warnings.warn(
            f"elastic was tested with {package} {oldest} to {newest}, but {found} is installed: its loops may"
            f" differ; if training does not continue after a worker is lost, install {package}=={newest}",
            stacklevel=3,
        )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
