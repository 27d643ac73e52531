"""Failpoints: rules are read or refused with a sentence, and hit their targets once."""

from __future__ import annotations

import json
import threading

import pytest

from elastic import failpoints
from elastic.errors import Invalid
from elastic.failpoints import actions, failpoint
from elastic.failpoints.rules import ACTIONS, Rule, parse
from elastic.rendezvous import worker_settings
from harness.golden import raises, recorded


@pytest.fixture
def struck(monkeypatch):
    """Record the arguments of every action instead of executing it."""
    arguments: list[str] = []
    for action in actions.ACTIONS:
        monkeypatch.setitem(actions.ACTIONS, action, arguments.append)
    return arguments


@pytest.fixture
def rules(monkeypatch):
    """Set these rules for this process, as worker localhost:2#1."""

    def set_rules(text: str) -> None:
        monkeypatch.setattr(failpoints, "_text", text)
        monkeypatch.setattr(failpoints, "_read", None)
        monkeypatch.setattr(failpoints, "_rules", [])
        monkeypatch.setattr(failpoints, "_met", {})
        monkeypatch.setattr(failpoints, "_step", "")
        monkeypatch.setenv("ELASTIC_WORKER", "localhost:2#1")

    return set_rules


# ---- rules as text -------------------------------------------------------------------------------


def test_rule_consists_of_place_action_and_conditions():
    assert parse("bucket kill rank=0,2 step=7 hit=3; before-commit slow=0.5") == [
        Rule("bucket", "kill", "", (("rank", ("0", "2")), ("step", ("7",))), hit=3, id="bucket"),
        Rule("before-commit", "slow", "0.5", (), id="before-commit"),
    ]


def test_rule_with_every_takes_effect_repeatedly(rules, struck):
    rules("bucket slow=0.1 hit=2 every=3")
    for _ in range(9):
        failpoint("bucket")
    assert struck == ["0.1"] * 3  # the second time, the fifth and the eighth


def test_rules_may_be_separated_by_lines_or_empty():
    assert [rule.place for rule in parse("\nforward kill\n\nreset term id=x\n")] == [
        "forward",
        "reset",
    ]
    assert parse("") == parse(" ; \n") == []


@pytest.mark.parametrize(
    "text",
    [
        "bucket",
        "bucket explode",
        "bucket exit",
        "bucket kill=9",
        "bucket slow=soon",
        "bucket slow=-1",
        "bucket slow=nan",
        "bucket exit=seven",
        "bucket kill rank",
        "bucket kill rank=",
        "bucket kill colour=red",
        "bucket kill hit=often",
    ],
)
def test_invalid_rule_is_refused(text):
    with raises(Invalid):
        parse(text)


# ---- targets -------------------------------------------------------------------------------------


def test_rule_matches_workers_with_one_of_the_values_of_each_condition():
    rule = parse("bucket kill rank=0,2 other-than=b:0#1")[0]
    assert rule.means({"worker": "a:0#1", "rank": "2"})
    assert not rule.means({"worker": "a:0#1", "rank": "1"})
    assert not rule.means({"worker": "b:0#1", "rank": "2"})
    assert not rule.means({"worker": "a:0#1"})  # it has no rank yet


def test_failpoint_without_rules_has_no_effect(rules, struck):
    rules("")
    failpoint("bucket")
    assert not struck


def test_rule_takes_effect_at_its_place_once(rules, struck):
    rules("bucket exit=7 worker=localhost:2#1")
    failpoint("forward")
    assert not struck
    failpoint("bucket")
    failpoint("bucket")
    assert struck == ["7"]


def test_a_rule_for_another_worker_has_no_effect(rules, struck):
    rules("bucket exit=7 slot=1; bucket exit=8 incarnation=2; bucket exit=9 rank=0")
    failpoint("bucket")
    assert not struck


def test_only_hits_that_satisfy_the_conditions_are_counted_by_a_rule(rules, struck):
    rules("bucket exit=7 step=4 hit=2")
    for step in (3, 3, 4):
        failpoints.set_step(step)
        failpoint("bucket")
    assert not struck
    failpoint("bucket")
    assert struck == ["7"]


def test_init_refuses_invalid_rules(rules):
    rules("bucket explode")
    with raises(Invalid):
        failpoints.check()
    rules("@/nowhere/rules")
    with raises(Invalid):
        failpoints.check()


def test_failpoint_environment_variables_are_read():
    recorded("messages", worker_settings.failpoints({"ELASTIC_FAILPOINTS": " bucket kill\n"}))
    assert worker_settings.failpoints({}) == ""
    assert str(worker_settings.worker({"ELASTIC_WORKER": "h:3#2"})) == "h:3#2"


# ---- rules in a file -----------------------------------------------------------------------------


def replace(file, text):
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def test_replaced_rule_file_is_read_again(rules, struck, tmp_path):
    file = tmp_path / "rules"
    replace(file, "")
    rules(f"@{file}")
    failpoint("bucket")
    assert not struck
    replace(file, "bucket exit=1 id=first")
    failpoint("bucket")
    replace(file, "bucket exit=2 id=second")
    failpoint("bucket")
    assert struck == ["1", "2"]


def test_a_rule_in_a_file_hits_the_given_number_of_processes(rules, struck, tmp_path):
    file = tmp_path / "rules"
    replace(file, "bucket exit=1 id=cell")
    for _ in range(2):  # like two processes
        rules(f"@{file}")
        failpoint("bucket")
    assert struck == ["1"]
    said = json.loads((tmp_path / "rules.cell.0").read_text())
    assert said["worker"] == "localhost:2#1"


def test_several_victims_of_a_rule_are_hit_together(struck, tmp_path):
    rule = parse("bucket exit=1 victims=2 id=cell")[0]
    facts = {"worker": "localhost:2#1"}
    first = threading.Thread(target=actions.strike, args=(rule, facts, tmp_path / "rules"))
    first.start()
    first.join(0.05)
    assert first.is_alive() and not struck
    actions.strike(rule, facts, tmp_path / "rules")
    first.join(10)
    assert struck == ["1", "1"]


# ---- actions -------------------------------------------------------------------------------------


def test_raise_action_raises_a_runtime_error():
    with pytest.raises(RuntimeError, match="a-damaged-sample"):
        actions.ACTIONS["raise"]("a-damaged-sample")


def test_disk_full_action_raises_oserror():
    with raises(OSError):
        actions.ACTIONS["disk-full"]("")


def test_every_declared_action_is_implemented():
    assert ACTIONS.keys() == actions.ACTIONS.keys()
