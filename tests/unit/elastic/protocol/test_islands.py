"""The value of --islands, and the island of a host."""

import pytest

from elastic.errors import Invalid
from elastic.protocol.islands import island_of, parse_islands
from harness.golden import raises


@pytest.mark.parametrize("text", ["", "host", " host "])
def test_island_without_rules_is_the_host(text):
    assert parse_islands(text) == ()
    assert island_of("gpu1", ()) != island_of("gpu2", ())


def test_first_matching_rule_names_the_island():
    rules = parse_islands("eu=eu-*, gpu7 ; us=us-?,e*")
    assert [rule.name for rule in rules] == ["eu", "us"]
    assert [island_of(host, rules) for host in ("eu-1", "gpu7", "us-2", "east")] == [
        "eu",
        "eu",
        "us",
        "us",
    ]


def test_host_without_a_rule_is_an_island_even_if_a_rule_has_its_name():
    rules = parse_islands("eu=eu-*")
    assert len({island_of(host, rules) for host in ("eu", "asia", "eu-1")}) == 3


@pytest.mark.parametrize(
    "text", ["eu", "eu=", "=gpu1", "eu=gpu1,,gpu2", "e u=gpu1", "eu=a;eu=b", "eu=a;us=a", "eu=a;"]
)
def test_malformed_rules_are_refused(text):
    with raises(Invalid):
        parse_islands(text)
