"""What a durable commit consists of, and which of them is the newest. Pure.

A commit lies in a folder of its own, ``r0002-g0003-c00000450``: the 2nd run on this folder of checkpoints, generation
3, commit 450 of it. A later one compares greater. In it:

    __0_0.distcp ...   the tensors, in the layout of torch.distributed.checkpoint; rank 0's, rank 1's, ...
    __0_2.distcp ...   of a fully sharded state, the rows of sharded tensors: rank 0's, rank 1's, ...
    share-0.json ...   what rank 0 has written, when it was complete
    .metadata          torch.distributed.checkpoint's index of the tensors
    python.pkl         values that are no plain data, if there are any
    manifest.json      everything above with sizes and checksums, and its own. It is written last: without it there is
                       no commit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from elastic.protocol.messages import Commit

# Grows when older versions could not read what is written. 1 had no checksums of manifests; 1 and 2 a SHA-256 of files.
# 4 is written where tensors are stored by rows, and 3 where none is.
FORMAT = 4
FORMAT_WITHOUT_ROWS = 3
MANIFEST = "manifest.json"
METADATA = ".metadata"
PICKLED = "python.pkl"
_NAME = re.compile(r"r(\d{4,})-g(\d{4,})-c(\d{8,})")


class Name(msgspec.Struct, frozen=True, order=True):
    """Which durable commit: ordered as they were made."""

    run: int
    generation: int
    number: int

    def __str__(self) -> str:
        return f"r{self.run:04d}-g{self.generation:04d}-c{self.number:08d}"

    @property
    def commit(self) -> Commit:
        return Commit(self.generation, self.number)


def parse(folder: str) -> Name | None:
    """The inverse of ``str``; None for any other folder."""
    found = _NAME.fullmatch(folder)
    return None if found is None else Name(*map(int, found.groups()))


class StoredFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``blocks``: the checksum of `files.checked`, in hexadecimal; in older formats ``sha256`` instead."""

    bytes: int
    blocks: str = ""
    sha256: str = ""


class StoredRows(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows ``begin`` up to, not including, ``end`` of a tensor that is sharded along its first dimension.

    Their bytes begin at ``data`` in the file. ``sums`` are CRC-32s of all bytes up to each ``step`` rows and up to the
    last: rows can be read and checked without the ones before them.
    """

    begin: int
    end: int
    data: int
    step: int
    sums: list[int]
    plain: bool = False  # the optimizer keeps it as a tensor of its rank's rows, not as a DTensor


class StoredTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a tensor lies: ``length`` bytes of a file from ``offset`` on are what ``torch.save`` wrote of it.

    ``path``: its keys in the nested state dict, joined by dots its name for torch.distributed.checkpoint. ``shape`` is
    that of the whole tensor, of which only ``rows`` lie here.
    """

    part: str  # of the state: the name of its keyword
    key: str  # in that part
    path: list[str | int]
    dtype: str  # as torch names it, without ``torch.``
    shape: list[int]
    file: str
    offset: int
    length: int
    rows: StoredRows | None = None  # None: all of it

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def stored_shape(self) -> list[int]:
        """Of what lies here."""
        return (
            self.shape if self.rows is None else [self.rows.end - self.rows.begin, *self.shape[1:]]
        )


class Share(msgspec.Struct, frozen=True):
    """What one rank has written. ``generators``: the states of its random generators as plain data, if committed.
    ``not_finite``: parameters of which it has written rows with an infinity or NaN.
    """

    format: int
    rank: int
    size: int
    files: dict[str, StoredFile]
    tensors: list[StoredTensor]
    generators: Any = None
    not_finite: list[str] = []


class Manifest(msgspec.Struct, frozen=True):
    """A whole commit. ``values`` and ``structures``: Python values by name and by part, see `plain_data`; those that
    are no plain data are in the file `PICKLED` instead, and named in ``pickled``.
    """

    format: int
    name: Name
    size: int  # of the world that wrote it
    written_at: float  # seconds since 1970
    torch_version: str
    layout: str
    values: dict[str, Any]
    structures: dict[str, Any]
    pickled: list[str]
    tensors: list[StoredTensor]
    files: dict[str, StoredFile]
    generators: list[Any]

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.files.values())

    @property
    def sharded(self) -> bool:
        """Whether tensors are stored by rows."""
        return any(each.rows is not None for each in self.tensors)

    @property
    def step(self) -> int | None:
        """The state's own count of its steps, if it has one."""
        found = self.values.get("step")
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def __str__(self) -> str:
        """``step 300 (commit g2c300)``."""
        return at_step(self.name.commit, self.step)


