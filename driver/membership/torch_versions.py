"""Detection of hosts with different versions of torch. Pure: no I/O, no clock.

Training with mixed versions usually works. A warning helps to explain different results, or errors on a single host.
"""

from __future__ import annotations


class Versions:
    """Registry of the first host that reported each torch version."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def record(self, host: str, version: str) -> str:
        """Record a host's torch version.

        Returns:
            A warning if this version is new and a host has reported another version before, otherwise an empty string.
        """
        if not version or version in self._first:
            return ""
        others = [f"{each} on {first}" for each, first in self._first.items()]
        self._first[version] = host
        if not others:
            return ""
        return (
            f"host {host} has torch {version}, others have {', '.join(others)}: they train together, but results"
            " and errors may differ between hosts; install the same version everywhere"
        )
