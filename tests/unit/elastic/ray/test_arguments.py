"""What a job on a Ray cluster is given: what can't be meant is told before anything is started."""

import pytest

from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.ray import arguments
from elastic.ray.arguments import Limits


def wanted(num=None, least=None, most=None, resources=None, use_gpu=False, **rest):
    return arguments.wanted(num, least, most, resources, use_gpu, **rest)


def test_one_number_is_a_static_job():
    job = wanted(4)
    assert (job.np, job.least, job.most, job.elastic) == (4, 4, 4, False)
    assert job.resources == {"CPU": 1.0}


@pytest.mark.parametrize(
    ("given", "found"),
    [((4, 2, 8), (4, 2, 8)), ((None, 2, None), (2, 2, 2)), ((4, None, 6), (4, 4, 6))],
)
def test_limits_make_it_elastic(given, found):
    job = wanted(*given)
    assert (job.np, job.least, job.most) == found
    assert job.elastic


@pytest.mark.parametrize(
    ("arguments_", "says"),
    [
        ({}, "num_workers and min_workers are missing"),
        ({"num": 0}, "num_workers is 0"),
        ({"num": True}, "num_workers is True"),
        ({"num": "4"}, "num_workers is '4'"),
        ({"least": 4, "most": 2}, "min_workers 4 is greater than max_workers 2"),
        ({"num": 9, "least": 1, "most": 8}, "num_workers 9 is not between"),
        ({"num": 1, "resources": {"CPU": -1}}, "give 0 or more"),
        ({"num": 1, "resources": {"CPU": "2"}}, "give a number"),
        ({"num": 1, "resources": ["CPU"]}, "resources_per_worker is a list"),
        ({"num": 1, "resources": {"CPU": 0}}, "asks for nothing"),
        ({"num": 1, "resources": {"GPU": 1}}, "give use_gpu=True too"),
        ({"num": 1, "resources": {"GPU": 1.5}, "use_gpu": True}, "give a whole number, or less"),
        ({"num": 1, "resources": {"GPU": 0}, "use_gpu": True}, "use_gpu=True needs GPUs"),
        ({"num": 1, "use_gpu": "yes"}, "use_gpu is 'yes'"),
        ({"num": 3, "num_hosts": 2}, "can't be spread evenly over 2 hosts"),
    ],
)
def test_what_can_not_be_meant(arguments_, says):
    with pytest.raises(Invalid, match=says):
        wanted(**arguments_)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(elastic_timeout=0), "elastic_timeout is 0"),
        (Limits(placement_timeout=float("nan")), "placement_timeout is nan"),
        (Limits(reset_limit=-1), "reset_limit is -1"),
        (Limits(cooldown_range=5), "cooldown_range is 5"),  # type: ignore[arg-type]
        (Limits(cooldown_range=(5, 1)), "the shortest and the longest"),
        (Limits(checkpoint_dir="/a", checkpoint_keep=0), "checkpoint_keep is 0; .* 1 or more"),
        (Limits(restarts=-1), "restarts is -1"),
        (Limits(standbys=-1), "standbys is -1"),
        (Limits(standbys=True), "standbys is True"),
    ],
)
def test_limits_are_checked(limits, says):
    with pytest.raises(Invalid, match=says):
        arguments.check_limits(limits)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (["A=1"], "env is a list"),
        ({"A": 1}, r"env\['A'\] is 1"),
        ({"A=B": "1"}, "can't be the name"),
        ({"A": "x\0y"}, "or its value"),
    ],
)
def test_an_environment_is_one_that_a_process_can_have(environ, says):
    with pytest.raises(Invalid, match=says):
        arguments.check_environ(environ)
    arguments.check_environ({"A": ""})


@pytest.mark.parametrize("name", [5, True, "", "a/b", "a b", "-a", "ü", "x" * 101])
def test_a_detached_job_has_a_name_that_can_be_one(name):
    with pytest.raises(Invalid, match="name the job"):
        arguments.check_job_name(name)
    arguments.check_job_name("bert-2.1_b")


def test_a_function_is_called_as_it_can_be():
    def alone(): ...

    def configured(config): ...

    arguments.check_call(alone, (), {})
    arguments.check_call(configured, ({"lr": 1},), {})
    arguments.check_call(print, (1, 2), {})
    with pytest.raises(Invalid, match="called with the config: too many"):
        arguments.check_call(alone, (1,), {})
    with pytest.raises(Invalid, match="give a config: missing"):
        arguments.check_call(configured, (), {})


def test_the_driver_gets_what_opentelemetry_reads():
    caller = {
        "OTEL_SERVICE_NAME": "ours",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318",
        "HOME": "/",
    }
    found = arguments.telemetry(caller, {"OTEL_SERVICE_NAME": "bert", "NCCL_DEBUG": "INFO"})
    assert found == {"OTEL_SERVICE_NAME": "bert", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}


def test_a_job_holds_places_for_its_standbys_too():
    wanted = arguments.wanted(2, 1, 4, None, use_gpu=False)
    assert arguments.places(wanted, Limits()) == 4
    assert arguments.places(wanted, Limits(standbys=2)) == 6


def test_a_job_that_is_not_elastic_has_no_use_for_standbys():
    arguments.check_limits(Limits(standbys=1))
    arguments.check_limits(Limits(standbys=0), elastic=False)
    with pytest.raises(
        Invalid, match="standbys is 1, but a job without min_workers and max_workers"
    ):
        arguments.check_limits(Limits(standbys=1), elastic=False)


def test_a_short_time_for_the_placement_is_none_for_the_start():
    """Workers import torch all at once, on nodes that were idle until they were placed."""
    assert Limits(placement_timeout=5.0).start_s == Settings.start_timeout_s
    assert Limits(placement_timeout=5.0, start_timeout=60.0).start_s == 60.0
