"""A timeline from a worker's records to the text in the file; no clock, no socket, no thread."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.driver.events import BreakWorld, KillWorker, ReportRecovery, TimePassed
from elastic.driver.monitoring.timeline import Timeline
from elastic.driver.reasons import as_sentence
from elastic.errors import Invalid
from elastic.monitoring import timeline, trace_flow_control
from elastic.monitoring.clock_offset import ClockOffset
from elastic.monitoring.trace_buffer import LASTS_NS, TraceBuffer
from elastic.monitoring.trace_flow_control import BATCH, ROUND, WINDOW, TraceSending
from elastic.protocol import messages as protocol
from elastic.protocol import trace_format
from elastic.protocol.messages import Worker
from elastic.protocol.trace_file import TraceFile
from elastic.protocol.trace_format import TraceFormat
from harness.golden import raises, recorded
from harness.published import published

A, B, C = (Worker("h", n) for n in range(3))
S = 1_000_000_000


def parsed(lines):
    return json.loads(f"[{','.join(lines)}]")


# ---- the buffer ------------------------------------------------------------------------------------------------------


def test_span_is_one_record_once_complete():
    buffer = TraceBuffer()
    buffer.begin("w", "ALLREDUCE", 10)
    buffer.begin("w", "QUEUE", 20)
    buffer.end("w", 25)
    buffer.end("w", 40)
    assert buffer.take(9) == [("X", "w", "QUEUE", 20, 5), ("X", "w", "ALLREDUCE", 10, 30)]
    assert len(buffer) == 0


def test_end_without_a_beginning_makes_no_record():
    buffer = TraceBuffer()
    buffer.end("w", 5)
    buffer.begin("w", "QUEUE", 6)
    buffer.end("w", 7)
    buffer.end("w", 8)
    assert len(buffer) == 1


def test_long_activity_is_recorded_while_in_progress():
    buffer = TraceBuffer()
    buffer.begin("w", "NEGOTIATE_ALLREDUCE", 0)
    buffer.begin("w", "inner", LASTS_NS - 1)
    buffer.report_open_spans(LASTS_NS)
    buffer.report_open_spans(LASTS_NS + 1)  # once is enough
    assert buffer.take(9) == [("B", "w", "NEGOTIATE_ALLREDUCE", 0, 0)]
    buffer.end("w", 2 * LASTS_NS)
    buffer.end("w", 3 * LASTS_NS)
    inner = ("X", "w", "inner", LASTS_NS - 1, LASTS_NS + 1)
    assert buffer.take(9) == [inner, ("E", "w", "NEGOTIATE_ALLREDUCE", 3 * LASTS_NS, 0)]


def test_full_buffer_drops_and_counts_records_but_ends_open_spans():
    buffer = TraceBuffer(limit=2)
    buffer.begin("w", "slow", 0)
    buffer.report_open_spans(LASTS_NS)
    for at in range(5):
        buffer.add(("i", "w", "tick", at, 0))
    buffer.end("w", 9)
    assert [kind for kind, *_ in buffer.take(9)] == ["B", "i", "E"]
    assert buffer.take_dropped() == 4 and buffer.take_dropped() == 0


def test_end_all_ends_every_open_span():
    buffer = TraceBuffer()
    buffer.begin("v", "outer", 1)
    buffer.begin("v", "inner", 2)
    buffer.begin("w", "outer", 3)
    buffer.end_all(10)
    assert [(row, name, ns) for _, row, name, _, ns in buffer.take(9)] == [
        ("v", "inner", 8),
        ("v", "outer", 9),
        ("w", "outer", 7),
    ]


# ---- call sites ------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows_of():
    """The buffer of an active timeline, and the number of wake-ups."""
    buffer, pokes = TraceBuffer(), []
    timeline.record(buffer, lambda: pokes.append(len(buffer)), cycles=False)
    yield buffer, pokes
    timeline.stop()


def test_call_sites_write_into_the_active_buffer(rows_of):
    buffer, _ = rows_of
    assert timeline.on
    timeline.begin("w", "ALLREDUCE")
    timeline.tick("w", 2)
    with timeline.during("state", "commit"):
        timeline.tick("state", 3)
    timeline.cycle()  # cycles are not marked
    timeline.end("w")
    timeline.spans(["v", "w"], "GLOO_ALLREDUCE", 5, 7)
    records = buffer.take(99)
    assert [(kind, row, name) for kind, row, name, _, _ in records] == [
        ("i", "w", "2"),
        ("i", "state", "3"),
        ("X", "state", "commit"),
        ("X", "w", "ALLREDUCE"),
        ("X", "v", "GLOO_ALLREDUCE"),
        ("X", "w", "GLOO_ALLREDUCE"),
    ]
    timeline.record(buffer, lambda: None, cycles=True)
    timeline.cycle()
    assert buffer.take(9)[0][:3] == ("i", "cycles", "CYCLE_START")


def test_many_waiting_records_wake_the_sender(rows_of):
    buffer, pokes = rows_of
    for _ in range(timeline.POKE_AT + 10):
        timeline.span("w", "QUEUE", 1, 2)
    assert pokes == [timeline.POKE_AT]
    buffer.clear()
    rows = [str(number) for number in range(timeline.POKE_AT + 10)]
    timeline.spans(rows, "QUEUE", 1, 2)  # jumps over the mark
    assert len(pokes) == 2


def test_activities_are_not_recorded_without_a_timeline():
    assert not timeline.on
    with timeline.during("state", "commit"):
        pass
    assert timeline.during("a", "b") is timeline.during("c", "d")


# ---- the clock -------------------------------------------------------------------------------------------------------


def test_fastest_round_trip_determines_the_clock_offset():
    clock, ahead = ClockOffset(), 5 * S
    clock.add(0, 900 + ahead, 910 + ahead, 1000)  # slow on the way there
    clock.add(2000, 2010 + ahead, 2020 + ahead, 2030)
    clock.add(3000, 3010 + ahead, 3020 + ahead, 9000)  # slow on the way back
    assert (clock.offset_ns, clock.error_ns) == (ahead, 10)


def test_clock_offset_is_zero_on_one_host():
    clock = ClockOffset()
    clock.add(1000, 1900, 1950, 2000)
    assert clock.offset_ns == 0 and clock.known


def test_impossible_clock_answer_is_ignored():
    clock = ClockOffset()
    clock.add(1000, 500, 5000, 1100)
    assert clock.samples == 1 and not clock.known and clock.offset_ns == 0


@given(
    st.integers(-(10**15), 10**15),
    st.lists(st.tuples(*[st.integers(0, 10**7)] * 3), min_size=1, max_size=8),
)
def test_the_error_of_the_offset_is_within_its_bound(true_ns, questions):
    clock = ClockOffset()
    for number, (there_ns, busy_ns, back_ns) in enumerate(questions):
        asked = number * 10**9
        heard = asked + there_ns + true_ns
        told = heard + busy_ns
        clock.add(asked, heard, told, told - true_ns + back_ns)
    # One more than the error, as halves are rounded; twice it where zero is taken for the truth.
    assert abs(clock.offset_ns - true_ns) <= 2 * clock.error_ns + 1


# ---- sending ---------------------------------------------------------------------------------------------------------


class Talk:
    """A worker and its driver, whose clock is ``ahead`` of the worker's."""

    def __init__(self, ahead=0, limit=10**6) -> None:
        self.buffer = TraceBuffer(limit)
        self.sending = TraceSending(self.buffer)
        self.ahead = ahead
        self.now = 0
        self.sent: list = []

    def say(self, message) -> None:
        self.note(self.sending.receive(message, self.now))

    def note(self, messages) -> None:
        for message in messages:
            if isinstance(message, protocol.ClockAsked):
                there = self.now + 1000 + self.ahead
                self.now += 2000
                self.say(protocol.ClockTold(message.asked_ns, there, there))
            self.sent.append(message)

    def due(self) -> None:
        self.note(self.sending.due(self.now))

    def fill(self, count) -> None:
        self.buffer.extend(("i", "w", "tick", at, 0) for at in range(count))

    def of(self, kind) -> list:
        found = [message for message in self.sent if isinstance(message, kind)]
        self.sent = [message for message in self.sent if not isinstance(message, kind)]
        return found


