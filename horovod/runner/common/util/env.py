"""Lookup of this process's rank and size in its environment, before ``init()``."""

from __future__ import annotations

import os

# Pairs of variables for rank and size that Horovod, Open MPI and PMI launchers set.
PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return the rank and size that the launcher set, or 0 and 1 if it set none.

    In an elastic job, these are the initial values.

    Raises:
        RuntimeError: the environment contains the rank without the size, or the size without the rank.
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
