"""Every kind of reason has its words, and what an older version wrote in words alone has its kind."""

from __future__ import annotations

import msgspec
import pytest

from elastic.driver import old_reasons
from elastic.driver.events import BreakWorld, KillWorker, Report
from elastic.driver.journal.entries import digest_of, is_digest, same_as_then
from elastic.driver.reasons import (
    SENTENCES,
    Fact,
    Reason,
    Why,
    because,
    brief,
    commit_id,
    in_one_line,
    in_words,
)
from elastic.protocol.messages import Commit, Worker
from harness.golden import recorded

WORKER = Worker("h", 1)
FROZEN = because(Why.FROZEN, how="stopped by a signal")


def test_every_kind_has_a_sentence():
    assert SENTENCES.keys() == set(Why)


def test_reasons_in_reasons_survive_json():
    lost = because(Why.LOST_KILLED, worker="h:1#1", killed_for=FROZEN)
    several = because(Why.SEVERAL, causes=[lost, in_words("more")], more=2)
    assert msgspec.json.decode(msgspec.json.encode(several), type=Reason) == several
    recorded("reasons", str(several))


def test_facts_that_do_not_fit_are_shown():
    odd: list[dict[str, Fact]] = [{}, {"within_s": "soon"}, {"within_s": None}]
    for facts in odd:
        recorded("reasons", str(Reason(Why.NO_INIT, facts)))


@pytest.mark.parametrize("why", [Why.OTHER_DIGEST, Why.SPOILT, Why.MACHINE_LEAVES])
def test_commits_of_journals_are_shown_by_an_id_that_is_no_decimal_number(why):
    facts: dict[str, Fact] = {
        "commit": "2.300",
        "newest": "2.300",
        "right": "h:0#1",
        "notice": "n",
        "durable": True,
    }
    assert "g2c300" in str(Reason(why, facts)) and "2.300" not in str(Reason(why, facts))
    assert commit_id("none") == "none" and commit_id(str(Commit(2, 300))) == "g2c300"


def test_a_line_that_an_older_version_recorded_is_the_same_line():
    now = Report("error", "fencing h:2#1: under commit g2c4")
    before = Report("error", "fencing h:2#1: under commit 2.4")
    assert same_as_then(before, now) and is_digest(digest_of([before]), [now])
    assert not same_as_then(Report("error", "fencing h:2#1: under commit 2.5"), now)


def test_what_a_worker_wrote_is_one_line_of_a_summary():
    facts = {"who": "rank 1", "exit": "exit code 3", "killed_for": None}
    assert in_one_line(because(Why.ENDED, **facts)) == ""
    wrote = because(Why.ENDED, **facts, wrote="Traceback\n  KeyError: 'x'")
    recorded("messages", in_one_line(wrote))
    same = because(
        Why.SAME_EXCEPTION, first="a", worker="b", commit="2.7", trace="T\nKeyError: 'x'"
    )
    recorded("messages", in_one_line(same))


@pytest.mark.parametrize(
    ("sentence", "kind"),
    [
        ("it is frozen (stopped by a signal)", Why.FROZEN),
        ("it is stuck: busy for 600 s (CPU 98%, 0 KiB/s) while the others waited in 'x'", Why.BUSY),
        ("its connection was lost", Why.CONNECTION_LOST),
        ("its connection was lost, they say", Why.UNKNOWN),
        ("no survivor holds a commit: lost h:1#1 (exit code 3)", Why.NO_COMMIT),
    ],
)
def test_an_old_sentence_has_its_kind_and_stays(sentence, kind):
    found = old_reasons.read(sentence)
    assert found.kind is kind and str(found) == sentence


def test_an_old_sentence_is_as_brief_as_it_was():
    recorded("messages", brief(old_reasons.read("it is cut off: its host acknowledges nothing")))
    lost = because(Why.LOST_ALIVE, worker="h:1#1", killed_for=old_reasons.read(str(FROZEN)))
    recorded("reasons", str(lost))


def test_the_numbers_in_an_old_end_are_facts():
    found = old_reasons.read("all 1 member of generation 12 returned")
    assert found.kind is Why.ALL_RETURNED
    assert (found.facts["members"], found.facts["generation"]) == (1, 12)


def test_old_actions_are_renewed_and_new_ones_left_alone():
    old = b'{"type":"KillWorker","worker":["h",1,1],"reason":"it is frozen (stopped)"}'
    kill = msgspec.json.decode(old_reasons.renewed(old), type=KillWorker)
    assert kill.reason.kind is Why.FROZEN and old_reasons.as_then(kill) == msgspec.json.decode(old)
    said = Report("info", 'a line with "reason":"in it"')
    for action in (KillWorker(WORKER, FROZEN), BreakWorld(2, [], in_words('"reason":"x"')), said):
        text = msgspec.json.encode(action)
        assert old_reasons.renewed(text) == text


def test_an_old_line_about_one_that_can_not_be_killed_says_which():
    text = "h:1#1 can't be killed within 1 s: going on without it"
    old = msgspec.json.encode({"type": "Report", "level": "error", "text": text})
    about = msgspec.json.decode(old_reasons.renewed(old), type=Report).about
    assert about is not None and about.kind is Why.CANT_BE_KILLED
    assert about.facts["worker"] == str(WORKER)


@pytest.mark.parametrize(
    "reason",
    [
        because(Why.BUSY, for_s=600.2, rates="CPU 98%, 0 KiB/s", where="in 'x'"),
        because(Why.GPU_FAILED, for_s=10.0, number=7, group="gradients"),
        because(Why.GPU_BEHIND, for_s=10.0, number=7, group="gradients"),
        because(Why.GPUS_HANG, for_s=10.0, number=7, group="gradients", before=2),
        because(Why.REJECTED),
        because(Why.STRANDED),
        because(Why.RETURNED_BEFORE),
        because(Why.JOB_OVER),
        because(Why.DRIVER_BUG, error="KeyError('x')"),
    ],
)
def test_sentences_that_no_kept_journal_has(reason):
    recorded("reasons", str(reason))
