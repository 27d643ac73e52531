"""The network for tests of many hosts: effects of its faults on plain programs, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.processes import lives, path_of_tests
from harness.waiting import wait_until
from stress.hosts import namespaces
from stress.hosts.namespaces import Host, Network, NetworkTrouble

PORT = 7000

ECHO = f"""
    import socket, threading
    def serve(connection):
        while data := connection.recv(65536):
            connection.sendall(data)
    door = socket.create_server(("", {PORT}))
    print("listening", flush=True)
    while True:
        threading.Thread(target=serve, args=(door.accept()[0],), daemon=True).start()
"""
CALL = f"""
    import socket, sys, time
    host, times, size, patience = sys.argv[1], *map(float, sys.argv[2:])
    line = socket.create_connection((host, {PORT}), timeout=patience)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    best = 1e9
    for _ in range(int(times)):
        began = time.monotonic()
        line.sendall(bytes(int(size)))
        left = int(size)
        while left:
            left -= len(line.recv(65536)) or sys.exit("it hung up")
        best = min(best, time.monotonic() - began)
    print(best)
"""
COUNT = f"""
    import socket
    door = socket.socket(type=socket.SOCK_DGRAM)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    door.bind(("", {PORT}))
    print("listening", flush=True)
    seen = 0
    while (data := door.recv(9)) != b"over":
        seen += 1
    print(seen, flush=True)
"""
SEND = f"""
    import socket, sys
    to = sys.argv[1], {PORT}
    door = socket.socket(type=socket.SOCK_DGRAM)
    for _ in range(int(sys.argv[2])):
        door.sendto(b"x", to)
"""


pytestmark = pytest.mark.skipif(bool(why := namespaces.obstacle()), reason=why)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Network]:
    with Network(["a", "b"], tmp_path_factory.mktemp("network")) as network:
        yield network


@pytest.fixture
def network(shared) -> Iterator[Network]:
    yield shared
    for host in shared.hosts.values():
        shared.heal(host.name)
        for pid in host.pids():
            os.kill(pid, signal.SIGKILL)


def python(program: str, *arguments: object) -> list[str]:
    return [sys.executable, "-ISc", textwrap.dedent(program), *map(str, arguments)]


def listening(host: Host, program: str) -> subprocess.Popen[bytes]:
    """Start a program that has reported its start."""
    process = host.popen(python(program), stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n"
    return process


def there_and_back(
    network: Network, *, size: int = 1, times: int = 1, patience: float = 5
) -> float:
    """Return seconds, the best of several attempts. Raises NetworkTrouble without an answer."""
    return float(network.hosts["a"].run(python(CALL, "b", times, size, patience), timeout=30))


def counted(host: Host, counter: subprocess.Popen[bytes]) -> int:
    """Return the received data. The request does not use the link."""
    host.run(python(f"import socket; socket.socket(type=2).sendto(b'over', ('127.0.0.1', {PORT}))"))
    said, _ = counter.communicate(timeout=10)
    return int(said)


def test_hosts_have_separate_names_and_loopbacks(network):
    listening(network.hosts["b"], ECHO)
    assert network.hosts["b"].run(["hostname"]) == "b\n"
    assert there_and_back(network) < 5
    with pytest.raises(NetworkTrouble, match="refused"):
        network.hosts["a"].run(python(CALL, "localhost", 1, 1, 1))
    own = subprocess.run(["ip", "address"], capture_output=True, text=True, check=True).stdout
    assert namespaces.SUBNET not in own  # of this machine


def test_cut_link_blocks_connections_until_healed(network):
    listening(network.hosts["b"], ECHO)
    network.cut("b")
    with pytest.raises(NetworkTrouble, match="TimeoutError"):
        there_and_back(network, patience=0.2)
    network.heal("b")
    assert there_and_back(network) < 5


def test_link_cut_in_one_direction_passes_the_other_direction(network):
    a, b = network.hosts["a"], network.hosts["b"]
    a.run(["ip", "neighbor", "replace", b.address, "lladdr", b.hardware_address, "dev", "eth0"])
    for way, expected in ("from", 20), ("towards", 0):
        counter = listening(b, COUNT)
        network.cut_one_way("b", way)
        a.run(python(SEND, b.address, 20))
        assert counted(b, counter) == expected, way
        network.heal("b")
    a.run(["ip", "neighbor", "flush", "dev", "eth0"])


def test_lossy_link_drops_the_configured_share_of_packets(network):
    counter = listening(network.hosts["b"], COUNT)
    network.lose("b", 0.02)
    network.hosts["a"].run(python(SEND, "b", 4000))
    # 80 are expected; this far from it is one case in 10^9.
    assert 4000 - 140 < counted(network.hosts["b"], counter) < 4000 - 30


def test_slow_link_limits_the_throughput(network):
    listening(network.hosts["b"], ECHO)
    network.slow("b", "10mbit")
    assert there_and_back(network, size=300_000) > 0.2  # 0.24 s one way, but for the first bucket
    network.heal("b")
    assert there_and_back(network, size=300_000, times=5) < 0.2


@pytest.mark.nightly
def test_delayed_link_increases_the_round_trip_time(network):
    listening(network.hosts["b"], ECHO)
    network.delay("b", 0.1)
    assert there_and_back(network, times=2) >= 0.2
    # The window opens over a long way too, and no byte is lost.
    assert there_and_back(network, size=300_000) >= 0.2
    network.heal("b")
    assert there_and_back(network, times=5) < 0.2


def test_host_dies_without_a_reset_and_resets_old_connections_after_its_return(network):
    a, b = network.hosts["a"], network.hosts["b"]
    echo = listening(b, ECHO)
    waiting = a.popen(
        python(
            f"""
            import socket
            line = socket.create_connection(("b", {PORT}))
            print("connected", flush=True)
            line.settimeout(0.3)
            try:
                print("closed:", line.recv(1), flush=True)
            except TimeoutError:
                print("silent", flush=True)
            line.settimeout(10)
            input()
            try:
                line.send(b"x")
                print("closed:", line.recv(1))
            except ConnectionResetError:
                print("reset")
            """
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert waiting.stdout.readline() == "connected\n"
    network.kill_host("b")
    assert echo.wait(5) == -signal.SIGKILL
    assert b.pids() == []
    with pytest.raises(NetworkTrouble, match="host b "):
        b.run(["true"])
    assert waiting.stdout.readline() == "silent\n"
    network.heal("b")
    assert b.run(["hostname"]) == "b\n"
    assert waiting.communicate("\n", timeout=10)[0] == "reset\n"


def test_network_namespaces_left_by_a_killed_run_are_removed(tmp_path):
    program = f"""
        import subprocess
        from pathlib import Path
        from stress.hosts.namespaces import Network
        network = Network(["x"], Path({str(tmp_path)!r})).__enter__()
        words = ["ip", "netns", "exec", network.hosts["x"].namespace, "sleep", "1000"]
        sleeps = subprocess.Popen(words, stdin=-3, stdout=-3)
        print(network.hosts["x"].namespace, sleeps.pid, flush=True)
        input()
    """
    words = [sys.executable, "-c", textwrap.dedent(program)]
    run = subprocess.Popen(
        words,
        env=os.environ | path_of_tests(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    name, pid = run.stdout.readline().split()
    assert namespaces.sweep() == []  # it lives
    run.kill()
    run.communicate()
    assert Path("/run/netns", name).exists()
    swept = namespaces.sweep()
    assert name in swept and len(swept) == 2  # and its switch
    assert not Path("/run/netns", name).exists()
    wait_until(lambda: not lives(int(pid)), "the end of the process that ran there", 5.0)
