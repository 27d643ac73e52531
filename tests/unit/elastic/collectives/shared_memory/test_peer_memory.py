"""Mapping of another process's memory, and errors. Other processes: integration tests."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from elastic.collectives.backend_selection import Identity, Shareable
from elastic.collectives.shared_memory import memfd, peer_memory
from elastic.collectives.shared_memory.peer_memory import PeerMemoryUnavailable, open_peer
from harness.golden import raises, recorded
from harness.waiting import wait_until

SIZE = 4 * memfd.PAGE


@pytest.fixture
def offered() -> Iterator[Shareable]:
    fd = memfd.create("offered", SIZE)
    os.pwrite(fd, b"hello", 0)
    yield Shareable(fd, os.fstat(fd).st_ino, SIZE)
    os.close(fd)


@pytest.fixture(autouse=True)
def nothing_left(mappings_of_its_own: None) -> Iterator[None]:
    """Check that a test leaves as many descriptors as there were."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert not peer_memory._open
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def me() -> Identity:
    return peer_memory.myself()


def test_a_process_has_a_constant_identity(me):
    assert me == peer_memory.myself()
    assert (me.pid, me.user) == (os.getpid(), os.geteuid())
    assert len(me.host.boot) == 36


def test_writes_of_one_side_are_visible_on_the_other(me, offered):
    mapping = open_peer(me, offered)
    assert ctypes.string_at(mapping.address, 5) == b"hello"
    ctypes.memmove(mapping.address + 2, b"y, you", 6)
    recorded("messages", os.pread(offered.fd, 8, 0))
    assert mapping.bytes == SIZE
    mapping.release()


def test_two_groups_share_one_mapping_until_both_have_released_the_mapping(me, offered):
    first, second = open_peer(me, offered), open_peer(me, offered)
    assert first.address == second.address
    first.release()
    first.release()
    assert ctypes.string_at(second.address, 5) == b"hello"
    second.release()
    assert not peer_memory._open


def test_a_mapping_that_is_kept_serves_the_next_generation(me, offered, monkeypatch):
    mapping = open_peer(me, offered, keep=True)
    mapping.release()
    peer_memory.sweep()  # its process is alive
    again = open_peer(me, offered, keep=True)
    assert again.address == mapping.address
    monkeypatch.setattr(peer_memory._Mapped, "gone", lambda self: True)
    peer_memory.sweep()  # it is used
    assert ctypes.string_at(again.address, 5) == b"hello"
    again.release()
    assert not peer_memory._open


def test_mapping_of_an_exited_process_is_swept(me, offered, monkeypatch):
    open_peer(me, offered, keep=True).release()
    assert peer_memory._open
    monkeypatch.setattr(peer_memory._Mapped, "gone", lambda self: True)
    peer_memory.sweep()
    assert not peer_memory._open
    maps = Path("/proc/self/maps")  # another thread unmaps it
    wait_until(lambda: "memfd:offered" not in maps.read_text(), "that nobody maps it", 10.0)


def test_a_release_in_the_middle_of_another_call_waits_for_its_end(me, offered):
    """As when the collector frees a group while its thread is in here."""
    mapping = open_peer(me, offered)
    with peer_memory._lock:
        mapping.release()
        assert ctypes.string_at(mapping.address, 5) == b"hello"
    peer_memory.sweep()
    assert not peer_memory._open


# ---- refusals ----------------------------------------------------------------------------------


def refused(owner: Identity, offered: Shareable) -> str:
    with pytest.raises(PeerMemoryUnavailable) as raised:
        open_peer(owner, offered)
    return str(raised.value)


def test_process_with_only_the_same_id_is_another_process(me, offered):
    other = msgspec.structs.replace(me, started=me.started - 1)
    recorded("messages", refused(other, offered), me.pid)


@pytest.mark.parametrize("change", [{"inode": 1}, {"bytes": SIZE + 1}])
def test_descriptor_of_another_file_is_not_mapped(me, offered, change):
    said = refused(me, msgspec.structs.replace(offered, **change))
    recorded("log", said, offered.fd, me.pid)


def test_closed_descriptor_is_refused(me, offered):
    recorded("messages", refused(me, msgspec.structs.replace(offered, fd=123456)))


@pytest.mark.parametrize("place", ["pidfd_open", "open", "map_shared"])
@pytest.mark.parametrize(
    "number",
    [
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
        errno.ESRCH,
        errno.EMFILE,
        errno.ENOMEM,
        errno.ENOSYS,
        errno.EIO,
    ],
)
def test_system_error_of_a_mapping_is_reported_as_a_sentence(
    me, offered, monkeypatch, place, number
):
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(memfd if place == "map_shared" else os, place, refuse)
    said = refused(me, offered)
    monkeypatch.undo()
    recorded("log", said, me.pid)


def test_without_proc_no_process_can_be_found(monkeypatch, tmp_path):
    monkeypatch.setattr(peer_memory, "_PROC", str(tmp_path))
    with raises(PeerMemoryUnavailable):
        peer_memory.myself()
