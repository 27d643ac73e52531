"""The C++ library is loaded completely or not at all, and the reason is logged."""

from __future__ import annotations

import ctypes
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from elastic.collectives import dtypes_and_ops
from elastic.collectives.interface import Op
from elastic.collectives.shared_memory import native_library
from harness.golden import raises, recorded
from harness.program import output_of, stdout_of

ROOT = Path(__file__).parents[5]
needed = pytest.mark.skipif(native_library.load() is None, reason=native_library.missing())
SIZES = {  # sizes of C types by these names
    "void": 0,
    "int": 4,
    "int32_t": 4,
    "int64_t": 8,
    "uint64_t": 8,
    "size_t": 8,
    "double": 8,
}


def read_elsewhere(file: Path) -> str:
    """Check a file in a separate process, because a bad one could end it."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom elastic.collectives.shared_memory import native_library as library\n"  # noqa: E501
        "found, why = library.read(Path(sys.argv[1]))\n"
        "print(why if found is None else found.elastic_kernels_name())"
    )
    return stdout_of(sys.executable, "-c", program, file).strip()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    if native_library.load() is None:
        pytest.skip(native_library.missing())
    return Path(shutil.copy(native_library.FILE, tmp_path / "copy.so"))


COMPILERS = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]


# Otherwise, an error in native/ would skip most tests of shared memory.
@pytest.mark.skipif(not COMPILERS, reason="there is no C++ compiler")
def test_library_is_built_when_a_compiler_is_available():
    assert native_library.load() is not None, native_library.missing()


@needed
def test_existing_library_is_loaded_once():
    assert native_library.load() is native_library.load()
    assert native_library.missing() == ""


def test_complete_copy_of_the_library_is_loaded(copy):
    assert read_elsewhere(copy) in {str(b) for b in (b"avx512", b"avx2", b"neon", b"baseline")}


def test_missing_library_is_reported_with_the_build_command(tmp_path):
    found, why = native_library.read(tmp_path / "none.so")
    assert found is None
    assert "g++" in why and "\n" not in why
    recorded("messages", why)


def test_unreadable_library_is_reported_without_an_error(tmp_path):
    found, why = native_library.read(tmp_path)
    assert found is None
    recorded("messages", why)


def damaged_copies():
    """Damage of a full disk, a lost page or an interrupted copy."""

    def cut(content: bytes) -> bytes:
        return content[: len(content) // 2]

    def first_page(content: bytes) -> bytes:
        return content[:4096]

    def zeros(content: bytes) -> bytes:
        return bytes(len(content))

    def a_page_of_zeros(content: bytes) -> bytes:
        return content[:8192] + bytes(4096) + content[12288:]

    def one_bit(content: bytes) -> bytes:
        return content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]

    def no_checksum(content: bytes) -> bytes:
        return content[:-64]

    def empty(content: bytes) -> bytes:
        return b""

    return [cut, first_page, zeros, a_page_of_zeros, one_bit, no_checksum, empty]


@pytest.mark.slow
@pytest.mark.parametrize("damage", damaged_copies(), ids=lambda damage: damage.__name__)
def test_corrupted_library_is_reported_without_a_crash(copy, damage):
    copy.write_bytes(damage(copy.read_bytes()))
    said = read_elsewhere(copy)
    assert str(copy) in said
    recorded("log", said)


def test_other_file_under_the_name_of_the_library_is_not_loaded(tmp_path):
    other = Path(shutil.copy(sys.executable, tmp_path / "other.so"))
    recorded("messages", read_elsewhere(other))


def test_a_library_of_another_version_is_refused(copy, monkeypatch):
    monkeypatch.setattr(native_library, "ABI", native_library.ABI + 1)
    found, why = native_library.read(copy)
    assert found is None
    assert f"ABI is {native_library.ABI - 1}, expected {native_library.ABI}" in why
    recorded("messages", why)


def test_library_without_a_declared_function_is_refused(copy, monkeypatch):
    more = {**native_library.FUNCTIONS, "elastic_of_tomorrow": (None, ())}
    monkeypatch.setattr(native_library, "FUNCTIONS", more)
    found, why = native_library.read(copy)
    assert found is None
    assert "elastic_of_tomorrow" in why
    recorded("messages", why)


def test_loading_needs_no_torch():
    program = "import sys\nfrom elastic.collectives.shared_memory import native_library as library\nlibrary.load()\nassert 'torch' not in sys.modules"  # noqa: E501
    stdout_of(sys.executable, "-c", program)


# ---- both sides agree ------------------------------------------------------------------------------------------------


def source(name: str) -> str:
    """A file of native/ without its comments."""
    return re.sub(r"//.*", "", (ROOT / "native" / name).read_text())


def size_in_c(declared: str) -> int:
    words = declared.replace("const", "").split()
    return 8 if "*" in declared else SIZES[words[0]]


def size_here(declared: type | None) -> int:
    return 0 if declared is None else ctypes.sizeof(declared)


def test_every_function_is_declared_as_in_the_headers():
    text = "".join(map(source, ("abi.cc", "copy.h", "file.h", "kernels.h", "lent.h", "group.h")))
    declared = {}
    for returns, name, takes in re.findall(r"([\w ]+[ *]+)(elastic_\w+)\(([^)]*)\)", text):
        arguments = [] if takes.strip() == "void" else takes.split(",")
        returns = returns.replace('extern "C"', "").strip().removeprefix("C ")
        declared[name] = [size_in_c(returns), *map(size_in_c, arguments)]
    known = {
        name: [size_here(returns), *map(size_here, takes)]
        for name, (returns, takes) in native_library.FUNCTIONS.items()
    }
    assert declared == known


def test_constants_match_the_headers():
    text = source("kernels.h")
    for enum, names in (("DType", dtypes_and_ops.DType), ("Op", dtypes_and_ops.OPS)):
        body = re.search(rf"enum class {enum} : int32_t {{(.*?)}};", text, re.DOTALL)
        assert body is not None
        declared = {
            name.upper(): int(number) for name, number in re.findall(r"k(\w+) = (\d+)", body[1])
        }
        assert declared == {each.name: each.value for each in names}
    assert f"kMaxRanks = {native_library.MAX_RANKS};" in text
    assert f"elastic_abi(void) {{ return {native_library.ABI}; }}" in source("abi.cc")


def test_the_options_have_the_fields_of_the_header():
    body = re.search(r"typedef struct {(.*?)} elastic_options;", source("group.h"), re.DOTALL)
    assert body is not None
    declared = [
        (name, size_in_c(kind)) for kind, name in re.findall(r"([\w *]+[ *])(\w+);", body[1])
    ]
    known = [(name, size_here(kind)) for name, kind in native_library.NativeOptions._fields_]
    assert declared == known


@pytest.mark.parametrize("dtype", list(dtypes_and_ops.DTYPES), ids=str)
def test_dtypes_are_as_wide_as_their_numbers_state(dtype):
    name = str(dtype).removeprefix("torch.").upper()
    assert dtypes_and_ops.DTYPES[dtype] is dtypes_and_ops.DType[name]
    dtypes_and_ops.check(torch.zeros(1, dtype=dtype), Op.SUM)


def test_unsupported_kinds_are_refused_with_the_same_message_everywhere():
    with raises(ValueError):
        dtypes_and_ops.check(torch.zeros(1), Op.AVERAGE)
    for dtype in (torch.bool, torch.complex64):
        with raises(TypeError, dtype):
            dtypes_and_ops.check(torch.zeros(1, dtype=dtype), Op.SUM)


@pytest.mark.nightly
def test_a_group_that_outlives_the_modules_is_silent():
    """The last group of a job that has ended normally: its finalizer runs after ``os`` and the rest are gone."""
    program = (
        "import ctypes, os\nfrom elastic.collectives.shared_memory import process_group as shared\n"
        "kept = object.__new__(shared._Native)\n"
        "kept.handle, kept._closed, kept._forgotten, kept._pid = 1, True, False, os.getpid()\n"
        # Its module is still referenced, and loses its names one by one: ``os`` before this one.
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(shared))\n"
        "shared.kept = kept\ndel kept\n"
    )
    assert output_of(sys.executable, "-c", program) == ""
