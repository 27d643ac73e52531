"""`run`: elastic training in the tasks of a Spark application, from Python."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import secrets
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic.driver.commandline.options.argument_parser import RAY
from elastic.driver.commandline.options.keyword_arguments import accepts, words_of
from elastic.errors import Invalid, JobFailed
from elastic.launcher.launch_function import run_apart, values_of
from elastic.launcher.run_function import pickled
from elastic.protocol.report_values import Report

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from elastic.launcher.option_types import RayOptions

NEEDS_SPARK = (
    "elastic.spark needs Spark: run pip install 'hvd-elastic[spark]', and install Java 17 or later"
)
START_S = 600.0  # timeout in seconds for the start of the tasks, as in Horovod
LOOK_S = 0.25
LOG_WAIT_S = 5.0  # seconds of waiting for executors after which a log line reports the wait
QUIET_S = 10.0  # seconds without a new executor after which no more are expected
WORKERS_MODULE = ("-m", "elastic.launcher.run_function")


@accepts(RAY)
def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    spark_start_timeout: float = START_S,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    executable: str | None = None,
    prefix_timestamps: bool = False,
    on_report: Callable[[Report], object] | None = None,
    **options: Unpack[RayOptions],
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on workers in tasks of the active SparkContext, and return the results by rank.

    By default, the job has a fixed size: its workers run in a barrier stage, and the first failure ends the job.
    ``min_num_proc`` or ``max_num_proc`` make the job elastic and run it in ordinary tasks. An elastic job begins with
    ``num_proc`` workers, or with fewer once no more executors join.

    Args:
        fn: function that each worker calls, pickled with cloudpickle.
        args, kwargs: arguments of ``fn``.
        num_proc: number of workers (default: spark.default.parallelism).
        min_num_proc: number of workers with which an elastic job continues when executors are lost.
        max_num_proc: number of workers to which an elastic job grows.
        spark_start_timeout: seconds for Spark to start the tasks.
        env: variables that are added to the workers' environment.
        stdout, stderr: text streams that receive the workers' output.
        executable: the workers' Python (default: that of Spark's tasks).
        prefix_timestamps: whether to prefix each line of the workers' output with the time.
        on_report: called in this process with each `elastic.report` of a worker. It blocks the driver until it returns.
        **options: options of `elastic.ray.run`, with times in seconds.

    Returns:
        The return values of ``fn``, by rank.

    Raises:
        Invalid: (a ValueError) an argument is invalid, no SparkContext is active, or Spark has fewer slots than
            workers. Raised before any process is started.
        JobFailed: the job failed.
    """
    flags = words_of(RAY, options)
    call = pickled(fn, args, kwargs or {})
    check_call(fn, args, kwargs or {})
    if on_report is not None and not callable(on_report):
        raise Invalid(f"on_report is a {type(on_report).__name__}: pass a function of one argument")
    forwarding = streams(stdout, stderr)
    context = active_context()
    from elastic.driver.commandline import cli
    from elastic.driver.job.start import Outcome, start
    from elastic.driver.network.secret import SECRET_BYTES
    from elastic.driver.spark.cluster import SparkCluster
    from elastic.driver.spark.provider import SparkProvider

    np, least, most = sizes(num_proc, min_num_proc, max_num_proc, int(context.defaultParallelism))
    elastic = min_num_proc is not None or max_num_proc is not None
    cluster = SparkCluster(context)
    barrier = not elastic and not cluster.dynamic
    if not cluster.dynamic:
        await_slots(cluster, least, spark_start_timeout)
    name = uuid.uuid4().hex[:12]
    flags += ["-np", str(np), "--job", name]
    if elastic:
        flags += ["--min-np", str(least), "--max-np", str(most)]
    environ = {**os.environ, **checked_environ(env)}
    command = [executable or "python", *WORKERS_MODULE]
    read = cli.read_options([*flags, *command], environ)
    provider = SparkProvider(
        context,
        name=name,
        call=call,
        secret=secrets.token_bytes(SECRET_BYTES),
        np=np,
        least=least if elastic else np,
        most=most + int(options.get("standbys") or 0),
        barrier=barrier,
        start_s=spark_start_timeout,
        interfaces=read.network_interfaces or [],
        threads=not _threads_given(context, environ),
        log_level="debug" if options.get("verbose") else "info",
    )
    job = cli.make_job(read, environ, provider=provider)
    assert job.fleet is not None
    forwarded = {name: value for name, value in job.fleet.forwarded.items() if name != "PYTHONPATH"}
    job = dataclasses.replace(
        job,
        fleet=dataclasses.replace(job.fleet, forwarded={**forwarded, **(env or {})}),
        streams=forwarding,
        prefix_timestamps=prefix_timestamps,
        reported=on_report,
        begun=provider.begun,
    )
    try:
        outcome: Outcome = run_apart(lambda: asyncio.run(start(job)))
    finally:
        provider.close()
    if outcome.code != 0:
        raise JobFailed(
            f"the job ended with exit code {outcome.code} (see the output of its workers): {outcome.reason}"
        )
    return values_of(outcome.results)