def at_step(commit: Commit, step: int | None) -> str:
    """A commit for people: by the state's step, where that has one."""
    return f"commit {commit}" if step is None else f"step {step} (commit {commit})"


class NotReadable(Exception):
    """A folder that holds no commit that can be taken: says why."""


class Newer(NotReadable):
    """It may be whole. Only a newer version can tell."""


_encoder = msgspec.json.Encoder()


def encoded(value: Share | Manifest) -> bytes:
    """JSON, whose last field is the sha256 of the object without it."""
    body = _encoder.encode(value)
    return body[:-1] + f',"checksum":"{hashlib.sha256(body).hexdigest()}"}}'.encode()


_CHECKSUM = re.compile(rb',"checksum":"([0-9a-f]{64})"\}\Z')


class _Versioned(msgspec.Struct):
    format: int


def decode_share(content: bytes) -> Share:
    """Raises NotReadable, Newer."""
    _check_format(content, "share")
    try:
        return msgspec.json.decode(content, type=Share)
    except msgspec.DecodeError as error:
        raise NotReadable(f"its share is damaged: {error}") from error


def decode_manifest(content: bytes) -> Manifest:
    """Raises NotReadable; Newer for one of a newer version."""
    _check_format(content, MANIFEST)
    try:
        return msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        raise NotReadable(f"its {MANIFEST} is damaged: {error}") from error


def _check_format(content: bytes, what: str) -> None:
    try:
        version = msgspec.json.decode(content, type=_Versioned).format
    except msgspec.DecodeError as error:
        raise NotReadable(f"its {what} is damaged: {error}") from error
    if version > FORMAT:
        raise Newer(
            f"it was written by a newer version (format {version}, this one reads up to {FORMAT})"
        )
    if version >= 2:
        last = _CHECKSUM.search(content)
        body = content[: last.start()] + b"}" if last else content
        if last is None or hashlib.sha256(body).hexdigest().encode() != last[1]:
            raise NotReadable(f"its {what} is damaged: its checksum differs")


def format_of(tensors: Sequence[StoredTensor]) -> int:
    """The oldest format that has a place for them."""
    return FORMAT if any(each.rows is not None for each in tensors) else FORMAT_WITHOUT_ROWS


def missing(manifest: Manifest, sizes: dict[str, int]) -> str:
    """What is wrong with the files of a commit, by their sizes; empty: nothing."""
    for file, stored in manifest.files.items():
        if file not in sizes:
            return f"{file} is missing"
        if sizes[file] != stored.bytes:
            return f"{file} has {sizes[file]} bytes instead of {stored.bytes}"
    return ""


def superfluous(names: list[Name], whole: list[Name], keep: int, floor: int = 0) -> list[Name]:
    """Which folders may be removed once ``whole`` commits were proven: all but the newest ``keep`` of them, and what
    is torn and older than the newest. Of runs before ``floor`` nothing is removed: they belong to another training.
    """
    ours = [each for each in sorted(whole) if each.run >= floor]
    if not ours or keep < 1:
        return []
    kept = set(ours[-keep:])
    return [n for n in sorted(names) if n.run >= floor and n < ours[-1] and n not in kept]
