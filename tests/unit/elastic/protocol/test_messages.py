"""Messages are unchanged by the wire; anything else is refused in one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol import messages as protocol
from elastic.protocol.calls import Called
from elastic.protocol.framing import TAG_BYTES, FramedConnection, proof
from elastic.protocol.messages import Address, Commit, Place, ProtocolError, Worker, encoded
from harness.golden import raises

PLACE = Place(1, 4, 1, 2, 0, 2)
STORE = Address("10.0.0.7", 7000)
FROM_WORKER = [
    protocol.Answer(Worker("h", 0), b"n" * 32, b"p" * 32),
    protocol.Hello(Worker("h", 0, 3), 4711),
    protocol.Reconnected(3, True),
    protocol.Layout("abc", "w float32 [2]"),
    protocol.StepInput(b"\x00kind"),
    protocol.Ready(3, Commit(3, 7), STORE, "abc"),
    protocol.Ready(0, None, STORE, running=False, number=2),
    protocol.Failed(3, "closed"),
    protocol.Stranded(1, "closed"),
    protocol.Failed(3, "calls", True, (Called(0, "allreduce.x", "a.py:3"), Called(1, "join"))),
    protocol.Checked(3, 1, 9),
    protocol.Leaving("SIGTERM"),
    protocol.Resumed(3, {"formed": 2.5}, 10**9),
    protocol.Progress(3, 17, "gradients", 1.5, ""),
    protocol.Progress(3, 17, "gradients", 1.5, "", [protocol.Launches("g", 4, 7, 6, 6, 1.0, True)]),
    protocol.Progress(3, 17, "gradients", 1.5, line="train.py:12"),
    protocol.Located(3, "train.py:12"),
    protocol.Pace(3, 100, 12.5, 30.0),
    protocol.TimeSpent(3, protocol.Times(1.5, 0.5, 0.0, 0.0, 2.0), "data"),
    protocol.Digested(3, Commit(3, 7), 2**63 - 1, 5, [1, 2], 1),
    protocol.Miscomputed(3, 17, 5, 2, "00ff", "00fe", [0, 1], 16),
    protocol.MistakeFound("no-commit", "no state.commit() in 20 steps"),
    protocol.Merged(3, 12, 600, 3, ["us"], 1.5, ["eu", "us"]),
    protocol.Raised(3, None, "ValueError: x", "Traceback"),
    protocol.Quit(3, 255),
    protocol.Returned(3),
    protocol.SendResult(b"\x00blob"),
    protocol.Reported(7, 5, 3, 1, 4, 1.8e9, b"\x80", 2),
    protocol.ClockAsked(2**62),
    protocol.Traced(1, -5, [("X", "grads", "ALLREDUCE", 2**62, 7), ("i", "", "2", 1, 0)], 3),
    protocol.TracedAll(1),
    protocol.TimelineWanted(1, "/t.json", True),
    protocol.TimelineUnwanted(2, 1),
    protocol.CheckpointDue(3, 40),
    protocol.NotFinite(3, Commit(3, 41), 2**63),
    protocol.NotFinite(3, Commit(3, 41), None),
    protocol.ShareWritten(3, 40, Commit(3, 41), {"model": 7}),
    protocol.ShareDropped(3, 40, "no room", True),
    protocol.CheckpointWritten(3, 40, Commit(3, 41), "/c/r0001-g0003-c00000041", 2**40, 0.5),
]
FROM_DRIVER = [
    protocol.Challenge(b"n" * 32),
    protocol.Accepted(b"p" * 32),
    protocol.TurnedAway("no worker", b"p" * 32),
    protocol.Welcome(PLACE, True, True, b"\x00kind"),
    protocol.World(4, PLACE, STORE, 3, Commit(3, 7), "lost h:1"),
    protocol.World(1, PLACE, STORE, 0, None, "first"),
    protocol.Broken(3, "lost h:1"),
    protocol.Prepare(3, 1),
    protocol.StopAt(3, 1, 10),
    protocol.Proceed(3, 1),
    protocol.Restate(),
    protocol.Locate(),
    protocol.Awaited(3, 2, "train.py:12"),
    protocol.Leave("SIGTERM"),
    protocol.Rejected("w differs"),
    protocol.Finish(3),
    protocol.End("failed"),
    protocol.ClockTold(2**62, 1, 2),
    protocol.ReportsTaken(7),
    protocol.HostsListed(),
    protocol.Tracing(1, True, True),
    protocol.TracesTaken(1),
    protocol.TimelineAnswer(1, 1, "/t.json", "no room"),
    protocol.MakeDurable(3, 40),
    protocol.CheckpointSoon(3),
    protocol.StandBy(),
    protocol.SealCheckpoint(3, 40),
    protocol.DropCheckpoint(3, 40, True),
    protocol.CheckpointDone(3, 40, Commit(3, 40)),
]


def test_every_message_survives_the_wire():
    for says, messages in (
        (protocol.from_driver, FROM_DRIVER),
        (protocol.from_worker, FROM_WORKER),
    ):
        for message in messages:
            there, here = FramedConnection(says), FramedConnection(says)
            assert list(here.receive(there.frame(message))) == [message]


def test_every_message_has_a_side_and_is_in_this_test():
    tested = {type(message) for message in FROM_WORKER + FROM_DRIVER}
    assert tested == set(protocol.Message.__subclasses__())


def sealed(*, secret=b"s", nonces=(b"d" * 32, b"w" * 32)):
    """A driver's and a worker's end of one connection, after the handshake."""
    driver, worker = FramedConnection(protocol.from_worker), FramedConnection(protocol.from_driver)
    driver.seal(b"s", mine=nonces[0], theirs=b"w" * 32, caller=False)
    worker.seal(secret, mine=nonces[1], theirs=b"d" * 32, caller=True)
    return driver, worker


@given(st.booleans(), st.lists(st.sampled_from(FROM_DRIVER), max_size=8), st.data())
def test_stream_may_be_divided_anywhere(seal, messages, data):
    driver, worker = (
        sealed()
        if seal
        else (FramedConnection(protocol.from_worker), FramedConnection(protocol.from_driver))
    )
    stream = b"".join(map(driver.frame, messages))
    received: list = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        received += worker.receive(stream[:cut])
        stream = stream[cut:]
    assert received == messages


@given(st.binary(max_size=64))
def test_any_other_bytes_are_refused_or_incomplete(data):
    wire = FramedConnection(protocol.from_worker)
    try:
        received = list(wire.receive(len(data).to_bytes(4, "big") + data))
    except ProtocolError:
        return
    assert all(isinstance(message, protocol.Message) for message in received)


def test_message_of_the_other_side_is_refused():
    with raises(ProtocolError):
        list(
            FramedConnection(protocol.from_worker).receive(
                FramedConnection(protocol.from_driver).frame(protocol.End("x"))
            )
        )


def test_frame_that_is_too_long_is_refused_by_its_header():
    with raises(ProtocolError):
        list(FramedConnection(protocol.from_worker).receive(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e300])
def test_number_outside_of_the_journal_range_is_refused(number):
    there, here = FramedConnection(protocol.from_worker), FramedConnection(protocol.from_worker)
    with raises(ProtocolError):
        list(here.receive(there.frame(protocol.Pace(1, 1, number, 1.0))))


def test_message_beyond_the_frame_limit_is_not_sent():
    with raises(ProtocolError):
        encoded(protocol.SendResult(bytes(protocol.FRAME_LIMIT)))


def test_fields_of_a_later_version_are_skipped():
    import msgspec

    body = msgspec.msgpack.encode({"type": "Broken", "generation": 3, "reason": "x", "new": 1})
    there = FramedConnection(protocol.from_driver)
    assert list(FramedConnection(protocol.from_driver).receive(there.frame_of(body))) == [
        protocol.Broken(3, "x")
    ]


# ---- the seal ----------------------------------------------------------------------------------------------------


@given(st.sampled_from(FROM_DRIVER), st.data())
def test_sealed_frame_with_one_modified_bit_is_not_accepted(message, data):
    driver, worker = sealed()
    frame = bytearray(driver.frame(message))
    at = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[at // 8] ^= 1 << at % 8
    try:
        received = list(worker.receive(bytes(frame)))
    except ProtocolError:
        return
    assert not received  # its length was increased: nothing is read before all of that has arrived


def refused(wire, data):
    with raises(ProtocolError):
        list(wire.receive(data))


def test_sealed_frame_is_accepted_once_in_order_and_only_by_the_peer():
    driver, worker = sealed()
    first, second = driver.frame(protocol.Finish(1)), driver.frame(protocol.Finish(2))
    refused(sealed()[1], second)  # the first was delayed
    assert list(worker.receive(first)) == [protocol.Finish(1)]
    refused(worker, first)  # it was replayed
    echoing, _ = sealed()
    refused(echoing, first)  # it was sent back


def test_seal_is_valid_for_one_connection_and_one_secret_only():
    frame = sealed()[0].frame(protocol.Finish(1))
    refused(sealed(secret=b"other")[1], frame)
    refused(sealed(nonces=(b"d" * 32, b"x" * 32))[1], frame)
    other = sealed(nonces=(b"e" * 32, b"w" * 32))[0]
    refused(sealed()[1], other.frame(protocol.Finish(1)))


def test_frame_without_a_seal_is_refused_on_a_sealed_connection():
    _, worker = sealed()
    refused(
        worker, FramedConnection(protocol.from_worker).frame(protocol.Finish(1)) + bytes(TAG_BYTES)
    )


def test_message_of_a_new_world_does_not_grow_with_the_world():
    small = protocol.World(3, Place(1, 2, 1, 2, 0, 1), STORE, 1, Commit(2, 5), "lost h:1")
    large = protocol.World(3, Place(9999, 10_000, 7, 8, 1249, 1250), STORE, 1, Commit(2, 5), "x")
    assert len(encoded(large)) < len(encoded(small)) + 16


@given(st.from_regex(r"[a-z0-9.:-]+", fullmatch=True), st.integers(0, 999), st.integers(1, 999))
def test_worker_name_is_parsed_unchanged(host, slot, incarnation):
    worker = Worker(host, slot, incarnation)
    assert Worker.parse(str(worker)) == worker


@pytest.mark.parametrize("text", ["", "h", "h:0", "h#1", ":0#1", "h:x#1", "h:0#"])
def test_invalid_worker_names_are_refused(text):
    with pytest.raises(ValueError):
        Worker.parse(text)


def test_later_commits_compare_greater():
    assert Commit(2, 99) < Commit(3, 0) < Commit(3, 1)


def test_proof_is_bound_to_role_worker_secret_and_nonces():
    worker = Worker("h", 0)
    true = proof(b"secret", "worker", b"a" * 32, b"b" * 32, str(worker))
    others = [
        proof(b"other", "worker", b"a" * 32, b"b" * 32, str(worker)),
        proof(b"secret", "driver", b"a" * 32, b"b" * 32, str(worker)),
        proof(b"secret", "worker", b"b" * 32, b"a" * 32, str(worker)),
        proof(b"secret", "worker", b"a" * 32, b"b" * 32, str(worker.next())),
    ]
    assert len({true, *others}) == 5 and len(true) == 32


def copying(rank: int, holders: int, copies: list[list[int]]) -> tuple[int, ...]:
    place = Place(rank, 5, 0, 1, 0, 2)
    return protocol.World(2, place, STORE, holders, Commit(1, 1), "a test", copies=copies).copying


def test_rank_0_sends_the_state_to_all_receivers_unless_groups_are_listed():
    assert [copying(rank, 3, []) for rank in range(5)] == [(0, 3, 4), (), (), (0, 3, 4), (0, 3, 4)]
    assert [copying(rank, 3, [[0, 3], [2, 4]]) for rank in range(5)] == [
        (0, 3),
        (),
        (2, 4),
        (0, 3),
        (2, 4),
    ]
    assert [copying(rank, 3, [[2, 3, 4]]) for rank in range(5)] == [(), (), *[(2, 3, 4)] * 3]
    assert [copying(rank, 5, []) for rank in range(5)] == [()] * 5
    assert copying(4, 0, []) == (0, 1, 2, 3, 4)
    # Without holders, the state of rank 0 replaces all others.
    assert copying(1, 0, [[0, 3], [2, 4]]) == (0, 1, 2, 3, 4)
