"""Utility functions of Horovod's module ``horovod.ray.utils``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from horovod.ray.settings import interfaces


def map_blocking(fn: Callable[[Any], Any], collection: Iterable[Any]) -> list[Any]:
    """Call ``fn`` on each element, and return the values of the resulting Ray references, in order."""
    import ray

    return list(ray.get([fn(each) for each in collection]))


def detect_nics(
    settings: Any,
    all_host_names: Collection[str] | None = None,
    node_workers: Collection[Any] | None = None,
) -> Collection[str]:
    """Return the network interfaces in the settings.

    No detection is needed, because each worker listens on the address through which it reaches rank 0.
    """
    return settings.nics or []


def nics_to_env_var(nics: Collection[str]) -> dict[str, str]:
    """Return the environment variables that set the network interfaces of a manually started worker."""
    if not nics:
        return {}
    names = interfaces(nics)
    return {"NCCL_SOCKET_IFNAME": names, "HOROVOD_GLOO_IFACE": names.split(",")[0]}


__all__ = ["detect_nics", "map_blocking", "nics_to_env_var"]
