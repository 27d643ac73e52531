import os
import socket

from harness import ports


def test_of_two_processes_none_is_given_a_port_of_the_other():
    ours = ports.free_ports(ports.BLOCK)
    theirs = ports._block(-os.getpid())
    assert not {*ours} & {next(theirs) for _ in range(2 * ports.BLOCK)}


def test_a_port_is_free_on_all_addresses_and_none_that_the_kernel_gives():
    with socket.create_server(("127.0.0.1", ports.free_port())) as taken:
        assert taken.getsockname()[1] not in (given := ports.free_ports(2 * ports.BLOCK))
    low, high = map(int, ports.KERNELS.read_text().split())
    assert low - ports.FIRST < ports.BLOCK or all(port < low or port > high for port in given)
