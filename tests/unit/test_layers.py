"""Allowed imports: the deciding part stays pure, the driver stays free of torch, imports start nothing."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path

import pytest

from harness.processes import path_of_tests
from harness.program import output_of
from harness.sources import INSTALLED, ROOT, facts, sources

# From the ground up: a room imports from itself and from rooms above its line, never from one on its line or below.
# Every folder is named, so no two folders import each other. The files of the package's own folder are rooms, too.
ROOMS = """
    elastic.errors elastic.conflicting_packages elastic.pickling elastic.version
    elastic.horovod_errors
    elastic.protocol elastic.protocol.uncaught
    elastic.protocol.uncaught.at_start
    elastic.rpc
    elastic.rendezvous
    elastic.failpoints
    elastic.health
    elastic.collectives
    elastic.collectives.algorithms elastic.collectives.gloo elastic.collectives.shared_memory
    elastic.collectives.hierarchical
    elastic.collectives.groups
    elastic.context
    elastic.monitoring
    elastic.negotiation
    elastic.runtime.failures
    elastic.runtime
    elastic.api
    elastic.data
    elastic.exact
    elastic.sharding
    elastic.torch_backend
    elastic.diloco
    elastic.state.snapshots
    elastic.state.handlers
    elastic.state.fully_sharded
    elastic.state
    elastic.optimizer.gradients
    elastic.optimizer.shard_sums
    elastic.optimizer
    elastic.checkpoints.files
    elastic.checkpoints
    elastic.torch_autoload
    elastic.script_checks
    elastic.run_loop
    elastic.tensorflow.graphs
    elastic.tensorflow
    elastic.jax
    elastic.keras
    elastic.mxnet
    elastic.integrations
    elastic.integrations.lightning
    elastic.driver
    elastic.driver.membership.records
    elastic.driver.membership.scheduling
    elastic.driver.membership.worlds
    elastic.driver.membership.failure_detection
    elastic.driver.membership
    elastic.driver.network
    elastic.driver.journal
    elastic.driver.monitoring
    elastic.driver.monitoring.dashboard elastic.driver.monitoring.explain
    elastic.driver.processes
    elastic.driver.preemption
    elastic.driver.launch
    elastic.driver.etcd
    elastic.driver.discovery
    elastic.driver.discovery.kubernetes
    elastic.driver.ray.node
    elastic.driver.ray elastic.driver.spark
    elastic.driver.agents
    elastic.driver.job.operator_api
    elastic.driver.job
    elastic.driver.commandline.options
    elastic.driver.commandline.kubernetes elastic.driver.commandline.offline
    elastic.driver.commandline.running_jobs elastic.driver.commandline.setup
    elastic.driver.commandline
    elastic.launcher
    elastic.ray
    elastic.spark
    elastic
    elastic.chaos.invariants
    elastic.chaos.simulator
    elastic.chaos.harness
    elastic.chaos.inject
    elastic.chaos.exact
    elastic.chaos
    stress.hosts.workers
    stress.soak
    stress.hosts stress.fault_matrix stress.fuzz stress.load stress.reductions
    stress
"""
LEVEL = {room: level for level, line in enumerate(ROOMS.split("\n")) for room in line.split()}
ORDERED = ("elastic", "driver", "chaos", "tests/stress")
PURE_ROOMS = ["driver/membership", "chaos/invariants"]  # whole, and what is in them
# Elsewhere a file is pure that says so of itself: "Pure." or "Pure: no clock, no network."
SAYS_PURE = re.compile(r"\bPure[.:;]|; pure\.|\bDeterministic: no\s")
IMPURE = {
    "time",
    "random",
    "socket",
    "select",
    "threading",
    "asyncio",
    "os",
    "subprocess",
    "tempfile",
    "logging",
    "torch",
}
# Extras; a driver module that needs one imports it lazily.
OPTIONAL = {"aetcd", "kubernetes", "pyspark", "ray"}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def dotted(file: Path) -> str:
    """The name a file is imported by: driver/ and chaos/ live in ``elastic``, tests/ is on the path."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "tests":
        parts = parts[1:]
    elif parts[0] not in ("elastic", "horovod"):
        parts = ("elastic", *parts)
    return ".".join(parts).removesuffix(".__init__")


def pure() -> list[Path]:
    said = sources(*ORDERED)
    said = [file for file in said if SAYS_PURE.search(facts(file).docstring)]
    return sorted({*said, *sources(*PURE_ROOMS)})


def bare(program: str) -> None:
    """Runs a program in a process of its own, where nothing has been imported yet."""
    output_of(sys.executable, "-c", program, cwd=ROOT, env=os.environ | path_of_tests())


def test_pure_files_name_no_clock_socket_thread_or_torch():
    assert len(pure()) > 140, "files that say so are found"
    for file in pure():
        found = facts(file)
        named = found.names | {name.split(".")[0] for name, _ in found.imported}
        seeded = any(within(dotted(file), each) for each in ("elastic.chaos", "stress"))
        drawn = {"random"} if seeded else set()
        assert not named & (IMPURE - drawn), file


def test_pure_files_import_neither_torch_nor_sockets():
    modules = [dotted(file) for file in pure()]
    bare(
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        "    loaded = {'torch', 'asyncio', 'socket'} & set(sys.modules)\n"
        "    assert not loaded, (name, loaded)"
    )


@pytest.mark.slow
def test_the_driver_never_imports_torch():
    modules = [dotted(file) for file in sources("driver") if file.name != "__main__.py"]
    bare(
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    try: importlib.import_module(name)\n"
        f"    except ModuleNotFoundError as e: assert e.name.split('.')[0] in {OPTIONAL}, e\n"
        "    assert 'torch' not in sys.modules, name"
    )


