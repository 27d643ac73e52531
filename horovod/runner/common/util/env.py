"""Rank and size of this process from its environment, before ``init()``."""

from __future__ import annotations

import os

# Variables of the rank and the size, of Horovod, Open MPI and PMI launchers.
PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size as set by the launcher, or 0 and 1. In an elastic job, these are the initial values.

    Raises:
        RuntimeError: only one variable of a pair is set.
    """
    for names in PAIRS:
        found = [os.environ[name] for name in names if name in os.environ]
        if len(found) == 1:
            raise RuntimeError(
                f"only one of {names[0]} and {names[1]} is set: set both variables, or unset both"
            )
        if found:
            return int(found[0]), int(found[1])
    return 0, 1


__all__ = ["get_env_rank_and_size"]
