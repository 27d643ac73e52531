"""Exceptions of workers: the first of a kind is shown once, the others are counted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from elastic.driver.events import ExitCause
from elastic.driver.monitoring.stack_excerpts import STACK, header_of
from elastic.driver.processes.stderr_tail import DiagnosticLines, StderrTails, TracebackLedger
from elastic.protocol.messages import Worker
from elastic.protocol.uncaught.sending import LostDriver, StackOf, TrainingThread, Uncaught
from harness.golden import recorded

A, B = Worker("h", 0), Worker("h", 1)
BAD = Uncaught("d1", "ValueError: bad", "folded\n", "whole\n", "train.py:3")
OTHER = msgspec.structs.replace(BAD, digest="d2", summary="KeyError: 'x'")
LOST = Uncaught("d3", "PeerLost: h:0", "folded\n", "whole\n", "train.py:9", peer=True)


def add(ledger: TracebackLedger, name: str, uncaught: Uncaught) -> str:
    return ledger.add(Worker(f"host{name}", 0), name, uncaught)


def encoded(message: Uncaught | StackOf | TrainingThread) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def test_first_of_many_exceptions_is_shown_and_later_ones_share_a_line():
    ledger = TracebackLedger()
    assert add(ledger, "3", BAD) == "folded\n"
    assert [add(ledger, str(rank), BAD) for rank in (0, 1, 2, 5, 7, 8)] == [""] * 6
    [line] = ledger.rest()
    recorded("log", line, BAD.summary, "rank 3", "6 more", "0-2, 5, 7, 8")
    assert ledger.rest() == [], "said once"
    assert add(ledger, "9", OTHER) == "folded\n", "another exception"


def test_workers_that_lost_a_peer_share_a_line():
    ledger = TracebackLedger()
    assert [add(ledger, str(rank), LOST) for rank in (0, 2, 3)] == ["", "", ""]
    assert add(ledger, "1", BAD) == "folded\n"
    [line] = ledger.rest()
    assert "0, 2, 3" in line and LOST.line in line and LOST.summary not in line
    assert add(ledger, "0", LOST) == ""
    assert ledger.shown == 1


def test_stopped_job_does_not_report_lost_peers():
    ledger = TracebackLedger()
    ledger.stopped = True
    assert add(ledger, "0", LOST) == "" and ledger.rest() == []
    assert add(ledger, "1", BAD) == "folded\n"


def test_lost_peers_are_reported_without_another_exception():
    ledger = TracebackLedger()
    add(ledger, "0", LOST)
    assert LOST.summary in ledger.rest()[0]


def test_verbose_shows_whole_tracebacks_including_lost_peers():
    ledger = TracebackLedger(verbose=True)
    assert [add(ledger, "0", BAD), add(ledger, "1", LOST), add(ledger, "2", BAD)] == [
        "whole\n",
        "whole\n",
        "",
    ]


def test_workers_without_a_rank_are_named_by_their_slots():
    ledger = TracebackLedger()
    for name in ("0", "h:2", "h:1"):
        add(ledger, name, BAD)
    assert "h:1, h:2" in ledger.rest()[0]


def test_workers_with_one_rank_in_different_generations_are_named_by_slot():
    ledger = TracebackLedger()
    for worker, name in ((A, "0"), (B, "0"), (Worker("h", 2), "1")):
        ledger.add(worker, name, BAD)
    [line] = ledger.rest()
    recorded("log", line, A, B, "rank 1")
    for worker in (A, B):
        ledger.add(worker, "0", LOST)
    [line] = ledger.rest()
    recorded("log", line, A, B)


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_record_that_arrives_in_pieces_is_reassembled(cut):
    lines, data = DiagnosticLines(), b"a line of stacks\n" + encoded(BAD) + encoded(OTHER)
    found = [each for at in range(0, len(data), cut) for each in lines.add(A, data[at : at + cut])]
    assert found == [b"a line of stacks", BAD, OTHER]


STACK_LINES = [STACK.encode(), b'  File "train.py", line 3 in step']


def written(*lines: bytes) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def test_stack_when_the_agent_names_a_thread_then_its_header_has_this_name():
    lines = DiagnosticLines()
    threads = [StackOf(7, "python", True), StackOf(8, "loader", False)]
    for thread in threads:
        found: list[Any] = lines.add(A, encoded(thread) + written(*STACK_LINES))
        assert found == [header_of(thread).encode(), STACK_LINES[1]]
        recorded("messages", found[0].decode(), thread.thread, thread.name)
    assert lines.add(B, written(*STACK_LINES)) == STACK_LINES


def test_stack_when_a_thread_writes_no_frames_then_its_header_is_omitted():
    lines, native, python = DiagnosticLines(), StackOf(8, "native", False), StackOf(9, "py", False)
    found = lines.add(A, encoded(native) + encoded(python) + written(*STACK_LINES))
    assert found == [header_of(python).encode(), STACK_LINES[1]]
    assert lines.add(A, written(*STACK_LINES)) == STACK_LINES, "each header once"


def test_training_thread_when_reported_then_is_known_until_the_worker_is_dropped():
    tails = StderrTails()
    assert tails.training_thread(A) is None
    tails.add(A, "diagnostics", encoded(TrainingThread(7)))
    assert (tails.training_thread(A), tails.training_thread(B)) == (7, None)
    tails.drop(A)
    assert tails.training_thread(A) is None


def test_invalid_record_is_an_ordinary_line():
    assert DiagnosticLines().add(A, b'{"digest": 3}\n{\n') == [b'{"digest": 3}', b"{"]


def test_last_output_of_a_worker_contains_its_exception_in_order():
    tails = StderrTails()
    tails.add(A, "stderr", b"first\n")
    tails.add(A, "diagnostics", encoded(BAD))
    tails.add(A, "stdout", b"not this\n")
    tails.add(B, "stderr", b"other\n")
    recorded("messages", tails.of(A))
    tails.drop(A)
    assert tails.of(A) == ""


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        (BAD, ExitCause.EXCEPTION),
        (LOST, ExitCause.LOST_PEER),
        (msgspec.structs.replace(BAD, driver=True), ExitCause.LOST_DRIVER),
        (LostDriver(), ExitCause.LOST_DRIVER),
    ],
)
def test_reported_cause_of_an_exit_is_kept_until_the_worker_is_dropped(report, cause):
    tails = StderrTails()
    assert tails.cause(A) is ExitCause.UNKNOWN
    tails.add(A, "diagnostics", msgspec.json.encode(report) + b"\n")
    assert tails.cause(A) is cause
    tails.drop(A)
    assert tails.cause(A) is ExitCause.UNKNOWN
