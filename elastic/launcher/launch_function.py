"""`launch`: run a Python function on many workers, as ``elasticrun`` runs a script."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from elastic.driver.commandline.options.argument_parser import LAUNCH
from elastic.driver.commandline.options.keyword_arguments import accepts, words_of
from elastic.errors import Invalid, JobFailed
from elastic.launcher.run_function import carried, pickled
from elastic.protocol.report_values import Report

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from elastic.launcher.option_types import LaunchOptions


@accepts(LAUNCH)
def launch(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    executable: str | None = None,
    on_report: Callable[[Report], object] | None = None,
    **options: Unpack[LaunchOptions],
) -> list[Any]:
    """Run ``func(*args, **kwargs)`` on every worker, and return the results by rank in the last world.

    ``min_np``, ``max_np`` or a discovery script makes the job elastic.

    Args:
        func: function that each worker calls, pickled by value with cloudpickle. Hosts that do not share this host's
            TMPDIR receive up to 512 KiB of pickled data over the job's connections.
        args, kwargs: arguments of ``func``.
        env: environment that the workers inherit (default: that of this process).
        executable: path of the Python that runs the workers (default: that of this process).
        on_report: called in this process with a `Report` for each `elastic.report` call of a worker, one at a time. It
            blocks the driver while it runs. If it raises, the first exception is logged and the job continues.
        **options: options of ``elasticrun``, with times in seconds. ``begin_from`` is ``--from``.

    Returns:
        The return values of ``func``, by rank in the last world.

    Raises:
        Invalid: (a ValueError) an argument is invalid. Raised before any process is started.
        TypeError: an option does not exist.
        JobFailed: the job failed, after all output of the workers was forwarded.

    Example::

        losses = elastic.launch(train, args=(0.1,), np=4)  # results of train(0.1), by rank
    """
    flags = words_of(LAUNCH, options)
    if not callable(func):
        raise Invalid(f"func is a {type(func).__name__}: pass a function")
    if not isinstance(args, list | tuple):
        raise Invalid(f"args is a {type(args).__name__}: pass a list or tuple of arguments")
    if on_report is not None and not callable(on_report):
        raise Invalid(f"on_report is a {type(on_report).__name__}: pass a function of one argument")
    from elastic.driver.commandline import cli
    from elastic.driver.job.start import Outcome, start

    environ = dict(os.environ if env is None else env)
    # Workers must import modules from the same folders as this process.
    environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)

    # The folder is created with mode 0700, so other users cannot read the pickled call.
    with tempfile.TemporaryDirectory(prefix="elastic-launch-") as folder:
        call = Path(folder) / "call"
        content = pickled(func, args, kwargs or {})
        call.write_bytes(content)
        command = [executable or sys.executable, "-m", "elastic.launcher.run_function", str(call)]
        job = cli.make_job(cli.read_options([*flags, *command], environ), environ)
        fleet = job.fleet
        # The folder may not exist on other machines, so the call is also passed in environment variables.
        if fleet is not None:
            fleet = replace(fleet, forwarded={**fleet.forwarded, **carried(content)})
        job = replace(job, reported=on_report, fleet=fleet)
        outcome: Outcome = run_apart(lambda: asyncio.run(start(job)))
    if outcome.code != 0:
        raise JobFailed(
            f"the job ended with exit code {outcome.code} (see the output of its workers): {outcome.reason}"
        )
    return values_of(outcome.results)


def values_of(results: Sequence[bytes | None]) -> list[Any]:
    """Return the unpickled results in rank order.

    Raises JobFailed if a result is missing, because the index of each result must be its rank.
    """
    missing = [str(rank) for rank, blob in enumerate(results) if blob is None]
    if missing:
        named = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing[:8])}"
        raise JobFailed(
            f"{named} of {len(results)} exited without a return value, possibly through sys.exit(): return from"
            " the function on every rank"
        )
    return [cloudpickle.loads(blob) for blob in results if blob is not None]


def run_apart(work: Callable[[], Any]) -> Any:
    """Run ``work`` in this thread, or in a new thread if this one already runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    return ThreadPoolExecutor(1, "elastic-driver").submit(work).result()
