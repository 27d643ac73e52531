"""Builds the fake CUDA: ``python tests/harness/fake_cuda/build.py``. A second call builds only missing parts.

Downloads the CUDA build of torch and the headers of the CUDA runtime and of NCCL that this torch was built with, 735 MB
in all, none of NVIDIA's libraries. They are replaced by our own runtime and NCCL, and by empty libraries that report
each call.
"""

from __future__ import annotations

import compileall
import concurrent.futures
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from harness.fake_cuda.start import BUILT, FOLDER, HERE, TORCH, sources

# Three equals signs: the build of exactly this name, which has CUDA, not one marked "+cpu".
WHEEL = f"torch==={TORCH}"
SITE, INCLUDE, LIB, OBJECTS = (FOLDER / name for name in ("site", "include", "lib", "objects"))

CUDART, NCCL, CUDA = "libcudart.so.13", "libnccl.so.2", "libcuda.so.1"
OURS = {
    CUDART: ("faults", "devices", "streams", "memory", "launches"),
    NCCL: ("nccl", "shared"),
    CUDA: ("driver",),
}
OPERATORS = "libfakeoperators.so"
# Prefixes of the libraries' symbols; the first match counts.
PREFIXES = {
    "cublasLt": "libcublasLt.so.13",
    "cublas": "libcublas.so.13",
    "cudnn": "libcudnn.so.9",
    "cufft": "libcufft.so.12",
    "curand": "libcurand.so.10",
    "cusparseLt": "libcusparseLt.so.0",
    "cusparse": "libcusparse.so.12",
    "cusolver": "libcusolver.so.12",
    "cuFile": "libcufile.so.0",
    "nvrtc": "libnvrtc.so.13",
    "nvshmem": "libnvshmem_host.so.3",
    "cupti": "libcupti.so.13",
    "nccl": NCCL,
    "__cuda": CUDART,
    "cuda": CUDART,
    "cu": CUDA,
}


def main() -> None:
    if BUILT.exists() and BUILT.read_text() == sources():
        print(f"built already: {FOLDER}")
        return
    BUILT.unlink(missing_ok=True)  # a folder of hard links shares it with others
    unpack()
    # As pip does. Otherwise, each process compiles its imports for 10 s, and again if Python may not write bytecode.
    compileall.compile_dir(SITE / "torch", quiet=2, workers=2)
    shutil.rmtree(LIB, ignore_errors=True)
    LIB.mkdir()
    OBJECTS.mkdir(exist_ok=True)
    modules = [each for names in OURS.values() for each in names]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(compiled, ["operators", *modules]))
    needed = symbols()
    # Functions that torch calls without using a result.
    major, minor, patch = pinned("nvidia-cudnn-cu13").split(".")[:3]
    version = 10000 * int(major) + 100 * int(minor) + int(patch)
    parts = f"(int[]){{{major}, {minor}, {patch}}}"
    answers = {
        "cudnnGetVersion": f"(void) {{ return {version}; }}",
        "cudnnGetProperty": f"(int which, int *value) {{ *value = ({parts})[which]; return 0; }}",
    }
    for library in [CUDART, *sorted(needed.keys() - {CUDART})]:
        link(library, needed[library], answers)
    run(
        *("g++", "-shared", "-o", LIB / OPERATORS, OBJECTS / "operators.o"),
        *(f"-L{SITE / 'torch' / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"),
        *(f"-L{LIB}", f"-l:{CUDART}"),
    )
    BUILT.write_text(sources())
    print(f"built: {FOLDER}")


def run(*words: str | Path) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


# ---- downloads -------------------------------------------------------------------------------------------------------


def unpack() -> None:
    """Torch into ``site``, where it can be imported from; of NVIDIA's wheels only headers. The wheels are not kept."""
    stamp = FOLDER / "unpacked"
    if stamp.exists() and stamp.read_text().split()[:1] == [WHEEL]:
        return
    for folder in (SITE, INCLUDE):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    with downloaded("--no-deps", WHEEL) as wheels:
        wheels[0].extractall(SITE)
    with downloaded(
        f"cuda-toolkit[cudart,crt]=={pinned('cuda-toolkit')}",
        f"nvidia-nccl-cu13=={pinned('nvidia-nccl-cu13')}",
    ) as wheels:
        for wheel in wheels:
            headers(wheel)
    # torch calls this entry point at the end of its import.
    entry = SITE / "fake_cuda-1.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-cuda\nVersion: 1\n")
    (entry / "entry_points.txt").write_text("[torch.backends]\nfake_cuda = fake_cuda:install\n")
    stamp.write_text(WHEEL)


