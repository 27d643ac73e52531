"""horovod.ray without a cluster: names, signatures, refused arguments, and calls of our executor."""

from __future__ import annotations

import inspect
import random
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import pytest

from elastic.errors import Invalid

if find_spec("ray") is None:
    pytest.skip("needs ray", allow_module_level=True)

from harness.golden import raises
from harness.program import output_of
from horovod.ray import ElasticRayExecutor, MiniSettings, RayExecutor, ray_logger
from horovod.ray.coordinator import Coordinator
from horovod.ray.elastic_v2 import RayHostDiscovery, TestDiscovery, rooms_of
from horovod.ray.jobs import PlacementTimeout
from horovod.ray.strategy import ColocatedStrategy, PGStrategy
from horovod.ray.utils import detect_nics, nics_to_env_var
from horovod.runner.common.util.timeout import Timeout, TimeoutException

# Their modules in Horovod.
PLACES = """
    horovod.ray.RayExecutor horovod.ray.ElasticRayExecutor horovod.ray.BaseHorovodWorker
    horovod.ray.runner.RayExecutor horovod.ray.runner.MiniSettings
    horovod.ray.elastic.ElasticRayExecutor horovod.ray.elastic.RayHostDiscovery
    horovod.ray.elastic.TestDiscovery horovod.ray.elastic_v2.RayHostDiscovery
    horovod.ray.elastic_v2.TestDiscovery horovod.ray.worker.BaseHorovodWorker
    horovod.ray.ray_logger.log horovod.ray.ray_logger.configure horovod.ray.utils.map_blocking
    horovod.ray.runner.Coordinator horovod.ray.utils.detect_nics
    horovod.runner.common.util.secret.make_secret_key horovod.runner.common.util.timeout.Timeout
    horovod.ray.utils.nics_to_env_var horovod.ray.strategy.PGStrategy
    horovod.ray.strategy.ColocatedStrategy
"""
# ruff: noqa: E501
SIGNATURES = """
    RayExecutor.create_settings(timeout_s=30, ssh_identity_file=None, ssh_str=None, placement_group_timeout_s=100, nics=None)
    RayExecutor(settings, num_workers=None, num_hosts=None, num_workers_per_host=1, cpus_per_worker=1, use_gpu=False, gpus_per_worker=None, use_current_placement_group=True, min_workers=None, max_workers=None, reset_limit=None, cooldown_range=None, elastic_timeout=600, override_discovery=True)
    RayExecutor.start(self, executable_cls=None, executable_args=None, executable_kwargs=None, extra_env_vars=None)
    RayExecutor.run(self, fn, args=None, kwargs=None, callbacks=None)
    RayExecutor.run_remote(self, fn, args=None, kwargs=None)
    RayExecutor.execute(self, fn, callbacks=None)
    RayExecutor.execute_single(self, fn)
    RayExecutor.shutdown(self)
    MiniSettings(nics=None, verbose=1, key=None, ssh_port=None, ssh_identity_file=None, timeout_s=300, placement_group_timeout_s=100, elastic=False)
    ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=None, reset_limit=None, elastic_timeout=600, timeout_s=30, ssh_identity_file=None, nics=None, min_np=None, max_np=None)
    ElasticRayExecutor(settings, use_gpu=False, cpus_per_slot=1, gpus_per_slot=None, env_vars=None, override_discovery=True)
    ElasticRayExecutor.start(self)
    ElasticRayExecutor.run(self, worker_fn, callbacks=None)
    elastic.TestDiscovery(min_hosts, max_hosts, change_frequency_s, use_gpu=False, cpus_per_slot=1, gpus_per_slot=1, verbose=True, _graceful=True)
    elastic.RayHostDiscovery(use_gpu=False, cpus_per_slot=1, gpus_per_slot=1)
    RayHostDiscovery(use_gpu=False, cpus_per_worker=1, gpus_per_worker=1)
    RayHostDiscovery.find_available_hosts_and_slots(self)
    TestDiscovery(min_hosts, max_hosts, change_frequency_s, use_gpu=False, cpus_per_worker=1, gpus_per_worker=1, verbose=True, _graceful=True)
    BaseHorovodWorker(world_rank=0, world_size=1)
    BaseHorovodWorker.hostname(self)
    BaseHorovodWorker.node_id(self)
    BaseHorovodWorker.get_gpu_ids(self)
    BaseHorovodWorker.update_env_vars(self, env_vars)
    BaseHorovodWorker.env_vars(self)
    BaseHorovodWorker.start_executable(self, executable_cls=None, executable_args=None, executable_kwargs=None)
    BaseHorovodWorker.execute(self, func)
    BaseHorovodWorker.set_queue(self, queue)
"""


