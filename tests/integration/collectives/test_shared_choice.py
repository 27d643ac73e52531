"""Processes of one host find each other's memory, and choose together whether to reduce in it. What is not chosen,
and what is given up half-way, leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from elastic.collectives import backend_selection
from elastic.collectives.backend_selection import Identity, Shareable
from elastic.collectives.groups import cpu
from elastic.collectives.groups.group_factory import Store, listen, meeting
from elastic.collectives.interface import Collectives, Op
from elastic.collectives.shared_memory import arena, memfd, native_library, peer_memory
from elastic.collectives.shared_memory.peer_memory import PeerMemoryUnavailable, open_peer
from elastic.errors import CollectiveFailed
from elastic.protocol.messages import Address
from harness import ranks, wording
from harness.groups import TIMEOUT_S, connecting
from harness.program import stdout_of
from harness.ranks import Ranks
from harness.waiting import wait_until

WAIT_S = 20.0  # for another thread to come to where it is waited for

pytestmark = pytest.mark.skipif(native_library.load() is None, reason=native_library.missing())


four = ranks.fixture(4)


# ---- memory of another process -----------------------------------------------------------------------------------


def offer(rank: int, size: int) -> tuple[Identity, Shareable]:
    mine = arena.mine()
    assert mine is not None
    ranks.kept["flat"] = arena.zeros(5000, torch.float32).fill_(rank + 1)
    return peer_memory.myself(), Shareable(mine.fd, mine.inode, mine.bytes)


def where(rank: int, size: int) -> int:
    mine = arena.mine()
    assert mine is not None
    offset = mine.offset_of(ranks.kept["flat"].data_ptr(), 20000)
    assert offset is not None
    return offset


def add_to_all(rank: int, size: int, offered: list[Any], offsets: list[int]) -> None:
    """Rank 0 writes, through its own mappings."""
    if rank != 0:
        return
    for (owner, offer), offset in zip(offered[1:], offsets[1:], strict=True):
        mapping = open_peer(owner, offer)
        held = (ctypes.c_float * 5000).from_address(mapping.address + offset)
        torch.frombuffer(held, dtype=torch.float32).add_(100)
        mapping.release()


def total(rank: int, size: int) -> float:
    return float(ranks.kept.pop("flat").sum())


def test_ranks_write_into_tensors_of_their_peers(four):
    offered = four.run(offer)
    four.run(add_to_all, offered, four.run(where))
    assert four.run(total) == [5000.0, 510_000.0, 515_000.0, 520_000.0]


# A process that offers memory, and ends when its input does.
OFFERING = """
import os, sys
import msgspec
from elastic.collectives.shared_memory import memfd as memory
from elastic.collectives.shared_memory import peer_memory as neighbours
from elastic.collectives.backend_selection import Shareable
fd = memory.create("offered", 8192)
os.pwrite(fd, b"hello", 0)
offer = Shareable(fd, os.fstat(fd).st_ino, 8192)
print(msgspec.msgpack.encode((neighbours.myself(), offer)).hex(), flush=True)
sys.stdin.read()
"""


class Offering:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OFFERING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        said = bytes.fromhex(self.process.stdout.readline().decode())
        self.owner, self.offer = msgspec.msgpack.decode(said, type=tuple[Identity, Shareable])

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def nothing_left(mappings_of_its_own: None) -> Iterator[None]:
    """The test leaves as many descriptors, as much of the arena and as many mappings as there were."""
    mine = arena.mine()
    assert mine is not None

    def held() -> tuple[int, int, int]:
        peer_memory.sweep()
        return len(os.listdir("/proc/self/fd")), mine.lent, len(peer_memory._open)

    peer_memory.myself()
    before = held()
    yield
    assert held() == before


@pytest.fixture
def offering(nothing_left: None) -> Iterator[Offering]:
    made = Offering()
    yield made
    made.end()


def test_mapped_memory_of_an_exited_process_is_released_after_its_last_use(offering):
    mapping = open_peer(offering.owner, offering.offer, keep=True)
    offering.end()
    peer_memory.sweep()
    assert ctypes.string_at(mapping.address, 5) == b"hello"
    mapping.release()
    assert not [owner for owner, _ in peer_memory._open if owner == offering.owner]


def test_a_process_that_has_ended_can_not_be_mapped(offering):
    offering.end()
    with pytest.raises(PeerMemoryUnavailable) as caught:
        open_peer(offering.owner, offering.offer)
    assert isinstance(caught.value.__cause__, ProcessLookupError)


def test_memory_whose_inode_differs_from_the_offer_is_not_mapped(offering):
    other = msgspec.structs.replace(offering.offer, inode=offering.offer.inode + 1)
    with pytest.raises(PeerMemoryUnavailable, match=wording.NOT_MEMORY_OFFERED):
        open_peer(offering.owner, other)


def test_without_a_free_descriptor_the_log_names_the_limit_to_raise(offering):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # One is left, for the process; none for its memory.
    resource.setrlimit(resource.RLIMIT_NOFILE, (_lowest_free() + 1, hard))
    try:
        with pytest.raises(PeerMemoryUnavailable, match="ulimit -n"):
            open_peer(offering.owner, offering.offer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _lowest_free() -> int:
    fd = os.dup(0)
    os.close(fd)
    return fd


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_memory_of_another_user_is_not_accessible(offering):
    """The mapped memory belongs to root, and must not be accessible."""
    asking = (
        "import os, sys, msgspec\n"
        "from elastic.collectives.shared_memory import peer_memory as neighbours\n"
        "from elastic.collectives.backend_selection import Identity, Shareable\n"
        "owner, offer = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=tuple[Identity, Shareable])\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: neighbours.open_peer(owner, offer)\n"
        "except neighbours.PeerMemoryUnavailable as error: print(type(error.__cause__).__name__)\n"
    )
    told = msgspec.msgpack.encode((offering.owner, offering.offer)).hex()
    assert stdout_of(sys.executable, "-c", asking, told) == "PermissionError\n"


def test_forked_child_unmaps_peer_memory_of_its_parent(offering):
    mapping = open_peer(offering.owner, offering.offer, keep=True)
    child = os.fork()
    if child == 0:
        mapping.release()
        with open("/proc/self/maps") as maps:
            left = any("offered" in line for line in maps)
        os._exit(1 if left or peer_memory._open else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert ctypes.string_at(mapping.address, 5) == b"hello"
    mapping.release()
    offering.end()


# ---- choosing ----------------------------------------------------------------------------------------------------


def choose(
    rank: int, size: int, addresses: list[Address], hosts: str, broken: dict[int, str]
) -> dict[str, Any]:
    """A group for each address, one after another: what it was, what it added up, what was said and what is left.

    ``hosts`` names each rank's; a rank beyond takes no part. ``broken`` is what is wrong on a rank.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elastic.collectives").addHandler(handler)
    cpu._logged.clear()
    with pytest.MonkeyPatch.context() as patch:
        here = peer_memory.myself()
        host = msgspec.structs.replace(here.host, boot=hosts[rank] if rank < len(hosts) else "")
        patch.setattr(peer_memory, "myself", lambda: msgspec.structs.replace(here, host=host))
        if broken.get(rank) == "mapping":
            patch.setattr(memfd, "map_shared", refuse)
        if broken.get(rank) == "arena":
            patch.setattr(arena, "mine", lambda: None)
            patch.setattr(arena, "why_not", lambda: "no memory to share can be mapped")
        native = broken.get(rank) != "off"
        made = [
            one_group(rank, len(hosts), number, address, native)
            for number, address in enumerate(addresses)
            if rank < len(hosts)
        ]
    logging.getLogger("elastic.collectives").removeHandler(handler)
    peer_memory.sweep()
    mine = arena.mine()
    assert mine is not None
    kept = [owner.pid for owner, _ in peer_memory._open]
    return {
        "kinds": {kind for kind, _, _ in made},
        "totals": {total for _, total, _ in made},
        "said": said,
        "descriptors": [descriptors for _, _, descriptors in made],
        "kept": len(kept) == len(set(kept)),
        "lent": mine.lent,
    }


