"""Warnings about hosts whose networks do not match."""

from __future__ import annotations

from elastic.driver.network.unreachable_hosts import AddressCheck
from harness.golden import recorded


def last_warning(**hosts: str) -> str:
    """Return the last warning when hosts with these addresses register, each using its first; empty if there is
    none.
    """
    agreement = AddressCheck()
    *before, last = [warning_of(agreement, host, text) for host, text in hosts.items()]
    assert not any(before), before
    return last


def warning_of(agreement: AddressCheck, host: str, text: str, calls_from: str = "") -> str:
    addresses = text.split()
    return agreement.note(host, addresses[0].partition("/")[0], addresses, calls_from)


def test_matching_hosts_cause_no_warning():
    assert last_warning(a="10.0.0.5/24") == ""
    assert last_warning(a="10.0.0.5/24", b="10.0.0.6/24", c="10.0.0.7/24") == ""
    assert (
        last_warning(a="10.0.0.5/24", b="10.0.1.6/24") == ""
    )  # there may be a router between them
    assert last_warning(a="10.0.0.5/32", b="10.0.0.6/32") == ""  # as assigned by clouds
    assert last_warning(a="127.0.0.1/8", b="127.0.0.1/8") == ""  # two names of one machine
    assert last_warning(a="192.0.2.5/24", b="192.0.2.5/24") == ""


def test_different_address_families_are_reported():
    recorded("messages", last_warning(a="10.0.0.5/24", c="10.0.0.7/24", b="fd00::6/64"))


def test_flag_to_pass_is_named():
    recorded(
        "messages",
        last_warning(
            a="10.0.0.5/24 fd00::5/64 172.17.0.1/16 127.0.0.1/8",
            b="fd00::6/64 10.0.0.6/24 172.17.0.1/16 127.0.0.1/8",
        ),
    )


def test_loopback_of_one_host_is_reported_when_the_remaining_hosts_have_networks():
    line = last_warning(a="127.0.0.1/8", b="10.0.0.6/24")
    recorded("messages", line)


def test_loopback_on_separate_machines_is_reported():
    agreement = AddressCheck()
    assert warning_of(agreement, "a", "127.0.0.1/8", "127.0.0.1") == ""
    recorded("log", warning_of(agreement, "b", "127.0.0.1/8", "10.0.0.6"))
    assert warning_of(AddressCheck(), "b", "127.0.0.1/8", "10.0.0.6") == ""


def test_bridge_address_of_every_machine_is_reported():
    agreement = AddressCheck()
    assert warning_of(agreement, "a", "172.17.0.1/16 10.0.0.5/24", "10.0.0.5") == ""
    recorded("log", warning_of(agreement, "b", "172.17.0.1/16 10.0.0.6/24", "10.0.0.6"))
    # Two agents of one machine connect from the same address.
    agreement = AddressCheck()
    assert warning_of(agreement, "a", "172.17.0.1/16", "10.0.0.5") == ""
    assert warning_of(agreement, "b", "172.17.0.1/16", "10.0.0.5") == ""


def test_different_networks_are_reported_when_a_common_network_exists():
    recorded(
        "messages",
        last_warning(
            a="10.0.0.5/24 192.168.7.5/24 172.17.0.1/16", b="192.168.7.6/24 172.17.0.1/16"
        ),
    )


def test_list_of_many_hosts_is_truncated():
    hosts = {f"h{n}": f"10.0.0.{n}/24" for n in range(1, 100)}
    recorded("messages", last_warning(**hosts, odd="fd00::1/64"))


def test_each_warning_is_logged_once():
    agreement = AddressCheck()
    lines = [
        warning_of(agreement, "a", "10.0.0.5/24"),
        warning_of(agreement, "b", "fd00::6/64"),
        warning_of(agreement, "c", "fd00::7/64"),
        warning_of(agreement, "b", "fd00::6/64"),
        warning_of(agreement, "d", "127.0.0.1/8"),
    ]
    recorded("log", [line[:12] for line in lines])


def test_removed_or_changed_host_is_no_longer_compared():
    agreement = AddressCheck()
    assert warning_of(agreement, "a", "fd00::5/64") == ""
    agreement.drop("a")
    agreement.drop("nobody")
    assert warning_of(agreement, "b", "10.0.0.6/24") == ""
    assert warning_of(agreement, "b", "fd00::6/64") == ""
    assert warning_of(agreement, "c", "fd00::7/64 10.0.0.7/24") == ""


def test_invalid_address_is_ignored():
    agreement = AddressCheck()
    assert agreement.note("a", "10.0.0.5/24", [], "") == ""
    assert agreement.note("b", "fd00::6", ["fd00::6/640"], "") == ""
    assert agreement.note("c", "127.0.0.1", [], "?") == ""
    assert warning_of(agreement, "d", "10.0.0.5/24") == ""
    assert warning_of(agreement, "e", "fd00::6/64") != ""
