"""A real job with unauthenticated peers at its port: it continues training, and its secrets are not exposed."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from certificates import OPENSSL, new_authority
from elastic.protocol import messages
from elastic.protocol.framing import FramedConnection
from elastic.protocol.messages import Address, Worker
from elastic.protocol.tls import TlsEndpoint, context
from harness import wording
from harness.history import RETURN, History, sizes, started
from harness.job import Job

JOB_SECRET = "5ec2e7" * 11  # what a user would give to drivers and agents
ATTACKS = 150


def environment_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def control_address(training: Job) -> Address:
    """Return the driver's address, as its workers get it."""
    host, _, port = environment_of(training.pid(0))["ELASTIC_DRIVER"].rpartition(":")
    return Address(host, int(port))


@contextlib.contextmanager
def attacked(address: Address, paths: tuple[str, str, str] | None) -> Iterator[None]:
    """All sorts of strangers have come, one after the other; those that stay silent are there until the end."""
    with contextlib.ExitStack() as silent:
        attack(address, paths, silent)
        yield


def attack(
    address: Address, paths: tuple[str, str, str] | None, silent: contextlib.ExitStack
) -> None:
    pick = random.Random(1)
    hello = FramedConnection(messages.from_driver).frame(messages.Hello(Worker("localhost", 0), 1))
    guess = FramedConnection(messages.from_driver).frame(
        messages.Answer(Worker("localhost", 0), b"n" * 32, b"p" * 32)
    )
    kinds = [b"", hello, guess, b"\xff" * 4, b"GET / HTTP/1.1\r\n\r\n", b"\0\0\4\0" * 300]
    if paths is not None:  # with a certificate of this very job, but without its secret
        kinds.append(b"TLS")
    for number in range(ATTACKS):
        said = kinds[number % len(kinds)] or pick.randbytes(number)
        sock = socket.create_connection((address.host, address.port), 10.0)
        if number % len(kinds) == 0:
            silent.enter_context(sock)
            continue
        with sock, contextlib.suppress(OSError):
            if said == b"TLS":
                assert paths is not None
                said = under_tls(sock, paths, guess)
            sock.sendall(said)
            if number % 2:
                sock.recv(1000)


def under_tls(sock: socket.socket, paths: tuple[str, str, str], frame: bytes) -> bytes:
    end = TlsEndpoint(context(*paths, server=False), server=False)
    while not end.established:
        sock.sendall(end.due())
        end.feed(sock.recv(65536))
    end.send(frame)
    return end.due()


def where_it_is_seen(training: Job, secret: str) -> list[str]:
    """Of all that other users, or readers of logs, may look at."""
    seen = []
    if secret in training.output:
        seen.append("the output")
    if secret in training.journal.read_text():
        seen.append("the journal")
    for file in (training.folder / "out").rglob("*"):
        if file.is_file() and secret in file.read_text():
            seen.append(str(file))
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if secret.encode() in file.read_bytes():
                seen.append(str(file))
    return seen


@pytest.mark.parametrize(
    "tls", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["clear", "tls"]
)
def test_unauthenticated_peers_neither_affect_a_job_nor_receive_data(job, tmp_path, tls):
    if tls and OPENSSL is None:
        pytest.skip("needs openssl")
    paths = new_authority(tmp_path).sign("host") if tls else None
    flags = "--log-level DEBUG --output-filename out"
    if paths is not None:
        flags += " --tls-cert {} --tls-key {} --tls-ca {}".format(*paths)
    training = started(
        job, 2, f"{RETURN} {flags}", STEPS="24", HOLD="12:file=go", ELASTIC_JOB_SECRET=JOB_SECRET
    )
    training.wait_for_world(2)
    training.until(lambda: len(History(training).all("step")) > 10, "some steps")
    address = control_address(training)
    inside = environment_of(training.pid(0))
    assert len(bytes.fromhex(inside["ELASTIC_SECRET"])) == 32
    assert not {"ELASTIC_JOB_SECRET", "ELASTIC_SECRET_FILE"} & inside.keys()
    assert bool(inside["ELASTIC_TLS_CERT"]) is tls

    before = len(training.records())
    with attacked(address, paths):
        training.kill(1)  # while the silent ones still stand at the door, another worker comes in
        training.wait_for_world(1)
        training.wait_for_world(2)
        for secret in (inside["ELASTIC_SECRET"], JOB_SECRET):
            assert where_it_is_seen(training, secret) == []
        (training.folder / "go").touch()
        training.succeed()
    for secret in (inside["ELASTIC_SECRET"], JOB_SECRET):
        assert where_it_is_seen(training, secret) == []
    History(training).check(steps=24)
    assert sizes(training)[2:] == [1, 2], "nobody else has come or gone"
    refused = [line for line in training.lines if wording.REFUSED_CONNECTION in line]
    assert 1 <= len(refused) <= 4, refused
    if tls:
        assert "TLS" in training.output
    events = [json.dumps(record["event"]) for record in training.records()[before:]]
    assert not [event for event in events if "WorkerConnected" in event and '"pid":1,' in event]
