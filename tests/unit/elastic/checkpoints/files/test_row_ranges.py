"""Which bytes hold which rows, whatever number of ranks wrote them, and that no row is missing."""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest

from elastic.checkpoints.files import row_ranges
from elastic.checkpoints.files.manifest import StoredRows, StoredTensor, UnreadableCommit
from elastic.checkpoints.files.row_ranges import check_ranges, reads
from elastic.sharding.row_layout import Rows, rows_of


def stored(
    content: bytes, rows: int, row_bytes: int, writers: int, step: int, draw: random.Random
) -> tuple[list[StoredTensor], dict[str, bytes]]:
    """A tensor of uint8 written by so many ranks, each in a file of its own after other bytes."""
    found, files = [], {}
    for rank in range(writers):
        mine = rows_of(rows, rank, writers)
        if not len(mine):
            continue
        before = draw.randbytes(draw.randrange(100))
        data = content[mine.begin * row_bytes : mine.end * row_bytes]
        ends = [*range(step, len(mine), step), len(mine)]
        sums = [zlib.crc32(data[: end * row_bytes]) for end in ends]
        file = f"__{rank}_2.distcp"
        files[file] = before + data + b"end"
        kept = StoredRows(mine.begin, mine.end, len(before), step, sums)
        shape = [rows, row_bytes]
        found.append(StoredTensor("model", "w", ["model", "w"], "uint8", shape, file, 0, 0, kept))
    draw.shuffle(found)
    return found, files


@pytest.mark.parametrize("seed", range(60))
def test_each_reader_gets_exactly_its_rows_and_reads_at_most_one_piece_more(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    draw = random.Random(seed)
    rows, row_bytes = draw.randint(1, 60), draw.randint(1, 9)
    writers, readers, step = draw.randint(1, 6), draw.randint(1, 6), draw.randint(1, 8)
    monkeypatch.setattr(row_ranges, "READ", draw.randint(1, 100))
    content = draw.randbytes(rows * row_bytes)
    tensors, files = stored(content, rows, row_bytes, writers, step, draw)
    check_ranges(tensors)
    for rank in range(readers):
        wanted = rows_of(rows, rank, readers)
        found = b""
        for each in reads(tensors, wanted, row_bytes):
            block = files[each.file][each.offset : each.offset + each.length]
            assert zlib.crc32(block, each.sum_before) == each.sum_after
            assert each.rows.begin > wanted.begin - step and each.rows.end < wanted.end + step
            first = (each.wanted.begin - each.rows.begin) * row_bytes
            found += block[first : first + len(each.wanted) * row_bytes]
        assert found == content[wanted.begin * row_bytes : wanted.end * row_bytes]


def test_rank_without_rows_reads_no_file():
    tensors, _ = stored(bytes(10), 5, 2, 2, 1, random.Random(1))
    assert not [*reads(tensors, Rows(5, 5), 2)]


def changed(tensor: StoredTensor, **fields: object) -> StoredTensor:
    assert tensor.rows is not None
    return msgspec.structs.replace(tensor, rows=msgspec.structs.replace(tensor.rows, **fields))


@pytest.mark.parametrize("case", ["missing", "twice", "gap", "short", "sums", "kind"])
def test_missing_or_duplicate_rows_are_an_unreadable_checkpoint(case: str):
    tensors, _ = stored(bytes(30), 15, 2, 3, 2, random.Random(1))
    tensors.sort(key=lambda each: each.rows.begin if each.rows else 0)
    check_ranges(tensors)
    match case:
        case "missing":
            del tensors[1]
        case "twice":
            tensors.append(tensors[1])
        case "gap":
            tensors[1] = changed(tensors[1], begin=6)
        case "short":
            tensors.pop()
        case "sums":
            tensors[1] = changed(tensors[1], sums=[1])
        case "kind":
            tensors[1] = msgspec.structs.replace(tensors[1], dtype="int8")
    with pytest.raises(UnreadableCommit):
        check_ranges(tensors)
