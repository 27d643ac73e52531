"""Checkpoint files with a size and a checksum that are computed during the write.

The checksum of a file is the SHA-256 of the CRC-32s of its 4 MiB blocks. It detects corruption and is computed at
memory speed.

On a local disk, files are written in a single pass that bypasses the page cache, which avoids the CPU time and memory
of a copy. Without the C++ library, or on a file system without O_DIRECT, files are written through the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Callable
from typing import IO, Any

from elastic.checkpoints.files.manifest import StoredFile
from elastic.collectives.shared_memory import memfd, native_library

BLOCK = 4 << 20  # bytes per CRC-32; part of the format, equal to kElasticBlock in native/file.h
PIECE = 1 << 18  # bytes; small enough to stay in the CPU cache between checksum and write
AT_ONCE = 4 * BLOCK  # bytes written between two checks for cancellation
# Bytes. Smaller writes are combined, because each write may delay the training thread by acquiring the GIL.
SMALL = 1 << 14

Bytes = bytes | bytearray | memoryview
# called regularly during a write; raises an exception if the write was cancelled
Alive = Callable[[], None]


class BlockSums:
    """Checksum of a file that is written in pieces."""

    def __init__(self) -> None:
        self._ended = hashlib.sha256()
        self._sum = 0  # checksum of the current block
        self._left = BLOCK

    def update(self, content: Bytes) -> None:
        view = memoryview(content).cast("B")
        while view:
            piece, view = view[: self._left], view[self._left :]
            self._sum = zlib.crc32(piece, self._sum)
            self._left -= len(piece)
            if not self._left:
                self._ended.update(_packed(self._sum))
                self._sum, self._left = 0, BLOCK

    def hexdigest(self) -> str:
        whole = self._ended.copy()
        if self._left < BLOCK:
            whole.update(_packed(self._sum))
        return whole.hexdigest()


def _packed(*sums: int) -> bytes:
    return struct.pack(f"<{len(sums)}I", *sums)


class Check:
    """Incremental check of a file against its recorded checksum. The file's bytes must be passed in order."""

    def __init__(self, stored: StoredFile) -> None:
        self._wanted = stored.blocks
        self._found = BlockSums()
        self.update = self._found.update

    def passed(self) -> bool:
        return self._found.hexdigest() == self._wanted


class CheckedFile:
    """File that counts and checksums its content while it writes to a stream.

    ``write`` raises OSError, or the exception that ``alive`` raises to cancel the write.
    """

    def __init__(self, stream: IO[bytes], alive: Alive) -> None:
        self._stream = stream
        self._alive = alive
        self._sums = BlockSums()
        self._small = bytearray()  # bytes not yet written to the stream
        self.count = 0  # number of bytes written so far

    def write(self, content: Bytes, crc: int = 0) -> int:
        """Write ``content``, and return the CRC-32 of the current record including ``content``.

        ``crc`` is the CRC-32 of the record's data before ``content``.
        """
        size = memoryview(content).nbytes
        self.count += size
        if size < SMALL:
            self._small += content
            crc = zlib.crc32(content, crc)
        if size >= SMALL or len(self._small) >= PIECE:
            self._put_small()
        return crc if size < SMALL else self._put(content, crc)

    def _put_small(self) -> None:
        if self._small:
            self._put(self._small, 0)
            self._small.clear()

    def _put(self, content: Bytes, crc: int) -> int:
        view = memoryview(content).cast("B")
        for begin in range(0, len(view), PIECE):
            piece = view[begin : begin + PIECE]
            self._alive()
            self._sums.update(piece)
            crc = zlib.crc32(piece, crc)
            self._stream.write(piece)
        return crc

    def complete(self) -> None:
        """Write the remaining buffered bytes to the stream. This method is called after the last `write`."""
        self._put_small()

    def stored(self) -> StoredFile:
        return StoredFile(self.count, blocks=self._sums.hexdigest())


class _NativeFile(ctypes.Structure):
    """Layout of the C struct `elastic_file` of native/file.h, which documents the fields."""

    _fields_ = (
        ("fd", ctypes.c_int32),
        ("sum", ctypes.c_uint32),
        ("buffer", ctypes.c_void_p),
        ("filled", ctypes.c_uint64),
    )


_Buffer = mmap.mmap | memoryview  # a buffer of BLOCK bytes
# Buffers are kept for reuse, because allocating memory takes longer than copying the data.
_buffers: list[_Buffer] = []


class DirectFile(CheckedFile):
    """File that the C++ library writes directly to disk, bypassing the page cache.

    ``close`` releases its buffer for reuse.
    """

    def __init__(self, stream: IO[bytes], alive: Alive, library: native_library.Library) -> None:
        super().__init__(stream, alive)
        self._library = library
        self._buffer = _buffer()
        self._file = _NativeFile(stream.fileno(), 0, _address(self._buffer), 0)
        self._ended: list[int] = []  # checksums of complete blocks
        self._past_the_cache(True)

    def _put(self, content: Bytes, crc: int) -> int:
        size, at = memoryview(content).nbytes, _address(content)
        running = ctypes.c_uint32(crc)
        for begin in range(0, size, AT_ONCE):
            self._alive()
            now = min(AT_ONCE, size - begin)
            full = (self._file.filled + now) // BLOCK
            sums = (ctypes.c_uint32 * full)()
            error = self._library.elastic_file_write(
                ctypes.byref(self._file), at + begin, now, ctypes.byref(running), sums
            )
            if error:
                raise OSError(error, os.strerror(error))
            self._ended += sums
        return running.value

    def complete(self) -> None:
        super().complete()
        self._past_the_cache(False)  # The rest can be less than a page, which O_DIRECT rejects.
        rest = memoryview(self._buffer)[: self._file.filled]
        while rest:
            rest = rest[os.write(self._file.fd, rest) :]

    def stored(self) -> StoredFile:
        begun = [self._file.sum] if self._file.filled else []
        return StoredFile(
            self.count, blocks=hashlib.sha256(_packed(*self._ended, *begun)).hexdigest()
        )

    def close(self) -> None:
        _buffers.append(self._buffer)

    def _past_the_cache(self, yes: bool) -> None:
        past = getattr(os, "O_DIRECT", 0)
        with contextlib.suppress(OSError):  # Some file systems do not support O_DIRECT.
            flags = fcntl.fcntl(self._file.fd, fcntl.F_GETFL)
            fcntl.fcntl(self._file.fd, fcntl.F_SETFL, flags | past if yes else flags & ~past)


def _buffer() -> _Buffer:
    with contextlib.suppress(IndexError):
        return _buffers.pop()
    made = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memfd.huge(_address(made), BLOCK)
    return made


def _address(content: Any) -> int:
    import numpy as np  # The import takes 0.1 s, and commands that write no file do not need it.

    return int(np.frombuffer(content, np.uint8).ctypes.data)
