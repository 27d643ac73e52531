"""Runtime of this process: ``init()``, ``shutdown()`` and access to the `worker_runtime.WorkerRuntime`."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from elastic import context, failpoints
from elastic.errors import NotInitialized
from elastic.failpoints import failpoint
from elastic.monitoring import timeline
from elastic.protocol import life_lock, messages
from elastic.protocol.messages import Address, Part, Place
from elastic.rendezvous import distributed_samplers, find_rank0, worker_settings
from elastic.rendezvous.launcher_detection import LauncherEnv
from elastic.rendezvous.worker_settings import Environment
from elastic.runtime.driver_connection import Link
from elastic.runtime.worker_runtime import WorkerRuntime

# created by the first init() and kept until the process exits
_runtime: WorkerRuntime | None = None
_initialized = False
# in a forked child, place and generation of the worker at the time of the fork; None in other processes
_inherited: tuple[Place, int] | None = None
_child_of_many = False  # in a forked child, whether the worker's job had other workers


def active() -> WorkerRuntime | None:
    """Return the runtime, or None before ``init()`` and after ``shutdown()``."""
    return _runtime if _initialized else None


def torchs_own() -> bool:
    """Return whether the script has created its own torch process group, without this package."""
    return _has_group() and active() is None and worker_settings.read().driver is not None


def _has_group() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _why_not_initialized(*, trains: bool) -> str:
    if worker_settings.read().driver is not None:
        return context.NOT_LOADED if torchs_own() else context.NOT_INITIALIZED
    # Scripts that use torch.distributed need not call init() under elasticrun. This one was started without it, so the
    # error recommends elasticrun.
    if trains or _has_group():
        return context.NOT_STARTED.format(script=sys.argv[0] or "train.py")
    return context.NOT_INITIALIZED


def current(*, trains: bool = False) -> WorkerRuntime:
    """Return the runtime. Raises NotInitialized without one.

    Args:
        trains: whether the caller is a function under ``elastic.run``.

    Raises:
        NotInitialized: ``init()`` was not called, or ``shutdown()`` was called.
    """
    if _runtime is None or not _initialized:
        if _inherited is not None:
            raise NotInitialized(
                "this process was forked from a worker, so it can't run collectives, steps or commits: run them in"
                " the worker itself. In this process, only rank(), size() and other queries work"
            )
        raise NotInitialized(_why_not_initialized(trains=trains))
    return _runtime


def position() -> tuple[Place, int] | None:
    """Return this worker's place and generation, or None before ``init()``.

    In a forked child, these are the values at the time of the fork.
    """
    rt = active()
    return _inherited if rt is None else (rt.place, rt.generation)


def _present_place() -> Place | None:
    found = position()
    return None if found is None else found[0]


def place() -> Place:
    """Return this worker's place in the world. In a forked child, this is the place at the time of the fork.

    Raises:
        NotInitialized: ``init()`` was not called.
    """
    found = position()
    return current().place if found is None else found[0]


def in_forked_child() -> bool:
    """Return whether this process was forked from a worker after ``init()``, so that ``init()`` has no effect in it."""
    return _inherited is not None and _child_of_many


def init() -> None:
    """Join the job of this process. Without ``elasticrun``, create a world of size 1. Idempotent.

    In a job of fixed size, and when an elastic job starts, this function returns when the first world is formed. On a
    worker that joins a training world, it returns immediately, with a provisional size and a rank other than 0. Under
    another launcher, it returns after all ranks have called it: see docs/launchers.md. In a forked child of a worker,
    it has no effect, because queries already work there.

    Raises:
        DriverLost, JobFailed: the driver cannot be reached, or the job has ended.
        Invalid: an argument or environment variable is invalid.
        CollectiveFailed: the ranks could not rendezvous in time.
    """
    global _runtime, _initialized
    if _initialized or in_forked_child():
        return
    failpoints.check()
    if _runtime is None:
        env = worker_settings.read()
        worker_settings.prepare(env)
        if env.started is not None and env.started.way is not None:
            runtime = _met(env, env.started)
        else:
            link = None if env.driver is None else _link(env, env.driver)
            runtime = WorkerRuntime(env, link)
            if link is not None:
                life_lock.hold(env.life_lock)
                runtime.connect()
        adopt(runtime)
    elif _runtime.alone and _runtime.world is not None:
        _runtime.fixed_worlds.next()
    assert _runtime is not None
    if not _runtime.alone:
        _runtime.first_world()
    # If this worker cannot enter another world, all further time counts as training.
    if _runtime.elastic:
        distributed_samplers.install(_present_place)
    part: Part = "joining" if _runtime.elastic else "training"
    _runtime.account.begin(part, time.monotonic())
    _initialized = True


def _link(env: Environment, driver: Address) -> Link:
    return Link(driver, env.secret, env.worker, tls=env.tls)


def _met(env: Environment, started: LauncherEnv) -> WorkerRuntime:
    """Create the runtime in a world of fixed size, with ranks that a launcher other than elasticrun has started."""
    met = find_rank0.meet(started, env)
    try:
        runtime = WorkerRuntime(met.env, None)
        runtime.fixed_worlds.form(met.store, started.rank, started.size, started.local_rank, 1)
    finally:
        met.store.close()
    return runtime


def init_static(
    rank: int, size: int, store: Address, environ: Mapping[str, str] | None = None
) -> None:
    """Create a world of fixed size without a driver. For benchmarks and tests.

    Args:
        rank: rank of this process.
        size: size of the world.
        store: address on which rank 0 serves the rendezvous store.
        environ: environment variables to use (default: none).
    """
    global _initialized
    env = worker_settings.read(environ or {})
    worker_settings.prepare(env)
    runtime = WorkerRuntime(env, None)
    place = Place(rank, size, rank, size, 0, 1)
    runtime.fixed_worlds.begin(messages.World(1, place, store, 0, None, "static"))
    adopt(runtime)
    _initialized = True


def init_through(started: LauncherEnv) -> None:
    """Join this process's job through a rendezvous of torch.distributed. Idempotent. See `init`.

    Under elasticrun, the driver's settings take precedence over ``started``.
    """
    if _runtime is None and not in_forked_child():
        env = worker_settings.read(launched=started)
        if env.driver is None:
            worker_settings.prepare(env)
            adopt(_met(env, started) if started.way is not None else WorkerRuntime(env, None))
    init()


def send_result(blob: bytes) -> None:
    """Send the return value of a launched function to the driver.

    Raises:
        DriverLost: the driver is unreachable.
    """
    runtime = _runtime
    if runtime is None:  # The function has not called init().
        env = worker_settings.read()
        if env.driver is None:
            return
        runtime = WorkerRuntime(env, _link(env, env.driver))
        runtime.connect()
        adopt(runtime)
    runtime.session.send(messages.SendResult(blob))


def shutdown() -> None:
    """Leave the world. To join again, call ``init()`` on every worker. Idempotent."""
    global _initialized, _inherited
    failpoint("shutdown")
    _inherited = None
    if _runtime is not None and _initialized:
        _runtime.pause()
    _initialized = False


def adopt(runtime: WorkerRuntime) -> None:
    """Set the runtime of this process. It is used until the process exits."""
    global _runtime
    runtime.tracing.begin(runtime.place)
    first = _runtime is None
    _runtime = runtime
    if first:
        atexit.register(_close)
        os.register_at_fork(after_in_child=_forget)


def _close() -> None:
    if _runtime is not None:
        _runtime.close()


def _forget() -> None:
    global _runtime, _initialized, _inherited, _child_of_many
    timeline.stop()
    if _runtime is not None:
        _inherited = position()
        _child_of_many = not _runtime.alone or _runtime.place.size > 1
        _runtime.close_in_forked_child()
    _runtime, _initialized = None, False


context.register(lambda: current())
