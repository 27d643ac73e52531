"""Who may import whom: the part that decides stays pure, the driver stays free of torch, importing starts nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = [
    "elastic/protocol.py",
    "elastic/wire.py",
    "elastic/errors.py",
    "elastic/horovod_errors.py",
    "elastic/recovery.py",
    "elastic/buckets.py",
    "elastic/requests.py",
    "elastic/coordinator.py",
    "elastic/standing_orders.py",
    "elastic/one_set.py",
    "elastic/offers.py",
    "elastic/fusion.py",
    "elastic/plans.py",
    "elastic/set_table.py",
    "elastic/started_by.py",
    "elastic/nccl_settings.py",
    "elastic/collectives/regions.py",
    "elastic/collectives/topology.py",
    "elastic/collectives/hierarchy_plan.py",
    "driver/membership.py",
    "driver/worlds.py",
    "driver/failures.py",
    "driver/frozen.py",
    "driver/hangs.py",
    "driver/reconnect.py",
    "driver/stuck.py",
    "driver/progress.py",
    "driver/stragglers.py",
    "driver/leases.py",
    "driver/reach.py",
    "driver/agency.py",
    "driver/agent_protocol.py",
    "driver/workforce.py",
    "driver/slots.py",
    "driver/composition.py",
    "driver/change.py",
    "driver/gathering.py",
    "driver/patience.py",
    "driver/blame.py",
    "driver/world.py",
    "driver/orders.py",
    "driver/roster.py",
    "driver/ending.py",
    "driver/placement.py",
    "driver/cooldown.py",
    "driver/versions.py",
    "driver/settings.py",
    "driver/events.py",
    "driver/etcd_contact.py",
    "driver/entries.py",
    "driver/chapters.py",
    "driver/records.py",
    "driver/snapshot.py",
    "driver/timeline.py",
    "driver/launch/start_failures.py",
    "driver/networks.py",
    "driver/ray_claims.py",
    "driver/agreement.py",
    "elastic/trace_format.py",
    "elastic/trace_sending.py",
    "elastic/clock_offset.py",
    "elastic/report_values.py",
    "elastic/report_queue.py",
    "driver/report_ledger.py",
    "chaos/hosts/links.py",
    "chaos/hosts/steps.py",
    "chaos/hosts/report.py",
    "chaos/hosts/adoption.py",
]
IMPURE = {"time", "random", "socket", "threading", "asyncio", "os", "logging", "torch"}
OPTIONAL = {"aetcd", "ray"}  # extras; a driver module that needs one imports it lazily


def sources(*folders: str) -> list[Path]:
    """Every Python file under the folders. The links elastic/driver and elastic/chaos aren't followed."""
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported module's full name, wherever it stands, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def dotted(file: Path) -> str:
    """The name a file is imported by: driver/ and chaos/ live in ``elastic``."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] in ("elastic", "horovod") else ("elastic", *parts)
    return ".".join(parts).removesuffix(".__init__")


def bare(program: str) -> None:
    """Runs a program in a process of its own, where nothing has been imported yet."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PURE)
def test_what_decides_names_no_clock_socket_thread_or_torch(path):
    tree = ast.parse((ROOT / path).read_text())
    named = {name.split(".")[0] for name, _ in imported(tree)}
    named |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not named & IMPURE


@pytest.mark.parametrize("path", PURE)
def test_what_decides_imports_without_torch_or_a_socket(path):
    bare(
        f"import {dotted(ROOT / path)}, sys\n"
        "loaded = {'torch', 'asyncio', 'socket'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )


def test_the_driver_never_imports_torch():
    modules = [dotted(file) for file in sources("driver") if file.name != "__main__.py"]
    bare(
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    try: importlib.import_module(name)\n"
        f"    except ModuleNotFoundError as e: assert e.name.split('.')[0] in {OPTIONAL}, e\n"
        "    assert 'torch' not in sys.modules, name"
    )


def test_importing_elastic_starts_nothing():
    bare(
        "import elastic, sys, threading\n"
        "loaded = {'torch', 'asyncio', 'elastic.driver'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "assert threading.active_count() == 1"
    )


def test_the_worker_side_never_imports_the_driver():
    # But for the public names that start jobs, and are the driver; their modules are loaded when they're first used.
    starting = {ROOT / "elastic/launching.py", ROOT / "elastic/ray/driver_actor.py"}
    starting.add(ROOT / "elastic/ray/following.py")
    starting |= {ROOT / "horovod/runner/launch.py", ROOT / "horovod/runner/elastic/discovery.py"}
    for file in set(sources("elastic", "horovod")) - starting:
        for name, line in imported(ast.parse(file.read_text())):
            assert not within(name, "elastic.driver"), f"{file}:{line} imports {name}"


def test_the_driver_imports_only_what_both_sides_share():
    shared = {"elastic.protocol", "elastic.errors", "elastic.recovery", "elastic.driver"}
    shared |= {"elastic.wire", "elastic.tls", "elastic.trace_format", "elastic.trace_file"}
    shared |= {"elastic.report_values", "elastic.nccl_settings"}
    for file in sources("driver"):
        for name, line in imported(ast.parse(file.read_text())):
            if within(name, "elastic") and name != "elastic":
                assert any(within(name, each) for each in shared), f"{file}:{line} imports {name}"


def test_nobody_imports_driver_by_its_folder():
    for file in sources("elastic", "driver", "chaos", "horovod", "examples", "benchmarks", "tests"):
        for name, line in imported(ast.parse(file.read_text())):
            assert name.split(".")[0] not in {"driver", "chaos"}, f"{file}:{line} imports {name}"