@dataclass
class Said:
    metrics: dict[str, Any]


class Executor:
    """Replacement of `elastic.ray.Executor`, which records its calls in order. Functions are called here."""

    made: list[Executor]
    refuses = ""

    def __init__(self, num_workers=None, *, on_report, **arguments):
        self.arguments = arguments | {"num_workers": num_workers}
        self.on_report = on_report
        self.asked: list[tuple] = []
        self.kept: Any = None
        Executor.made.append(self)

    def start(
        self, executable_cls=None, executable_args=None, executable_kwargs=None, extra_env_vars=None
    ):
        if self.refuses:
            raise Invalid(self.refuses)
        self.asked.append(("start", extra_env_vars))
        if executable_cls is not None:
            self.kept = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def run(self, fn, *args, **kwargs):
        self.on_report(Said({"step": 1}))
        return [fn(*args, **kwargs)]

    def run_remote(self, fn, *args, **kwargs):
        return [("reference", fn(*args, **kwargs))]

    def execute(self, fn):
        self.on_report(Said({"step": 2}))
        return [fn(self.kept)]

    def execute_single(self, fn):
        self.on_report(Said({"step": 3}))
        return fn(self.kept)

    def shutdown(self):
        self.asked.append(("shutdown",))


@pytest.fixture
def ours(monkeypatch):
    """Calls of our executor; the real one checks the arguments before."""
    import elastic.ray

    real = elastic.ray.Executor

    def make(**arguments):
        real(**arguments)
        return Executor(**arguments)

    Executor.made = []
    monkeypatch.setattr(Executor, "refuses", "")
    monkeypatch.setattr(elastic.ray, "Executor", make)
    return Executor.made


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PLACES.split())
def test_horovod_ray_names_can_be_imported_from_their_paths(path):
    assert callable(resolve_name(path))


@pytest.mark.parametrize("line", [each.strip() for each in SIGNATURES.strip().splitlines()])
def test_arguments_are_horovods_with_their_order_and_defaults(line):
    path, _, listed = line.removesuffix(")").partition("(")
    found = resolve_name(f"horovod.ray.{path}")
    parameters = [
        name if each.default is each.empty else f"{name}={each.default!r}"
        for name, each in inspect.signature(found).parameters.items()
        if each.kind is not each.VAR_KEYWORD
    ]
    wanted = [each for each in listed.split(", ") if each]
    assert parameters[: len(wanted)] == wanted
    assert all("=" in more for more in parameters[len(wanted) :])


def test_the_import_does_not_import_ray_and_names_the_missing_package():
    program = (
        "import sys, horovod.ray, horovod.ray.runner, horovod.ray.elastic, horovod.ray.worker\n"
        "assert 'ray' not in sys.modules\n"
        "for name in [each for each in sys.modules if each.startswith('horovod.ray')]: del sys.modules[name]\n"
        "sys.modules['ray'] = None\n"
        "try: import horovod.ray\n"
        "except ImportError as error: assert 'pip install' in str(error), error\n"
        "else: raise SystemExit('imported')\n"
    )
    output_of(sys.executable, "-c", program)


