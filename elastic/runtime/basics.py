"""init, shutdown and the queries, with Horovod's signatures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from elastic.errors import Invalid
from elastic.negotiation import process_sets as sets
from elastic.runtime import lifecycle


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job that this process was started for; without ``elasticrun``, a world of one. Idempotent.

    ``process_sets``: a list of `ProcessSet` objects to register, the same on all ranks, or "dynamic":
    then `add_process_set` and `remove_process_set` may follow. ``comm``: a list of all ranks, which
    says nothing new; a part of them can't be a job of its own here.

    A newcomer to a world that trains already returns at once, with a provisional size and a rank
    other than 0; entering ``elastic.run`` means that it is ready. Raises DriverLost or JobFailed if
    there is no job to join, and Invalid (a ValueError) for arguments that have no meaning here.

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
    """The ranks that ``init(comm=...)`` was given; empty: all."""
    if comm is None:
        return []
    if isinstance(comm, str) or not isinstance(comm, Iterable):
        raise Invalid(
            f"init(comm={comm!r}): communicators need MPI, which is not used here: leave comm out, and pass"
            " process_sets for collectives among some of the ranks"
        )
    members = list(comm)
    for rank in members:
        if not isinstance(rank, int):
            raise Invalid(
                f"init(comm=[{rank!r}, ...]): communicators need MPI, which is not used here: pass ranks, or leave"
                " comm out"
            )
    return members


def _check_members(members: list[int]) -> None:
    """Raises Invalid unless they are all ranks. A newcomer does not know yet how many there are."""
    rt = lifecycle.current()
    if not members or (rt.provisional and not rt.alone):
        return
    everybody = list(range(rt.place.size))
    if members != everybody:
        raise Invalid(
            f"init(comm={members}): this job has the ranks {everybody}, which all train together: start another job"
            f" (-np {len(members)}) for some of them, or use a process set for their collectives,"
            f" init(process_sets=[ProcessSet({members})])"
        )


def shutdown() -> None:
    """Leaves the world. ``init()`` may follow, on every worker. Idempotent."""
    sets.unregister_all()
    lifecycle.shutdown()


@contextlib.contextmanager
def long_phase(name: str) -> Iterator[None]:
    """Around work during which the others wait for this worker, such as an evaluation or a checkpoint on one rank.

    While it lasts, this worker is not taken for stuck, however long it takes and whatever it does; the log names it and
    the phase now and then. What is not turned off: a process that is stopped or cut off is fenced as ever, and if the
    world breaks meanwhile, the others wait for ``--elastic-timeout`` at most. Costs a message at both ends; may be
    nested; has no effect outside the thread that trains. Without a driver it does nothing.
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
    """Whether ``init()`` was called, and ``shutdown()`` was not since; in a forked child, by its worker at the fork."""
    return lifecycle.position() is not None


def rank() -> int:
    """This worker's index in the world. Raises NotInitialized (a ValueError) before ``init()``, as
    all queries do. In a forked child, such as a worker of a DataLoader, they answer with the place at the fork.
    """
    return lifecycle.place().rank


def size() -> int:
    """Number of workers in the world."""
    return lifecycle.place().size


def local_rank() -> int:
    """The slot of this worker on its host. It stays with the slot while the world changes, as a GPU does."""
    return lifecycle.place().local_rank


def local_size() -> int:
    """Number of workers of the world on this host."""
    return lifecycle.place().local_size


def cross_rank() -> int:
    """Index of this host among the hosts that have a worker with this local rank."""
    return lifecycle.place().cross_rank


def cross_size() -> int:
    """Number of hosts that have a worker with this local rank."""
    return lifecycle.place().cross_size


def is_homogeneous() -> bool:
    """Whether every host has as many workers as this one: size == local_size * cross_size."""
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
