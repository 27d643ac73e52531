"""Environment variables of a worker."""

from __future__ import annotations

import pytest

from elastic.errors import Invalid
from elastic.rendezvous import nccl_settings, worker_settings
from harness.golden import raises


def test_without_a_driver_a_collective_has_half_an_hour_by_default():
    env = worker_settings.read({})
    assert (env.timeout_s, env.collective_timeout_s) == (30.0, 1800.0)
    env = worker_settings.read({"HOROVOD_GLOO_TIMEOUT_SECONDS": "7"})
    assert (env.timeout_s, env.collective_timeout_s) == (7.0, 7.0)


def test_a_collective_has_longer_if_the_driver_detects_stuck_workers():
    env = worker_settings.read({"ELASTIC_COLLECTIVE_TIMEOUT": "660"})
    assert (env.timeout_s, env.collective_timeout_s) == (30.0, 660.0)


def test_the_wait_for_the_driver_is_longer_than_any_timeout_of_the_driver():
    assert worker_settings.read({}).wait_timeout_s == 1260.0
    assert worker_settings.read({"ELASTIC_WAIT_TIMEOUT": "62"}).wait_timeout_s == 62.0


@pytest.mark.parametrize(
    "name", ["HOROVOD_GLOO_TIMEOUT_SECONDS", "ELASTIC_COLLECTIVE_TIMEOUT", "ELASTIC_WAIT_TIMEOUT"]
)
def test_a_damaged_number_is_named(name):
    with raises(Invalid, name):
        worker_settings.read({name: "soon"})


def test_horovod_variables_are_read():
    env = worker_settings.read(
        {
            "HOROVOD_CYCLE_TIME": "2.5",
            "HOROVOD_CACHE_CAPACITY": "0",
            "HOROVOD_FUSION_THRESHOLD": "65536",
            "HOROVOD_DISABLE_GROUP_FUSION": "1",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40",
            "HOROVOD_THREAD_AFFINITY": "4, 6",
            "HOROVOD_DYNAMIC_PROCESS_SETS": "True",
            "HOROVOD_TIMELINE": "t.json",
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        }
    )
    assert (env.cycle_s, env.cache_capacity, env.fusion_bytes) == (0.0025, 0, 65536)
    assert (env.group_fusion, env.dynamic_process_sets) == (False, True)
    assert (env.stall_warning_s, env.stall_shutdown_s) == (20.0, 40.0)
    assert (env.timeline, env.timeline_mark_cycles) == ("t.json", True)
    assert [env.core(local_rank) for local_rank in range(3)] == [4, 6, None]


NAMES = [
    "CYCLE_TIME",
    "CACHE_CAPACITY",
    "FUSION_THRESHOLD",
    "DISABLE_GROUP_FUSION",
    "STALL_CHECK_DISABLE",
    "STALL_CHECK_TIME_SECONDS",
    "STALL_SHUTDOWN_TIME_SECONDS",
    "THREAD_AFFINITY",
    "DYNAMIC_PROCESS_SETS",
    "TIMELINE",
    "TIMELINE_MARK_CYCLES",
    "GLOO_TIMEOUT_SECONDS",
    "START_TIMEOUT",
]


@pytest.mark.parametrize("value", [None, ""])
def test_unset_or_empty_horovod_variables_have_defaults(value):
    environ = {} if value is None else {f"HOROVOD_{name}": value for name in NAMES}
    env = worker_settings.read(environ)
    assert (env.cycle_s, env.cache_capacity, env.fusion_bytes) == (0.001, 1024, None)
    assert (env.group_fusion, env.dynamic_process_sets) == (True, False)
    assert (env.stall_warning_s, env.stall_shutdown_s) == (60.0, 0.0)
    assert (env.timeline, env.timeline_mark_cycles, env.core(0)) == (None, False, None)
    assert (env.timeout_s, env.start_timeout_s) == (30.0, 600.0)


