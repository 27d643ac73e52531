"""Malicious peers: their messages are rejected, their cost is bounded, and other peers are unaffected."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import socket
import threading
import time
import urllib.request
from types import SimpleNamespace
from unittest.mock import create_autospec

import msgspec
import pytest

from certificates import OPENSSL, new_authority
from elastic.driver.agents import messages as agent_protocol
from elastic.driver.membership.worker_messages import event_of
from elastic.driver.monitoring import prometheus_metrics
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.prometheus_metrics import JobMetrics, MetricsServer
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.monitoring.timeline_collection import Tracing
from elastic.driver.network import control_connection
from elastic.driver.network import control_server as server_module
from elastic.driver.network.control_server import ControlServer
from elastic.driver.processes.console import Console
from elastic.errors import Invalid
from elastic.protocol import framing, messages
from elastic.protocol.framing import FramedConnection
from elastic.protocol.messages import ProtocolError, Worker
from elastic.protocol.tls import TlsEndpoint, TlsFailed, context
from harness.conversation import failed, running, worker
from harness.golden import recorded
from stress.fuzz import command
from stress.fuzz.decoders import Decoders, Streams
from stress.fuzz.inputs import Inputs
from stress.fuzz.server import LoopbackServer
from stress.fuzz.tally import Tally
from unit.driver.network.test_control_server import SECRET, A, B, Peer, conversation, driving

needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="needs openssl")


# ---- the fuzzer, and proof that it finds defects ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.5, pytest.param(10.0, marks=pytest.mark.nightly)])
def test_short_run_of_the_fuzzer_has_no_findings(seconds):
    tallies, _ = command.fuzz(seconds, seed=11)
    assert [finding for tally in tallies for finding in tally.findings] == []
    assert all(tally.total > 5 for tally in tallies)


@pytest.mark.slow
def test_frame_truncated_to_zero_bytes_is_a_heartbeat(monkeypatch):
    nothing = create_autospec(Inputs.spoilt, return_value=("cut off", b""))
    monkeypatch.setattr(Inputs, "spoilt", nothing)
    tallies, _ = command.fuzz(0.5, seed=11)
    assert [finding for tally in tallies for finding in tally.findings] == []


def test_same_seed_generates_the_same_input():
    once, again = Inputs(messages.FromWorker, 5), Inputs(messages.FromWorker, 5)
    for _ in range(200):
        assert once.spoilt(once.body()) == again.spoilt(again.body())


def test_every_kind_of_message_is_generated_and_valid():
    inputs = Inputs(agent_protocol.FromAgent, 3)
    drawn = set()
    for _ in range(500):
        drawn.add(type(agent_protocol.from_agent.decode(inputs.body())).__name__)
    assert drawn == {struct.__name__ for struct in agent_protocol.FromAgent.__args__}


@pytest.mark.slow
def test_fuzzer_finds_a_seal_without_a_sequence_number(monkeypatch):
    sealed = framing._tag
    monkeypatch.setattr(framing, "_tag", lambda key, number, body: sealed(key, 0, body))
    _found(Streams, lambda streams: streams.tally, "a frame repeated")


@pytest.mark.slow
def test_fuzzer_finds_a_key_shared_by_all_connections(monkeypatch):
    sealed = framing._tag
    monkeypatch.setattr(framing, "_tag", lambda key, number, body: sealed(b"k", number, body))
    _found(Streams, lambda streams: streams.tally, "a frame of another connection")


@pytest.mark.slow
def test_fuzzer_finds_an_unexpected_exception(monkeypatch):
    def bare(self, data):
        self.feed(data)
        try:
            yield self._decoder.decode(bytes(self._buffer[4:]))
        except (msgspec.MsgspecError, RecursionError):  # the only errors in msgspec's documentation
            raise ProtocolError("no message") from None

    monkeypatch.setattr(FramedConnection, "receive", bare)
    _found(Decoders, lambda decoders: decoders.tally, "UnicodeDecodeError")


@pytest.mark.slow
def test_fuzzer_finds_a_server_without_authentication(monkeypatch):
    anybody = SimpleNamespace(compare_digest=lambda a, b: True)
    monkeypatch.setattr(server_module, "hmac", anybody)
    _found(LoopbackServer, lambda loopback: loopback.strangers, "was answered with")


def test_finding_sets_the_exit_code(monkeypatch, capsys):
    options = argparse.Namespace(seconds=1.0, seed=1)
    tally = Tally("a decoder")
    tally.found("planted")
    monkeypatch.setattr(command, "fuzz", lambda seconds, seed: ([tally], []))
    assert command.main(options) == 1
    recorded("output", capsys.readouterr().out)
    with pytest.raises(Invalid, match="positive"):
        command.main(argparse.Namespace(seconds=0.0, seed=1))


def _found(part, tally, what: str) -> None:
    """Search in several rounds of a fraction of a second, since one round may do little on a busy machine."""
    for seed in range(40):
        target = part(seed)
        target.run(time.monotonic() + 0.25)
        if any(what in finding for finding in tally(target).findings):
            return
    pytest.fail(f"nothing was found with {what!r} in it")


# ---- unauthenticated peers ----------------------------------------------------------------------------------------


async def test_unauthenticated_connections_do_not_block_workers(monkeypatch):
    monkeypatch.setattr(server_module, "count_limit", lambda *limits: 8)
    async with driving() as driver:
        strangers = [await Peer.reach(driver.address) for _ in range(30)]
        await driver.worker(A)
        await driver.worker(B)
        assert len(driver.server._strangers.all()) <= 8
        assert await strangers[0].hear() is not None  # its challenge
        assert await strangers[0].hear() is None  # the oldest was closed
        latest = strangers[-1]
        assert await latest.answer(Worker("nobody", 0))  # the newest may still authenticate
        assert isinstance(await latest.hear(), messages.TurnedAway)
        assert await latest.hear() is None
        assert len(driver.log) == 1
        recorded("log", driver.log[0])


async def test_slow_sender_is_closed_in_time(monkeypatch):
    monkeypatch.setattr(control_connection, "HANDSHAKE_S", 0.2)
    async with driving() as driver:
        peer = await Peer.reach(driver.address)

        async def drip() -> None:
            for byte in b"\0\0\4\0" + bytes(1000):  # part of a frame of 1024 bytes
                peer.writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        try:
            assert await peer.hear() is not None
            assert await peer.hear() is None
        finally:
            dripping.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await dripping
        recorded("log", driver.log[0])
        assert driver.events.empty()


@conversation
async def test_unauthenticated_messages_are_ignored_and_harm_no_connection(driver):
    honest = await driver.worker(A)
    for body in (
        messages.encoded(messages.Returned(1)),
        b"\x81\xa4type\xa5H\xffllo",  # invalid UTF-8
        b"\x91" * 900,
    ):
        peer = await Peer.reach(driver.address)
        await peer.hear()
        peer.writer.write(len(body).to_bytes(4, "big") + body)
        assert await peer.hear() is None
    honest.say(messages.Failed(1, "still here"))
    assert await driver.next() == (A, messages.Failed(1, "still here"))
    assert driver.events.empty()


@conversation
async def test_challenge_cannot_be_reflected(driver):
    """Neither to the same connection nor to another one, nor with the driver's own proof."""
    honest = await Peer.reach(driver.address)
    challenge, nonce = await honest.answer(A)
    accepted = await honest.hear()
    for word in (
        challenge,
        accepted,
        messages.Answer(A, challenge.nonce, accepted.proof),
        messages.Answer(A, nonce, accepted.proof),
        messages.Answer(B, nonce, accepted.proof),
    ):
        peer = await Peer.reach(driver.address)
        await peer.hear()
        peer.say(word)
        assert await peer.hear() is None
    assert driver.events.empty()


