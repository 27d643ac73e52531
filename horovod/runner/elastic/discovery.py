"""Horovod's classes that find hosts, for scripts that use or subclass them. ``horovodrun`` has adapters of its own,
which are never waited for: see docs/many-hosts.md.
"""

from __future__ import annotations

import subprocess

from elastic.errors import Invalid
from elastic.runtime.host_updates import HostUpdateResult

SCRIPT_S = 60.0  # that a discovery script may take


class HostDiscovery:
    """Finds hosts: a subclass gives ``find_available_hosts_and_slots``."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Slots by host, the preferred host first."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """Asks a script, which prints ``host`` or ``host:slots``, one a line."""

    def __init__(self, discovery_script: str, default_slots: int | None = None) -> None:
        self._discovery_script = discovery_script
        self._default_slots = default_slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Runs the script, for SCRIPT_S seconds at most. Raises Invalid (a ValueError) for a script that can't be run
        and for a wrong line, RuntimeError if it fails or does not end.
        """
        from elastic.driver.discovery.script import find_script
        from elastic.driver.network.hosts import parse_lines

        name = self._discovery_script
        try:
            done = subprocess.run(
                find_script(name), stdout=subprocess.PIPE, text=True, timeout=SCRIPT_S, check=True
            )
        except subprocess.CalledProcessError as error:
            raise RuntimeError(
                f"the discovery script {name} ended with exit code {error.returncode}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"the discovery script {name} did not end within {SCRIPT_S:g} s"
            ) from error
        return parse_lines(done.stdout, source=name, default_slots=self._default_slots or 1)


class FixedHosts(HostDiscovery):
    """The hosts that it is given; ``set`` gives it others."""

    def __init__(self, available_hosts_and_slots: dict[str, int]) -> None:
        self._hosts = dict(available_hosts_and_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._hosts)

    def set(self, available_hosts_and_slots: dict[str, int]) -> None:
        self._hosts = dict(available_hosts_and_slots)


class HostManager:
    """Remembers what a discovery found, and says what has become of it. What a host did wrong is the driver's to judge:
    there is no ``blacklist`` here.
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
        """Slots by host, as of the last update."""
        return dict(self._hosts)

    def update_available_hosts(self) -> HostUpdateResult:
        """Asks again; what has come and gone since the last time, slots included. Raises what the discovery raises."""
        before, self._hosts = self._hosts, dict(self._discovery.find_available_hosts_and_slots())
        result = HostUpdateResult.no_update
        for host in {*before, *self._hosts}:
            more = self._hosts.get(host, 0) - before.get(host, 0)
            if more:
                result |= HostUpdateResult.added if more > 0 else HostUpdateResult.removed
        return result


__all__ = ["FixedHosts", "HostDiscovery", "HostDiscoveryScript", "HostManager"]
