"""Point-to-point messages over Gloo.

Gloo ends the process if a message is longer than its receive, and fills the buffer partly if it is shorter. A header is
therefore sent first, together with messages of up to `INLINE_BYTES`. Every receive has room for both. A longer message
follows separately, under another Gloo tag: a hash of the message's tag, length and dtype. It therefore never matches a
shorter receive. The receive of a longer message is started together with that of the header, unless the source is
unknown until the header arrives.
"""

from __future__ import annotations

import collections
import struct
import threading
import zlib
from typing import Any, Protocol

import torch

from elastic.collectives import message_types, threads_at_exit
from elastic.collectives.interface import MAX_TAG
from elastic.collectives.message_types import TensorType
from elastic.collectives.torch_group import as_bytes
from elastic.errors import CollectiveFailed, Invalid, TensorMismatch

# Up to this size in bytes, copying the tensor is faster than sending a second message.
INLINE_BYTES = 32 << 10
_HEADER = struct.Struct("=QQ")


class MessageCarrier(Protocol):
    """Methods of a Gloo group that `GlooMessages` uses."""

    rank: int

    def begin(self, name: str, *arguments: Any) -> Any:
        """Call the method ``name`` of Gloo's group.

        Raises:
            CollectiveFailed: the group has failed.
        """

    def wait_for(self, work: Any) -> None:
        """Wait for one of Gloo's works.

        Raises:
            CollectiveFailed: the group has failed.
        """

    def mismatched(self, error: TensorMismatch) -> None:
        """Make all later calls fail with this error."""


class GlooMessages:
    """Point-to-point messages of one group."""

    def __init__(self, group: MessageCarrier) -> None:
        self._group = group
        # Long receives from any rank that wait for a header, by tag. Gloo completes them in the order of the calls.
        self._headless: dict[int, collections.deque[ReceivedMessage]] = {}
        self._changing = threading.Lock()

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> SentMessage:
        type_, flat = message_types.type_of(tensor), as_bytes(tensor)
        head = torch.frombuffer(bytearray(_HEADER.pack(*type_)), dtype=torch.uint8)
        if type_.nbytes <= INLINE_BYTES:
            whole = torch.cat((head, flat))
            return SentMessage(self._group, [self._group.begin("send", [whole], to, tag)], whole)
        works = [
            self._group.begin("send", [head], to, tag),
            self._group.begin("send", [flat], to, _body_tag(tag, type_)),
        ]
        return SentMessage(self._group, works, (head, tensor))

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> ReceivedMessage:
        long = tensor.nbytes > INLINE_BYTES
        message = ReceivedMessage(self._group, tensor, tag)
        if source is not None:
            with self._changing:
                unknown = long and tag in self._headless
            if unknown:
                raise Invalid(
                    f"recv from rank {source} uses tag {tag}, but a recv from any rank already waits for a"
                    " message with this tag: use different tags, or wait for the earlier recv first"
                )
            message.begin_head("recv", source)
            if long:
                message.begin_body(source)
            return message
        message.begin_head("recv_anysource")
        if long:
            with self._changing:
                waiting = self._headless.get(tag)
                message.headed = threading.Event()
                if waiting is not None:
                    waiting.append(message)
                else:
                    self._headless[tag] = collections.deque([message])
                    threads_at_exit.begin("elastic-gloo-any-rank", self._follow, tag)
        return message

    def _follow(self, tag: int) -> None:
        """Receive message bodies from any rank in the background, because a sender waits until its body is received."""
        waiting = self._headless[tag]
        while True:
            waiting[0].meet()
            with self._changing:
                waiting.popleft()
                if not waiting:
                    del self._headless[tag]
                    return


def _body_tag(tag: int, type_: TensorType) -> int:
    return MAX_TAG + 1 + (zlib.crc32(struct.pack("=QQQ", tag, *type_)) & MAX_TAG)


class SentMessage:
    """Sent message that is in flight.

    Gloo reports completion only to a waiting caller, and a wait that times out closes the connection. The wait for this
    message therefore has the timeout of a collective, or ends when the sockets are closed.
    """

    source = -1

    def __init__(self, group: MessageCarrier, works: list[Any], held: object) -> None:
        self._group = group
        self._works = works
        self._held = held
        self._over = False

    def done(self) -> bool:
        return self._over

    def within(self, timeout_s: float) -> bool:
        self.wait()
        return True

    def wait(self) -> None:
        if not self._over:
            for work in self._works:
                self._group.wait_for(work)
            self._over = True
            self._held = None


class ReceivedMessage:
    """Message that is being received. If a thread receives the body, it sets ``headed`` once the header has arrived."""

    def __init__(self, group: MessageCarrier, tensor: torch.Tensor, tag: int) -> None:
        self.headed: threading.Event | None = None
        self._group = group
        self._type = message_types.type_of(tensor)
        self._flat = as_bytes(tensor)
        self._tag = tag
        self._room = torch.empty(_HEADER.size + INLINE_BYTES, dtype=torch.uint8, device="cpu")
        self._head: Any = None
        self._body: Any = None
        self._failed: CollectiveFailed | TensorMismatch | None = None
        self._over = False

    def begin_head(self, method: str, *source: int) -> None:
        self._head = self._group.begin(method, [self._room], *source, self._tag)

    def begin_body(self, source: int) -> None:
        self._body = self._group.begin(
            "recv", [self._flat], source, _body_tag(self._tag, self._type)
        )

    @property
    def source(self) -> int:
        """Return the rank of the sender, after the message is received."""
        return int(self._head._source_rank())

    def done(self) -> bool:
        return self._over

    def within(self, timeout_s: float) -> bool:
        self.wait()
        return True

    def meet(self) -> None:
        """Wait for the header, then start to receive the body. This method runs in a thread and never raises."""
        assert self.headed is not None
        try:
            self._read_header()
            self.begin_body(self.source)
        except (CollectiveFailed, TensorMismatch) as error:
            self._failed = error
        finally:
            self.headed.set()

    def wait(self) -> None:
        """Block until the message is received.

        Raises:
            CollectiveFailed: the group has failed.
            TensorMismatch: the sender's tensor has another dtype or length.
        """
        if self._over:
            return
        if self.headed is None:
            self._read_header()
        else:
            self.headed.wait()
            if self._failed is not None:
                raise self._failed
        if self._body is not None:
            self._group.wait_for(self._body)
        else:
            self._flat.copy_(self._room[_HEADER.size : _HEADER.size + self._type.nbytes])
        self._over = True

    def _read_header(self) -> None:
        self._group.wait_for(self._head)
        sent = TensorType(*_HEADER.unpack(self._room.numpy().data[: _HEADER.size]))
        if sent != self._type:
            error = message_types.mismatch(self.source, sent, self._group.rank, self._type)
            self._group.mismatched(error)
            raise error
