"""Distribution of tests over the processes of pytest-xdist (``-n 2``), and rescheduling of the tests of a dead process.

With ``--filler``, the last process (``-n 3``: of two and one more) runs the light tests at low priority, because tests
of real jobs often wait for a lease, an import or a signal and leave the processors idle. Light tests only compute: they
start no jobs, or use worlds that exist for a whole module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

# Tests that start a job each, and share nothing.
SPREAD = {
    "test_endings",
    "test_failure_phases",
    "test_frozen",
    "test_healthy",
    "test_horovod_exceptions",
    "test_horovod_scripts",
    "test_join",
    "test_launch",
    "test_other_launchers",
    "test_progress",
    "test_recovery",
    "test_stuck",
    "test_traps",
}
# The longest tests start first: otherwise, one process is busy with them when the other has finished.
LONGEST = (
    "cluster",
    "two Ray nodes",
    "Ray with Redis",
    "tests/integration/ray/",
    "frameworks",
    "tests/integration/hosts/test_hosts.py",
    "tests/integration/jobs/test_ddp.py",
    "tests/integration/jobs/test_exact.py",
    "tests/integration/jobs/test_checkpoints.py",
    "tests/integration/jobs/test_matrix.py",
    "tests/integration/jobs/test_stalls.py",
    "tests/integration/jobs/test_hostile.py",
    "sharded jobs",
)
# Modules that share a Ray cluster, which ends at the first other test: tests/integration/ray/conftest.py. And those
# whose jobs are forks of a process with further imports: harness/sharded_jobs.py.
TOGETHER = {
    "test_horovod_ray": "two Ray nodes",
    "test_ray_dead_node": "two Ray nodes",
    "test_ray_agents": "Ray with Redis",
    "test_ray_discovery": "Ray with Redis",
    "test_ray_journal": "Ray with Redis",
    "test_sharded": "sharded jobs",
    "test_sharded_checkpoints": "sharded jobs",
    "test_zero": "sharded jobs",
}

# They compute, and have generous deadlines: the filler runs them, at a lower priority.
LIGHT = (
    "tests/unit/",
    "tests/simulation/",
    "tests/charts/",
    "conformance",
    "tests/conformance/",
    *(
        f"tests/integration/collectives/test_{name}.py"
        for name in (
            *("batch_norm", "diloco_means", "gloo", "hierarchy", "long_way", "ops", "process_sets"),
            *("shared", "shared_choice", "state_transfer", "trees"),
        )
    ),
)
NICE = 5


def scope(nodeid: str) -> str:
    """Tests that run in one process, one after another, where there are several.

    The tests of a module share worlds of processes; those of `conformance` and `frameworks` one for each size; the jobs
    of `frameworks` the process that has imported TensorFlow; those of `cluster` a control plane.
    """
    module = nodeid.partition("::")[0]
    size = re.search(r"\d-ranks", nodeid)
    for folder in ("cluster", "conformance", "frameworks"):
        if f"/{folder}/" in module:
            return f"{folder} {size[0]}" if size else folder
    stem = Path(module).stem
    if module.startswith("tests/integration/") and stem in TOGETHER:
        return TOGETHER[stem]
    return nodeid if stem in SPREAD else module


def together(nodeids: Iterable[str]) -> list[str]:
    """Move tests of TOGETHER next to the first of their scope; all others keep their order. For a single process."""
    groups: dict[str, list[str]] = {}
    for each in nodeids:
        name = scope(each)
        groups.setdefault(name if name in TOGETHER.values() else each, []).append(each)
    return [each for group in groups.values() for each in group]


def light(name: str) -> bool:
    """Return whether the filler has the tests of this scope."""
    return name.startswith(LIGHT)


def longest_first(scopes: Iterable[str]) -> list[str]:
    """Move the tests of LONGEST before all others, which keep their order."""

    def place(name: str) -> int:
        return next((at for at, each in enumerate(LONGEST) if name.startswith(each)), len(LONGEST))

    return sorted(scopes, key=place)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--filler",
        action="store_true",
        help="the last process of -n has the light tests, and gives way to the others",
    )


# After pytest's own order, and that of the command line.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    by_name = {item.nodeid: item for item in items}
    items[:] = (by_name[name] for name in together(by_name))


def pytest_collection_finish(session: pytest.Session) -> None:
    """All collect the same tests: the others wait for it."""
    config = session.config
    told = getattr(config, "workerinput", None)
    if told and config.getoption("--filler") and told["workerid"] == f"gw{told['workercount'] - 1}":
        os.nice(NICE)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        _filler: Any = None

        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            """Give light tests to the filler; the others run them when nothing else is left."""
            if self._filler is not None:
                fits = (name for name in self.workqueue if light(name) == (node is self._filler))
                if name := next(fits, ""):
                    self.workqueue.move_to_end(name, last=False)
            super()._assign_work_unit(node)

        def schedule(self) -> None:
            """Start every process with the scopes that have most tests; then come the longest ones."""
            begins = self.collection is None
            if begins and config.getoption("--filler") and len(self.nodes) > 1:
                self._filler = max(self.nodes, key=lambda node: int(node.gateway.id[2:]))
            super().schedule()
            if begins:
                for name in longest_first(self.workqueue):
                    self.workqueue.move_to_end(name)

        def _reschedule(self, node: Any) -> None:
            """Not yet who has not collected the tests: it has taken the place of one that died, and is asked again when
            it has.
            """
            if node not in self.registered_collections:
                return
            if node is self._filler and not any(map(light, self.workqueue)):
                node.shutdown()
            else:
                super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """As xdist's, but that the test at which a worker died is not run again: it would end one after another,
            and the last of them leaves a run that never ends. The others of its scope still run.
            """
            units = self.assigned_work.pop(node)
            left = [(unit, test) for unit in units.values() for test in unit if not unit[test]]
            if not left:
                return None
            unit, died = left[0]
            unit[died] = True
            self.workqueue.update(
                {name: unit for name, unit in units.items() if False in unit.values()}
            )
            for other in self.assigned_work:
                self._reschedule(other)
            return str(died)

    return Scheduler(config, log)