def active_context() -> Any:
    """Return the active SparkContext. Raises Invalid without one."""
    try:
        import pyspark
    except ImportError:
        raise Invalid(NEEDS_SPARK) from None
    context = pyspark.SparkContext._active_spark_context
    if context is not None:
        return context
    java = os.environ.get("JAVA_HOME") or shutil.which("java")
    raise Invalid(
        "there is no active SparkContext: create one first, with SparkSession.builder.getOrCreate(); Spark Connect"
        " provides no SparkContext"
        + ("" if java else ". Spark also needs Java 17 or later, which is not installed here")
    )


def check_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise Invalid if the function's signature does not accept these arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        # Skip the check for functions without a signature, such as those not written in Python.
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", "the function")
        raise Invalid(
            f"{name}{signature} can't be called with the given args and kwargs ({error}): pass arguments that match"
            " its parameters"
        ) from None


def sizes(
    num_proc: int | None, least: int | None, most: int | None, parallelism: int
) -> tuple[int, int, int]:
    """Return the initial, minimum and maximum number of workers.

    Args:
        num_proc, least, most: arguments ``num_proc``, ``min_num_proc`` and ``max_num_proc`` of `run`.
        parallelism: initial number of workers if ``num_proc`` is None, unless ``least`` or ``most`` requires another
            number.

    Raises:
        Invalid: the arguments contradict each other, or one is not a positive integer.
    """
    given = {"num_proc": num_proc, "min_num_proc": least, "max_num_proc": most}
    for name, count in given.items():
        if count is not None and (
            not isinstance(count, int) or isinstance(count, bool) or count < 1
        ):
            raise Invalid(f"{name} is {count!r}: pass a whole number of at least 1")
    np = num_proc
    if np is None:
        np = max(parallelism, least or 1)
        np = np if most is None else min(np, most)
    low, high = np if least is None else least, np if most is None else most
    if not low <= np <= high:
        raise Invalid(
            f"num_proc {np} is not between min_num_proc {low} and max_num_proc {high}: pass min <= num <= max"
        )
    return np, low, high


def await_slots(cluster: Any, needed: int, within_s: float) -> None:
    """Wait until Spark has slots for ``needed`` tasks.

    Raises Invalid after ``within_s`` seconds, or immediately if no executors can join.
    """
    from elastic.driver.agents.agent_main import write_stderr
    from elastic.driver.processes.console import Console

    began = grown = time.monotonic()
    most, logged = -1, False
    while (slots := cluster.slots()) < needed:
        now = time.monotonic()
        if now - began >= LOG_WAIT_S and not logged:
            logged = True
            log = Console(write_stderr, level="info", colour=False, timestamps=True)
            log("info", f"waiting for executors of Spark: {slots} of {needed} slots are available")
        if slots > most:
            most, grown = slots, now
        idle = slots > 0 and now - grown >= QUIET_S
        if cluster.local or idle or now - began >= within_s:
            more = "use the master local[N]" if cluster.local else "add executors or cores"
            raise Invalid(
                f"{needed} workers need {needed} slots, but Spark has {slots}: pass num_proc={max(1, slots)} or less,"
                f" or {more}; a slot has spark.task.cpus cores"
            )
        time.sleep(LOOK_S)


def checked_environ(given: Mapping[str, str] | None) -> dict[str, str]:
    """Validate additional environment variables, and return a copy.

    Raises Invalid if a name or a value is not allowed.
    """
    from elastic.ray.arguments import check_environ

    check_environ(given)
    return dict(given or {})


def _threads_given(context: Any, environ: Mapping[str, str]) -> bool:
    """Return whether the user has set the number of threads per worker."""
    key = "spark.executorEnv.OMP_NUM_THREADS"
    return "OMP_NUM_THREADS" in environ or context.getConf().get(key) is not None


def streams(
    stdout: Any, stderr: Any
) -> tuple[Callable[[bytes], None], Callable[[bytes], None]] | None:
    """Return functions that write to the given text streams, or None without any. Raises Invalid for other objects."""
    for name, stream in {"stdout": stdout, "stderr": stderr}.items():
        if stream is not None and not callable(getattr(stream, "write", None)):
            raise Invalid(f"{name} is a {type(stream).__name__}: pass an open text file or stream")
    if stdout is None and stderr is None:
        return None

    def writer(stream: Any) -> Callable[[bytes], None]:
        def write(data: bytes) -> None:
            binary = getattr(stream, "buffer", None)
            try:
                if binary is None:
                    stream.write(data.decode("utf-8", "replace"))
                else:
                    binary.write(data)
                stream.flush()
            except Exception as error:  # a user's stream may raise any exception
                raise OSError(
                    f"the stream that forwards the workers' output raised {type(error).__name__}"
                ) from error

        return write

    return writer(stdout or sys.stdout), writer(stderr or sys.stderr)
