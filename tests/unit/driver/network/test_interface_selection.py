"""Address selection: addresses of hosts, listening address of the driver, and names with changing addresses."""

from __future__ import annotations

import asyncio
import socket
import threading
from unittest.mock import create_autospec

import pytest

from elastic.driver.network import local_interfaces, name_lookup
from elastic.driver.network.interface_selection import (
    InterfaceAddress,
    check_wanted,
    choose_bind,
    wanted_address,
    worker_variables,
)
from elastic.driver.network.local_interfaces import (
    alone_address,
    listen_address,
    own_addresses,
    route_to,
)
from elastic.driver.network.name_lookup import resolved
from harness.golden import raises, recorded
from harness.refusals import refusal_of

LO4 = InterfaceAddress("lo", "127.0.0.1", 8, True, True)
LO6 = InterfaceAddress("lo", "::1", 128, True, True)
ETH0 = InterfaceAddress("eth0", "192.0.2.5", 24, True, False)
ETH1 = InterfaceAddress("eth1", "10.0.0.5", 16, True, False)
ETH1_NEW = InterfaceAddress("eth1", "fd00::5", 64, True, False)
ETH1_LINK = InterfaceAddress("eth1", "fe80::5", 64, True, False)
ETH10 = InterfaceAddress("eth10", "10.9.0.5", 16, False, False)
DOCKER = InterfaceAddress("docker0", "172.17.0.1", 16, True, False)
OWN = [LO4, LO6, DOCKER, ETH0, ETH1, ETH1_NEW, ETH1_LINK, ETH10]


# ---- address of a host


def test_default_is_the_local_end_of_the_connection_to_the_driver():
    assert choose_bind([], OWN, local="10.0.0.5") == "10.0.0.5"
    assert choose_bind([], OWN, local="fd00::5") == "fd00::5"
    assert choose_bind([], OWN, local="::ffff:10.0.0.5") == "10.0.0.5"


def test_driver_on_loopback_has_all_hosts_on_one_machine():
    assert choose_bind([], OWN, local="127.0.0.1") == "127.0.0.1"
    assert choose_bind([], OWN, local="::1") == "::1"


def test_loopback_is_skipped_with_several_machines():
    """The driver is reached through a tunnel, for example. Container bridges do not lead to other machines."""
    assert choose_bind([], OWN, local="127.0.0.1", several=True) == "192.0.2.5"
    assert choose_bind([], OWN, local="::1", several=True) == "fd00::5"
    assert choose_bind([], [LO4, DOCKER], local="127.0.0.1", several=True) == "172.17.0.1"
    error = refusal_of(choose_bind, [], [LO4, LO6, ETH10], local="127.0.0.1", several=True)
    recorded("log", error)


@pytest.mark.parametrize(
    ("wanted", "local", "address"),
    [
        ("eth1", "192.0.2.5", "10.0.0.5"),
        ("eth1", "fd77::5", "fd00::5"),  # the address family of the driver
        ("10.0.0.0/8", "192.0.2.5", "10.0.0.5"),
        ("fd00::/8", "192.0.2.5", "fd00::5"),
        ("10.0.7.7/8", "192.0.2.5", "10.0.0.5"),  # a network as users write it
        ("10.0.0.5", "192.0.2.5", "10.0.0.5"),
        ("ib0,eth10,eth0,eth1", "10.0.0.5", "192.0.2.5"),  # missing; down; the first existing one
        ("lo", "192.0.2.5", "127.0.0.1"),
        ("::1", "192.0.2.5", "::1"),
    ],
)
def test_first_existing_interface_or_network_is_used(wanted, local, address):
    assert choose_bind(wanted.split(","), OWN, local=local, several=True) == address


def test_missing_interface_is_reported_with_the_existing_ones():
    recorded("messages", refusal_of(wanted_address, ["ib0", "fd77::/16"], [LO4, ETH10]))


def test_address_that_needs_a_scope_is_rejected():
    error = refusal_of(wanted_address, ["eth1"], [LO4, ETH1_LINK])
    recorded("log", error)
    assert "fd00::/8" in refusal_of(choose_bind, [], OWN, local="fe80::5%eth1")
    # A better one that follows it is used.
    assert wanted_address(["eth1", "eth0"], [ETH1_LINK, ETH0]) == "192.0.2.5"


