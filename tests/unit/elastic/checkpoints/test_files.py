"""A file is written as it was given and checksummed on the way; a tensor as torch itself writes it."""

from __future__ import annotations

import io
import mmap
import os
import random
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable
from hashlib import sha256
from unittest.mock import create_autospec

import pytest
import torch

from elastic.checkpoints.files import checksummed_file, tensor_file
from elastic.checkpoints.files.checksummed_file import (
    BLOCK,
    BlockSums,
    Check,
    CheckedFile,
    DirectFile,
)
from elastic.checkpoints.files.storage import Storage
from elastic.collectives.shared_memory import native_library
from harness.golden import raises
from harness.sources import ROOT


def nobody_minds() -> None:
    pass


def without_warnings(make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    with warnings.catch_warnings():  # such kinds are deprecated, or in beta
        warnings.simplefilter("ignore")
        return make()


def by_definition(content: bytes) -> str:
    blocks = range(0, len(content), BLOCK)
    sums = (zlib.crc32(content[begin : begin + BLOCK]) for begin in blocks)
    return sha256(b"".join(each.to_bytes(4, "little") for each in sums)).hexdigest()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK, 5 * BLOCK + 77])
def test_file_written_in_pieces_has_the_content_and_checksums(tmp_path, monkeypatch, native, size):
    if not native:
        monkeypatch.setattr(native_library, "load", lambda: None)
    drawn = random.Random(size)
    content = drawn.randbytes(size)
    storage, crc, at = Storage(str(tmp_path)), 0, 0
    with storage.writing("file") as file:
        assert type(file) is (DirectFile if native else CheckedFile)
        while at < size:
            piece = content[at : at + drawn.choice([0, 1, 700, 5 * BLOCK])]
            crc = file.write(piece if drawn.random() < 0.5 else bytearray(piece), crc)
            at += len(piece)
    assert (tmp_path / "file").read_bytes() == content
    assert crc == zlib.crc32(content)
    assert file.stored().bytes == size and file.stored().blocks == by_definition(content)
    check = Check(file.stored())
    check.update(content[: size // 3])
    check.update(content[size // 3 :])
    assert check.passed()
    assert os.listdir(tmp_path) == ["file"]


def test_refused_direct_write_falls_back_to_the_page_cache(tmp_path, monkeypatch):
    """As of a file system that wants memory in larger pages: none takes an odd address."""
    odd = memoryview(mmap.mmap(-1, 2 * BLOCK))[1 : BLOCK + 1]
    monkeypatch.setattr(checksummed_file, "_buffers", [odd])
    content = os.urandom(2 * BLOCK + 5)
    with Storage(str(tmp_path)).writing("file") as file:
        file.write(content)
    assert (tmp_path / "file").read_bytes() == content
    assert checksummed_file._buffers == [odd], "it is there for the next file"


def test_disk_error_is_raised_and_leaves_no_file(tmp_path):
    with raises(OSError), Storage(str(tmp_path)).writing("file") as file:
        assert isinstance(file, DirectFile)
        file._file.fd = -1
        file.write(bytes(BLOCK))
    assert os.listdir(tmp_path) == []


PLAIN = [
    torch.arange(5.0),
    torch.tensor(3.0),
    torch.arange(63, dtype=torch.uint8),
    torch.randn(70, 100).t(),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(300, dtype=torch.complex64),
    torch.ones(3, dtype=torch.bool),
    torch.randn(1000).to(torch.float8_e5m2),
    torch.randn(10)[2:5],
]
ODD = [  # with bytes of others in between, or none, or more to say than its bytes
    torch.randn(4).expand(3, 4),
    torch.randn(6)[::2],
    torch.empty(0),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.nn.Parameter(torch.randn(3)),
    torch.ones(1).to_sparse(),
    *without_warnings(
        lambda: [
            torch.quantize_per_tensor(torch.randn(40), 0.1, 0, torch.qint8),
            torch.eye(3).to_sparse_csr(),
        ]
    ),
]


@pytest.mark.filterwarnings("ignore:.*quantized", "ignore:TypedStorage", "ignore:Sparse")
@pytest.mark.parametrize("tensor", PLAIN + ODD, ids=lambda each: f"{each.dtype} {[*each.shape]}")
def test_tensor_file_has_the_same_content_as_one_of_torch(tensor, monkeypatch):
    save = torch.save
    by_torch = create_autospec(save, side_effect=save)
    monkeypatch.setattr(torch, "save", by_torch)
    found, reference = io.BytesIO(), io.BytesIO()
    file = CheckedFile(found, nobody_minds)
    for _ in range(2):
        found.seek(0)
        tensor_file.write(tensor, file)
        file.complete()
    save(tensor.clone(), reference)
    plain = any(tensor is each for each in PLAIN)
    times = by_torch.call_count
    assert times <= 1 if plain else times == 2, "what is around its bytes is remembered"
    zips = [zipfile.ZipFile(each) for each in (found, reference)]
    assert zips[0].testzip() is None
    assert zips[0].namelist() == zips[1].namelist()
    for name in zips[0].namelist():
        if not name.endswith("serialization_id"):
            assert zips[0].read(name) == zips[1].read(name)
            assert zips[0].getinfo(name).header_offset == zips[1].getinfo(name).header_offset
    found.seek(0)
    back = torch.load(found, weights_only=True)
    assert back.dtype == tensor.dtype and back.shape == tensor.shape


@pytest.fixture
def another_torch(monkeypatch):
    """It writes in another way than today's."""
    monkeypatch.setattr(tensor_file, "_MARK", b"another")
    tensor_file._frame.cache_clear()
    yield
    tensor_file._frame.cache_clear()


@pytest.mark.usefixtures("another_torch")
def test_tensor_is_saved_by_torch_when_its_format_is_unknown(tmp_path):
    with Storage(str(tmp_path)).writing("file") as file:
        tensor_file.write(torch.arange(5e4), file)
    assert torch.equal(torch.load(tmp_path / "file", weights_only=True), torch.arange(5e4))
    check = Check(file.stored())
    check.update((tmp_path / "file").read_bytes())
    assert check.passed()


@pytest.mark.usefixtures("another_torch")
def test_error_of_the_liveness_check_is_raised_during_a_write():
    in_vain = create_autospec(nobody_minds, side_effect=TimeoutError("in vain"))
    with raises(TimeoutError):
        tensor_file.write(torch.arange(5e4), CheckedFile(io.BytesIO(), in_vain))
    in_vain.assert_called_once()


def test_tensor_that_torch_cannot_allocate_empty_is_saved_by_torch(monkeypatch):
    monkeypatch.setattr(
        torch,
        "empty_strided",
        create_autospec(torch.empty_strided, side_effect=NotImplementedError),
    )
    tensor_file._frame.cache_clear()
    found = io.BytesIO()
    file = CheckedFile(found, nobody_minds)
    tensor_file.write(torch.arange(5.0), file)
    file.complete()
    tensor_file._frame.cache_clear()
    found.seek(0)
    assert torch.equal(torch.load(found, weights_only=True), torch.arange(5.0))


def test_block_size_and_fields_match_the_header():
    header = (ROOT / "native/file.h").read_text()
    block = re.search(r"kElasticBlock = (\d+) << (\d+)", header)
    assert block is not None and int(block[1]) << int(block[2]) == BLOCK
    body = re.search(r"struct elastic_file {(.*?)};", header, re.DOTALL)
    assert body is not None
    names = re.findall(r"(\w+);", body[1])
    assert names == [name for name, _ in checksummed_file._NativeFile._fields_]


def test_swapped_blocks_change_the_checksum():
    content = os.urandom(2 * BLOCK)
    sums = BlockSums()
    sums.update(content[BLOCK:] + content[:BLOCK])
    assert sums.hexdigest() != by_definition(content)
