"""Settings of Horovod's executors, except the number of workers, and their conversion to those of this package."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

# replaces Horovod's default, which is too short if many workers import torch at the same time
HOROVODS_TIMEOUT_S = 30
VERBOSE = 2  # minimum value of ``verbose`` for the complete log


@dataclass
class MiniSettings:
    """Settings of an executor. Times are in seconds.

    Args:
        nics: names of network interfaces. Each host uses the first one that exists there.
        key: has no effect, because each job has its own secret.
        ssh_port, ssh_identity_file: have no effect, because Ray starts processes on the hosts.
    """

    nics: Collection[str] | None = None
    verbose: int = 1
    key: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False


@dataclass
class ElasticSettings(MiniSettings):
    """Settings of `ElasticRayExecutor`."""

    timeout_s: float = HOROVODS_TIMEOUT_S
    elastic: bool = True
    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[float, float] | None = None
    elastic_timeout: float = 600


def limits(settings: Any) -> dict[str, Any]:
    """Convert settings to arguments of `elastic.ray.Executor`. Accepts any object with the fields of MiniSettings.

    A ``timeout_s`` of 30, Horovod's default, is replaced by the default of this package, 120 s.
    """
    warn_of_ssh(settings)
    found: dict[str, Any] = {"verbose": int(getattr(settings, "verbose", 1) or 0) >= VERBOSE}
    timeout_s = getattr(settings, "timeout_s", None)
    if timeout_s is not None and timeout_s != HOROVODS_TIMEOUT_S:
        found["start_timeout"] = timeout_s
    placement_s = getattr(settings, "placement_group_timeout_s", None)
    if placement_s is not None:
        found["placement_timeout"] = placement_s
    nics = getattr(settings, "nics", None)
    if nics:
        found["network_interface"] = interfaces(nics)
    return found


def interfaces(nics: Collection[str]) -> str:
    """Format interfaces for a flag. If they are a set, which has no order, they are sorted."""
    if isinstance(nics, str):
        return nics
    return ",".join(sorted(nics) if isinstance(nics, set | frozenset) else nics)


def warn_of_ssh(settings: Any) -> None:
    given = [
        name
        for name in ("ssh_identity_file", "ssh_str", "ssh_port")
        if getattr(settings, name, None) is not None
    ]
    if given and not getattr(settings, "_warned_of_ssh", False):
        warnings.warn(
            f"{' and '.join(given)}: no effect, because Ray starts the workers, not ssh",
            UserWarning,
            stacklevel=4,
        )
        settings._warned_of_ssh = True


def verbosity(verbose: bool | int | None) -> int:
    """Convert ``verbose``, a deprecated argument of ``create_settings`` found only in Horovod's documentation."""
    if verbose is None:
        return 1
    warnings.warn(
        "create_settings(verbose=...) is deprecated; set the field: settings.verbose = 2",
        DeprecationWarning,
        stacklevel=3,
    )
    return VERBOSE if verbose is True else int(verbose)


def checked_environment(given: Any) -> dict[str, str]:
    """Convert names and values of variables to strings, like Horovod.

    Variables with the value None are omitted.

    Raises:
        ValueError: ``given`` is not a dict.
    """
    try:
        items = dict(given or {}).items()
    except (TypeError, ValueError):
        kind = type(given).__name__
        raise ValueError(f"extra_env_vars is a {kind}: pass a dict of names and values") from None
    return {
        str(name): os.fspath(v) if isinstance(v, os.PathLike) else str(v)
        for name, v in items
        if v is not None
    }