def refuse(fd: int, size: int) -> int:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def one_group(
    rank: int, size: int, generation: int, address: Address, native: bool
) -> tuple[str, float, int]:
    store = ranks.open_store(rank, address, generation)
    group = connecting(store, rank, size, native=native).connect()
    tensor = torch.ones(1000) * (rank + 1)
    group.allreduce(tensor, Op.SUM).wait()
    kind = type(group).__name__.removesuffix("Collectives")
    store.exchange("all have it", rank, size, b"")
    group.abort()
    group.close()
    del group
    store.exchange("all have closed it", rank, size, b"")
    store.close()
    return kind, float(tensor[-1]), len(os.listdir("/proc/self/fd"))


def chosen(
    four: Ranks, hosts: str, *, broken: dict[int, str] | None = None, groups: int = 1
) -> tuple[str, list[dict[str, Any]]]:
    """Return the choices of all ranks, and what each has seen."""
    addresses = four.run(ranks.serve_stores, groups)[0]
    results = four.run(choose, addresses, hosts, broken or {})[: len(hosts)]
    kinds = {kind for result in results for kind in result["kinds"]}
    size = len(hosts)
    assert {total for result in results for total in result["totals"]} == {size * (size + 1) / 2}
    assert [result["lent"] for result in results] == [0] * size
    (kind,) = kinds
    return kind, results


def test_ranks_of_one_host_share_memory_without_a_log_line(four):
    kind, results = chosen(four, "aaaa")
    assert kind == "Shared"
    assert [result["said"] for result in results] == [[]] * 4


def test_repeated_groups_accumulate_no_descriptors(four):
    kind, results = chosen(four, "aaa", groups=8)
    assert kind == "Shared"
    for rank, result in enumerate(results):
        held = result["descriptors"]
        # Rank 0 had bound the listeners of all, and gives each away.
        assert held[1:] == ([held[1] - n for n in range(7)] if rank == 0 else [held[0]] * 7)
        assert result["kept"]


