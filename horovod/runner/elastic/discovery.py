"""Horovod's host discovery classes, for scripts that use or subclass them.

``horovodrun`` does not use these classes, but its own non-blocking adapters. See docs/many-hosts.md.
"""

from __future__ import annotations

import subprocess

from elastic.errors import Invalid
from elastic.runtime.host_updates import HostUpdateResult

SCRIPT_S = 60.0  # timeout for a discovery script, in seconds


class HostDiscovery:
    """Base class for host discovery. Subclasses define ``find_available_hosts_and_slots``."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots of each host, preferred hosts first."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """Discovery with a script that prints one ``host`` or ``host:slots`` per line."""

    def __init__(self, discovery_script: str, default_slots: int | None = None) -> None:
        self._discovery_script = discovery_script
        self._default_slots = default_slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Run the script, for at most SCRIPT_S seconds.

        Raises:
            Invalid: (a ValueError) the script cannot be run or prints an invalid line.
            RuntimeError: the script fails or does not exit within the time limit.
        """
        from elastic.driver.discovery.script import find_script
        from elastic.driver.network.host_lists import parse_lines

        name = self._discovery_script
        try:
            done = subprocess.run(
                find_script(name), stdout=subprocess.PIPE, text=True, timeout=SCRIPT_S, check=True
            )
        except subprocess.CalledProcessError as error:
            raise RuntimeError(
                f"the discovery script {name} ended with exit code {error.returncode}, so the list of hosts is unknown:"
                " run the script by hand to see its error"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"the discovery script {name} did not finish within {SCRIPT_S:g} s, so the list of hosts is unknown:"
                " make it print a list that another process keeps up to date"
            ) from error
        return parse_lines(done.stdout, source=name, default_slots=self._default_slots or 1)


class FixedHosts(HostDiscovery):
    """Discovery with a given set of hosts, which ``set`` replaces."""

    def __init__(self, available_hosts_and_slots: dict[str, int]) -> None:
        self._hosts = dict(available_hosts_and_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._hosts)

    def set(self, available_hosts_and_slots: dict[str, int]) -> None:
        self._hosts = dict(available_hosts_and_slots)


class HostManager:
    """Tracker of changes in the result of a host discovery.

    It has no method ``blacklist``, because the driver decides which failed hosts to exclude.
    """

    def __init__(self, discovery: HostDiscovery) -> None:
        if not hasattr(discovery, "find_available_hosts_and_slots"):
            raise Invalid(
                f"{type(discovery).__name__} has no find_available_hosts_and_slots(): pass a HostDiscovery"
            )
        self._discovery = discovery
        self._hosts: dict[str, int] = {}

    @property
    def available_hosts(self) -> set[str]:
        return set(self._hosts)

    @property
    def host_slots(self) -> dict[str, int]:
        """Number of slots of each host at the last update."""
        return dict(self._hosts)

    def update_available_hosts(self) -> HostUpdateResult:
        """Run the discovery again, and return whether hosts or slots were added or removed.

        Exceptions raised by the discovery propagate to the caller.
        """
        before, self._hosts = self._hosts, dict(self._discovery.find_available_hosts_and_slots())
        result = HostUpdateResult.no_update
        for host in {*before, *self._hosts}:
            more = self._hosts.get(host, 0) - before.get(host, 0)
            if more:
                result |= HostUpdateResult.added if more > 0 else HostUpdateResult.removed
        return result


__all__ = ["FixedHosts", "HostDiscovery", "HostDiscoveryScript", "HostManager"]
