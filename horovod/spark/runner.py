"""Horovod's ``run`` and ``run_elastic``, which call a function on workers in the tasks of a Spark application."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import elastic.spark
from elastic.errors import Invalid
from horovod.common.renamed import renamed
from horovod.ray.settings import VERBOSE, interfaces

START_S = 600.0
START_TIMEOUT = "HOROVOD_SPARK_START_TIMEOUT"


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Collection[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``num_proc`` workers in Spark tasks, and return the values by rank.

    Args:
        num_proc: number of workers. Default: spark.default.parallelism.
        start_timeout: timeout for Spark to start the tasks, in seconds. Default: HOROVOD_SPARK_START_TIMEOUT, or 600.
        env: variables that are added to the workers' environment.
        stdout, stderr: text streams that receive the workers' output. Default: those of this process.
        verbose: verbosity; 2 logs everything.
        nics: names of network interfaces; each host uses the first one that it has.
        executable: Python interpreter of the workers. Default: that of the Spark tasks.

    ``use_gloo`` has no effect, because MPI is not supported.

    Raises:
        Invalid: (a ValueError) an argument is not supported, no SparkContext exists, or it has too few slots.
        JobFailed: (a RuntimeError) the job failed.
    """
    for name, value in {"use_mpi": use_mpi, "extra_mpi_args": extra_mpi_args}.items():
        if value:
            raise Invalid(
                f"horovod.spark.run({name}=...) is not supported, because MPI is not used: omit {name}"
            )
    return elastic.spark.run(
        fn,
        args,
        kwargs,
        num_proc=num_proc,
        executable=executable,
        **_common(start_timeout, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp),
    )


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Collection[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on workers that continue when Spark executors are lost or added.

    Args:
        num_proc: number of workers to begin with. Default: spark.default.parallelism.
        min_num_proc, max_num_proc: minimum and maximum number of workers. Default: ``num_proc``.
        elastic_timeout: timeout for ``min_num_proc`` workers to become ready, in seconds.
        reset_limit: maximum number of failures; planned changes are not counted.
        min_np, max_np: old names of ``min_num_proc`` and ``max_num_proc``.

    The other arguments are those of `run`. Returns the values of the last world, by rank.

    Raises:
        Invalid: (a ValueError) an argument is not supported, no SparkContext exists, or it has too few slots.
        JobFailed: (a RuntimeError) the job failed.
    """
    context = elastic.spark.active_context()
    least = renamed("run_elastic", "min_num_proc", min_num_proc, "min_np", min_np)
    most = renamed("run_elastic", "max_num_proc", max_num_proc, "max_np", max_np)
    np, least, most = elastic.spark.sizes(num_proc, least, most, int(context.defaultParallelism))
    return elastic.spark.run(
        fn,
        args,
        kwargs,
        num_proc=np,
        min_num_proc=least,
        max_num_proc=most,
        elastic_timeout=elastic_timeout,
        reset_limit=reset_limit,
        **_common(start_timeout, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp),
    )


def _common(
    start_timeout: float | None,
    env: Mapping[str, str] | None,
    stdout: Any,
    stderr: Any,
    verbose: int,
    nics: Collection[str] | str | None,
    prefix_timestamps: bool,
) -> dict[str, Any]:
    return {
        "spark_start_timeout": _start_s(start_timeout),
        "env": env,
        "stdout": stdout,
        "stderr": stderr,
        "verbose": _verbosity(verbose) >= VERBOSE,
        "network_interface": interfaces(nics) if nics else None,
        "prefix_timestamps": prefix_timestamps,
    }


def _verbosity(given: int | None) -> int:
    if given is not None and not isinstance(given, int):
        raise Invalid(f"verbose is {given!r}: pass 0, 1 or 2")
    return given or 0


def _start_s(given: float | None) -> float:
    text = os.environ.get(START_TIMEOUT) if given is None else given
    try:
        seconds = START_S if text is None else float(text)
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds > 0:
        name = START_TIMEOUT if given is None else "start_timeout"
        raise Invalid(f"{name} is {text!r}: pass a positive number of seconds")
    return seconds


__all__ = ["run", "run_elastic"]