def test_valid_names_and_networks_are_accepted():
    check_wanted(["eth1", "br-0a1b2c", "eth0:1", "enp3s0f0", "10.0.0.0/8", "fd00::/8", "::1"])
    for word in ("10.0.0.0/33", "10.0.0", "fd00::/129", "fd00:::1", "eth 1", "", "fe80::1%eth0"):
        recorded("messages", refusal_of(check_wanted, [word]))


def test_workers_use_the_interface_of_their_address():
    assert worker_variables("10.0.0.5", OWN, {"PATH": "/bin"}) == {
        "NCCL_SOCKET_IFNAME": "=eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "HOROVOD_GLOO_IFACE": "eth1",
    }
    assert worker_variables("fd00::5", OWN, {})["NCCL_SOCKET_FAMILY"] == "AF_INET6"
    assert worker_variables("127.0.0.2", OWN, {})["NCCL_SOCKET_IFNAME"] == "=lo"
    assert worker_variables("203.0.113.1", OWN, {}) == {}


def test_settings_of_the_user_for_workers_are_kept():
    assert worker_variables("fd00::5", OWN, {"NCCL_SOCKET_IFNAME": "ib0"}) == {
        "GLOO_SOCKET_IFNAME": "eth1",
        "HOROVOD_GLOO_IFACE": "eth1",
    }
    assert "GLOO_SOCKET_IFNAME" not in worker_variables("fd00::5", OWN, {"GLOO_SOCKET_IFNAME": ""})


# ---- this machine


def test_this_machine_has_loopback():
    assert LO4 in own_addresses()
    assert route_to("127.0.0.1") == "127.0.0.1"
    assert all("%" not in each.address for each in own_addresses())


def test_zone_of_a_link_local_address_is_kept(monkeypatch):
    probe = create_autospec(socket.socket, instance=True)
    probe.__enter__.return_value = probe
    probe.getsockname.return_value = ("fe80::2%lo", 1, 0, 1)
    monkeypatch.setattr(socket, "socket", lambda *_: probe)
    assert route_to("fe80::1%lo") == "fe80::2"
    probe.connect.assert_called_once_with(("fe80::1", 9, 0, socket.if_nametoindex("lo")))


def test_job_on_one_machine_uses_loopback():
    assert alone_address([]) == "127.0.0.1"
    assert alone_address(["lo"]) == "127.0.0.1"
    assert alone_address(["eth77", "127.0.0.0/8"]) == "127.0.0.1"


# ---- listening address of the driver


def listening(
    *towards: str, wanted: str = "", routes: dict[str, str] | None = None, grows: bool = False
) -> str:
    """A network in which ``gpu1`` is 10.0.0.6, ``here`` is this machine, and ``dual`` has both families."""
    book = {
        "gpu1": ["10.0.0.6"],
        "here": ["127.0.1.1"],
        "dual": ["fd00::6", "10.0.0.6"],
        "near": ["fe80::6%2"],
    }
    ways = {
        "10.0.0.6": "10.0.0.5",
        "127.0.1.1": "127.0.0.1",
        "fd00::6": "fd00::5",
        "fe80::6%2": "fe80::5",
    }

    async def resolve(name: str, port: int, timeout_s: float) -> name_lookup.Found:
        if name not in book:
            raise OSError(f"{name} could not be resolved: not known")
        return [
            (int(socket.AF_INET6) if ":" in each else socket.AF_INET, each) for each in book[name]
        ]

    return asyncio.run(
        listen_address(
            wanted.split(",") if wanted else [],
            towards,
            grows=grows,
            own=OWN,
            resolve=resolve,
            route=(ways if routes is None else routes).get,
        )
    )


def test_driver_listens_on_the_address_that_reaches_its_hosts():
    assert listening() == "127.0.0.1"
    assert listening("here") == "127.0.0.1"
    assert listening("here", "gpu1") == "10.0.0.5"
    assert listening("dual") == "fd00::5"
    assert listening("nobody", "gpu1") == "10.0.0.5"


