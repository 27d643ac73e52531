"""Writes tensors as ``torch.save`` does, with one pass over their bytes.

What torch writes around the bytes of a tensor is the same for all of its kind, but for their CRC-32. So torch writes it
once for an empty one, and it is kept.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sized
from dataclasses import dataclass
from typing import IO, cast

import torch

from elastic.checkpoints.files.checked import CheckedFile
from elastic.checkpoints.manifest import NotReadable
from elastic.state.snapshots import tensor_index

KINDS = 10_000  # of tensors, that are remembered; some 2 kB each
_RECORD = b"archive/data/0"  # what torch calls the tensor's bytes in its zip
_CRC = struct.Struct("<I")
# Behind the bytes of a record comes a mark, then its CRC-32; in the directory it stands this far before the name.
_MARK, _BEFORE_NAME = b"PK\7\x08", 30


def write(tensor: torch.Tensor, file: CheckedFile) -> None:
    """``tensor``: on the CPU. Raises OSError, and what the file's ``alive`` does."""
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
    """As `write`. Returns where the bytes of the tensor begin in the file, and the CRC-32 of all of them up to each
    ``step`` rows and up to the last.

    Args:
        tensor: on the CPU, contiguous, with at least one element.

    Raises OSError, NotReadable where this torch does not write such tensors as bytes in a row, and what the file's
    ``alive`` raises.
    """
    frame = _frame(tensor.dtype, tensor.shape, tensor.stride()) if _plain(tensor) else None
    if frame is None:
        raise NotReadable(
            f"torch {torch.__version__} writes rows of {tensor.dtype} in a way that is not known, so they could not be"
            " read again"
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
    """Whether its bytes, as they lie in memory, are all that distinguishes it from others of its kind."""
    if type(tensor) is not torch.Tensor or not tensor_index.plain(tensor):
        return False
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    return (
        tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg() or tensor.requires_grad)
        and 1 + sum((length - 1) * stride for length, stride in lengths) == tensor.numel()
    )


class _Onward:
    """Passes on what torch writes. What a write raises is kept: torch would make an error of its own of it."""

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
    _at: int  # where the directory, which is in the tail, names the bytes

    def tail(self, crc: int) -> bytearray:
        made = bytearray(self._tail)
        for at in (len(_MARK), self._at - _BEFORE_NAME):
            _CRC.pack_into(made, at, crc)
        return made


class _Around:
    """A file that keeps all but the bytes of the tensor, of which there are ``left``."""

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
        """Where the tensor's bytes come: after its name and what fills up to the next multiple of 64."""
        name = self.head.find(_RECORD)
        if name < 0:
            return -1
        return name + len(_RECORD) + int.from_bytes(self.head[name - 2 : name], "little")


@functools.lru_cache(KINDS)
def _frame(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> _Frame | None:
    """None: this torch writes in another way, or can't make one of this kind."""
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
