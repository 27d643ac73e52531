"""Fuzzing of a real control server on loopback, while honest workers communicate with it.

Nothing from an unauthenticated peer may be accepted, none may receive more than a challenge, and messages of honest
workers must arrive completely, in order, and be answered in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from typing import Any

import msgspec

from elastic.driver.network.blocking_calls import within
from elastic.driver.network.control_server import WORKERS, ControlServer
from elastic.driver.processes.console import Console
from elastic.protocol import messages
from elastic.protocol.framing import NONCE_BYTES, FramedConnection, proof
from elastic.protocol.messages import Address, ProtocolError, Worker
from stress.fuzz.inputs import Inputs
from stress.fuzz.tally import Tally

SECRET = b"fuzz" * 8
HONEST = [Worker("honest", slot) for slot in range(2)]
TALKERS = 16  # concurrent strangers and turncoats
TURNCOATS = 0.4  # share of clients that know the secret
FLOOD = 2000  # messages
TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(192)
HTTP = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
UNEXPECTED, SECOND = "a worker that is not expected", "a worker that is here already"
KNOWN = (UNEXPECTED, SECOND)  # these know the secret, and receive the reason for their rejection


class Caller:
    """A caller's end of a connection."""

    answer_s = 5.0  # time for the answer to an honest worker, and for a connection to be closed

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.wire = FramedConnection(messages.from_driver)
        self.nonce = b""  # nonce of the server

    async def hear(self) -> Any:
        """Return the next message, or None at the end of the connection."""
        while (message := self.wire.next()) is None:
            try:
                data = await within(self.reader.read(65536), self.answer_s)
            except ConnectionError:
                return None
            if not data:
                return None
            self.wire.feed(data)
        return message

    async def ended(self) -> bytes:
        """Stop sending. Return the data received until the other end has closed. Raises TimeoutError if it does not."""
        data = b""
        try:
            await self.writer.drain()
            with contextlib.suppress(OSError):  # already closed
                self.writer.write_eof()
            while part := await within(self.reader.read(65536), self.answer_s):
                data += part
        except ConnectionError:
            pass
        return data


