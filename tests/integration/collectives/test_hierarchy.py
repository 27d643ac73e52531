"""Two hosts of two ranks, by their own description: processes of this machine, memory for one half of the way and
Gloo for the other.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import threading
import time
import zlib
from typing import Any

import msgspec
import pytest
import torch

from elastic.collectives.hierarchical import steps
from elastic.collectives.hierarchical.process_group import HierarchicalCollectives
from elastic.collectives.interface import Collectives, Op
from elastic.collectives.shared_memory import arena, native_library, peer_memory
from elastic.errors import CollectiveFailed
from elastic.protocol.messages import Address
from harness import ranks
from harness.collectives_contract import FLOATS, INTEGERS, REFERENCE
from harness.groups import TIMEOUT_S, connecting
from harness.ranks import Died

WAKE_S = 5.0  # generous: measured are 1 to 30 ms
LENGTHS = (1, 2, 3, 1000, 50_001, 600_007)

pytestmark = pytest.mark.skipif(native_library.load() is None, reason=native_library.missing())


four = ranks.fixture(4)
doomed = ranks.fixture(4, "function")  # of which one does not come back
HOSTS = ["aabb", pytest.param("abab", marks=pytest.mark.nightly), "aaab"]


def connect(
    rank: int, size: int, address: Address, hosts: str, timeout_s: float = TIMEOUT_S
) -> Collectives:
    """A group of all ranks; the r-th letter names the host of rank r."""
    store = ranks.kept["store"] = ranks.open_store(rank, address)
    with pytest.MonkeyPatch.context() as patch:
        here = peer_memory.myself()
        host = msgspec.structs.replace(here.host, boot=hosts[rank])
        patch.setattr(peer_memory, "myself", lambda: msgspec.structs.replace(here, host=host))
        group = connecting(store, rank, size, collective_timeout_s=timeout_s).connect()
    assert isinstance(group, HierarchicalCollectives)
    return group


def end(group: Collectives) -> None:
    """No rank leaves before all are done."""
    ranks.kept["store"].exchange("the end", group.rank, group.size, b"")
    group.abort()
    group.close()
    ranks.kept.pop("store").close()


def numbers(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Any numbers; floats are near to one, so that products stay in range."""
    made = torch.Generator().manual_seed(rank)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (length,), generator=made, dtype=torch.int64).to(dtype)
    return (torch.rand(length, generator=made, dtype=torch.float64) + 0.5).to(dtype)


def placed(tensor: torch.Tensor, inside: bool) -> torch.Tensor:
    return (
        arena.zeros(len(tensor) + 1, tensor.dtype)[1:].copy_(tensor) if inside else tensor.clone()
    )