def test_records_are_sent_after_the_clocks_are_compared():
    talk = Talk(ahead=7 * S)
    talk.fill(3)
    assert talk.sending.due(0) == []  # none was requested
    talk.say(protocol.Tracing(1, True))
    assert len(talk.of(protocol.ClockAsked)) == ROUND
    talk.fill(3)
    talk.due()
    [traced] = talk.of(protocol.Traced)
    assert (traced.timeline, traced.offset_ns, len(traced.records)) == (1, 7 * S, 3)
    talk.due()
    assert not talk.sent


def test_driver_that_acknowledges_no_records_gets_at_most_a_window():
    talk = Talk(limit=WINDOW * BATCH)
    talk.say(protocol.Tracing(1, True))
    talk.fill(WINDOW * BATCH)
    talk.due()
    assert [len(t.records) for t in talk.of(protocol.Traced)] == [BATCH] * WINDOW
    talk.fill(WINDOW * BATCH + 5)  # the last ones find no room
    talk.due()
    assert not talk.of(protocol.Traced)
    talk.say(protocol.TracesTaken(1))
    [traced] = talk.of(protocol.Traced)
    assert len(traced.records) == BATCH and traced.dropped == 5


def test_remaining_records_are_sent_in_portions_when_the_timeline_ends():
    talk = Talk()
    talk.say(protocol.Tracing(1, True))
    talk.fill(BATCH * (WINDOW + 1) + 1)
    talk.say(protocol.Tracing(1, False))
    assert len(talk.of(protocol.Traced)) == WINDOW and not talk.of(protocol.TracedAll)
    talk.say(protocol.TracesTaken(1))
    talk.say(protocol.TracesTaken(1))
    assert [len(t.records) for t in talk.of(protocol.Traced)] == [BATCH, 1]
    assert talk.of(protocol.TracedAll) == [protocol.TracedAll(1)]
    talk.fill(1)
    talk.due()
    assert not talk.of(protocol.Traced)  # it is over


