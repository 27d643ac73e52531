"""Small things that scripts take from Horovod's module of this name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from horovod.ray.settings import interfaces


def map_blocking(fn: Callable[[Any], Any], collection: Iterable[Any]) -> list[Any]:
    """The values of the references that ``fn`` returns for each, in order."""
    import ray

    return list(ray.get([fn(each) for each in collection]))


def nics_to_env_var(nics: Collection[str]) -> dict[str, str]:
    """The variables by which a worker that is started by hand is told its network interfaces."""
    names = interfaces(nics)
    return {"NCCL_SOCKET_IFNAME": names, "HOROVOD_GLOO_IFACE": names.split(",")[0]}


__all__ = ["map_blocking", "nics_to_env_var"]
