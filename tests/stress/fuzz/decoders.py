"""Fuzzing of the four decoders with corrupted messages, and of sealed connections with changed streams.

No sockets are used.

A decoder must return a message or raise ProtocolError. A stream must return the original messages, in order, up to the
first change.
"""

from __future__ import annotations

import random
import time
from typing import Any

from elastic.driver.agents import messages as agent_protocol
from elastic.protocol import messages
from elastic.protocol.framing import NONCE_BYTES, FramedConnection
from elastic.protocol.messages import ProtocolError
from stress.fuzz.inputs import Inputs
from stress.fuzz.tally import Tally

UNIONS: dict[str, tuple[Any, Any]] = {
    "worker": (messages.FromWorker, messages.from_worker),
    "driver, to a worker": (messages.FromDriver, messages.from_driver),
    "agent": (agent_protocol.FromAgent, agent_protocol.from_agent),
    "driver, to an agent": (agent_protocol.ToAgent, agent_protocol.to_agent),
}
TYPES = {name: frozenset(union.__args__) for name, (union, _) in UNIONS.items()}
OF_EACH = 20  # corrupted inputs per valid one
SLOW_S = 1.0  # a decoder that takes longer hangs, on any machine
SECRET = b"fuzz" * 8


class Decoders:
    """Fuzzes the four decoders in turn."""

    def __init__(self, seed: int) -> None:
        self.tally = Tally("a decoder")
        self._inputs = [
            (name, Inputs(union, seed + number), decoder)
            for number, (name, (union, decoder)) in enumerate(UNIONS.items())
        ]

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            for name, inputs, decoder in self._inputs:
                body = inputs.body()
                for _ in range(OF_EACH):
                    self._try(name, decoder, *inputs.spoilt(body))

    def _try(self, name: str, decoder: Any, how: str, body: bytes) -> None:
        wire = FramedConnection(decoder, limit=messages.FRAME_LIMIT)
        frame = len(body).to_bytes(4, "big") + body
        began = time.perf_counter()
        taken = False
        try:
            for message in wire.receive(frame):
                taken = True
                if type(message) not in TYPES[name]:
                    self.tally.found(f"{name}: {body!r} became {message!r}")
        except ProtocolError as error:
            if not str(error).isprintable():
                self.tally.found(f"{name}: {body!r} is repeated raw: {error!r}")
        except Exception as error:
            self.tally.found(f"{name}: {how}: {body[:200]!r} raised {error!r}")
        seconds = time.perf_counter() - began
        if seconds > SLOW_S:
            self.tally.found(f"{name}: {how}: {body[:200]!r} took {seconds:.1f} s")
        self.tally.note(how, taken=taken, seconds=seconds)


class Streams:
    """Sealed conversations between a caller and a server, changed in transit by an attacker without the secret."""

    def __init__(self, seed: int) -> None:
        self.tally = Tally("a sealed stream")
        self._random = random.Random(seed)
        self._inputs = Inputs(messages.FromWorker, seed)

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            bodies = [self._inputs.body() for _ in range(self._random.randrange(1, 6))]
            for how in self.changes:
                self._try(how, bodies)

    def _try(self, how: str, bodies: list[bytes]) -> None:
        caller, server = self._pair()
        frames = [caller.frame_of(body) for body in bodies]
        stream, intact = self.changes[how](self, frames)
        sent = [messages.from_worker.decode(body) for body in bodies]
        received: list[Any] = []
        began = time.perf_counter()
        refused = False
        try:
            while stream:
                cut = self._random.randrange(1, 400)
                received += server.receive(stream[:cut])
                stream = stream[cut:]
        except ProtocolError:
            refused = True
        except Exception as error:
            self.tally.found(f"{how} raised {error!r}")
        # Compared by repr, because NaN is not equal to itself.
        if repr(received) != repr(sent[: len(received)]) or len(received) > intact:
            self.tally.found(f"{how}: {sent} was sent, {received} was received")
        seconds = time.perf_counter() - began
        self.tally.note(how, taken=not refused and len(received) == len(sent), seconds=seconds)

    def _pair(self) -> tuple[FramedConnection, FramedConnection]:
        mine, theirs = (self._random.randbytes(NONCE_BYTES) for _ in range(2))
        caller, server = (
            FramedConnection(messages.from_driver),
            FramedConnection(messages.from_worker),
        )
        caller.seal(SECRET, mine=mine, theirs=theirs, caller=True)
        server.seal(SECRET, mine=theirs, theirs=mine, caller=False)
        return caller, server

    # ---- each returns the stream as it arrives, and the number of frames before the first change

    def _intact(self, frames: list[bytes]) -> tuple[bytes, int]:
        return b"".join(frames), len(frames)

    def _flipped(self, frames: list[bytes]) -> tuple[bytes, int]:
        whole = bytearray(b"".join(frames))
        at = self._random.randrange(len(whole))
        whole[at] ^= 1 << self._random.randrange(8)
        return bytes(whole), _before(frames, at)

    def _cut(self, frames: list[bytes]) -> tuple[bytes, int]:
        whole = b"".join(frames)
        at = self._random.randrange(len(whole))
        return whole[:at], _before(frames, at)

    def _inserted(self, frames: list[bytes]) -> tuple[bytes, int]:
        whole = b"".join(frames)
        at = self._random.randrange(len(whole))
        strange = self._random.randbytes(self._random.choice((1, 4, 20, 100)))
        return whole[:at] + strange + whole[at:], _before(frames, at + len(strange))

    def _repeated(self, frames: list[bytes]) -> tuple[bytes, int]:
        at = self._random.randrange(len(frames))
        return b"".join([*frames[: at + 1], *frames[at:]]), at + 1

    def _left_out(self, frames: list[bytes]) -> tuple[bytes, int]:
        at = self._random.randrange(len(frames))
        return b"".join([*frames[:at], *frames[at + 1 :]]), at

    def _swapped(self, frames: list[bytes]) -> tuple[bytes, int]:
        if len(frames) < 2:
            return self._left_out(frames)
        at = self._random.randrange(len(frames) - 1)
        turned = [*frames[:at], frames[at + 1], frames[at], *frames[at + 2 :]]
        return b"".join(turned), at

    def _of_another(self, frames: list[bytes]) -> tuple[bytes, int]:
        """Replace a frame by one with the same number, sealed for another connection of the same job."""
        at = self._random.randrange(len(frames))
        other, _ = self._pair()
        strange = [other.frame_of(self._inputs.body()) for _ in range(at + 1)][-1]
        return b"".join([*frames[:at], strange, *frames[at + 1 :]]), at

    def _unsealed(self, frames: list[bytes]) -> tuple[bytes, int]:
        at = self._random.randrange(len(frames))
        body = self._inputs.body()
        bare = len(body).to_bytes(4, "big") + body
        return b"".join([*frames[:at], bare, *frames[at:]]), at

    changes = {  # noqa: RUF012
        "untouched": _intact,
        "a bit flipped": _flipped,
        "cut off": _cut,
        "bytes inserted": _inserted,
        "a frame repeated": _repeated,
        "a frame left out": _left_out,
        "frames swapped": _swapped,
        "a frame of another connection": _of_another,
        "a frame without a seal": _unsealed,
    }


def _before(frames: list[bytes], at: int) -> int:
    """Return how many frames end at or before this byte."""
    whole = 0
    for number, frame in enumerate(frames):
        whole += len(frame)
        if whole > at:
            return number
    return len(frames)