class LoopbackServer:
    """One server, during `run`."""

    def __init__(self, seed: int) -> None:
        self.strangers = Tally("a server, by strangers")
        self.turncoats = Tally("a server, by those who know the secret")
        self.lines = 0  # lines of the log
        self._random = random.Random(seed)
        self._inputs = Inputs(messages.FromWorker, seed)
        self._said: dict[Worker, deque[Any]] = {worker: deque() for worker in HONEST}
        self._inside: set[Worker] = set()  # turncoats that are authenticated or about to be
        self._numbers = iter(range(10**9))
        # Frames of honest workers, as an eavesdropper sees them.
        self._stolen: deque[bytes] = deque(maxlen=50)
        self._replayed: deque[messages.Answer] = deque(maxlen=50)
        self._server = ControlServer(
            secret=SECRET, log=Console(self._log, timestamps=False), callers=WORKERS
        )
        self._address = Address("", 0)
        self.answered_s = 0.0  # longest wait of an honest worker for an answer
        self.words = 0  # received from honest workers

    def run(self, until: float) -> None:
        asyncio.run(self._run(until))

    async def _run(self, until: float) -> None:
        asyncio.get_running_loop().set_exception_handler(self._raised)
        self._address = await self._server.open(
            "127.0.0.1",
            received=self._received,
            gone=lambda worker, silent: self._inside.discard(worker),
            expected=lambda worker: worker in self._said or worker in self._inside,
        )
        over = asyncio.Event()
        honest = [await self._working(worker, over) for worker in HONEST]
        talkers = [asyncio.create_task(self._talk(until)) for _ in range(TALKERS)]
        ends = await asyncio.gather(*talkers, return_exceptions=True)
        over.set()
        ends += await asyncio.gather(*honest, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                self.strangers.found(f"a talker ended with {end!r}")
        await self._server.close()

    def _log(self, line: bytes) -> None:
        self.lines += 1
        text = line.decode()
        if not text.replace("\n", "").isprintable():
            self.strangers.found(f"the log holds {text!r}")

    def _raised(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.strangers.found(
            f"the event loop reported {context.get('exception') or context['message']!r}"
        )

    def _received(self, worker: Worker, message: Any) -> None:
        if worker in self._said:
            expected = self._said[worker].popleft() if self._said[worker] else None
            if message != expected:
                self.strangers.found(f"{worker} sent {expected!r}, {message!r} was received")
            self.words += 1
            self._server.send(worker, messages.Finish(message.generation))
        elif worker not in self._inside:
            self.strangers.found(f"{message!r} was received from {worker}, which is not connected")

    # ---- honest workers

    async def _working(self, worker: Worker, over: asyncio.Event) -> asyncio.Task[None]:
        peer = await self._reach()
        await self._enter(peer, worker)
        # It has sent nothing yet, but the eavesdropper needs a first frame.
        self._stolen.append(_framed(self._inputs.body()) + bytes(16))
        return asyncio.create_task(self._work(peer, worker, over))

    async def _work(self, peer: Caller, worker: Worker, over: asyncio.Event) -> None:
        number = 0
        while not over.is_set():
            number += 1
            message = messages.Failed(number, "x" * (number % 300))
            self._said[worker].append(message)
            frame = peer.wire.frame(message)
            self._stolen.append(frame)
            began = time.monotonic()
            peer.writer.write(frame)
            answer = await peer.hear()
            self.answered_s = max(self.answered_s, time.monotonic() - began)
            if answer != messages.Finish(number):
                self.strangers.found(
                    f"{worker} received {answer!r} as the answer to its message {number}"
                )
                return
            await asyncio.sleep(0.005)
        await self._leave(peer)

    async def _reach(self) -> Caller:
        address = self._address
        peer = Caller(*await asyncio.open_connection(address.host, address.port))
        challenge = await peer.hear()
        assert isinstance(challenge, messages.Challenge), challenge
        peer.nonce = challenge.nonce
        return peer

    def _answer(self, peer: Caller, worker: Worker, **changes: Any) -> messages.Answer:
        nonce = changes.pop("nonce", self._random.randbytes(NONCE_BYTES))
        role, secret = changes.pop("role", "worker"), changes.pop("secret", SECRET)
        mine = proof(secret, role, peer.nonce, nonce, str(worker))
        return messages.Answer(worker, nonce, mine, **changes)

    async def _enter(self, peer: Caller, worker: Worker) -> None:
        answer = self._answer(peer, worker)
        self._replayed.append(answer)
        peer.writer.write(peer.wire.frame(answer))
        accepted = await peer.hear()
        assert isinstance(accepted, messages.Accepted), accepted
        peer.wire.seal(SECRET, mine=answer.nonce, theirs=peer.nonce, caller=True)

    async def _leave(self, peer: Caller) -> None:
        peer.writer.transport.abort()

    # ---- other clients

    async def _talk(self, until: float) -> None:
        while time.monotonic() < until:
            peer = await self._reach()
            try:
                if self._random.random() < TURNCOATS:
                    await self._betray(peer)
                else:
                    await self._intrude(peer)
            except ConnectionError:
                pass  # disconnected while it was still sending
            finally:
                await self._leave(peer)

    async def _intrude(self, peer: Caller) -> None:
        what, chunks = self._random_bytes(peer)
        began = time.monotonic()
        for chunk in chunks:
            peer.writer.write(chunk)
            await asyncio.sleep(0)
        try:
            answered = await peer.ended()
        except asyncio.TimeoutError:
            self.strangers.found(
                f"{what}: it was not closed within {Caller.answer_s:g} s: {chunks!r}"
            )
            return
        if what in KNOWN:
            self._check_reason(what, peer, answered)
            answered = b""
        if answered:
            self.strangers.found(f"{what}: {chunks!r} was answered with {answered!r}")
        self.strangers.note(what, taken=bool(answered), seconds=time.monotonic() - began)

    def _check_reason(self, what: str, peer: Caller, answered: bytes) -> None:
        """Check that a peer that knows the secret receives the reason for its rejection, and nothing else."""
        peer.wire.feed(answered)
        if not isinstance(peer.wire.next(), messages.TurnedAway) or peer.wire.unread:
            self.strangers.found(f"{what} was answered with {answered!r}")

    def _random_bytes(self, peer: Caller) -> tuple[str, list[bytes]]:
        """Return the input of a stranger, which knows earlier network traffic, but not the secret."""
        pick, frame = self._random, peer.wire.frame
        someone = pick.choice([*HONEST, *self._inside, Worker("h", 0)])
        wrong = frame(self._answer(peer, someone, secret=b"wrong" * 6))
        first = self._inputs.body()
        kinds: dict[str, Any] = {
            "wrong secret": lambda: [wrong],
            "wrong secret, then messages": lambda: [wrong + _framed(first)],
            "wrong version": lambda: [frame(self._answer(peer, someone, version=99))],
            "nonce of another length": lambda: [
                frame(self._answer(peer, someone, nonce=b"n" * 31))
            ],
            "proof of the driver's role": lambda: [
                frame(self._answer(peer, someone, role="driver"))
            ],
            UNEXPECTED: lambda: [frame(self._answer(peer, Worker("\x1b[2J\n", 7)))],
            SECOND: lambda: [frame(self._answer(peer, HONEST[0]))],
            "an answer replayed": lambda: [frame(pick.choice(self._replayed))],
            "the challenge sent back": lambda: [
                frame(messages.Challenge(peer.nonce)),
                frame(messages.Accepted(peer.nonce)),
            ],
            "frames of an honest worker": lambda: pick.sample(
                list(self._stolen), min(3, len(self._stolen))
            ),
            "valid messages before the answer": lambda: [_framed(first)],
            "spoilt messages before the answer": lambda: [_framed(self._inputs.spoilt(first)[1])],
            "a spoilt answer": lambda: [_framed(self._inputs.spoilt(wrong[4:])[1])],
            "a frame too long": lambda: [pick.randrange(1025, 2**32).to_bytes(4, "big") + first],
            "more than may come": lambda: [b"\0\0\0\0" * 300],
            "an answer, a byte at a time": lambda: [wrong[i : i + 1] for i in range(len(wrong))],
            "half an answer": lambda: [wrong[: pick.randrange(len(wrong))]],
            "TLS": lambda: [TLS_HELLO],
            "HTTP": lambda: [HTTP],
            "nothing": lambda: [],
            "random bytes": lambda: [pick.randbytes(pick.randrange(1, 3000))],
        }
        what = pick.choice(list(kinds))
        return what, kinds[what]()

    async def _betray(self, peer: Caller) -> None:
        """Authenticate, then send data that no worker sends."""
        worker = Worker("turncoat", next(self._numbers))
        self._inside.add(worker)
        await self._enter(peer, worker)
        what, chunks, closed = self._treason(peer)
        began = time.monotonic()
        for chunk in chunks:
            peer.writer.write(chunk)
        try:
            if not closed:
                await peer.ended()
            elif await peer.hear() is not None:  # closed unprompted
                self.turncoats.found(f"{what} was answered")
        except asyncio.TimeoutError:
            self.turncoats.found(
                f"{what}: it was not closed within {Caller.answer_s:g} s: {chunks!r}"
            )
            return
        self.turncoats.note(what, taken=not closed, seconds=time.monotonic() - began)

    def _treason(self, peer: Caller) -> tuple[str, list[bytes], bool]:
        """Return a description, the bytes, and whether the server must close the connection for them."""
        pick, wire = self._random, peer.wire
        body = self._harmless()
        kinds: dict[str, Any] = {
            "valid messages in any order": lambda: (
                [wire.frame_of(self._harmless()) for _ in range(8)],
                False,
            ),
            "a flood of messages": lambda: (
                [b"".join(wire.frame_of(body) for _ in range(FLOOD))],
                False,
            ),
            "a spoilt message": lambda: self._spoilt(wire, body),
            "a frame changed on its way": lambda: ([_changed(pick, wire.frame_of(body))], True),
            "a frame twice": lambda: ([wire.frame_of(body)] * 2, True),
            "a frame left out": lambda: ([(wire.frame_of(body), wire.frame_of(body))[1]], True),
            "a frame of an honest worker": lambda: ([self._stolen[-1]], True),
            "a frame without a seal": lambda: ([_framed(body) + bytes(16)], True),
            "hello in another's name": lambda: ([wire.frame(messages.Hello(HONEST[0], 1))], True),
            "a second answer": lambda: ([wire.frame(self._answer(peer, HONEST[0]))], True),
            "a frame of 4 GB": lambda: ([b"\xff\xff\xff\xff"], True),
            "half a frame": lambda: ([wire.frame_of(body)[:-1]], False),
        }
        # A flood takes a hundred times as long as the others.
        what = pick.choices(list(kinds), [0.05 if "flood" in kind else 1.0 for kind in kinds])[0]
        chunks, closed = kinds[what]()
        return what, chunks, closed

    def _harmless(self) -> bytes:
        """Return a message that a worker may send at any time."""
        while True:
            tree = self._inputs.tree()
            if tree["type"] not in ("Answer", "Hello"):
                return msgspec.msgpack.encode(tree)

    def _spoilt(self, wire: FramedConnection, body: bytes) -> tuple[list[bytes], bool]:
        _, spoilt = self._inputs.spoilt(body)
        wrong = spoilt != b"" and not _decodes(spoilt)  # an empty frame is a heartbeat
        return [wire.frame_of(spoilt)], wrong


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def _decodes(body: bytes) -> bool:
    """Return whether a worker may send this. An Answer or another's Hello decodes, but ends the connection."""
    wire = FramedConnection(messages.from_worker, limit=messages.FRAME_LIMIT)
    try:
        return any(
            not isinstance(message, messages.Answer | messages.Hello)
            for message in wire.receive(_framed(body))
        )
    except ProtocolError:
        return False


def _changed(pick: random.Random, frame: bytes) -> bytes:
    """Flip one bit, but not in the length: the server would wait for a longer frame."""
    changed = bytearray(frame)
    changed[pick.randrange(4, len(frame))] ^= 1 << pick.randrange(8)
    return bytes(changed)
