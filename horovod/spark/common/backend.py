"""Backends, such as ``SparkBackend``, that run the training function of an estimator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import elastic.spark
import horovod.spark

ELASTIC = {"min_num_proc", "max_num_proc", "elastic_timeout", "reset_limit"}


class Backend:
    """Interface of the backends, which run a function on several workers."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every worker, and return the values by rank."""
        raise NotImplementedError

    def num_processes(self) -> int:
        """Return the number of workers."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Backend that uses `horovod.spark.run`, or `run_elastic` if an argument of the latter is given."""

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        context = elastic.spark.active_context()
        self._num_proc, _, _ = elastic.spark.sizes(
            num_proc, None, None, int(context.defaultParallelism)
        )
        self._env = env
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        run = horovod.spark.run_elastic if ELASTIC & self._kwargs.keys() else horovod.spark.run
        both = {**(self._env or {}), **(env or {})}
        return run(fn, args, kwargs, num_proc=self._num_proc, env=both or None, **self._kwargs)

    def num_processes(self) -> int:
        return self._num_proc


__all__ = ["Backend", "SparkBackend"]