@contextlib.contextmanager
def downloaded(*words: str) -> Iterator[list[zipfile.ZipFile]]:
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder, contextlib.ExitStack() as opened:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:")
        run(*pip, "--dest", folder, *words)
        yield [opened.enter_context(zipfile.ZipFile(each)) for each in Path(folder).glob("*.whl")]


def pinned(package: str) -> str:
    """Return the version of one of NVIDIA's packages with which this torch was built."""
    metadata = (SITE / f"torch-{TORCH}.dist-info" / "METADATA").read_text()
    found = re.search(rf"^Requires-Dist: {package}(\[.*\])?==([\d.]+)", metadata, re.MULTILINE)
    if not found:
        sys.exit(
            f"torch {TORCH} does not say which {package} it needs: is this a build for CUDA 13?"
        )
    return found[2]


def headers(wheel: zipfile.ZipFile) -> None:
    for name in wheel.namelist():
        _, found, inner = name.partition("/include/")
        if not found or not inner or name.endswith("/"):
            continue
        content = wheel.read(name)
        if inner == "nccl.h":  # of the narrow floats it needs only the names of the dtypes
            content = re.sub(rb"#include <cuda_(fp16|bf16|fp8)\.h>", b"", content)
        path = INCLUDE / inner
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


# ---- builds ----------------------------------------------------------------------------------------------------------


def compiled(module: str) -> None:
    """Only torch's own headers need a newer C++."""
    source, built = HERE / f"{module}.cpp", OBJECTS / f"{module}.o"
    changed = max(path.stat().st_mtime for path in [source, *HERE.glob("*.h")])
    if built.exists() and built.stat().st_mtime > max(
        changed, (FOLDER / "unpacked").stat().st_mtime
    ):
        return
    include = SITE / "torch" / "include"
    system = [INCLUDE]
    if module == "operators":
        system += [include, include / "torch/csrc/api/include"]
    run(
        *("g++", "-c", "-fPIC", "-O1", "-g1", "-Wall", "-Wextra", "-Werror"),
        "-std=c++20" if module == "operators" else "-std=c++17",
        *(word for folder in system for word in ("-isystem", folder)),
        *(source, "-o", built),
    )


def symbols() -> dict[str, dict[str, str]]:
    """Return the symbols that torch's libraries need from NVIDIA's: library, symbol, version."""
    needed: dict[str, dict[str, str]] = {library: {} for library in PREFIXES.values()}
    for library in (SITE / "torch" / "lib").glob("*.so*"):
        for line in run("readelf", "--dyn-syms", "--wide", library).splitlines():
            words = line.split()
            if len(words) < 8 or words[6] != "UND":
                continue
            name, _, version = words[7].partition("@")
            found = next((PREFIXES[each] for each in PREFIXES if name.startswith(each)), None)
            if found:
                needed[found][name] = version.strip("@")
    return needed


def link(library: str, needed: dict[str, str], answers: dict[str, str]) -> None:
    """Link our objects, and for the other symbols functions that report that they are not implemented."""
    objects = [OBJECTS / f"{module}.o" for module in OURS.get(library, ())]
    have = run("nm", "--defined-only", "--format=posix", *objects) if objects else ""
    defined = {line.split()[0] for line in have.splitlines() if line}
    # An error in each of these interfaces; 801: not supported.
    code = 801 if library == CUDART else 1
    lines = ["#include <stdio.h>"]
    for name in sorted(needed.keys() - defined):
        said = f'fputs("[fake cuda] {name} was called, which is not made up\\n", stderr); return {code};'
        lines.append(f"long {name}{answers.get(name, f'(void) {{ {said} }}')}")
    source = OBJECTS / f"{library}.c"
    source.write_text("\n".join(lines) + "\n")
    run("gcc", "-c", "-fPIC", "-w", source, "-o", source.with_suffix(".o"))
    versions = {version for version in needed.values() if version}
    assert len(versions) <= 1, f"{library} has several versions: {versions}"
    script = OBJECTS / f"{library}.map"
    script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
    run(
        *("g++", "-shared", "-pthread", "-o", LIB / library, f"-Wl,-soname,{library}"),
        *([f"-Wl,--version-script={script}"] if versions else []),
        *(*objects, source.with_suffix(".o")),
        *([f"-L{LIB}", f"-l:{CUDART}"] if objects and library != CUDART else []),
    )


if __name__ == "__main__":
    main()
