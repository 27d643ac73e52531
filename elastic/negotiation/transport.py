"""Connections over which ranks negotiate collectives: one from every rank to rank 0, for one generation.

This module implements the end of a connecting rank; `rank0_transport` implements rank 0's end. Rank 0 publishes its
address in the generation's store. Frames have the format of `elastic.protocol.framing`: they are authenticated,
validated against a schema and never pickled. A rank's first frame proves that the rank has the job's secret. `abort`,
called from any thread, ends blocking calls.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket

import msgspec

from elastic.errors import CollectiveFailed
from elastic.negotiation.fusion import FusionLimits
from elastic.negotiation.messages import RequestList, ResponseList
from elastic.protocol.framing import NONCE_BYTES, FramedConnection, derived
from elastic.protocol.messages import ProtocolError
from elastic.rendezvous.store import Store, StoreListener

FRAME_LIMIT = 256 << 20  # maximum size of a frame, in bytes
_CONNECT_S = 10.0
_READ_BYTES = 1 << 16
KEY = "negotiation"  # key of the rendezvous store under which rank 0 publishes its settings
_LISTENS = 30  # consecutive receive timeouts after which rank 0 counts as lost

_encoder = msgspec.msgpack.Encoder()


class ControllerSettings(msgspec.Struct, frozen=True, array_like=True):
    """Settings that rank 0 publishes to all ranks: the address of its coordinator, and the limits of fusion."""

    host: str
    port: int
    nonce: bytes
    fusion_bytes: int
    alone_bytes: int
    groups: bool

    @property
    def limits(self) -> FusionLimits:
        return FusionLimits(self.fusion_bytes, self.alone_bytes, self.groups)


class RankHello(msgspec.Struct, frozen=True, array_like=True):
    """First message from a rank to rank 0."""

    rank: int


_decisions: msgspec.msgpack.Decoder[ResponseList] = msgspec.msgpack.Decoder(ResponseList)


def rules_of(listener: StoreListener, limits: FusionLimits) -> ControllerSettings:
    """Return the settings that rank 0 publishes, given its address and limits."""
    where = listener.address
    nonce = os.urandom(NONCE_BYTES)
    return ControllerSettings(
        where.host, where.port, nonce, limits.fusion_bytes, limits.alone_bytes, limits.groups
    )


def encode_rules(rules: ControllerSettings) -> bytes:
    return _encoder.encode(rules)


def fetch_rules(store: Store, rank: int, timeout_s: float | None = None) -> ControllerSettings:
    """Fetch rank 0's negotiation settings. Rank 0 need not have called a collective yet.

    Args:
        store: store of the world.
        rank: this worker's rank.
        timeout_s: timeout in seconds. None means the store's own timeout.

    Raises:
        CollectiveFailed: rank 0 did not respond in time, or sent invalid settings.
    """
    try:
        return msgspec.msgpack.decode(store.fetch(KEY, rank, timeout_s)[0], type=ControllerSettings)
    except (msgspec.MsgspecError, IndexError) as error:
        raise CollectiveFailed(
            f"rank 0 sent invalid negotiation settings ({error}): install the same hvd-elastic on every host"
        ) from error


class ControllerClient:
    """Client end of a rank's connection to rank 0. Only one thread may receive at a time; another may send.

    Rank 0 counts as lost after ``silence_s`` seconds without a message or heartbeat. With 0, rank 0 is never considered
    lost.
    """

    def __init__(
        self,
        rules: ControllerSettings,
        rank: int,
        generation: int,
        secret: bytes,
        silence_s: float = 0.0,
    ) -> None:
        nonce = os.urandom(NONCE_BYTES)
        self._wire = FramedConnection(_decisions)
        self._wire.seal(
            derived(secret, KEY, generation),
            mine=nonce,
            theirs=rules.nonce,
            caller=True,
            limit=FRAME_LIMIT,
        )
        self._aborted = False
        self._silence_s = silence_s
        self._in_vain = 0  # receive timeouts since the last message from rank 0
        try:
            self._socket = socket.create_connection((rules.host, rules.port), _CONNECT_S)
        except OSError as error:
            raise CollectiveFailed(
                f"rank 0 can't be reached for negotiation at {rules.host} port {rules.port} within {_CONNECT_S:g} s"
                f" ({error}): check that rank 0 runs and that no firewall blocks the port"
            ) from error
        self._socket.settimeout(silence_s or None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self._send(nonce + self._wire.frame_of(_encoder.encode(RankHello(rank))))

    def send(self, offer: RequestList) -> None:
        self._send(self._wire.frame_of(_encoder.encode(offer)))

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._failure(error) from error

    def receive(self, within_s: float | None = None) -> list[ResponseList]:
        """Block until a decision or a wake-up arrives, for at most ``within_s`` seconds.

        Returns an empty list after a wake-up or timeout. Raises CollectiveFailed if rank 0 is lost, or `abort` was
        called.
        """
        while True:
            try:
                decisions: list[ResponseList] = [*self._wire.receive(b"")]
            except ProtocolError as error:
                raise self._failure(error) from error
            if decisions:
                return decisions
            listen_s = self._silence_s / _LISTENS or None
            short = within_s is not None and (listen_s is None or within_s < listen_s)
            wait_s = within_s if short else listen_s
            ready = self._poll.poll(None if wait_s is None else 1000 * wait_s)
            if not ready and short:
                return []
            if not ready:
                # Count timeouts instead of measuring time, so that rank 0 does not seem lost after all processes were
                # suspended together.
                self._in_vain += 1
                if self._in_vain >= _LISTENS:
                    raise self._failure(
                        f"rank 0 sent no message for {self._silence_s:g} s: check that its process runs"
                    )
                continue
            if all(fd == self._woken.fileno() for fd, _ in ready) and not self._aborted:
                self._woken.recv(_READ_BYTES)
                return []
            try:
                part = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise self._failure(error) from error
            if not part:
                raise self._failure("rank 0 closed the connection: see its output")
            self._wire.feed(part)
            self._in_vain = 0

    def wake(self) -> None:
        """Wake the thread in `receive`. Thread-safe."""
        with contextlib.suppress(OSError):  # If the pipe is full, a wake-up is already pending.
            self._waker.send(b"!")

    def _failure(self, error: object) -> CollectiveFailed:
        if self._aborted:
            return CollectiveFailed("aborted", aborted=True)
        return CollectiveFailed(f"negotiation with rank 0 failed: {error}", rank=0)

    def abort(self) -> None:
        self._aborted = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self.close_sockets()

    def close_sockets(self) -> None:
        for held in (self._socket, self._woken, self._waker):
            held.close()