# ---- refusals before the start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "Either `num_workers`, `num_hosts` or `min_workers` must be provided"),
        ({"min_workers": 1, "num_workers": 2}, "Both `min_workers` and `num_workers` provided."),
        ({"min_workers": 1, "num_hosts": 2}, "Both `min_workers` and `num_hosts` provided."),
        ({"num_workers": 1, "num_hosts": 2}, "Both `num_workers` and `num_hosts` provided."),
        ({"max_workers": 2}, "`max_workers` provided without any positive `min_workers`"),
        ({"max_workers": 2, "min_workers": 0}, "`max_workers` provided without any positive"),
        ({"min_workers": 0}, "min_workers is 0"),
        ({"min_workers": 3, "max_workers": 2}, "min_workers 3 is greater than max_workers 2"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"num_workers": "2"}, "num_workers is '2'"),
        ({"num_hosts": 0}, "num_hosts is 0"),
        ({"num_hosts": 1, "num_workers_per_host": 0}, "num_workers_per_host is 0"),
        ({"num_workers": 1, "gpus_per_worker": 1}, "gpus_per_worker is set, but use_gpu is False"),
        (
            {"num_workers": 1, "gpus_per_worker": 0, "use_gpu": True},
            "gpus_per_worker must be >= 1: Got 0",
        ),
        ({"min_workers": 1, "gpus_per_worker": 1}, "gpus_per_worker is set, but use_gpu is False"),
        ({"num_workers": 1, "cpus_per_worker": -1}, "CPU"),
        ({"min_workers": 1, "override_discovery": False}, "override_discovery=False"),
        ({"min_workers": 1, "elastic_timeout": 0}, "elastic_timeout is 0"),
        ({"num_workers": 1, "cpus_per_slot": 2, "cpus_per_worker": 3}, "old name"),
    ],
)
def test_contradictory_executor_arguments_raise_value_error(arguments, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        RayExecutor(MiniSettings(), **arguments)


def test_executor_calls_before_start_and_without_a_function_are_refused(ours):
    executor: Any = RayExecutor(MiniSettings(), num_workers=1)
    with pytest.raises(ValueError, match="start"):
        executor.run(len)
    for call in (executor.run, executor.run_remote, executor.execute, executor.execute_single):
        with pytest.raises(ValueError, match="function"):
            call("no function")
    executor.start()
    with pytest.raises(ValueError, match="callbacks"):
        executor.run(len, ["a"], callbacks=["no function"])
    with raises(ValueError):
        executor.start()
    executor.shutdown()
    with pytest.raises(ValueError, match="start"):
        executor.execute(len)
    with pytest.raises(ValueError, match="extra_env_vars"):
        executor.start(extra_env_vars=3)
    with pytest.raises(ValueError, match="executable_cls"):
        executor.start(executable_cls="Trainer")


def test_missing_resources_raise_a_timeout_and_value_error(ours, monkeypatch):
    monkeypatch.setattr(Executor, "refuses", "1 of 8 workers are placed")
    several: list[dict[str, Any]] = [{"num_workers": 8}, {"min_workers": 8, "max_workers": 8}]
    for arguments in several:
        executor = RayExecutor(MiniSettings(), **arguments)
        for error in (TimeoutError, ValueError, PlacementTimeout):
            with pytest.raises(error, match="1 of 8"):
                executor.start()


# ---- calls of our executor ---------------------------------------------------------------------------------------------


def test_static_job_gets_the_arguments_of_its_executor(ours):
    settings = RayExecutor.create_settings(timeout_s=60, placement_group_timeout_s=5, nics=["eth1"])
    RayExecutor(settings, num_workers=3, cpus_per_worker=2, use_gpu=True, gpus_per_worker=0.5)
    assert ours[0].arguments == {
        "num_workers": 3,
        "resources_per_worker": {"CPU": 2, "GPU": 0.5},
        "use_gpu": True,
        "placement_group": "current",
        "start_timeout": 60,
        "placement_timeout": 5,
        "network_interface": "eth1",
        "verbose": False,
    }
    RayExecutor(MiniSettings(), num_workers=1, use_gpu=True, use_current_placement_group=False)
    assert ours[1].arguments["placement_group"] is None
    assert ours[1].arguments["resources_per_worker"] == {"CPU": 1, "GPU": 1}


def test_num_hosts_and_workers_per_host_determine_the_number_of_workers(ours):
    RayExecutor(MiniSettings(), num_hosts=2, num_workers_per_host=3)
    assert ours[0].arguments["num_workers"] == 6
    assert ours[0].arguments["num_hosts"] == 2
    assert ours[0].arguments["placement_group"] is None


def test_elastic_arguments_of_ray_executor_are_passed_on(ours):
    RayExecutor(
        MiniSettings(timeout_s=30),
        min_workers=2,
        max_workers=4,
        reset_limit=3,
        cooldown_range=[1, 2],
        elastic_timeout=50,
    )
    assert (
        ours[0].arguments.items()
        >= {
            "num_workers": None,
            "min_workers": 2,
            "max_workers": 4,
            "reset_limit": 3,
            "cooldown_range": (1, 2),
            "elastic_timeout": 50,
        }.items()
    )
    assert "start_timeout" not in ours[0].arguments  # Horovod's default is too short for torch


def test_executor_without_max_workers_uses_all_free_slots(ours, monkeypatch):
    monkeypatch.setattr(
        RayHostDiscovery, "find_available_hosts_and_slots", lambda self: {"a": 3, "b": 4}
    )
    RayExecutor(MiniSettings(), min_workers=2).start()
    assert ours[-1].arguments["max_workers"] == 7
    RayExecutor(MiniSettings(), min_workers=9).start()
    assert ours[-1].arguments["max_workers"] == 9


def _one(trainer: object) -> int:
    return 1


class Trainer:
    def __init__(self, start, by=1):
        self.value = start + by


@pytest.mark.parametrize("arguments", [{"num_workers": 1}, {"min_workers": 1, "max_workers": 1}])
def test_executor_runs_functions_and_objects_with_variables_and_callbacks(ours, arguments):
    executor = RayExecutor(MiniSettings(), **arguments)
    executor.start(Trainer, [5], {"by": 2}, {"A": 1, "B": None})
    assert ("start", {"A": "1"}) in ours[-1].asked
    heard: list[dict] = []
    assert executor.run(lambda a, b: (a, b), [1], {"b": 2}, [heard.append]) == [(1, 2)]
    assert executor.execute(lambda trainer: trainer.value, [heard.append]) == [7]
    assert [each["step"] for each in heard] in ([1, 2], [1, 1])
    if "num_workers" in arguments:  # an elastic one calls init() there
        assert executor.execute_single(_one) == 1
    executor.run(len, ["x"])
    assert len(heard) == 2  # callbacks are for one call
    executor.shutdown()
    assert ours[-1].asked[-1] == ("shutdown",)
    executor.start()
    assert executor.execute(lambda nothing: nothing) == [None]


def test_remote_references_are_supported_only_in_static_jobs(ours):
    static = RayExecutor(MiniSettings(), num_workers=1)
    static.start(Trainer, [1])
    assert static.run_remote(len, ["ab"]) == [("reference", 2)]
    assert static.execute_single(lambda trainer: trainer.value) == 2
    changing = RayExecutor(MiniSettings(), min_workers=1, max_workers=1)
    changing.start()
    with raises(NotImplementedError):
        changing.run_remote(len, ["ab"])


# ---- settings ----------------------------------------------------------------------------------------------------------


def test_verbose_and_slot_options_are_accepted_with_a_warning(ours):
    with pytest.warns(DeprecationWarning, match="verbose"):
        settings = RayExecutor.create_settings(verbose=True)
    with pytest.warns(DeprecationWarning, match="cpus_per_slot"):
        RayExecutor(settings, num_workers=1, cpus_per_slot=2)
    with pytest.warns(DeprecationWarning, match="gpus_per_slot"):
        RayExecutor(settings, num_workers=1, use_gpu=True, gpus_per_slot=2)
    assert ours[0].arguments["verbose"] is True
    assert ours[0].arguments["resources_per_worker"] == {"CPU": 2}
    assert ours[1].arguments["resources_per_worker"] == {"CPU": 1, "GPU": 2}


@pytest.mark.parametrize("given", [{"ssh_identity_file": "key"}, {"ssh_str": "secret"}])
def test_ssh_settings_are_ignored_with_one_warning(ours, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="no effect") as warned:
        settings = RayExecutor.create_settings(**given)
        RayExecutor(settings, num_workers=1)
    assert len(warned) == 1
    assert "secret" not in str(warned[0].message)
    assert not list(tmp_path.iterdir())


def test_foreign_settings_objects_are_accepted(ours):
    class Settings:
        nics = frozenset({"b", "a"})
        start_timeout = 5
        verbose = 2

    RayExecutor(Settings(), num_workers=1)
    assert ours[0].arguments["network_interface"] == "a,b"
    assert ours[0].arguments["verbose"] is True
    RayExecutor(None, num_workers=1)
    assert "network_interface" not in ours[1].arguments


def test_deprecated_elastic_executor_works_with_a_warning(ours):
    with pytest.warns(DeprecationWarning, match="min_np"):
        settings = ElasticRayExecutor.create_settings(min_np=2, max_num_proc=3, reset_limit=1)
    settings.cooldown_range = (1, 5)
    with pytest.warns(DeprecationWarning, match="RayExecutor"):
        executor = ElasticRayExecutor(settings, cpus_per_slot=2, env_vars={"A": "b"})
    executor.start()
    assert (
        ours[0].arguments.items() >= {"min_workers": 2, "max_workers": 3, "reset_limit": 1}.items()
    )
    assert ours[0].arguments["cooldown_range"] == (1, 5)
    assert ours[0].arguments["resources_per_worker"] == {"CPU": 2}
    assert ours[0].asked == [("start", {"A": "b"})]
    heard: list[dict] = []
    assert executor.run(lambda: 5, callbacks=[heard.append]) == [5]
    assert heard == [{"step": 1}]
    executor.shutdown()


@pytest.mark.filterwarnings("ignore:ElasticRayExecutor")
def test_invalid_settings_of_the_deprecated_executor_are_refused():
    with raises(ValueError):
        ElasticRayExecutor.create_settings(colour="red")
    with raises(ValueError):
        ElasticRayExecutor.create_settings(min_num_proc=2, min_np=3)
    with raises(ValueError):
        ElasticRayExecutor(ElasticRayExecutor.create_settings(), gpus_per_slot=1)


# ---- small functions ---------------------------------------------------------------------------------------------------


def test_strategies_define_the_number_of_workers():
    assert PGStrategy(num_workers=3).num_workers == 3
    assert ColocatedStrategy(num_hosts=2, num_workers_per_host=4).num_workers == 8
    group = object()
    assert PGStrategy(num_workers=1, placement_group=group).arguments["placement_group"] is group


def test_ranks_and_sizes_are_derived_from_registrations_of_a_coordinator():
    coordinator = Coordinator(MiniSettings())
    for rank, node in enumerate(["a", "b", "a", "a", "b"]):
        coordinator.register(f"host {node}", node, rank)
    assert coordinator.hostnames == {"host a", "host b"}
    names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert {
        rank: tuple(place[f"HOROVOD_{name}"] for name in names)
        for rank, place in coordinator.finalize_registration().items()
    } == {0: (0, 3, 0, 2), 1: (0, 2, 1, 2), 2: (1, 3, 0, 2), 3: (2, 3, 0, 1), 4: (1, 2, 1, 2)}


def test_a_world_without_rank_0_is_refused():
    coordinator = Coordinator(MiniSettings())
    coordinator.register("host a", "a", 1)
    with pytest.raises(ValueError, match="starting from 0"):
        coordinator.establish_rendezvous()


def test_interfaces_are_taken_from_the_settings():
    assert detect_nics(MiniSettings(nics={"eth0"}), ["a"], []) == {"eth0"}
    assert nics_to_env_var(detect_nics(MiniSettings())) == {}


def test_timeout_message_names_the_activity():
    late = Timeout(0.0, "no {activity} in {timeout}")
    assert (late.remaining(), late.timed_out()) == (0.0, True)
    with raises(TimeoutException):
        late.check_time_out_for("start")
    Timeout(60.0, "").check_time_out_for("start")


def test_network_interfaces_are_converted_to_variables():
    assert nics_to_env_var(["eth0", "eth1"]) == {
        "NCCL_SOCKET_IFNAME": "eth0,eth1",
        "HOROVOD_GLOO_IFACE": "eth0",
    }


@pytest.mark.parametrize(
    ("arguments", "resources", "slots"),
    [
        ({}, {"CPU": 3.5}, 3),
        ({"cpus_per_worker": 2}, {"CPU": 3.9}, 1),
        ({"cpus_per_worker": 0.1}, {"CPU": 0.3}, 3),
        ({"use_gpu": True}, {"CPU": 8, "GPU": 2}, 2),
        ({"use_gpu": True, "gpus_per_worker": 0.5}, {"CPU": 3, "GPU": 4}, 3),
        ({"use_gpu": True, "cpus_per_worker": 0}, {"GPU": 1}, 1),
        ({"use_gpu": True}, {"CPU": 8}, 0),
    ],
)
def test_slots_are_computed_from_free_resources(arguments, resources, slots):
    assert RayHostDiscovery(**arguments).slots(resources) == slots


def test_worker_without_resources_is_refused():
    with raises(ValueError):
        RayHostDiscovery(cpus_per_worker=0)


def test_free_resources_of_a_node_default_to_its_total():
    node = {"NodeID": "1", "NodeManagerAddress": "a", "Alive": True, "Resources": {"CPU": 8.0}}
    assert rooms_of([node], {"1": {"CPU": 3.0}}) == [("a", {"CPU": 3.0})]
    assert rooms_of([node | {"Alive": False}], {"1": {"CPU": 3.0}}) == []
    new = node | {"NodeID": "2"}  # it was added after the query of the others
    assert rooms_of([new], {"1": {"CPU": 3.0}}) == [("a", {"CPU": 8.0})]


def test_nodes_with_missing_keys_are_accepted():
    """Programs under test replace Ray's lists by their own, in the form of its older releases."""
    node = {"NodeManagerAddress": "a", "alive": True, "Resources": {"CPU": 8.0}}
    assert rooms_of([node], {}) == [("a", {"CPU": 8.0})]
    assert rooms_of([node | {"alive": False}, {"NodeID": "1"}, {"alive": True}], {}) == []


def test_churn_keeps_host_counts_within_its_bounds(monkeypatch):
    hosts = {f"h{i}": 1 for i in range(6)}
    discovery = TestDiscovery(2, 5, 0.0, verbose=False)
    chance = random.Random(1)
    seen = set()
    for _ in range(200):
        discovery.change(hosts, chance)
        seen.add(len(hosts) - len(discovery._hidden))
    assert seen == {2, 3, 4, 5}
    discovery.change({"h0": 1}, chance)  # removed hosts are not hidden any more
    assert discovery._hidden <= {"h0"}


def test_logged_values_are_put_into_the_configured_queue():
    class Queue(list):
        put = list.append

    queue = Queue()
    ray_logger.configure(queue)
    try:
        ray_logger.log({"a": object})
    finally:
        ray_logger.configure(None)
    assert queue == [{"a": object}]
    with pytest.raises(ValueError, match="init"):
        ray_logger.log({"a": 1})