def test_end_of_an_earlier_timeline_does_not_end_the_current_one():
    talk = Talk()
    talk.say(protocol.Tracing(2, True))
    talk.say(protocol.Tracing(1, False))
    assert talk.of(protocol.TracedAll) == [protocol.TracedAll(1)]
    talk.fill(1)
    talk.due()
    assert len(talk.of(protocol.Traced)) == 1


def test_a_process_that_ends_sends_the_rest_without_waiting():
    talk = Talk()
    talk.say(protocol.Tracing(1, True))
    talk.fill(BATCH * (WINDOW + 3))
    talk.buffer.begin("w", "unfinished", 0)
    talk.note(talk.sending.rest(talk.now))
    rest = talk.of(protocol.Traced)
    assert sum(len(message.records) for message in rest) == BATCH * (WINDOW + 3) + 1


def test_clocks_are_compared_again_periodically():
    talk = Talk(ahead=0)
    talk.say(protocol.Tracing(1, True))
    talk.ahead = 3 * S
    talk.now += trace_flow_control.AGAIN_NS + 1
    talk.due()
    talk.fill(1)
    talk.due()
    assert talk.of(protocol.Traced)[-1].offset_ns == 3 * S


@pytest.mark.parametrize("name", ["x" * (2 << 20), "\udc80"])
def test_names_that_cannot_be_sent_are_dropped_and_counted(name):
    talk = Talk()
    talk.say(protocol.Tracing(1, True))
    talk.buffer.add(("i", "w", name, 0, 0))
    talk.due()
    [traced] = talk.of(protocol.Traced)
    assert (traced.records, traced.dropped) == ([], 1)
    protocol.encoded(traced)


