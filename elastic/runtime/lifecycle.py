"""Runtime of this process: init, shutdown and access to it. `worker_runtime` implements it."""

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
from elastic.rendezvous import environment, find_rank0, following_samplers
from elastic.rendezvous.environment import Environment
from elastic.rendezvous.launcher_env import LauncherEnv
from elastic.runtime.link import Link
from elastic.runtime.worker_runtime import WorkerRuntime

_runtime: WorkerRuntime | None = None  # created by the first init(), kept until the process exits
_initialized = False
# Place and generation of the worker at the fork, in a forked child. None in other processes.
_inherited: tuple[Place, int] | None = None
_child_of_many = False  # whether that worker's job had other workers


def active() -> WorkerRuntime | None:
    """Return the runtime, or None before ``init()`` and after ``shutdown()``."""
    return _runtime if _initialized else None


def torchs_own() -> bool:
    """Return whether the script has created a torch process group that does not use this package."""
    return _has_group() and active() is None and environment.read().driver is not None


def _has_group() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _why_not_initialized(*, trains: bool) -> str:
    if environment.read().driver is not None:
        return context.NOT_LOADED if torchs_own() else context.NOT_INITIALIZED
    # elasticrun, which did not start this process, initializes scripts that use torch.distributed without calling
    # init().
    if trains or _has_group():
        return context.NOT_STARTED.format(script=sys.argv[0] or "train.py")
    return context.NOT_INITIALIZED


def current(*, trains: bool = False) -> WorkerRuntime:
    """Return the runtime.

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
    """Return the place and generation of this worker, or None before ``init()``.

    A forked child returns the values at the fork.
    """
    rt = active()
    return _inherited if rt is None else (rt.place, rt.generation)


def _present_place() -> Place | None:
    found = position()
    return None if found is None else found[0]


def place() -> Place:
    """Return the place of this worker in the world. In a forked child, this is the place at the fork.

    Raises:
        NotInitialized: ``init()`` was not called.
    """
    found = position()
    return current().place if found is None else found[0]


def in_forked_child() -> bool:
    """Return whether this is a forked child of a worker that has called ``init()``, so that ``init()`` does nothing."""
    return _inherited is not None and _child_of_many


def init() -> None:
    """Join the job of this process. Without ``elasticrun``, create a world of size 1. Idempotent.

    In a job of fixed size, and at the first start of an elastic one, this returns when the first world is formed. A
    worker that joins a training world returns immediately, with a provisional size and a rank other than 0. Under
    another launcher, it returns after all ranks have called it. See docs/launchers.md. In a forked child of a worker it
    has no effect, since the queries already work there.

    Raises:
        DriverLost, JobFailed: the driver cannot be reached, or the job has ended.
        Invalid: an argument or environment variable is invalid.
        CollectiveFailed: ranks did not find each other.
    """
    global _runtime, _initialized
    if _initialized or in_forked_child():
        return
    failpoints.check()
    if _runtime is None:
        env = environment.read()
        environment.prepare(env)
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
    # If this worker cannot enter another world, all the time that follows counts as training.
    if _runtime.elastic:
        following_samplers.install(_present_place)
    part: Part = "joining" if _runtime.elastic else "training"
    _runtime.account.begin(part, time.monotonic())
    _initialized = True


def _link(env: Environment, driver: Address) -> Link:
    return Link(driver, env.secret, env.worker, tls=env.tls)


def _met(env: Environment, started: LauncherEnv) -> WorkerRuntime:
    """Create the runtime in a world of fixed size, with all ranks started by a launcher other than elasticrun."""
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
    """Create a world of fixed size without a driver. Used by benchmarks and tests.

    Args:
        rank: rank of this process.
        size: size of the world.
        store: address at which rank 0 serves the store.
        environ: environment variables to use; none by default.
    """
    global _initialized
    env = environment.read(environ or {})
    environment.prepare(env)
    runtime = WorkerRuntime(env, None)
    place = Place(rank, size, rank, size, 0, 1)
    runtime.fixed_worlds.begin(messages.World(1, place, store, 0, None, "static"))
    adopt(runtime)
    _initialized = True


def init_through(started: LauncherEnv) -> None:
    """Join the job of this process through a rendezvous of torch.distributed. Idempotent. See `init`.

    Under elasticrun, the driver's settings take precedence over ``started``.
    """
    if _runtime is None and not in_forked_child():
        env = environment.read(launched=started)
        if env.driver is None:
            environment.prepare(env)
            adopt(_met(env, started) if started.way is not None else WorkerRuntime(env, None))
    init()


def send_result(blob: bytes) -> None:
    """Send the return value of a launched function to the driver.

    Raises:
        DriverLost: the driver is unreachable.
    """
    runtime = _runtime
    if runtime is None:  # the function did not call init()
        env = environment.read()
        if env.driver is None:
            return
        runtime = WorkerRuntime(env, _link(env, env.driver))
        runtime.connect()
        adopt(runtime)
    runtime.session.send(messages.SendResult(blob))


def shutdown() -> None:
    """Leave the world. ``init()`` may follow, on every worker. Idempotent."""
    global _initialized, _inherited
    failpoint("shutdown")
    _inherited = None
    if _runtime is not None and _initialized:
        _runtime.pause()
    _initialized = False


def adopt(runtime: WorkerRuntime) -> None:
    """Set the runtime of this process until it exits."""
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
