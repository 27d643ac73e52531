"""Host lists in every notation, errors for invalid ones, and names of this machine."""

from __future__ import annotations

import threading

import pytest

from elastic.driver.network.host_lists import (
    ThisHost,
    literal_address,
    parse_address,
    parse_hosts,
    parse_lines,
    read_hostfile,
    show,
)
from harness.golden import recorded
from harness.refusals import refusal_of


def this_host(**names: list[str]) -> ThisHost:
    """A machine named ``trainer`` with one address; ``names`` are the entries of its name server."""

    def resolve(name: str) -> list[str]:
        if name not in names:
            raise OSError(-2, "Name or service not known")
        return names[name]

    return ThisHost(
        hostname="Trainer", resolve=resolve, has_address=lambda address: address == "10.0.0.5"
    )


# ---- lists


def test_hosts_keep_their_order_and_spelling():
    hosts = parse_hosts("localhost:2, 127.1:1,[::1]:4,gpu-7.lab_2.net:8")
    assert list(hosts.items()) == [
        ("localhost", 2),
        ("127.1", 1),
        ("::1", 4),
        ("gpu-7.lab_2.net", 8),
    ]


def test_host_without_slots_has_the_default():
    assert parse_hosts("a,b:2,[fe80::1%eth0]", default_slots=3) == {
        "a": 3,
        "b": 2,
        "fe80::1%eth0": 3,
    }


@pytest.mark.parametrize(
    "text",
    [
        "a:0",
        "a:-1",
        "a:two",
        "a:",
        "a:22222",
        ":4",
        "a b:4",
        "a#1:4",
        "",
        "a:1,,b:1",
        "a:1,a:2",
        "::1:4",
        "[::1:4",
        "[gpu7]:4",
        "[::1]4",
    ],
)
def test_invalid_list_is_rejected(text):
    answer = refusal_of(parse_hosts, text)
    assert answer.startswith(f"-H {text}: ")
    recorded("messages", answer)


def test_lines_may_have_either_format_and_comments():
    text = (
        "# the lab\ngpu1 slots=4\n\n  gpu2:2  # half of it\ngpu3\tslots = 1\n[::1] slots=2\ngpu4\n"
    )
    assert parse_lines(text, source="x", default_slots=8) == {
        "gpu1": 4,
        "gpu2": 2,
        "gpu3": 1,
        "::1": 2,
        "gpu4": 8,
    }


@pytest.mark.parametrize("line", ["gpu2 slot=4", "gpu2 slots=many", "gpu2:4 slots=4", "gpu1"])
def test_invalid_line_is_rejected_with_its_number(tmp_path, line):
    file = tmp_path / "hosts"
    file.write_text(f"gpu1 slots=4\n\n{line}\n")
    answer = refusal_of(read_hostfile, str(file))
    assert answer.startswith(f"hostfile {file} line 3 reads {line!r}: ")
    recorded("messages", answer)


def test_host_without_slots_is_omitted_if_allowed():
    assert parse_lines("a:0\nb:1", source="x", slots_min=0) == {"b": 1}


def test_unreadable_hostfile_is_rejected(tmp_path):
    missing = str(tmp_path / "none")
    recorded("messages", refusal_of(read_hostfile, missing))
    recorded("messages", refusal_of(read_hostfile, str(tmp_path)))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    recorded("messages", refusal_of(read_hostfile, str(tmp_path / "bytes")))
    (tmp_path / "empty").write_text("# nothing\n")
    recorded("messages", refusal_of(read_hostfile, str(tmp_path / "empty")))


def test_lists_are_formatted_in_the_notation_of_the_flag():
    assert show({"a": 1, "::1": 2}) == "a:1,[::1]:2"
    assert show({}) == "none"
    assert show({f"h{n}": 1 for n in range(10)}).endswith("h7:1 and 2 more")


# ---- this machine


@pytest.mark.parametrize(
    "name",
    [
        "localhost",
        "LocalHost",
        "localhost.",
        "trainer",
        "127.0.0.1",
        "127.0.0.2",
        "127.1",
        "127.0.1",
        "0x7f.1",
        "2130706433",
        "0177.0.0.1",
        "::1",
        "0:0:0:0:0:0:0:1",
        "::ffff:127.0.0.1",
        "10.0.0.5",
    ],
)
def test_some_names_need_no_lookup(name):
    host = ThisHost(
        hostname="Trainer",
        resolve=lambda name: pytest.fail(f"{name} was looked up"),
        has_address=lambda address: address == "10.0.0.5",
    )
    assert host.elsewhere(name) is None


def test_name_that_resolves_to_this_machine_is_this_machine():
    host = this_host(**{"trainer.lab.net": ["10.0.0.5"], "alias": ["fe80::7", "127.0.1.1"]})
    assert host.elsewhere("trainer.lab.net") is None
    assert host.elsewhere("alias") is None


def test_other_machines_are_distinguished():
    host = this_host(gpu7=["10.0.0.7"])
    recorded("messages", host.elsewhere("gpu7"))
    recorded("messages", host.elsewhere("10.0.0.7"))
    recorded("messages", host.elsewhere("0.0.0.0"))
    recorded("messages", host.elsewhere("gpu8"))


def test_unresponsive_name_server_is_not_awaited():
    never = threading.Event()

    def hang(name: str) -> list[str]:
        never.wait(60)
        return []

    host = ThisHost(hostname="trainer", resolve=hang, resolve_s=0.01)
    recorded("messages", host.elsewhere("gpu7"))
    never.set()


def test_known_name_is_not_resolved_again_but_a_failed_lookup_is_repeated():
    asked: list[str] = []

    def resolve(name: str) -> list[str]:
        asked.append(name)
        if len(asked) == 1:
            raise OSError(-3, "Temporary failure in name resolution")
        return ["127.0.1.1"]

    host = ThisHost(hostname="trainer", resolve=resolve)
    recorded("messages", str(host.elsewhere("alias")))
    assert host.elsewhere("alias") is None
    assert host.elsewhere("alias") is None
    assert len(asked) == 2


def test_name_invalid_in_dns_is_reported():
    recorded("messages", str(ThisHost().elsewhere("a" * 70)))


def test_only_own_addresses_can_be_bound():
    recorded("messages", ThisHost(hostname="trainer").elsewhere("192.0.2.1"))


def test_notations_of_an_address_are_equal():
    assert literal_address("127.1") == "127.0.0.1"
    assert literal_address("gpu7") is None


def test_addresses_with_a_port_are_parsed():
    assert parse_address("driver.lab:4711") == ("driver.lab", 4711)
    assert parse_address("[fd00::1]:80") == ("fd00::1", 80)
    for text in (
        "driver",
        ":80",
        "fd00::1:80",
        "[a]:80",
        "[::1:80",
        "a:0",
        "a:65536",
        "a:b",
        "",
        "a:",
    ):
        recorded("messages", refusal_of(parse_address, text), f"{text!r}")
