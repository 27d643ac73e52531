"""What is said of hosts whose networks don't fit together."""

from __future__ import annotations

from elastic.driver.network.address_check import Agreement
from harness.golden import recorded


def told(**hosts: str) -> str:
    """What is said when hosts with these addresses come, each using its first; said at the last, if at all."""
    agreement = Agreement()
    *before, last = [said(agreement, host, text) for host, text in hosts.items()]
    assert not any(before), before
    return last


def said(agreement: Agreement, host: str, text: str, calls_from: str = "") -> str:
    addresses = text.split()
    return agreement.note(host, addresses[0].partition("/")[0], addresses, calls_from)


def test_hosts_that_fit():
    assert told(a="10.0.0.5/24") == ""
    assert told(a="10.0.0.5/24", b="10.0.0.6/24", c="10.0.0.7/24") == ""
    assert told(a="10.0.0.5/24", b="10.0.1.6/24") == ""  # there may be a router between them
    assert told(a="10.0.0.5/32", b="10.0.0.6/32") == ""  # as clouds hand them out
    assert told(a="127.0.0.1/8", b="127.0.0.1/8") == ""  # two names of one machine
    assert told(a="192.0.2.5/24", b="192.0.2.5/24") == ""


def test_two_families():
    recorded("messages", told(a="10.0.0.5/24", c="10.0.0.7/24", b="fd00::6/64"))


def test_the_flag_to_give_is_named():
    recorded(
        "messages",
        told(
            a="10.0.0.5/24 fd00::5/64 172.17.0.1/16 127.0.0.1/8",
            b="fd00::6/64 10.0.0.6/24 172.17.0.1/16 127.0.0.1/8",
        ),
    )


def test_loopback_among_others():
    line = told(a="127.0.0.1/8", b="10.0.0.6/24")
    recorded("messages", line)


def test_loopback_on_machines_that_are_apart():
    agreement = Agreement()
    assert said(agreement, "a", "127.0.0.1/8", "127.0.0.1") == ""
    recorded("log", said(agreement, "b", "127.0.0.1/8", "10.0.0.6"))
    assert said(Agreement(), "b", "127.0.0.1/8", "10.0.0.6") == ""


def test_the_bridge_that_every_machine_has():
    agreement = Agreement()
    assert said(agreement, "a", "172.17.0.1/16 10.0.0.5/24", "10.0.0.5") == ""
    recorded("log", said(agreement, "b", "172.17.0.1/16 10.0.0.6/24", "10.0.0.6"))
    # Two agents of one machine call from the same address.
    agreement = Agreement()
    assert said(agreement, "a", "172.17.0.1/16", "10.0.0.5") == ""
    assert said(agreement, "b", "172.17.0.1/16", "10.0.0.5") == ""


def test_different_networks_where_there_is_one_in_common():
    recorded(
        "messages",
        told(a="10.0.0.5/24 192.168.7.5/24 172.17.0.1/16", b="192.168.7.6/24 172.17.0.1/16"),
    )


def test_many_hosts_are_not_all_listed():
    hosts = {f"h{n}": f"10.0.0.{n}/24" for n in range(1, 100)}
    recorded("messages", told(**hosts, odd="fd00::1/64"))


def test_a_trouble_is_told_once_whoever_comes():
    agreement = Agreement()
    lines = [
        said(agreement, "a", "10.0.0.5/24"),
        said(agreement, "b", "fd00::6/64"),
        said(agreement, "c", "fd00::7/64"),
        said(agreement, "b", "fd00::6/64"),
        said(agreement, "d", "127.0.0.1/8"),
    ]
    recorded("log", [line[:12] for line in lines])


def test_a_host_that_is_gone_or_has_changed_counts_no_more():
    agreement = Agreement()
    assert said(agreement, "a", "fd00::5/64") == ""
    agreement.drop("a")
    agreement.drop("nobody")
    assert said(agreement, "b", "10.0.0.6/24") == ""
    assert said(agreement, "b", "fd00::6/64") == ""
    assert said(agreement, "c", "fd00::7/64 10.0.0.7/24") == ""


def test_what_is_no_address_is_taken_for_nothing():
    agreement = Agreement()
    assert agreement.note("a", "10.0.0.5/24", [], "") == ""
    assert agreement.note("b", "fd00::6", ["fd00::6/640"], "") == ""
    assert agreement.note("c", "127.0.0.1", [], "?") == ""
    assert said(agreement, "d", "10.0.0.5/24") == ""
    assert said(agreement, "e", "fd00::6/64") != ""
