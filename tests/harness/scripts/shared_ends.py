"""One of two ranks that share memory, whose program ends at an unusual moment. Prints only "done" at the end."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import warnings
from typing import Any

import torch

from elastic.collectives.groups.group_factory import ConnectingGroup, Store
from elastic.collectives.interface import Collectives, Op
from elastic.collectives.shared_memory import arena
from elastic.protocol.messages import Address
from elastic.rendezvous.store import StoreListener

TIMEOUT_S = 20.0
kept: list[Any] = []


def join(rank: int, port: int, listening: int) -> Collectives:
    address = Address("127.0.0.1", port)
    listener = StoreListener(socket.socket(fileno=listening), address) if rank == 0 else None
    store = Store(address, listener, TIMEOUT_S)
    store.open()
    kept.append(store)
    connecting = ConnectingGroup(
        store,
        purpose="ends",
        rank=rank,
        size=2,
        device_type="cpu",
        bind_host="127.0.0.1",
        timeout_s=TIMEOUT_S,
    )
    os.register_at_fork(after_in_child=connecting.close_in_forked_child)
    return connecting.connect()


def tensors() -> list[torch.Tensor]:
    inside = arena.zeros(1 << 20, torch.float32).fill_(1.0)
    return [inside, torch.ones(1 << 20), torch.ones(3)]


def leave_under_way(group: Collectives) -> None:
    """Rank 0 starts a collective that rank 1 never joins; both end with their globals unchanged."""
    kept.append([group.allreduce(tensor, Op.SUM) for tensor in tensors() if group.rank == 0])
    kept.append(group)


def leave_under_way_in_a_cycle(group: Collectives) -> None:
    leave_under_way(group)
    kept.append(kept)
    sys.modules["of_the_user"] = kept  # type: ignore[assignment]


def leave_a_thread_waiting(group: Collectives) -> None:
    if group.rank == 0:
        work = group.barrier()
        waiting = threading.Event()

        def wait() -> None:
            waiting.set()
            work.wait()

        threading.Thread(target=wait, daemon=True).start()
        waiting.wait()
    kept.append(group)


def fork(group: Collectives) -> None:
    """The child ends normally, while the parent's collectives are in progress."""
    mine = tensors()
    works = [group.allreduce(tensor, Op.SUM) for tensor in mine] if group.rank == 0 else []
    with warnings.catch_warnings():  # Python 3.12 and newer warn if there are threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for work in works or [group.allreduce(tensor, Op.SUM) for tensor in mine]:
        work.wait()
    assert all((tensor == 2.0).all() for tensor in mine)


def leave_first(group: Collectives) -> None:
    """Rank 1 ends immediately after its last collective; rank 0 reads its result after that."""
    other = torch.zeros(1, dtype=torch.int64) + os.getpid()
    group.broadcast(other, 1).wait()
    watched = os.pidfd_open(int(other)) if group.rank == 0 else -1
    mine = tensors()
    works = [group.allreduce(tensor, Op.SUM) for tensor in mine]
    copy = torch.full((1000,), float(group.rank))
    works.append(group.broadcast(copy, 1))
    gathered = [torch.zeros(1000) for _ in range(2)]
    works.append(group.allgather(gathered, torch.full((1000,), 7.0)))
    works.append(group.barrier())
    if group.rank == 0:
        assert select.select([watched], [], [], TIMEOUT_S)[0]
    for work in works:
        work.wait()
    assert all((tensor == 2.0).all() for tensor in mine)
    assert (copy == 1.0).all()
    assert all((each == 7.0).all() for each in gathered)
    kept.append(group)


if __name__ == "__main__":
    how, rank, port, listening = sys.argv[1], *map(int, sys.argv[2:])
    {
        "under way": leave_under_way,
        "under way in a cycle": leave_under_way_in_a_cycle,
        "daemon waits": leave_a_thread_waiting,
        "forked child": fork,
        "last": leave_first,
    }[how](join(rank, port, listening))
    print("done", flush=True)