@conversation
async def test_proof_for_one_server_is_invalid_for_another(driver):
    """A connection relayed to the driver of another job has another secret."""
    other = ControlServer(
        secret=b"o" * 32, log=lambda level, text: None, callers=driver.server.callers
    )
    address = await other.open(
        "127.0.0.1", received=lambda *_: None, gone=lambda *_: None, expected=lambda _: True
    )
    try:
        peer = await Peer.reach(address)
        await peer.answer(A, secret=SECRET)
        assert await peer.hear() is None
    finally:
        await other.close()


def test_message_of_an_old_generation_has_no_effect():
    """A message stolen from an authenticated worker could only be replayed by a worker, and is outdated by then."""
    talk = running(4)
    now = 2
    for message in (
        messages.Failed(now - 1, "reset"),
        messages.Stranded(now - 1, "reset"),
        messages.Checked(now - 1, 1, 5),
        messages.Resumed(now - 1, {}),
        messages.Progress(now - 1, 3, "allreduce", 1e9),
        messages.Pace(now - 1, 1, 1.0, 1.0),
    ):
        assert talk.tell(event_of(worker("h:0"), message)) == [], message
    assert talk.tell(failed("h:0", now)) != []  # one of the current generation is accepted


@pytest.mark.slow
def test_driver_continues_for_any_messages_of_an_authenticated_worker():
    inputs = Inputs(messages.FromWorker, 9)
    handled = 0
    for round_ in range(60):
        talk = running(3)
        while handled < 12 * (round_ + 1):
            tree = inputs.tree()
            if "generation" in tree:
                tree["generation"] = inputs.random.choice((1, 2, 2, 2, 3))
            message = messages.from_worker.decode(msgspec.msgpack.encode(tree))
            try:
                event = event_of(worker(f"h:{inputs.random.randrange(3)}"), message)
            except KeyError:
                continue  # handled by the event loop, the server or the timeline
            talk.m.handle(event, talk.now)
            handled += 1