def test_requested_interface_is_used_in_the_family_of_the_hosts():
    assert listening("gpu1", wanted="eth1") == "10.0.0.5"
    assert listening("dual", wanted="eth1") == "fd00::5"
    assert listening("nobody", wanted="192.0.2.0/24,eth1") == "192.0.2.5"
    assert listening(wanted="eth0") == "192.0.2.5"


def test_default_route_is_used_if_no_name_resolves():
    assert listening("nobody", routes={"192.0.2.1": "192.0.2.5"}) == "192.0.2.5"
    error = refusal_of(listening, "nobody", routes={})
    recorded("log", error)


def test_default_route_is_used_if_hosts_may_be_added():
    ways = {"192.0.2.1": "192.0.2.5"}
    assert listening(routes=ways) == "127.0.0.1"
    assert listening(routes=ways, grows=True) == "192.0.2.5"
    assert listening(routes=ways, grows=True, wanted="eth1") == alone_address(["eth1"], OWN)
    assert listening(routes=ways, grows=True, wanted="lo") == "127.0.0.1"
    assert listening(routes={}, grows=True) == "127.0.0.1"
    assert listening(routes={"2001:db8::1": "fe80::5"}, grows=True) == "127.0.0.1"
    assert listening("gpu1", grows=True) == "10.0.0.5"


def test_driver_does_not_listen_on_an_address_that_needs_a_scope():
    recorded("messages", refusal_of(listening, "near"))


# ---- names


def answers(*rows: tuple[int, tuple]):
    return lambda name, port, type: [(family, type, 6, "", where) for family, where in rows]


def test_addresses_of_a_name_are_unique_and_ordered():
    ask = answers(
        (socket.AF_INET6, ("fd00::6", 80, 0, 0)),
        (socket.AF_INET, ("10.0.0.6", 80)),
        (socket.AF_INET, ("10.0.0.6", 80)),
        (socket.AF_INET6, ("fe80::6", 80, 0, 2)),
    )
    assert asyncio.run(resolved("gpu1", 80, 5.0, ask=ask)) == [
        (socket.AF_INET6, "fd00::6"),
        (socket.AF_INET, "10.0.0.6"),
        (socket.AF_INET6, "fe80::6%2"),
    ]


async def test_name_is_resolved_each_time():
    book = ["10.0.0.6", "10.0.0.7"]

    def ask(name, port, type):
        return answers((socket.AF_INET, (book.pop(0), port)))(name, port, type)

    assert [
        found[0][1] for found in [await resolved("gpu1", 80, 5.0, ask=ask) for _ in range(2)]
    ] == ["10.0.0.6", "10.0.0.7"]


async def test_unresponsive_name_server_blocks_one_thread_but_not_the_loop():
    asked, let_go = [], threading.Event()

    def ask(name, port, type):
        asked.append(name)
        let_go.wait(30)
        return answers((socket.AF_INET, ("10.0.0.6", port)))(name, port, type)

    for _ in range(3):
        with raises(OSError):
            await resolved("slow", 80, 0.01, ask=ask)
    third = asyncio.create_task(resolved("slow", 80, 30.0, ask=ask))
    await asyncio.sleep(0)
    let_go.set()
    assert await third == [(socket.AF_INET, "10.0.0.6")]
    assert asked == ["slow"]


def test_unknown_name_is_reported():
    with raises(OSError):
        asyncio.run(resolved("nobody.invalid", 80, 30.0, ask=unknown))


def unknown(name, port, type):
    if name.startswith("nobody"):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return socket.getaddrinfo(name, port, type=type)


def test_numeric_addresses_need_no_name_server():
    assert asyncio.run(resolved("127.0.0.1", 4711, 30.0)) == [(socket.AF_INET, "127.0.0.1")]
    assert asyncio.run(resolved("::1", 4711, 30.0)) == [(socket.AF_INET6, "::1")]


def test_flag_accepts_the_same_values(monkeypatch):
    monkeypatch.setattr(local_interfaces, "own_addresses", lambda: OWN)
    assert alone_address(["eth1"]) == "10.0.0.5"
    assert local_interfaces.worker_network("10.0.0.5", {})["NCCL_SOCKET_IFNAME"] == "=eth1"
