"""Tested versions of trainer libraries: older versions are rejected, and newer versions cause a warning."""

from __future__ import annotations

import importlib.metadata
import warnings

from elastic.errors import Invalid

# The oldest version is also the lower bound in pyproject.toml, and the newest is in constraints.txt.
TRIED = {
    "lightning": ("2.6.0", "2.6.6"),
    "transformers": ("5.3.0", "5.24.0"),
    "accelerate": ("1.4.0", "1.15.0"),
}


def check(package: str, *, installed: str | None = None) -> None:
    """Warn, once per call site, if the installed version is newer than the tested versions.

    Raises:
        Invalid: the version is older than the tested versions, and may lack private names that the integrations use.
    """
    oldest, newest = TRIED[package]
    found = installed or importlib.metadata.version(package)
    if _minor(found) < _minor(oldest):
        raise Invalid(
            f"{package} {found} is installed, but elastic training needs {package} {oldest} or later: run pip"
            f" install '{package}>={oldest}'"
        )
    if _minor(found) > _minor(newest):
        warnings.warn(
            f"elastic was tested with {package} {oldest} to {newest}, but {found} is installed, whose training loops"
            f" may differ: if training does not continue after a worker is lost, install {package}=={newest}",
            stacklevel=3,
        )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
