"""Sentences of all kinds of reasons."""

from __future__ import annotations

import msgspec
import pytest

from elastic.driver.events import KillWorker, Report
from elastic.driver.journal.entries import digest_of, same
from elastic.driver.reasons import (
    SENTENCES,
    Fact,
    Reason,
    ReasonKind,
    as_sentence,
    because,
    commit_id,
    in_one_line,
)
from elastic.protocol.messages import Commit, Worker
from harness.golden import recorded

WORKER = Worker("h", 1)
FROZEN = because(ReasonKind.FROZEN, how="stopped by a signal")


def test_every_kind_has_a_sentence():
    assert SENTENCES.keys() == set(ReasonKind)


def test_nested_reasons_are_kept_in_json():
    lost = because(ReasonKind.LOST_KILLED, worker="h:1#1", killed_for=FROZEN)
    several = because(ReasonKind.SEVERAL, causes=[lost, as_sentence("more")], more=2)
    assert msgspec.json.decode(msgspec.json.encode(several), type=Reason) == several
    recorded("reasons", str(several))


def test_workers_that_ended_in_the_same_way_are_named_together():
    exits = [("h:3#1", "exit code 1"), ("h:0#1", "exit code 1"), ("h:2#1", "signal 9 SIGKILL")]
    causes = [because(ReasonKind.LOST_EXITED, worker=w, exit=how) for w, how in exits]
    stranded = because(ReasonKind.LOST_STRANDED, worker="h:1#1")
    recorded("reasons", str(because(ReasonKind.SEVERAL, causes=[*causes, stranded], more=0)))


def test_mismatching_facts_are_shown():
    odd: list[dict[str, Fact]] = [{}, {"within_s": "soon"}, {"within_s": None}]
    for facts in odd:
        recorded("reasons", str(Reason(ReasonKind.NO_INIT, facts)))


@pytest.mark.parametrize(
    "why", [ReasonKind.OTHER_DIGEST, ReasonKind.SPOILT, ReasonKind.MACHINE_LEAVES]
)
def test_commits_of_journals_have_an_id_that_is_not_a_decimal_number(why):
    facts: dict[str, Fact] = {
        "commit": "2.300",
        "newest": "2.300",
        "right": "h:0#1",
        "notice": "n",
        "durable": True,
    }
    assert "g2c300" in str(Reason(why, facts)) and "2.300" not in str(Reason(why, facts))
    assert commit_id("none") == "none" and commit_id(str(Commit(2, 300))) == "g2c300"


def test_decisions_are_equal_if_only_the_wording_differs():
    now, before = Report("error", "fenced h:2#1"), Report("error", "fencing h:2#1")
    assert same(before, now) and digest_of([before]) == digest_of([now])
    assert not same(Report("warning", "fenced h:2#1"), now)


def test_decisions_differ_if_the_kind_of_reason_or_another_field_differs():
    one = KillWorker(WORKER, FROZEN)
    others = [KillWorker(WORKER, because(ReasonKind.CUT_OFF)), KillWorker(Worker("h", 2), FROZEN)]
    assert same(KillWorker(WORKER, because(ReasonKind.FROZEN, how="in a debugger")), one)
    for other in others:
        assert not same(other, one) and digest_of([other]) != digest_of([one])
    assert not same(None, one) and not same(one, None)


def test_output_of_a_worker_is_one_line_of_a_summary():
    facts = {"who": "rank 1", "exit": "exit code 3", "killed_for": None}
    assert in_one_line(because(ReasonKind.ENDED, **facts)) == ""
    wrote = because(ReasonKind.ENDED, **facts, wrote="Traceback\n  KeyError: 'x'")
    recorded("messages", in_one_line(wrote))
    same = because(
        ReasonKind.SAME_EXCEPTION, first="a", worker="b", commit="2.7", trace="T\nKeyError: 'x'"
    )
    recorded("messages", in_one_line(same))


@pytest.mark.parametrize(
    "reason",
    [
        because(ReasonKind.BUSY, for_s=600.2, rates="CPU 98%, 0 KiB/s", where="in 'x'"),
        because(ReasonKind.GPU_FAILED, for_s=10.0, number=7, group="gradients"),
        because(ReasonKind.GPU_BEHIND, for_s=10.0, number=7, group="gradients"),
        because(ReasonKind.GPUS_HANG, for_s=10.0, number=7, group="gradients", before=2),
        because(ReasonKind.REJECTED),
        because(ReasonKind.STRANDED),
        because(ReasonKind.RETURNED_BEFORE),
        because(ReasonKind.JOB_OVER),
        because(ReasonKind.DRIVER_BUG, error="KeyError('x')"),
    ],
)
def test_sentences_that_occur_in_no_kept_journal(reason):
    recorded("reasons", str(reason))
