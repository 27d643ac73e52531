import os
import socket

from harness import ports


def test_two_processes_get_no_common_port():
    ours = ports.free_ports(ports.BLOCK)
    theirs = ports._block(-os.getpid())
    assert not {*ours} & {next(theirs) for _ in range(2 * ports.BLOCK)}


def test_free_port_is_unused_on_all_addresses_and_outside_of_the_ephemeral_range():
    with socket.create_server(("127.0.0.1", ports.free_port())) as taken:
        assert taken.getsockname()[1] not in (given := ports.free_ports(2 * ports.BLOCK))
    low, high = map(int, ports.KERNELS.read_text().split())
    assert low - ports.FIRST < ports.BLOCK or all(port < low or port > high for port in given)