# ---- display of untrusted text ------------------------------------------------------------------------------------


def test_text_of_an_unauthenticated_peer_is_escaped():
    body = msgspec.msgpack.encode(
        {"type": "\x1b]0;owned\x07\nelastic | all is well\u202e" + "x" * 900}
    )
    wire_ = FramedConnection(messages.from_worker)
    with pytest.raises(ProtocolError) as refusal:
        list(wire_.receive(len(body).to_bytes(4, "big") + body))
    text = str(refusal.value)
    assert text.isprintable() and len(text) < 400
    assert "\\x1b]0;owned\\x07\\nelastic" in text


def test_drivers_log_lines_contain_no_control_characters():
    lines: list[bytes] = []
    console = Console(lines.append, timestamps=False)
    console("info", "lost \x1b[2J\x07 h\u202e:0\r\nTraceback:\n\tüñí 中")
    recorded("log", b"".join(lines).decode())


def test_text_that_is_not_unicode_can_be_sent():
    """A traceback may contain a file name that is not UTF-8."""
    message = messages.Raised(1, messages.Commit(1, 2), "no file 'a\udcff'", "traceback \udcff")
    heard = messages.from_worker.decode(messages.encoded(message))
    assert heard.commit == message.commit
    recorded("messages", heard.summary)
    result = messages.Answer(Worker("\udcff", 0), b"\xff\0", b"p")
    assert messages.from_worker.decode(messages.encoded(result)).nonce == b"\xff\0"


# ---- cost ---------------------------------------------------------------------------------------------------------


def test_excessive_lists_are_rejected_before_allocation():
    head = b"\x84\xa4type\xa6Traced\xa8timeline\x01\xa9offset_ns\x00\xa7records\xdd"
    many = 5_000_000
    body = head + many.to_bytes(4, "big") + b"\x95\xa0\xa0\xa0\0\0" * many  # 500 MB when decoded
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(msgspec.ValidationError, match="length <= 100000"):
        messages.from_worker.decode(body)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


@pytest.mark.parametrize(
    "spoilt",
    [
        {"type": "Printed", "worker": ["h", 0, 1], "stream": "../../.bashrc", "data": b""},
        {"type": "Logged", "level": "fatal", "text": ""},
    ],
)
def test_messages_of_an_agent_are_validated(spoilt):
    with pytest.raises(msgspec.ValidationError):
        agent_protocol.from_agent.decode(msgspec.msgpack.encode(spoilt))


def test_number_of_concurrent_metrics_requests_is_limited(monkeypatch):
    monkeypatch.setattr(prometheus_metrics, "VISITORS", 3)
    # No request is closed only because this machine is slow.
    monkeypatch.setattr(prometheus_metrics, "VISIT_S", 60.0)
    served = MetricsServer("127.0.0.1", 0, JobMetrics(TimeSpent(JobView())), threading.Lock())
    url = f"http://127.0.0.1:{served.port}/metrics"
    visitors = []
    try:
        for _ in range(3):
            visitors.append(socket.create_connection(("127.0.0.1", served.port), 10.0))
            visitors[-1].sendall(b"GET ")
        with pytest.raises(OSError), urllib.request.urlopen(url, timeout=10):
            pass  # closed without an answer
        visitors.pop().close()
        for _ in range(1000):
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
                assert b"elastic_" in answer.read()
                break
        else:
            pytest.fail("who has left still counts")
    finally:
        for visitor in visitors:
            visitor.close()
        served.close()


