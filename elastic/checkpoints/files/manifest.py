"""Format of a durable commit, and the ordering of commits by age. Pure: no I/O, no clock.

Each commit is a folder, such as ``r0002-g0003-c00000450``: run 2 in this folder of checkpoints, generation 3, commit
450 of that generation. Newer commits compare greater. A commit consists of:

    __0_0.distcp ...   the tensors, in the layout of torch.distributed.checkpoint: one file per rank
    __0_2.distcp ...   the rows of sharded tensors of a fully sharded state: one file per rank
    share-0.json ...   the list of the files and tensors that a rank has written: one file per rank
    .metadata          torch.distributed.checkpoint's index of the tensors
    python.pkl         values that are not plain data; missing if all values are plain data
    manifest.json      sizes and checksums of all files above, and its own checksum. It is written last: without it
                       the commit is incomplete.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

from elastic.protocol.messages import Commit, at_step

FORMAT = 1  # version of the format, incremented by changes that older releases cannot read
MANIFEST = "manifest.json"
METADATA = ".metadata"
PICKLED = "python.pkl"
_NAME = re.compile(r"r(\d{4,})-g(\d{4,})-c(\d{8,})")


class CommitName(msgspec.Struct, frozen=True, order=True):
    """Identifier of a durable commit. A later commit compares greater."""

    run: int
    generation: int
    number: int

    def __str__(self) -> str:
        return f"r{self.run:04d}-g{self.generation:04d}-c{self.number:08d}"

    @property
    def commit(self) -> Commit:
        return Commit(self.generation, self.number)


def parse(folder: str) -> CommitName | None:
    """Parse the name of a commit's folder. Return None if the folder is not that of a commit."""
    found = _NAME.fullmatch(folder)
    return None if found is None else CommitName(*map(int, found.groups()))


class StoredFile(msgspec.Struct, frozen=True):
    """Size and checksum of a file.

    Args:
        blocks: checksum of the file in hexadecimal, as computed by `files.checked`.
    """

    bytes: int
    blocks: str


