"""Messages from one rank to another over Gloo, each with a header. Acts.

Gloo ends the process where a message is longer than its receive, and fills a part where it is shorter. So a header
travels in front, in one piece with a message of up to `INLINE_BYTES`, for which every receive has room. A longer one
follows by itself, under a tag that only messages of its tag, length and dtype have: it never meets a receive that is
shorter. That receive is begun with the header's, except where the source is unknown before the header has come.
"""

from __future__ import annotations

import collections
import struct
import threading
import zlib
from typing import Any, Protocol

import torch

from elastic.collectives import message_types, threads
from elastic.collectives.interface import MAX_TAG
from elastic.collectives.message_types import TensorType
from elastic.collectives.torch_group import as_bytes
from elastic.errors import CollectiveFailed, Invalid, TensorMismatch

INLINE_BYTES = 32 << 10  # up to here a copy takes less time than a second message
_HEADER = struct.Struct("=QQ")


class MessageCarrier(Protocol):
    """The group that carries them."""

    rank: int

    def begin(self, name: str, *arguments: Any) -> Any:
        """Calls this method of Gloo's group. Raises CollectiveFailed."""

    def wait_for(self, work: Any) -> None:
        """Raises CollectiveFailed."""

    def mismatched(self, error: TensorMismatch) -> None:
        """From now on the reason for which calls fail."""


class GlooMessages:
    """Of one group."""

    def __init__(self, group: MessageCarrier) -> None:
        self._group = group
        # Long ones from any rank, by tag, whose headers have not come. Gloo gives them out in the order of the calls.
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
                    f"recv from rank {source} while a recv from any rank waits for a message of the same tag,"
                    f" {tag}: use different tags, or wait for the first one before"
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
                    threads.begin("elastic-gloo-any-rank", self._follow, tag)
        return message

    def _follow(self, tag: int) -> None:
        """Begins the bodies of those from any rank while the script does something else: their senders wait for it."""
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
    """A message under way. Gloo says that it is done to who waits for it, and a wait that ends too soon closes the
    connection: so it is waited for as long as for a collective, or until the sockets are cut.
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
    """As `SentMessage`. ``headed``: of one whose body a thread begins, once the header has come; set then."""

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
        """From which rank, once it has been received."""
        return int(self._head._source_rank())

    def done(self) -> bool:
        return self._over

    def within(self, timeout_s: float) -> bool:
        self.wait()
        return True

    def meet(self) -> None:
        """In a thread: waits for the header, and begins the body. Never raises."""
        assert self.headed is not None
        try:
            self._read_header()
            self.begin_body(self.source)
        except (CollectiveFailed, TensorMismatch) as error:
            self._failed = error
        finally:
            self.headed.set()

    def wait(self) -> None:
        """Raises CollectiveFailed; TensorMismatch if the sender's tensor has another dtype or length."""
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