def total(inputs: list[torch.Tensor], op: Op) -> torch.Tensor:
    """The result for these inputs, in double precision if they are floats."""
    dtype = inputs[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    found = functools.reduce(REFERENCE[op], [each.to(wide) for each in inputs])
    return found if dtype.is_floating_point else found.to(dtype)


def reduce_everything(rank: int, size: int, address: Address, hosts: str) -> list[int]:
    """Checks every result, and returns what tells whether others have the same bits. There are many chunks here."""
    group = connect(rank, size, address, hosts)
    patch = pytest.MonkeyPatch()
    patch.setattr(steps, "SHARE_BYTES", 1 << 16)
    patch.setattr(steps, "LEADER_BYTES", 1 << 17)
    bits = []
    number = 0
    for length, dtype in itertools.product(LENGTHS, [*INTEGERS, *FLOATS]):
        inputs = [numbers(r, length, dtype) for r in range(size)]
        for op in REFERENCE if length < 100_000 else (Op.SUM,):
            right = total(inputs, op)
            for scale in (1.0, 1 / size):
                # In every mixture of inside and outside: the ranks need not agree.
                tensor = placed(inputs[rank], bool((number >> rank) & 1))
                number += 1
                group.allreduce(tensor, op, scale).wait()
                if dtype.is_floating_point:
                    close = 4 * torch.finfo(dtype).eps
                    found, wanted = tensor.double(), right * scale
                    assert torch.allclose(found, wanted, rtol=close, atol=0), (length, dtype, op)
                else:
                    assert torch.equal(tensor, right), (length, dtype, op)
                bits.append(zlib.crc32(tensor.view(torch.uint8).numpy().tobytes()))
    end(group)
    patch.undo()
    return bits


@pytest.mark.parametrize("hosts", [pytest.param("aabb", marks=pytest.mark.nightly), *HOSTS[1:]])
def test_reductions_of_every_dtype_and_operation_match_double_precision_on_all_ranks(four, hosts):
    address = four.run(ranks.serve_stores)[0][0]
    first, *others = four.run(reduce_everything, address, hosts)
    assert all(other == first for other in others)


def move_everything(rank: int, size: int, address: Address, hosts: str) -> None:
    group = connect(rank, size, address, hosts)
    for length in (0, 1, 7, 3_000_001):
        for root in range(size):
            tensor = torch.arange(length) * (1 if rank == root else 0) + root * (rank == root)
            group.broadcast(tensor, root).wait()
            assert torch.equal(tensor, torch.arange(length) + root)
    for length in (0, 5, 100_001):
        outputs = [torch.empty(length, dtype=torch.int16) for _ in range(size)]
        group.allgather(outputs, torch.full((length,), rank, dtype=torch.int16)).wait()
        assert all(bool((output == r).all()) for r, output in enumerate(outputs))
    # No rows at all; only from one rank to itself; only between hosts; uneven ones, many.
    tables = [
        [[0] * size for _ in range(size)],
        [[int(s == r == 2) for r in range(size)] for s in range(size)],
        [[5 * int(hosts[s] != hosts[r]) for r in range(size)] for s in range(size)],
        [[1000 * ((2 * s + r) % 3) for r in range(size)] for s in range(size)],
    ]
    for table in tables:
        sent, received = table[rank], [row[rank] for row in table]
        rows = [torch.full((n, 2), 10.0 * rank + r) for r, n in enumerate(sent)]
        output = torch.empty(sum(received), 2)
        group.alltoall(output, torch.cat(rows), received, sent).wait()
        came = [torch.full((n, 2), 10.0 * s + rank) for s, n in enumerate(received)]
        assert torch.equal(output, torch.cat(came))
    end(group)


@pytest.mark.parametrize("hosts", HOSTS)
def test_broadcasts_gathers_and_exchanges_transfer_all_elements(four, hosts):
    four.run(move_everything, four.run(ranks.serve_stores)[0][0], hosts)


# ---- ranks that are lost ---------------------------------------------------------------------------------------------


def lose_a_rank(rank: int, size: int, address: Address, hosts: str, lost: int) -> dict[str, Any]:
    """One is killed in the middle of an allreduce, by a separate thread; return what the others see."""
    group = connect(rank, size, address, hosts)
    buffers = [arena.zeros(3_000_000, torch.float32), torch.zeros(3_000_000)]
    if rank == lost:
        began = threading.Event()

        def kill() -> None:
            began.wait()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    completed = 0
    try:
        while True:
            for buffer in buffers:
                buffer.fill_(rank + 1.0)
            works = [group.allreduce(buffer, Op.SUM) for buffer in buffers]
            if rank == lost and completed == 5:
                began.set()
            for work, buffer in zip(works, buffers, strict=True):
                work.wait()
                assert bool((buffer == 10.0).all())
            completed += 1
    except CollectiveFailed as error:
        reason, ended = str(error), error.ended
    raised_at = time.monotonic()
    group.abort()
    assert group.drain(WAKE_S)
    # From here on the tensors are this rank's own.
    for buffer in buffers:
        buffer.fill_(7.0)
    group.close()
    ranks.kept.pop("store").close()
    assert all(bool((buffer == 7.0).all()) for buffer in buffers)
    return {"completed": completed, "raised_at": raised_at, "reason": reason, "ended": ended}


@pytest.mark.parametrize(
    ("hosts", "lost"), [("aabb", 3), ("aabb", 0), ("aaab", 1), ("aaab", 3), ("abbb", 1)]
)
def test_killed_rank_ends_collectives_on_all_hosts_without_a_wrong_result(doomed, hosts, lost):
    address = doomed.run(ranks.serve_stores)[0][0]
    doomed.start(lose_a_rank, address, hosts, lost)
    others = {rank: doomed.result(rank) for rank in range(4) if rank != lost}
    assert isinstance(doomed.result(lost), Died)
    for result in others.values():
        assert isinstance(result, dict), result
        assert 5 <= result["completed"] <= 6
        # By its rank in the whole group, where a neighbour has seen it.
        assert result["ended"] in (None, lost)
    times = [result["raised_at"] for result in others.values()]
    print(f"raised within {(max(times) - min(times)) * 1e3:.1f} ms of each other", others)
    assert max(times) - min(times) < WAKE_S


def abort_one(rank: int, size: int, address: Address, hosts: str, aborter: int) -> str:
    group = connect(rank, size, address, hosts)
    group.barrier().wait()
    if rank == aborter:
        group.abort()
    try:
        while True:
            group.allreduce(torch.ones(100_000), Op.SUM).wait()
    except CollectiveFailed as error:
        reason = str(error)
    assert group.drain(WAKE_S)
    group.close()
    ranks.kept.pop("store").close()
    return reason


@pytest.mark.parametrize(("hosts", "aborter"), [("aabb", 1), ("aaab", 2), ("aaab", 3)])
def test_abort_on_one_rank_reaches_all_ranks(four, hosts, aborter):
    reasons = four.run(abort_one, four.run(ranks.serve_stores)[0][0], hosts, aborter)
    assert reasons[aborter] == "aborted"
    assert all(reasons)


def come_late(rank: int, size: int, address: Address, hosts: str) -> str:
    """The last rank never joins; waiting ranks give up after the collective's timeout."""
    group = connect(rank, size, address, hosts, timeout_s=1.0)
    reason = ""
    if rank < size - 1:
        with pytest.raises(CollectiveFailed) as failed:
            group.allreduce(torch.ones(100_000), Op.SUM).wait()
        reason = str(failed.value)
    end(group)
    return reason


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
def test_missing_rank_fails_the_connect_of_present_ranks_at_the_deadline(four, hosts):
    *reasons, none = four.run(come_late, four.run(ranks.serve_stores)[0][0], hosts)
    assert all(reasons) and none == ""


def form_and_close(rank: int, size: int, address: Address, hosts: str) -> int:
    """How many bytes of the arena one group has kept, without anybody looking for garbage."""
    gc.collect()  # of other tests: an error that is caught holds frames that hold a group
    mine = arena.mine()
    assert mine is not None
    before = mine.lent
    group = connect(rank, size, address, hosts)
    # Outside of the arena, so that it is copied there in pieces.
    tensor = torch.ones(5 * steps.SHARE_BYTES)
    group.allreduce(tensor, Op.SUM).wait()
    assert bool((tensor == size).all())
    end(group)
    del group
    return mine.lent - before


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
def test_closed_group_leaves_no_arena_memory_allocated(four, hosts):
    for _ in range(3):
        assert four.run(form_and_close, four.run(ranks.serve_stores)[0][0], hosts) == [0] * 4


def call_other_sizes(rank: int, size: int, address: Address, hosts: str) -> tuple[bool, bool]:
    """Hosts with different properties. Return whether this rank carries for its host, and whether it got the reason."""
    group = connect(rank, size, address, hosts)
    carries = not (hosts == "aaab" and rank in (1, 2))
    with pytest.raises(CollectiveFailed) as failed:
        group.allreduce(torch.ones(100 + (hosts[rank] == "b")), Op.SUM).wait()
    end(group)
    return carries, failed.value.differs is not None


@pytest.mark.parametrize("hosts", HOSTS)
def test_hosts_that_call_different_collectives_get_an_error(four, hosts):
    (address,) = four.run(ranks.serve_stores)[0]
    for carries, told in four.run(call_other_sizes, address, hosts):
        assert told or not carries
