"""A worker's link and a control server, each in a separate thread, with and without TLS. Real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from certificates import OPENSSL, new_authority, openssl
from elastic.driver.network import control_connection
from elastic.driver.network.control_server import WORKERS, ControlServer
from elastic.errors import DriverLost, Invalid
from elastic.protocol import messages as protocol
from elastic.protocol.framing import FramedConnection
from elastic.protocol.messages import Address, Worker
from elastic.protocol.tls import check, context
from elastic.runtime import driver_connection as link_module
from elastic.runtime.driver_connection import Link
from harness.golden import raises, recorded

SECRET = b"s" * 32
A = Worker("localhost", 0)
DEADLINE_S = 60.0
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="needs openssl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder):
    return new_authority(folder)


@pytest.fixture(scope="module")
def files(authority):
    return authority.sign("host")


@pytest.fixture(params=[False, pytest.param(True, marks=needs_openssl)], ids=["clear", "tls"])
def paths(request):
    """Certificate, key and authority; or None, for a connection in the clear."""
    return request.getfixturevalue("files") if request.param else None


class Driver:
    """A server, its loop in a thread, and its received messages."""

    def __init__(self, tls=None) -> None:
        self.heard: queue.Queue = queue.Queue()
        self.log: queue.Queue[str] = queue.Queue()
        self.loop = asyncio.new_event_loop()
        self.server = ControlServer(
            secret=SECRET,
            log=lambda level, text: self.log.put(text),
            callers=WORKERS,
            tls=None if tls is None else context(*tls, server=True),
        )
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.address = self.ask(
            self.server.open(
                "127.0.0.1",
                received=lambda worker, message: self.heard.put(message),
                gone=lambda worker, silent: self.heard.put("silent" if silent else "gone"),
                expected=lambda worker: worker == A,
            )
        )

    def ask(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    def send(self, message) -> None:
        self.loop.call_soon_threadsafe(self.server.send, A, message)

    def next(self):
        return self.heard.get(timeout=DEADLINE_S)

    def line(self) -> str:
        """Return the next logged line."""
        return self.log.get(timeout=DEADLINE_S)

    def close(self) -> None:
        self.ask(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(DEADLINE_S)
        self.loop.close()


@contextlib.contextmanager
def driving(tls=None) -> Iterator[Driver]:
    driver = Driver(tls)
    try:
        yield driver
    finally:
        driver.close()


@contextlib.contextmanager
def linked(driver, paths):
    """The link, and the queue of what it delivers; "poked" and the reason of a loss among it."""
    link = Link(driver.address, SECRET, A, tls=paths)
    told: queue.Queue = queue.Queue()
    link.start(told.put, lambda: 1.0, told.put)
    try:
        yield link, told
    finally:
        link.close()


def test_messages_of_any_size_are_sent_both_ways(paths):
    blob = os.urandom(1 << 20) * 8
    with driving(paths) as driver, linked(driver, paths) as (link, told):
        link.send(protocol.Hello(A, 7))
        link.send(protocol.SendResult(blob))
        assert driver.next() == protocol.Hello(A, 7)
        assert driver.next() == protocol.SendResult(blob)
        text = "x" * (8 << 20)
        driver.send(protocol.End(text))
        driver.send(protocol.Finish(1))
        assert told.get(timeout=DEADLINE_S) == protocol.End(text)
        assert told.get(timeout=DEADLINE_S) == protocol.Finish(1)
        link.close()
        assert driver.next() == "gone"
    assert driver.log.empty()


def test_threads_may_send_while_another_reads(paths):
    with driving(paths) as driver, linked(driver, paths) as (link, told):

        def chatter(who: int) -> None:
            for n in range(300):
                link.send(protocol.Failed(n, f"{who}" * (n % 97)))

        threads = [threading.Thread(target=chatter, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for n in range(300):
            driver.send(protocol.Finish(n))
        assert [told.get(timeout=DEADLINE_S).generation for _ in range(300)] == [*range(300)]
        heard = [driver.next() for _ in range(1200)]
        for thread in threads:
            thread.join(DEADLINE_S)
        for who in range(4):
            mine = [m.generation for m in heard if m.reason[:1] == str(who)]
            assert mine == [n for n in range(300) if n % 97]


def test_forked_child_does_not_close_the_connection_of_its_parent(paths):
    with driving(paths) as driver, linked(driver, paths) as (link, told):
        pid = os.fork()
        if pid == 0:
            link.close_in_forked_child()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        link.send(protocol.Hello(A, 7))
        assert driver.next() == protocol.Hello(A, 7)
        driver.send(protocol.Finish(1))
        assert told.get(timeout=DEADLINE_S) == protocol.Finish(1)


def test_closing_from_another_thread_ends_the_reader_without_a_loss(paths):
    with driving(paths) as driver, linked(driver, paths) as (link, told):
        assert link._thread is not None
        link.close()
        link._thread.join(DEADLINE_S)
        assert not link._thread.is_alive()
        assert told.empty()
        with pytest.raises(DriverLost):
            link.send(protocol.Hello(A, 7))
        assert driver.next() == "gone"


def test_the_loss_of_the_driver_is_reported_once(paths):
    with driving(paths) as driver, linked(driver, paths) as (link, told):
        driver.loop.call_soon_threadsafe(driver.server.disconnect, A)
        assert "driver" in told.get(timeout=DEADLINE_S)
        link._thread.join(DEADLINE_S)
        assert told.empty()


def test_last_messages_are_read_before_the_loop_processes_them(paths):
    """As when an exit is seen first: with TLS the bytes wait in the socket like others."""
    with driving(paths) as driver, linked(driver, paths) as (link, _):
        link.send(protocol.Hello(A, 7))
        assert driver.next() == protocol.Hello(A, 7)
        said = threading.Event()
        heard = []

        async def busy() -> None:
            said.wait(DEADLINE_S)  # the loop has no turn meanwhile
            driver.server.drain(A)
            heard.append(driver.heard.get_nowait())

        waiting = asyncio.run_coroutine_threadsafe(busy(), driver.loop)
        link.send(protocol.Failed(1, "last words"))
        said.set()
        waiting.result(DEADLINE_S)
        assert heard == [protocol.Failed(1, "last words")]


def test_different_secret_is_refused_by_both_sides(paths):
    with driving(paths) as driver:
        with raises(DriverLost):
            Link(driver.address, b"x" * 32, A, tls=paths)
        recorded("messages", driver.line())
        assert driver.heard.empty()


def test_a_requested_check_runs_immediately(paths):
    with driving(paths) as driver:
        link = Link(driver.address, SECRET, A, tls=paths)
        looks = threading.Semaphore(0)

        def poked() -> float:
            looks.release()
            return 0.001

        link.start(lambda message: None, poked, lambda reason: None)
        try:
            assert all(looks.acquire(timeout=DEADLINE_S) for _ in range(200))
        finally:
            link.close()


@contextlib.contextmanager
def impostor(*said) -> Iterator[Address]:
    """Listen, send this to a client, and then nothing."""
    listening = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve() -> None:
        sock, _ = listening.accept()
        with sock:
            for data in said:
                sock.sendall(data)
            over.wait(DEADLINE_S)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Address(*listening.getsockname())
    finally:
        over.set()
        thread.join(DEADLINE_S)
        listening.close()


def framed(*messages) -> bytes:
    wire = FramedConnection(protocol.from_worker)
    return b"".join(wire.frame(message) for message in messages)


def test_second_connection_of_a_worker_is_refused_with_a_reason(paths):
    """A child of a worker has its environment, and so everything for authentication."""
    with driving(paths) as driver, linked(driver, paths):
        with raises(DriverLost):
            Link(driver.address, SECRET, A, tls=paths)
        with raises(DriverLost):
            Link(driver.address, SECRET, Worker("localhost", 1), tls=paths)


@pytest.mark.parametrize(
    "said",
    [
        framed(protocol.Challenge(b"n" * 32), protocol.Accepted(b"p" * 32)),
        framed(protocol.Challenge(b"n" * 32), protocol.TurnedAway("x", b"p" * 32)),
        framed(protocol.Accepted(b"p" * 32)),
        framed(protocol.Challenge(b"n" * 32, 99)),
        framed(protocol.Challenge(b"n" * 33)),
        framed(protocol.Challenge(b"")),
        b"\x00\x00\xff\xff",
        b"HTTP/1.1 200 OK\r\n",
    ],
)
def test_impostor_driver_is_refused(said):
    with impostor(said) as address, raises(DriverLost):
        Link(address, SECRET, A)


def test_driver_that_sends_too_slowly_is_abandoned(monkeypatch):
    monkeypatch.setattr(link_module, "CONNECT_S", 0.2)
    listening = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def drip() -> None:
        sock, _ = listening.accept()
        with sock, contextlib.suppress(OSError):
            for _ in range(60):  # then it closes the connection, if it still exists
                if over.wait(0.05):
                    break
                sock.sendall(b"\0")

    # Each byte comes well within the limit; zeros are frames without a message.
    monkeypatch.setattr(FramedConnection, "next", lambda wire: None)
    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with raises(DriverLost):
            Link(Address(*listening.getsockname()), SECRET, A)
    finally:
        over.set()
        thread.join(DEADLINE_S)
        listening.close()


# ---- TLS on one side only, or with the wrong certificate -------------------------------------------------------


@needs_openssl
def test_worker_without_tls_is_refused_by_a_driver_with_tls(files, monkeypatch):
    monkeypatch.setattr(control_connection, "HANDSHAKE_S", 0.1)
    with driving(files) as driver:
        with raises(DriverLost):
            Link(driver.address, SECRET, A)
        recorded("messages", driver.line())


@needs_openssl
def test_driver_without_tls_is_refused_by_a_worker_with_tls(files):
    with driving() as driver:
        with raises(DriverLost):
            Link(driver.address, SECRET, A, tls=files)
        recorded("messages", driver.line())


@needs_openssl
def test_a_certificate_of_another_authority_is_refused_on_both_sides(files, tmp_path):
    stranger = new_authority(tmp_path, "others").sign("stranger")
    with driving(files) as driver:
        with raises(DriverLost):  # it accepts ours, and shows its own
            Link(driver.address, SECRET, A, tls=(stranger[0], stranger[1], files[2]))
        recorded("messages", driver.line())
        assert driver.heard.empty()
    with driving(stranger) as driver:
        with raises(DriverLost):
            Link(driver.address, SECRET, A, tls=files)
        recorded("messages", driver.line())


@needs_openssl
def test_connection_without_a_certificate_is_refused(files):
    with driving(files) as driver:
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname = False
        bare.load_verify_locations(files[2])
        raw = socket.create_connection((driver.address.host, driver.address.port), DEADLINE_S)
        failing = pytest.raises((ssl.SSLError, ConnectionError))
        with raw, failing, bare.wrap_socket(raw) as sock:
            sock.recv(1)
        recorded("messages", driver.line())


@needs_openssl
@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3", "TLSv1_1"])
def test_tls_versions_before_1_2_are_refused(files, version, monkeypatch):
    with driving(files) as driver:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname = False
        old.load_verify_locations(files[2])
        old.load_cert_chain(files[0], files[1])
        old.set_ciphers("DEFAULT:@SECLEVEL=0")  # or the test's own end refuses
        with pytest.warns() if version == "TLSv1_1" else contextlib.nullcontext():
            old.minimum_version = old.maximum_version = ssl.TLSVersion[version]
        raw = socket.create_connection((driver.address.host, driver.address.port), DEADLINE_S)
        with raw:
            if version == "TLSv1_1":
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    old.wrap_socket(raw)
                recorded("messages", driver.line())
            else:
                with old.wrap_socket(raw) as sock:
                    assert b"Challenge" in sock.recv(1000)


@needs_openssl
def test_invalid_tls_files_are_refused(authority, files, tmp_path):
    cert, key, ca = files
    check(*files)
    check(*authority.sign("both", usage="clientAuth,serverAuth"))
    other = new_authority(tmp_path, "others").sign("other")
    text = tmp_path / "text.pem"
    text.write_text("no certificate\n")
    for given in [
        ("/no/such/file", key, ca),
        (cert, str(tmp_path), ca),
        (cert, other[1], ca),
        (other[0], other[1], ca),
        (cert, key, str(text)),
        (str(text), key, ca),
        authority.sign("old", days=-1),
        authority.sign("server-only", usage="serverAuth"),
    ]:
        with raises(Invalid):
            check(*given)
    locked = tmp_path / "locked.key"
    openssl("ec", "-in", key, "-aes256", "-passout", "pass:four", "-out", locked)
    with pytest.raises(Invalid, match="passphrase"):
        check(cert, str(locked), ca)