# ---- text ------------------------------------------------------------------------------------------------------------


def test_worker_is_shown_as_a_process_and_tensor_as_a_thread():
    form = TraceFormat(start_ns=1000, epoch_us=1_700_000_000_000_000)
    lines = [*form.opening(), *form.process("h:0#1", "rank 0 (h:0#1)", 1)]
    lines += form.records(
        "h:0#1", [("X", 'a "b"\n', "ALLREDUCE", 3500, 1500), ("i", "w", "1", 0, 0)]
    )
    lines += form.records("h:1#1", [("B", "w", "QUEUE", 500, 0), ("?", "w", "", 0, 0)], 2000)
    began, name, _, row, _, span, _, _, instant, other, _, open_ = parsed(lines)
    assert began["args"] == {"start_time_since_epoch_in_micros": 1_700_000_000_000_000}
    assert (name["pid"], name["args"]) == (1, {"name": "rank 0 (h:0#1)"})
    assert row["name"] == "thread_name" and row["args"] == {"name": 'a "b"\n'}
    assert (span["ts"], span["dur"], span["tid"]) == (2.5, 1.5, row["tid"])
    assert instant["ts"] == 0 and instant["s"] == "t"  # never before the beginning
    assert (open_["ph"], open_["pid"], open_["ts"]) == ("B", 2, 1.5)
    # A viewer treats equal thread numbers as one thread, in all processes.
    assert other["tid"] not in (row["tid"], instant["tid"])


@given(st.text(), st.text(), st.sampled_from("XBEi"), st.integers(0, 2**63), st.integers(0, 2**63))
def test_records_are_written_as_valid_json(row, name, kind, at_ns, ns):
    form = TraceFormat(0, 0)
    events = parsed(form.records("k", [(kind, row, name, at_ns, ns)]))
    assert events[-1]["name"] == name[: trace_format.NAME_LIMIT]


def test_rows_beyond_the_limit_share_one_row():
    form = TraceFormat(0, 0)
    many = [("i", f"noname.{n}", "x", 0, 0) for n in range(trace_format.ROWS_LIMIT + 50)]
    rows = [
        e["args"]["name"] for e in parsed(form.records("k", many)) if e["name"] == "thread_name"
    ]
    assert len(rows) == trace_format.ROWS_LIMIT + 1 and rows[-1] == trace_format.OTHERS


# ---- the file --------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.text(max_size=20), max_size=4), max_size=8))
def test_timeline_file_is_valid_after_each_write(tmp_path_factory, writes):
    path = tmp_path_factory.mktemp("timeline") / "t.json"
    file, expected = TraceFile(str(path)), []
    assert json.loads(path.read_text()) == []
    for names in writes:
        file.append([json.dumps({"name": name}) for name in names])
        expected += [{"name": name} for name in names]
        assert json.loads(path.read_text()) == expected
        assert path.stat().st_size == file.size
    file.close()
    assert [each.name for each in path.parent.iterdir()] == ["t.json"]


def test_old_timeline_file_is_replaced_completely_through_a_link(tmp_path):
    target, link = tmp_path / "old.json", tmp_path / "link.json"
    target.write_text("something that is longer than an empty timeline, and no JSON")
    link.symlink_to(target)
    TraceFile(str(link)).close()
    assert link.is_symlink() and json.loads(target.read_text()) == []


