"""Messages between ranks: sealed from the first frame. Control connections: tests/unit/driver/network."""

import msgspec
import pytest

from elastic.protocol.framing import NONCE_BYTES, AcceptedConnection, FramedConnection, derived
from elastic.protocol.messages import ProtocolError
from harness.golden import raises, recorded

SECRET = b"s" * 32
TEXTS = msgspec.msgpack.Decoder(str)


def caller(secret=SECRET, purpose="store", generation=7, theirs=b"", nonce=b"n" * NONCE_BYTES):
    wire = FramedConnection(TEXTS)
    wire.seal(derived(secret, purpose, generation), mine=nonce, theirs=theirs, caller=True)
    return wire, nonce


def called(purpose="store", generation=7, mine=b""):
    return AcceptedConnection(TEXTS, derived(SECRET, purpose, generation), mine=mine, limit=100)


def text(wire, value):
    return wire.frame_of(msgspec.msgpack.encode(value))


def heard(wire, data):
    return list(wire.receive(data))


def test_a_call_is_received_and_answered_for_any_division_of_its_bytes():
    mine, nonce = caller()
    server = called()
    call = nonce + text(mine, "where is rank 0?")
    recorded("messages", [each for byte in call for each in heard(server, bytes([byte]))])
    assert heard(mine, text(server, "here")) == ["here"]


@pytest.mark.parametrize(
    "stranger",
    [
        {"secret": b"another"},
        {"purpose": "negotiation"},
        {"generation": 8},
        {"theirs": b"a nonce that it was not told"},
    ],
)
def test_messages_with_another_secret_use_generation_or_nonce_are_refused(stranger):
    wire, nonce = caller(**stranger)
    with pytest.raises(ProtocolError, match="authentication"):
        heard(called(), nonce + text(wire, "let me in"))


def test_modified_repeated_omitted_or_reflected_frame_ends_the_connection():
    def talk():
        mine, nonce = caller()
        server = called()
        first, second = text(mine, "first"), text(mine, "second")
        assert heard(server, nonce + first) == ["first"]
        return mine, server, first, second

    _, server, _, second = talk()
    changed = bytearray(second)
    changed[5] ^= 1
    for data in (
        lambda first, second: bytes(changed),
        lambda first, second: first,
        lambda first, second: second[:4] + second[4:-16] + first[-16:],
    ):
        _, server, first, second = talk()
        with pytest.raises(ProtocolError, match="authentication"):
            heard(server, data(first, second))
    mine, _, _, _ = talk()
    other, _ = caller()
    with pytest.raises(ProtocolError, match="authentication"):
        heard(mine, text(other, "sent back"))


def test_reply_to_another_call_is_refused():
    one, nonce = caller(nonce=b"1" * NONCE_BYTES)
    other, _ = caller(nonce=b"2" * NONCE_BYTES)
    server = called()
    heard(server, nonce + text(one, "?"))
    with pytest.raises(ProtocolError, match="authentication"):
        heard(other, text(server, "!"))


def test_heartbeat_is_no_message_and_cannot_be_forged():
    mine, nonce = caller()
    server = called()
    assert heard(server, nonce + mine.frame_of(b"") + text(mine, "a") + mine.frame_of(b"")) == ["a"]
    with pytest.raises(ProtocolError, match="authentication"):
        heard(server, bytes(4 + 16))


def test_an_unauthenticated_peer_may_send_little():
    server = called()
    with raises(ProtocolError):
        heard(server, bytes(NONCE_BYTES) + (101).to_bytes(4, "big"))
