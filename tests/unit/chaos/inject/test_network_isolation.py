"""Sockets of processes, and the packets to drop."""

import os
import socket
import sys

import pytest

from elastic.chaos.inject import network_isolation
from elastic.chaos.inject.network_isolation import Socket
from elastic.errors import Invalid
from harness.golden import raises


def test_sockets_of_a_process_are_listed_with_both_addresses():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        door = listening.getsockname()
        with socket.create_connection(door) as calling:
            called, _ = listening.accept()
            with called:
                found = network_isolation.sockets_of(os.getpid())
                assert Socket(door, None) in found
                assert Socket(calling.getsockname(), door) in found
                assert Socket(door, calling.getsockname()) in found


def test_exited_process_has_no_sockets():
    with pytest.raises(OSError):
        network_isolation.sockets_of(2**22 + 1)


@pytest.mark.skipif(sys.byteorder != "little", reason="the texts are a little-endian machine's")
@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("0100007F:1F90", ("127.0.0.1", 8080)),
        ("00000000:0016", ("0.0.0.0", 22)),
        ("00000000000000000000000001000000:1F90", ("::1", 8080)),
        ("0000000000000000FFFF00000100007F:1F90", ("127.0.0.1", 8080)),
    ],
)
def test_addresses_in_the_kernel_format_are_parsed(text, end):
    line = f"0: {text} {text} 01 0:0 00:0 0 0 0 4711".split()
    assert network_isolation._socket(line, {"4711"}) == Socket(end, end)
    assert network_isolation._socket(line, {"4712"}) is None


def test_connection_is_dropped_in_both_directions_and_a_listener_inbound():
    connection = Socket(("10.0.0.1", 5), ("10.0.0.2", 6))
    assert network_isolation._elements(connection) == [
        "flows_ip { 10.0.0.1 . 5 . 10.0.0.2 . 6 }",
        "flows_ip { 10.0.0.2 . 6 . 10.0.0.1 . 5 }",
    ]
    assert network_isolation._elements(Socket(("::1", 5), None)) == ["doors_ip6 { ::1 . 5 }"]
    assert network_isolation._elements(Socket(("0.0.0.0", 5), None)) == ["doors { 5 }"]


def test_partition_and_cut_are_refused_without_root_or_their_program(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for check in [network_isolation.check_partition, network_isolation.check_cut]:
        with raises(Invalid):
            check()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda program: None)
    with raises(Invalid):
        network_isolation.check_partition()
    with pytest.raises(Invalid, match="apt-get install iproute2"):
        network_isolation.check_cut()
