"""Detect hosts with different versions of torch. Pure: no I/O, no clock.

Hosts with different versions may train together, which usually works. The warning helps to explain different results,
or errors on one host only.
"""

from __future__ import annotations


class Versions:
    """First host that reported each version of torch."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def heard(self, host: str, version: str) -> str:
        """Record the version of a host.

        Returns:
            A warning if a version other than the first is reported for the first time, otherwise the empty string.
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