def test_hosts_with_several_ranks_are_a_hierarchy(four):
    assert chosen(four, "abab")[0] == "Hierarchical"


def test_hosts_with_unequal_numbers_of_ranks_are_a_hierarchy(four):
    assert chosen(four, "aab")[0] == "Hierarchical"


def test_single_ranks_per_host_use_the_network_without_a_log_line(four):
    kind, results = chosen(four, "abc")
    assert kind == "Gloo"
    assert [result["said"] for result in results] == [[]] * 3


def test_turned_off_everywhere_the_network_is_used_without_a_log_line(four):
    kind, results = chosen(four, "aaa", broken={0: "off", 1: "off", 2: "off"})
    assert kind == "Gloo"
    assert [result["said"] for result in results] == [[]] * 3


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("off", "rank 1 has ELASTIC_NATIVE=0"),
        ("arena", r"rank 1: .*\bmapped\b"),
        # Arenas of other ranks may be mapped from the tests before; then its own control block is the first.
        ("mapping", wording.RANK_MEMORY_PROCESS_SHARE),
    ],
)
@pytest.mark.parametrize("hosts", ["aaa", "aaba", "baaa"])
def test_all_ranks_fall_back_to_gloo_and_one_logs_the_reason_when_one_rank_cannot_share(
    four, wrong, why, hosts
):
    kind, results = chosen(four, hosts, broken={1: wrong}, groups=3)
    assert kind == "Gloo"
    (line,), *others = [result["said"] for result in results]
    assert re.search(why, line)
    assert others == [[]] * (len(hosts) - 1)


# ---- given up half-way -------------------------------------------------------------------------------------------


@pytest.fixture
def store(nothing_left: None) -> Iterator[Store]:
    listener = listen("127.0.0.1")
    store = Store(listener.address, listener, TIMEOUT_S)
    store.open()
    yield store
    store.close()


class Attempt:
    """Rank 0 of two, connecting in a separate thread."""

    def __init__(self, store: Store) -> None:
        self.connecting = connecting(store, 0, 2)
        self.outcome: Collectives | BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self.connecting.connect()
        except CollectiveFailed as error:
            self.outcome = error

    def end(self) -> CollectiveFailed:
        self._thread.join(WAIT_S)
        assert isinstance(self.outcome, CollectiveFailed)
        return self.outcome


def test_an_abandoned_connect_does_not_start(store):
    attempt = connecting(store, 0, 2)
    attempt.abort()
    with pytest.raises(CollectiveFailed, match="aborted"):
        attempt.connect()


def test_wait_for_a_late_rank_is_reported_and_can_be_aborted(store):
    attempt = Attempt(store)
    wait_until(lambda: meeting("named", "cpu", 2) in store.awaited(), "its row", WAIT_S)
    attempt.connecting.abort()
    ended = attempt.end()
    assert ended.aborted and ended.awaited == "named/2"


def test_wait_for_a_rank_that_does_not_report_its_mapping_can_be_aborted(store):
    """Memory is mapped and the group's thread runs by then."""
    attempt = Attempt(store)
    assert native_library.load() is not None
    from elastic.collectives.shared_memory.memory_offers import MemoryOffer

    offer = MemoryOffer(2, True, native_library.load(), "")
    try:
        blob = msgspec.msgpack.encode(offer.row)
        rows = store.exchange(meeting("named", "cpu", 2), 1, 2, blob)
        assert (
            backend_selection.plan(
                [msgspec.msgpack.decode(row, type=backend_selection.RankInfo) for row in rows]
            ).why
            == ""
        )
        wait_until(lambda: "named/shared/2" in store.awaited(), "its offer", WAIT_S)
        attempt.connecting.abort()
        assert attempt.end().aborted
    finally:
        offer.withdraw()
        for mapped in peer_memory._open.values():
            mapped.keep = False  # this process was its own neighbour, and lives on


def test_rank_that_dies_while_connecting_is_named_as_awaited_by_its_peer(four):
    (address,) = four.run(ranks.serve_stores, 1)[0]
    results = four.run(lose_rank_1, address)
    assert results[0] == "named/shared/2"


def lose_rank_1(rank: int, size: int, address: Address) -> str:
    if rank > 1:
        return ""
    store = ranks.open_store(rank, address, timeout_s=0.5)
    if rank == 1:
        from elastic.collectives.shared_memory.memory_offers import MemoryOffer

        offer = MemoryOffer(2, True, native_library.load(), "")
        store.exchange(meeting("named", "cpu", 2), 1, 2, msgspec.msgpack.encode(offer.row))
        offer.withdraw()
        store.close()
        return ""
    attempt = connecting(store, 0, 2, timeout_s=0.5, collective_timeout_s=TIMEOUT_S)
    try:
        attempt.connect()
    except CollectiveFailed as error:
        return error.awaited
    finally:
        store.close()
    return "connected"
