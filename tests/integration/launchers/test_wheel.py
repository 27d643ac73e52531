"""The wheel, in an environment without this checkout: two workers train, and the commands exist."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from elastic.collectives.shared_memory import native_library
from elastic.version import __version__
from harness import wording
from harness.program import output_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
TRAIN = """
import torch
import elastic

elastic.init()
total = elastic.allreduce(torch.ones(3), op=elastic.Sum, name="ones")
assert total.tolist() == [2.0, 2.0, 2.0]
print("from", elastic.__file__, "version", elastic.__version__)
"""


def run(words: list[str | Path], folder: Path, **env: str) -> str:
    return output_of(*words, cwd=folder, env=os.environ | env, timeout=500)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT]
    run([sys.executable, "-m", "pip", *build], folder)
    found: Path
    [found] = folder.glob("*.whl")
    return found


def test_wheel_has_the_version_in_its_name_and_contains_page_files_and_chaos_tools(wheel):
    assert wheel.name.startswith(f"hvd_elastic-{__version__}-py3-none-")
    held = set(zipfile.ZipFile(wheel).namelist())
    for name in ("page.html",):
        assert f"elastic/driver/monitoring/dashboard/{name}" in held
    for name in ("charts.js", "charts.css"):
        assert f"elastic/driver/monitoring/{name}" in held
    for name in ("report.html", "report.js"):
        assert f"elastic/driver/monitoring/explain/{name}" in held
    assert not [name for name in held if name.startswith(("driver/", "chaos/", "tests/"))]
    # Tools for jobs of users only; stress tests of hvd-elastic itself are in tests/stress.
    parts = [name.split("/") for name in held if name.startswith("elastic/chaos/")]
    rooms = {each[2] for each in parts if len(each) > 3}
    assert rooms == {"exact", "harness", "inject", "invariants", "simulator"}


def test_wheel_trains_in_a_separate_environment(wheel, tmp_path):
    trains(wheel, tmp_path)


def trains(wheel: Path, tmp_path: Path) -> None:
    """Its requirements come from this environment: torch alone would be a download of minutes."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    target = Path(
        run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path
        ).strip()
    )
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run([*pip, "--no-deps", "--no-index", wheel], tmp_path)
    others = [each for each in sys.path if each.endswith("site-packages")]
    # Behind its own, and without the .pth files of an editable install.
    (target / "others.pth").write_text("\n".join(others) + "\n")
    (tmp_path / "train.py").write_text(TRAIN)
    elasticrun = tmp_path / "env" / "bin" / "elasticrun"
    told = run(
        [elasticrun, "-np", "2", "--report", "report.html", python, "train.py"],
        tmp_path,
        PYTHONPATH="",
        OMP_NUM_THREADS="1",
    )
    assert told.count(f"from {target}/elastic/__init__.py version {__version__}") == 2
    assert wording.JOB_ENDED_WELL in (tmp_path / "report.html").read_text()
    assert __version__ in run([tmp_path / "env" / "bin" / "horovodrun", "--version"], tmp_path)


MACHINES = {"x86_64": 62, "aarch64": 183}  # as an ELF file names them


@pytest.fixture(scope="module")
def released() -> dict[str, Path]:
    """Return the wheels of `make wheels`, by architecture."""
    for package in ("ziglang", "auditwheel"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}; run: make wheels")
    run(["make", "wheels", f"VENV={sys.prefix}"], ROOT)
    found = {m: [*(ROOT / "dist").glob(f"*-py3-none-manylinux*_{m}.whl")] for m in MACHINES}
    assert {m: len(wheels) for m, wheels in found.items()} == dict.fromkeys(MACHINES, 1)
    return {m: wheels[0] for m, wheels in found.items()}


@pytest.mark.parametrize("machine", MACHINES)
def test_released_wheel_requires_at_most_glibc_2_28_and_no_libstdcxx(released, tmp_path, machine):
    with zipfile.ZipFile(released[machine]) as archive:
        held = archive.namelist()
        [library] = [name for name in held if name.endswith(".so")]
        data = archive.read(library)
    assert library == "elastic/collectives/shared_memory/libelastic_native.so"
    assert "elastic/driver/monitoring/dashboard/page.html" in held
    assert data[:4] == b"\x7fELF" and int.from_bytes(data[18:20], "little") == MACHINES[machine]
    versions = {tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)}
    assert versions and max(versions) <= (2, 28)
    assert b"GLIBCXX_" not in data and b"libstdc++" not in data
    assert hashlib.sha256(data[:-64]).hexdigest().encode() == data[-64:]
    if machine == platform.machine():
        (tmp_path / "library.so").write_bytes(data)
        loaded, why = native_library.read(tmp_path / "library.so")
        assert loaded is not None, why


def test_released_wheel_for_this_machine_trains(released, tmp_path):
    trains(released[platform.machine()], tmp_path)
