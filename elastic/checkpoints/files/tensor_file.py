"""Writer of tensors in the format of ``torch.save`` in a single pass over their bytes.

The bytes before and after a tensor's data depend only on dtype, shape and stride, except for the CRC-32. They are
obtained once from torch, by saving a tensor without data, and cached.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sized
from dataclasses import dataclass
from typing import IO, cast

import torch

from elastic.checkpoints.files.checksummed_file import CheckedFile
from elastic.checkpoints.files.manifest import UnreadableCommit
from elastic.state.snapshots import state_structure

KINDS = 10_000  # Maximum number of cached headers, one for each dtype, shape and stride, of about 2 kB each.
_RECORD = b"archive/data/0"  # name of the tensor's data in torch's zip archive
_CRC = struct.Struct("<I")
# Signature that separates a record's data from its CRC-32, and the distance in bytes from the CRC-32 to the record's
# name in the zip directory.
_MARK, _BEFORE_NAME = b"PK\7\x08", 30


def write(tensor: torch.Tensor, file: CheckedFile) -> None:
    """Write a CPU tensor of any shape and dtype in the format of ``torch.save``.

    Raises:
        OSError: the storage failed.
        Exception: raised by the file's ``alive`` to cancel the write.
    """
    frame = _frame(tensor.dtype, tensor.shape, tensor.stride()) if _plain(tensor) else None
    if frame is None:
        onward = _Onward(file)
        torch.save(tensor.clone(), cast("IO[bytes]", onward))
        if onward.raised is not None:
            raise onward.raised
        return
    file.write(frame.head)
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)
    file.write(frame.tail(file.write(flat.numpy().data)))


def write_rows(tensor: torch.Tensor, file: CheckedFile, step: int) -> tuple[int, list[int]]:
    """Write a CPU tensor so that ranges of its rows can be read and verified separately.

    Args:
        tensor: tensor on the CPU, contiguous, with at least one element.
        file: file to write to.
        step: number of rows per checksum.

    Returns:
        The offset of the tensor's data in the file, and the CRC-32s of the data up to each multiple of ``step`` rows
            and up to the last row.

    Raises:
        UnreadableCommit: this version of torch does not write such tensors as consecutive bytes.
        OSError: the storage failed.
        Exception: raised by the file's ``alive`` to cancel the write.
    """
    frame = _frame(tensor.dtype, tensor.shape, tensor.stride()) if _plain(tensor) else None
    if frame is None:
        raise UnreadableCommit(
            f"torch {torch.__version__} writes tensors of {tensor.dtype} in an unknown format, so single rows"
            " could not be read: cast the tensor to another dtype"
        )
    file.write(frame.head)
    begin, crc = file.count, 0
    sums = []
    for rows in tensor.split(step):
        crc = file.write(rows.reshape(-1).view(torch.uint8).numpy().data, crc)
        sums.append(crc)
    file.write(frame.tail(crc))
    return begin, sums


def _plain(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or not state_structure.plain(tensor):
        return False
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    return (
        tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg() or tensor.requires_grad)
        and 1 + sum((length - 1) * stride for length, stride in lengths) == tensor.numel()
    )


class _Onward:
    """File object that passes torch's writes on to a checkpoint file.

    It keeps the exception of a failed write, because torch raises a different one.
    """

    def __init__(self, file: CheckedFile) -> None:
        self._file = file
        self.raised: BaseException | None = None

    def write(self, block: memoryview) -> int:
        try:
            if self.raised is None:
                self._file.write(block)
        except BaseException as error:
            self.raised = error
        return len(block)

    def flush(self) -> None:
        pass


@dataclass(frozen=True)
class _Frame:
    head: bytes
    _tail: bytes
    _at: int  # offset of the record's name in the zip directory, which is in the tail

    def tail(self, crc: int) -> bytearray:
        made = bytearray(self._tail)
        for at in (len(_MARK), self._at - _BEFORE_NAME):
            _CRC.pack_into(made, at, crc)
        return made


class _Around:
    def __init__(self, left: int) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self._left = left

    def write(self, block: Sized) -> int:
        if len(self.head) != self._begin():
            self.head += cast("bytes", block)
        elif self._left:
            self._left -= len(block)
        else:
            self.tail += cast("bytes", block)
        return len(block)

    def flush(self) -> None:
        pass

    def _begin(self) -> int:
        name = self.head.find(_RECORD)
        if name < 0:
            return -1
        return name + len(_RECORD) + int.from_bytes(self.head[name - 2 : name], "little")


@functools.lru_cache(KINDS)
def _frame(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> _Frame | None:
    """Return the cached bytes before and after a tensor's data.

    Return None if this version of torch uses another format or cannot save the tensor.
    """
    try:
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        around = _Around(empty.nbytes)
        torch.save(empty, cast("IO[bytes]", around))
    except RuntimeError:
        return None
    at = around.tail.find(_RECORD)
    if not around.tail.startswith(_MARK) or at < 0:
        return None
    return _Frame(bytes(around.head), bytes(around.tail), at)