def test_disabled_stall_check_has_no_timeouts():
    env = worker_settings.read(
        {
            "HOROVOD_STALL_CHECK_DISABLE": "1",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40",
        }
    )
    assert (env.stall_warning_s, env.stall_shutdown_s) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HOROVOD_CYCLE_TIME", "soon", "set it to a number of milliseconds"),
        ("HOROVOD_CYCLE_TIME", "-1", "set it to a number of milliseconds"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "inf", "set it to a number of seconds"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "0", "set it to a positive number of seconds"),
        ("HOROVOD_CACHE_CAPACITY", "-1", "set it to a whole number, 0 or more"),
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "set it to a whole number, 0 or more"),
        ("HOROVOD_THREAD_AFFINITY", "0,one", "set it to one core number per worker"),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "maybe", "set it to 1 or 0"),
        ("HOROVOD_DYNAMIC_PROCESS_SETS", "2", "set it to 1 or 0"),
        ("ELASTIC_CHECKS", "maybe", "set it to 1 or 0"),
        ("ELASTIC_DIGESTS", "tensor", "set it to 1, 0 or tensors"),
    ],
)
def test_invalid_variable_is_named(name, value, said):
    with pytest.raises(Invalid, match=f"{name} is '{value}'[:;] {said}"):
        worker_settings.read({name: value})


def test_the_tls_files_must_be_given_together():
    read = worker_settings.read
    assert read({}).tls is None
    empty = {"ELASTIC_TLS_CERT": "", "ELASTIC_TLS_KEY": "", "ELASTIC_TLS_CA": ""}
    assert read(empty).tls is None
    given = {"ELASTIC_TLS_CERT": "/c", "ELASTIC_TLS_KEY": "/k", "ELASTIC_TLS_CA": "/a"}
    assert read(given).tls == ("/c", "/k", "/a")
    with raises(Invalid):
        read({**given, "ELASTIC_TLS_KEY": ""})


@pytest.mark.parametrize(
    ("value", "native"), [(None, True), ("", True), ("1", True), ("0", False), ("false", False)]
)
def test_shared_memory_is_enabled_unless_turned_off(value, native):
    variables = {} if value is None else {"ELASTIC_NATIVE": value}
    assert worker_settings.read(variables).native is native


def test_invalid_value_of_elastic_native_is_refused():
    with raises(Invalid):
        worker_settings.read({"ELASTIC_NATIVE": "yes"})


def test_required_nccl_settings_override_and_optional_ones_do_not():
    env = worker_settings.read({"HOROVOD_GLOO_TIMEOUT_SECONDS": "7.5"})
    given = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "NCCL_RUNTIME_CONNECT": "1"}
    worker_settings.prepare(env, given)
    assert given["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert given["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "8"
    assert given["NCCL_RUNTIME_CONNECT"] == "1"
    assert given["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"


def test_correct_nccl_settings_are_not_written_again():
    class Written(dict[str, str]):
        def __setitem__(self, name: str, value: str) -> None:
            raise AssertionError(f"{name} was written while other threads may read")

    env = worker_settings.read({})
    worker_settings.prepare(env, Written({**nccl_settings.needed(30.0), **nccl_settings.DEFAULTS}))


@pytest.mark.parametrize(
    ("given", "gb", "told"),
    [
        ({}, 24, ("1", "65536")),
        ({}, 256, ("1", "262144")),  # all of the host's, where that is more than TensorFlow's 64 GB
        ({"TF_CPU_BFC_MEM_LIMIT_IN_MB": "500"}, 256, ("1", "500")),
        ({"TF_CPU_ALLOCATOR_USE_BFC": "0"}, 256, ("0", None)),
        ({"MALLOC_TRIM_THRESHOLD_": "100"}, 256, (None, None)),
        ({"LD_PRELOAD": "libtcmalloc_minimal.so.4"}, 256, (None, None)),
    ],
)
def test_tensorflow_keeps_the_memory_of_its_tensors_by_default(given, gb, told):
    environ = dict(given)
    worker_settings.keep_tensors(environ, gb << 30)
    names = ("TF_CPU_ALLOCATOR_USE_BFC", "TF_CPU_BFC_MEM_LIMIT_IN_MB")
    assert tuple(map(environ.get, names)) == told