def test_importing_elastic_starts_no_thread_and_no_heavy_import():
    bare(
        "import elastic, sys, threading\n"
        "loaded = {'torch', 'asyncio', 'elastic.driver'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "assert threading.active_count() == 1"
    )


def test_the_worker_side_never_imports_the_driver():
    # But for the public names that start jobs, and are the driver; their modules are loaded when they're first used.
    ray = ("arguments", "driver_actor", "driver_client", "executor")
    starting = {ROOT / f"elastic/ray/{name}.py" for name in ray}
    starting.add(ROOT / "elastic/spark/spark_run.py")
    starting.add(ROOT / "elastic/launcher/launch_function.py")
    starting.add(ROOT / "elastic/launcher/running_job.py")
    starting |= {ROOT / "horovod/runner/launch.py", ROOT / "horovod/runner/elastic/discovery.py"}
    for file in set(sources("elastic", "horovod")) - starting:
        for name, line in facts(file).imported:
            assert not within(name, "elastic.driver"), f"{file}:{line} imports {name}"


def test_driver_imports_only_shared_packages():
    shared = {
        "elastic.driver",
        "elastic.errors",
        "elastic.conflicting_packages",
        "elastic.version",
        "elastic.health",
        "elastic.protocol",
        "elastic.rpc",
        "elastic.rendezvous.nccl_settings",
        "elastic.rendezvous.rank_variables",
        "elastic.runtime.recovery",
        "elastic.checkpoints.catalog",
        "elastic.checkpoints.export_format",
        "elastic.checkpoints.exporting",  # only where `elasticrun checkpoints export` runs
        "elastic.checkpoints.finished_training",
        "elastic.checkpoints.files.manifest",
        "elastic.checkpoints.options",
        "elastic.checkpoints.files",
    }
    for name, others in imports().items():
        for other in others if within(name, "elastic.driver") else ():
            if other == "elastic.checkpoints":
                continue  # its __init__ is empty
            assert any(within(other, each) for each in shared), f"{name} imports {other}"


def test_no_file_imports_driver_by_its_folder():
    by_folder = re.compile(
        r"^\s*(?:from|import) (?:driver|chaos)\b(?=.* import |\.|,|$)", re.MULTILINE
    )
    assert by_folder.search("import driver.x") and by_folder.search("  from chaos import y")
    for file in sources(*INSTALLED, "examples", "benchmarks", "tests"):
        assert not (found := by_folder.search(file.read_text())), f"{file}: {found}"


def test_example_and_benchmark_file_names_are_unique():
    """mypy finds examples and benchmarks by the same names as Python does: two of one name stop it."""
    names = [file.stem for file in sources("examples", "benchmarks") if "horovod" not in file.parts]
    assert [name for name in names if names.count(name) > 1 and name != "__init__"] == []


def test_product_imports_no_test():
    """What is installed has none: a file that is needed belongs to the product."""
    folders = {folder.name for folder in (ROOT / "tests").iterdir() if folder.is_dir()}
    for file in sources(*INSTALLED):
        assert not re.search(r'"tests"|\btests/', file.read_text()), file
        for name, line in facts(file).imported:
            assert name.partition(".")[0] not in {"tests", *folders}, (
                f"{file}:{line} imports {name}"
            )


@functools.cache
def imports() -> dict[str, set[str]]:
    """Every file of the product and of its stress tests, and the files of them that it imports, wherever and for
    whatever.

    By full names: the linter refuses relative ones.
    """
    files = {dotted(file): file for file in sources(*ORDERED)}
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        heard = {each for each, _ in facts(file).imported}
        # `from a import b` names a.b: a itself is meant only where there is no such file.
        whole = {each for each in heard if each in files}
        found[name] = {
            each
            for each in whole
            if each != name and not any(more.startswith(each + ".") for more in whole)
        }
    return found


def room(name: str) -> str:
    return name if name in LEVEL else name.rpartition(".")[0]


def test_every_folder_has_a_level():
    for top in ORDERED:
        for file in sources(top):
            if file.name != "__init__.py":
                assert room(dotted(file)) in LEVEL, f"{file} stands in no line of ROOMS"


def test_package_init_files_are_empty_except_for_public_packages():
    """Rooms that are packages for users give names, some at their first use; failpoints is a room of one door."""
    doors = "elastic elastic.data elastic.failpoints elastic.integrations.lightning elastic.jax"
    doors += " elastic.ray elastic.spark elastic.state elastic.torch_backend"
    files = sources("elastic", "driver", "chaos")
    full = {dotted(file) for file in files if file.name == "__init__.py" and file.read_text()}
    assert full == set(doors.split())


def test_no_package_imports_from_a_higher_level():
    up = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if room(other) != room(name) and LEVEL[room(other)] >= LEVEL[room(name)]
    ]
    assert not up, "\n".join(up)


def test_no_files_import_each_other_in_cycles():
    edges = imports()

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        todo = [start]
        while todo:
            for each in edges[todo.pop()] - found:
                found.add(each)
                todo.append(each)
        return found

    below = {name: reached(name) for name in edges}
    circles = {
        tuple(sorted(other for other in others if name in below[other]))
        for name, others in below.items()
        if name in others
    }
    assert not circles


@pytest.mark.parametrize("side", ORDERED)
def test_class_names_are_unique_within_a_side(side):
    places: dict[str, list[str]] = {}
    for file in sources(side):
        for name, line, _ in facts(file).classes:
            places.setdefault(name, []).append(f"{file}:{line}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_unit_tests_mirror_the_folders_of_the_product():
    tests = ROOT / "tests" / "unit"
    for room in INSTALLED:
        for file in sources(f"tests/unit/{room}"):
            folder = file.parent.relative_to(tests)
            assert (ROOT / folder).is_dir(), f"{file}: there is no {folder}"