class StoredRows(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows ``begin`` (inclusive) to ``end`` (exclusive) of a tensor that is sharded along its first dimension.

    ``data`` is the byte offset of the first row in the file. ``sums`` are running CRC-32s of the rows, one after each
    block of ``step`` rows and one after the last row. A block is verified by continuing the CRC of the block before it,
    without reading earlier rows.
    """

    begin: int
    end: int
    data: int
    step: int
    sums: list[int]
    # whether the optimizer stores this rank's rows as a plain tensor instead of a DTensor
    plain: bool = False
    # shape of the unsharded tensor if the tensor is flattened before it is sharded, otherwise None
    sizes: list[int] | None = None
    on_host: bool = False  # whether the tensor is in host memory even if its parameter is on a GPU


class StoredTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """Location of a tensor in a file, as written by ``torch.save``.

    Args:
        length: number of bytes.
        offset: position of the first byte in the file.
        path: keys in the nested state dict. Joined by dots, they are the tensor's name in torch.distributed.checkpoint.
        shape: shape of the whole tensor.
        rows: the rows of the tensor that the file contains. None means all.
    """

    part: str  # part of the state, by the name of its keyword argument
    key: str  # name of the tensor within the part
    path: list[str | int]
    dtype: str  # name of the dtype in torch, without ``torch.``
    shape: list[int]
    file: str
    offset: int
    length: int
    rows: StoredRows | None = None  # the rows that the file contains, or None for the whole tensor

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def stored_shape(self) -> list[int]:
        """Return the shape of the rows that the file contains."""
        return (
            self.shape if self.rows is None else [self.rows.end - self.rows.begin, *self.shape[1:]]
        )


class Share(msgspec.Struct, frozen=True):
    """Record of the files and tensors that one rank has written.

    Args:
        format: version of the format.
        rank: rank of the writer.
        size: size of the writer's world.
        files: files by name.
        tensors: tensors that these files contain.
        generators: states of the random generators as plain data, if they were committed.
        not_finite: parameters with an infinity or NaN in the rows written by this rank.
    """

    format: int
    rank: int
    size: int
    files: dict[str, StoredFile]
    tensors: list[StoredTensor]
    generators: Any = None
    not_finite: list[str] = []


class Manifest(msgspec.Struct, frozen=True):
    """Description of a complete commit.

    ``values`` contains Python values by name, and ``structures`` by part of the state, both encoded as in `plain_data`.
    Values that are not plain data are in the file `PICKLED` instead and are named in ``pickled``. ``group_sizes`` are
    the numbers of parameters of each group of an optimizer, by part.
    """

    format: int
    name: CommitName
    size: int  # size of the world that wrote the commit
    written_at: float  # time at which the commit was completed, in seconds since 1970
    torch_version: str
    layout: str
    values: dict[str, Any]
    structures: dict[str, Any]
    pickled: list[str]
    tensors: list[StoredTensor]
    files: dict[str, StoredFile]
    generators: list[Any]
    group_sizes: dict[str, list[int]] = {}

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.files.values())

    @property
    def sharded(self) -> bool:
        """Whether the commit contains sharded tensors."""
        return any(each.rows is not None for each in self.tensors)

    @property
    def step(self) -> int | None:
        """Return the step counter of the state, or None if the state has none."""
        found = self.values.get("step")
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def __str__(self) -> str:
        """Describe the commit, for example ``step 300 (commit g2c300)``."""
        return at_step(self.name.commit, self.step)


# remedy for a damaged file of a commit
RESTORE = "Restore the checkpoint from a backup, or use another checkpoint"


class UnreadableCommit(Exception):
    """Error raised for a commit that cannot be read.

    Args:
        trouble: what is wrong with the commit. Messages that contain another remedy quote only this.
        remedy: what the user can do, as a sentence without a full stop.
    """

    def __init__(self, trouble: str, remedy: str = "") -> None:
        super().__init__(f"{trouble}. {remedy}" if remedy else trouble)
        self.trouble = trouble


class NewerFormat(UnreadableCommit):
    """Error raised for a commit in the format of a newer version. The commit may be intact."""


_encoder = msgspec.json.Encoder()


def encoded(value: Share | Manifest) -> bytes:
    """Encode a value as a JSON object with an additional last field: the SHA-256 of the other fields."""
    body = _encoder.encode(value)
    return body[:-1] + f',"checksum":"{hashlib.sha256(body).hexdigest()}"}}'.encode()


_CHECKSUM = re.compile(rb',"checksum":"([0-9a-f]{64})"\}\Z')


class _Versioned(msgspec.Struct):
    format: int


def decode_share(content: bytes) -> Share:
    """Decode the record of a rank's share.

    Raises:
        UnreadableCommit: the record is corrupted.
        NewerFormat: the record was written by a newer version.
    """
    _check_format(content, "the record of a rank's files")
    try:
        return msgspec.json.decode(content, type=Share)
    except msgspec.DecodeError as error:
        raise UnreadableCommit(
            f"the manifest of a rank's files is corrupted: {error}", RESTORE
        ) from error


def decode_manifest(content: bytes) -> Manifest:
    """Decode a manifest.

    Raises:
        UnreadableCommit: the manifest is corrupted.
        NewerFormat: the manifest was written by a newer version.
    """
    _check_format(content, MANIFEST)
    try:
        return msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        raise UnreadableCommit(f"{MANIFEST} is corrupted: {error}", RESTORE) from error


def _check_format(content: bytes, what: str) -> None:
    try:
        version = msgspec.json.decode(content, type=_Versioned).format
    except msgspec.DecodeError as error:
        raise UnreadableCommit(f"{what} is corrupted: {error}", RESTORE) from error
    if version > FORMAT:
        raise NewerFormat(
            f"{what} has format {version}, but this version reads formats up to {FORMAT}",
            "Install the version of hvd-elastic that wrote the checkpoint",
        )
    last = _CHECKSUM.search(content)
    body = content[: last.start()] + b"}" if last else content
    if last is None or hashlib.sha256(body).hexdigest().encode() != last[1]:
        raise UnreadableCommit(
            f"{what} is corrupted: its checksum differs from the recorded one", RESTORE
        )


def missing(manifest: Manifest, sizes: dict[str, int]) -> str:
    """Compare the recorded sizes of a commit's files with the actual ``sizes`` in bytes, by file name.

    Return a description of the mismatch, or an empty string.
    """
    for file, stored in manifest.files.items():
        if file not in sizes:
            return f"{file} is missing"
        if sizes[file] != stored.bytes:
            return f"{file} has {sizes[file]} bytes instead of {stored.bytes}"
    return ""


def superfluous(
    names: list[CommitName], whole: list[CommitName], keep: int, floor: int = 0
) -> list[CommitName]:
    """Return the commits to remove: complete commits except the newest ``keep``, and older incomplete commits.

    Args:
        names: all commits.
        whole: complete commits.
        keep: number of complete commits to keep.
        floor: smallest run number of this training. Commits of runs with smaller numbers are never removed.
    """
    ours = [each for each in sorted(whole) if each.run >= floor]
    if not ours or keep < 1:
        return []
    kept = set(ours[-keep:])
    return [n for n in sorted(names) if n.run >= floor and n < ours[-1] and n not in kept]