def test_silent_metrics_connection_is_closed(monkeypatch, capfd):
    monkeypatch.setattr(prometheus_metrics, "VISIT_S", 0.1)
    served = MetricsServer("127.0.0.1", 0, JobMetrics(TimeSpent(JobView())), threading.Lock())
    try:
        with socket.create_connection(("127.0.0.1", served.port), 10.0) as visitor:
            visitor.sendall(b"GET /")
            assert visitor.recv(100) == b""
    finally:
        served.close()
    assert capfd.readouterr().err == ""


def test_worker_cannot_replace_a_file_on_the_drivers_host(tmp_path):
    keys = tmp_path / "authorized_keys"
    keys.write_text("ssh-ed25519 AAAA\n")
    link = tmp_path / "timeline.json"
    link.symlink_to(keys)
    answers = []

    async def ask(path) -> messages.TimelineAnswer:
        tracing = Tracing(lambda level, text: None, JobView())
        tracing.serve(lambda worker, message: answers.append(message))
        assert tracing.handle(A, messages.TimelineWanted(1, str(path), False))
        await tracing.close()
        assert isinstance(answers[-1], messages.TimelineAnswer)
        return answers[-1]

    for path in (keys, link):
        recorded("messages", asyncio.run(ask(path)).error)
    assert keys.read_text() == "ssh-ed25519 AAAA\n"
    for _ in range(2):  # the second replaces the first
        assert asyncio.run(ask(tmp_path / "own.json")).error == ""


def test_symbolic_link_in_place_of_a_timeline_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = tmp_path / "timeline.json"
    (tmp_path / f"timeline.json.{os.getpid()}.new").symlink_to(victim)
    tracing = Tracing(lambda level, text: None, JobView())
    tracing.open(str(path))
    assert victim.read_text() == "mine"
    assert path.read_bytes() == b"[\n\n]\n"


# ---- TLS ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_openssl
def test_modified_tls_handshake_fails_without_side_effects(tmp_path):
    files = new_authority(tmp_path).sign("host")
    ours, theirs = context(*files, server=True), context(*files, server=False)
    pick = Inputs(messages.FromWorker, 2)
    refused = 0
    for _ in range(150):
        server, client = TlsEndpoint(ours, server=True), TlsEndpoint(theirs, server=False)
        spoilt = pick.random.randrange(4)
        try:
            for step in range(4):
                data = client.due() if step % 2 == 0 else server.due()
                if step == spoilt and data:
                    _, data = pick.spoilt(
                        data, pick.random.choice(("bits flipped", "truncated", "bytes inserted"))
                    )
                clear = (server if step % 2 == 0 else client).feed(data)
                assert clear == b""
        except TlsFailed as failure:
            refused += 1
            assert str(failure).isprintable()
        else:
            server.send(b"secret")
            with contextlib.suppress(TlsFailed):
                assert client.feed(server.due()) in (b"", b"secret")
    assert refused > 50


@needs_openssl
async def test_stalled_tls_handshake_is_closed_in_time_and_uses_no_slot(tmp_path, monkeypatch):
    files = new_authority(tmp_path).sign("host")
    monkeypatch.setattr(control_connection, "HANDSHAKE_S", 0.2)
    ours = context(*files, server=True)
    log: list[str] = []
    server = ControlServer(
        secret=SECRET,
        log=lambda level, text: log.append(text),
        callers=server_module.WORKERS,
        tls=ours,
    )
    address = await server.open(
        "127.0.0.1", received=lambda *_: None, gone=lambda *_: None, expected=lambda _: True
    )
    begun = TlsEndpoint(context(*files, server=False), server=False).due()
    for record in [
        begun[: len(begun) // 2],
        begun,
        b"\x16\x03\x01\x40\x00" + bytes(20_000),
        b"\x16\x03\x01\x40\x00" + bytes(70_000),
        b"\0\0\0\x10" + bytes(16),
    ]:
        server._refused_at = float("-inf")
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(record)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
        recorded("log", log[-1])
        assert not server._strangers.all()
    await server.close()
