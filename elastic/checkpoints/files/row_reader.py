"""Reader for rows of sharded tensors in the files of a checkpoint. `row_ranges` computes the bytes to read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from elastic.checkpoints.files.manifest import RESTORE, StoredTensor, UnreadableCommit
from elastic.checkpoints.files.row_ranges import reads
from elastic.checkpoints.files.storage import Storage
from elastic.sharding.row_layout import Rows


def read(
    storage: Storage, folder: str, stored: Sequence[StoredTensor], wanted: Rows, into: torch.Tensor
) -> None:
    """Read rows of one tensor and verify their checksums before using them.

    Args:
        storage: the folder of checkpoints.
        folder: folder of the commit.
        stored: the row ranges of this tensor in the checkpoint, in any number of files.
        wanted: range of rows to read.
        into: tensor to fill, with one row for each wanted row, and with the dtype and row shape that are stored.

    Raises:
        UnreadableCommit: a file is missing, truncated or corrupted.
        OSError: the storage failed.
    """
    if not into.numel():
        return
    for part in reads(stored, wanted, into.nbytes // len(into)):
        try:
            content = storage.read_range(f"{folder}/{part.file}", part.offset, part.length)
        except FileNotFoundError:
            raise UnreadableCommit(f"{part.file} is missing from the commit", RESTORE) from None
        if zlib.crc32(content, part.sum_before) != part.sum_after or len(content) != part.length:
            raise UnreadableCommit(
                f"{part.file} is corrupted: the checksum of {stored[0].name} differs from the recorded one",
                RESTORE,
            )
        rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(into.dtype)
        rows = rows.view(len(part.rows), *into.shape[1:])
        needed, first = part.wanted, part.rows.begin
        target = into[needed.begin - wanted.begin : needed.end - wanted.begin]
        target.copy_(rows[needed.begin - first : needed.end - first])
