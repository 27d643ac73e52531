"""Build options and utility functions of Horovod that need no framework."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from horovod.common.built_with import (
    ccl_built,
    check_has_gpu,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)

Value = TypeVar("Value")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether Horovod is available for a framework: True only for ``torch``."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework detects a GPU on this machine."""
    return extension_available(ext_base_name) and check_has_gpu()


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Context manager that sets environment variables. A variable with the value None is not changed."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether this number of ranks can use Adasum."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Value], n: int) -> list[Sequence[Value]]:  # noqa: E741, as in Horovod
    """Split a list into ``n`` consecutive parts whose lengths differ by at most 1."""
    least, more = divmod(len(l), n)
    ends = [part * least + min(part, more) for part in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]


def is_iterable(x: Any) -> bool:
    return isinstance(x, Iterable)


__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]