def test_full_disk_keeps_the_previous_content_of_the_file(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    file = TraceFile(str(path))
    file.append(['{"name":"first"}'])
    room, pwrite = path.stat().st_size + 10, os.pwrite

    def full(fd, text, at):
        return pwrite(fd, text[: max(0, room - at)], at)

    monkeypatch.setattr(os, "pwrite", full)
    with raises(OSError):
        file.append(['{"name":"second, which is too long"}'])
    assert json.loads(path.read_text()) == [{"name": "first"}]


@pytest.mark.parametrize("path", ["no/such/folder/t.json", ".", "null\0character"])
def test_a_file_that_cannot_be_written_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with raises(Invalid):
        TraceFile(path)
    assert list(tmp_path.iterdir()) == []


# ---- the timeline of a job -------------------------------------------------------------------------------------------


def told(lines):
    """(process, kind, row, name) of each event, with names in the place of numbers."""
    events = parsed(lines)
    processes, rows, found = {}, {}, []
    for event in events:
        if event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            rows[event["tid"]] = event["args"]["name"]
        elif event["ph"] != "M":
            row = rows[event["tid"]]
            found.append((processes.get(event["pid"]), event["ph"], row, event["name"]))
    return found


def test_driver_events_include_generations_joins_fences_and_recoveries():
    job = Timeline()
    lines = job.begin(0, 0, None)
    lines += job.noted(TimePassed(), [published(1, A, B)], 1 * S, {})
    lines += job.noted(
        TimePassed(),
        [BreakWorld(1, [A], as_sentence("lost h:1#1")), KillWorker(B, as_sentence("stuck"))],
        2 * S,
        {A: 0, B: 1},
    )
    lines += job.noted(TimePassed(), [published(2, A, C)], 3 * S, {A: 0, B: 1})
    report = ReportRecovery(
        2, "recovery", as_sentence("lost h:1#1"), 2, 1500.0, {"gathered": 3.0}, 0
    )
    lines += job.noted(TimePassed(), [report], 4 * S, {A: 0, C: 1})
    lines += job.end(5 * S)
    found = told(lines)
    assert [event[1:] for event in found if event[2] == "generations"] == [
        ("B", "generations", "generation 1: 2 workers"),
        ("i", "generations", "lost h:1#1"),
        ("E", "generations", "generation 1: 2 workers"),
        ("B", "generations", "generation 2: 2 workers"),
        ("E", "generations", "generation 2: 2 workers"),
    ]
    recorded("messages", [name for _, _, row, name in found if row == "workers"])
    [recovery] = [e for e in parsed(lines) if e["ph"] == "X"]
    assert (recovery["ts"], recovery["dur"]) == (2.5e6, 1.5e6)
    assert recovery["args"]["gathered_ms"] == 3.0
    places = [
        (process, name) for process, kind, row, name in found if (kind, row) == ("B", "world")
    ]
    assert places == [
        ("rank 0 (h:0#1)", "generation 1: rank 0 of 2"),
        ("rank 1 (h:1#1)", "generation 1: rank 1 of 2"),
        ("rank 0 (h:0#1)", "generation 2: rank 0 of 2"),
        ("rank 1 (h:2#1)", "generation 2: rank 1 of 2"),
    ]


def test_timeline_that_begins_later_shows_the_present_world():
    job = Timeline()
    found = told(job.begin(5 * S, 0, published(3, A, B)))
    assert ("driver", "B", "generations", "generation 3: 2 workers") in found
    job.end(6 * S)
    assert told(job.begin(8 * S, 0, None)) == []


def test_records_of_each_worker_have_its_name_and_the_clock_of_the_driver():
    job = Timeline()
    lines = job.begin(10 * S, 0, None) + job.noted(TimePassed(), [published(1, A, B)], 10 * S, {})
    record = ("X", "allreduce.w", "ALLREDUCE", 1 * S, S)
    lines += job.traced(B, protocol.Traced(1, 10 * S, [record], dropped=4), {A: 0, B: 1})
    lines += job.traced(C, protocol.Traced(1, 0, [record]), {A: 0, B: 1})  # in no world
    assert told(lines)[-3:] == [
        ("rank 1 (h:1#1)", "X", "allreduce.w", "ALLREDUCE"),
        ("rank 1 (h:1#1)", "i", "dropped records", "4 records dropped"),
        ("(h:2#1)", "X", "allreduce.w", "ALLREDUCE"),
    ]
    [first, _] = [event for event in parsed(lines) if event["name"] == "ALLREDUCE"]
    assert first["ts"] == 1e6
