"""``init``, ``shutdown`` and queries such as ``rank`` and ``size``, with Horovod's signatures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from elastic.errors import Invalid
from elastic.negotiation import process_sets as sets
from elastic.runtime import lifecycle


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job of this process. Without ``elasticrun``, create a world of size 1. Idempotent.

    Args:
        comm: list of all ranks, for compatibility with Horovod. It has no effect; a subset of the ranks is rejected.
        process_sets: list of `ProcessSet` objects to register, equal on all ranks, or "dynamic" to enable
            `add_process_set` and `remove_process_set`.

    Raises:
        DriverLost, JobFailed: the driver cannot be reached, or the job has ended.
        Invalid: (a ValueError) ``comm`` is not a list of all ranks, or ``process_sets`` is invalid.

    If a world is already training, a joining worker returns immediately, with a provisional size and a rank other than
    0. Both become final when the worker enters ``elastic.run``.

    Example::

        elastic.init()
        print(f"rank {elastic.rank()} of {elastic.size()}")
    """
    members = _checked_comm(comm)
    given, dynamic = sets.checked(process_sets)
    if lifecycle.in_forked_child():
        return
    before = lifecycle.active()
    lifecycle.init()
    try:
        _check_members(members)
        sets.begin(given, dynamic)
    except Invalid:
        if before is None:
            shutdown()
        raise


def _checked_comm(comm: Any) -> list[int]:
    if comm is None:
        return []
    if isinstance(comm, str) or not isinstance(comm, Iterable):
        raise Invalid(
            f"init(comm={comm!r}) got an MPI communicator, but MPI is not used: omit comm, and pass process_sets for"
            " collectives among some of the ranks"
        )
    members = list(comm)
    for rank in members:
        if not isinstance(rank, int):
            raise Invalid(
                f"init(comm=[{rank!r}, ...]) got a communicator, but MPI is not used: pass ranks, or omit comm"
            )
    return members


def _check_members(members: list[int]) -> None:
    """Raise Invalid unless ``members`` contains all ranks of the world.

    A joining worker cannot check this, because its size is provisional.
    """
    rt = lifecycle.current()
    if not members or (rt.provisional and not rt.alone):
        return
    all_ranks = list(range(rt.place.size))
    if members != all_ranks:
        raise Invalid(
            f"init(comm={members}) selects some of the ranks {all_ranks}, but all ranks of a job train together:"
            f" start another job (-np {len(members)}), or use a process set with"
            f" init(process_sets=[ProcessSet({members})])"
        )


def shutdown() -> None:
    """Leave the world. To join again, call ``init()`` on every worker. Idempotent."""
    sets.unregister_all()
    lifecycle.shutdown()


@contextlib.contextmanager
def long_phase(name: str) -> Iterator[None]:
    """Context manager that marks long work on one rank, such as an evaluation, while the other workers wait for it.

    Inside the context, the worker is never treated as stuck, and the log periodically reports the worker and the name
    of the phase. A stopped or unreachable process is still killed. If the world fails in the meantime, the other
    workers wait for at most ``--elastic-timeout``. Contexts may be nested. The context sends one message when it is
    entered and one when it is left. It has no effect outside the training thread, or without a driver.

    Args:
        name: name of the phase, for the log.

    Raises:
        Invalid: ``name`` is empty or not a string.
    """
    if not isinstance(name, str) or not name:
        raise Invalid(f"long_phase got {name!r}: pass a name, as in long_phase('evaluate')")
    rt = lifecycle.active()
    if rt is None:
        yield
        return
    with rt.training.long_phase(name):
        yield


def is_initialized() -> bool:
    """Return whether ``init()`` was called and ``shutdown()`` was not.

    In a forked child, this includes the calls of the worker from which it was forked.
    """
    return lifecycle.position() is not None


def rank() -> int:
    """Return this worker's rank in the world.

    In a forked child, such as a worker of a DataLoader, this and all other queries return the values at the time of the
    fork. Before ``init()``, they raise NotInitialized (a ValueError).
    """
    return lifecycle.place().rank


def size() -> int:
    """Return the number of workers in the world. Raises NotInitialized before ``init()``."""
    return lifecycle.place().size


def local_rank() -> int:
    """Return this worker's slot on its host. It never changes for a worker, so scripts can use it to select the GPU.

    Raises:
        NotInitialized: ``init()`` was not called.
    """
    return lifecycle.place().local_rank


def local_size() -> int:
    """Return the number of this world's workers on this host. Raises NotInitialized before ``init()``."""
    return lifecycle.place().local_size


def cross_rank() -> int:
    """Return this host's index among the hosts that have a worker with the same local rank.

    Raises:
        NotInitialized: ``init()`` was not called.
    """
    return lifecycle.place().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a worker with the same local rank.

    Raises NotInitialized before ``init()``.
    """
    return lifecycle.place().cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of workers, so that size == local_size * cross_size.

    Raises:
        NotInitialized: ``init()`` was not called.
    """
    place = lifecycle.place()
    return place.size == place.local_size * place.cross_size


__all__ = [
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
