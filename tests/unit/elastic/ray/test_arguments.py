"""Arguments of a job on a Ray cluster: invalid ones are refused before anything is started."""

from typing import Any

import pytest

from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.ray import arguments
from harness.golden import raises


def wanted(num=None, least=None, most=None, resources=None, use_gpu=False, **rest):
    return arguments.wanted(num, least, most, resources, use_gpu, **rest)


def test_single_number_of_workers_is_a_static_job():
    job = wanted(4)
    assert (job.np, job.least, job.most, job.elastic) == (4, 4, 4, False)
    assert job.resources == {"CPU": 1.0}


@pytest.mark.parametrize(
    ("given", "found"),
    [((4, 2, 8), (4, 2, 8)), ((None, 2, None), (2, 2, 2)), ((4, None, 6), (4, 4, 6))],
)
def test_limits_make_a_job_elastic(given, found):
    job = wanted(*given)
    assert (job.np, job.least, job.most) == found
    assert job.elastic


@pytest.mark.parametrize(
    "arguments_",
    [
        {},
        {"num": 0},
        {"num": True},
        {"num": "4"},
        {"least": 4, "most": 2},
        {"num": 9, "least": 1, "most": 8},
        {"num": 1, "resources": {"CPU": -1}},
        {"num": 1, "resources": {"CPU": "2"}},
        {"num": 1, "resources": ["CPU"]},
        {"num": 1, "resources": {"CPU": 0}},
        {"num": 1, "resources": {"GPU": 1}},
        {"num": 1, "resources": {"GPU": 1.5}, "use_gpu": True},
        {"num": 1, "resources": {"GPU": 0}, "use_gpu": True},
        {"num": 1, "use_gpu": "yes"},
        {"num": 3, "num_hosts": 2},
        {"num": 1, "placement_timeout": float("nan")},
    ],
)
def test_contradictory_arguments_are_refused(arguments_):
    with raises(Invalid):
        wanted(**arguments_)


@pytest.mark.parametrize(
    "options",
    [
        {"elastic_timeout": 0},
        {"start_timeout": float("nan")},
        {"reset_limit": -1},
        {"cooldown_range": 5},
        {"cooldown_range": (5, 1)},
        {"checkpoint_dir": "/a", "checkpoint_keep": 0},
        {"restarts": -1},
        {"standbys": -1},
        {"standbys": True},
    ],
)
def test_options_are_checked(options):
    with raises(Invalid):
        arguments.check_options(options)


@pytest.mark.parametrize("environ", [["A=1"], {"A": 1}, {"A=B": "1"}, {"A": "x\0y"}])
def test_invalid_environment_is_refused(environ):
    with raises(Invalid):
        arguments.check_environ(environ)
    arguments.check_environ({"A": ""})


@pytest.mark.parametrize("name", [5, True, "", "a/b", "a b", "-a", "ü", "x" * 101])
def test_invalid_name_of_a_detached_job_is_refused(name):
    with raises(Invalid):
        arguments.check_job_name(name)
    arguments.check_job_name("bert-2.1_b")


def test_arguments_that_the_function_does_not_accept_are_refused():
    def alone(): ...

    def configured(config): ...

    arguments.check_call(alone, (), {})
    arguments.check_call(configured, ({"lr": 1},), {})
    arguments.check_call(print, (1, 2), {})
    with raises(Invalid):
        arguments.check_call(alone, (1,), {})
    with raises(Invalid):
        arguments.check_call(configured, (), {})


def test_opentelemetry_variables_are_passed_to_the_driver():
    caller = {
        "OTEL_SERVICE_NAME": "ours",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318",
        "HOME": "/",
    }
    found = arguments.telemetry(caller, {"OTEL_SERVICE_NAME": "bert", "NCCL_DEBUG": "INFO"})
    assert found == {"OTEL_SERVICE_NAME": "bert", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}


def test_places_of_a_job_include_its_standbys():
    wanted = arguments.wanted(2, 1, 4, None, use_gpu=False)
    assert arguments.places(wanted, {}) == 4
    assert arguments.places(wanted, {"standbys": 2}) == 6


def test_label_selector_is_part_of_the_request():
    given = {"pool": "training", "zone": "in(a, b)"}
    wanted = arguments.wanted(2, None, None, None, use_gpu=False, label_selector=given)
    assert wanted.labels == given
    assert arguments.wanted(2, None, None, None, use_gpu=False).labels == {}


@pytest.mark.parametrize("selector", ["pool=training", ["pool"], {"": "x"}, {1: "x"}, {"x": 1}])
def test_label_selector_that_is_no_mapping_of_strings_is_refused(selector):
    with raises(Invalid):
        arguments.wanted(2, None, None, None, use_gpu=False, label_selector=selector)


def test_label_selector_is_refused_with_a_placement_group():
    with raises(Invalid):
        arguments.labels({"pool": "training"}, object())
    assert arguments.labels({"pool": "training"}, None)
    assert arguments.labels({}, object()) == {}


def test_options_may_be_texts_of_numbers():
    wanted = arguments.wanted(2, 1, 4, None, use_gpu=False)
    options: Any = {"standbys": "2", "start_timeout": "60"}
    arguments.check_options(options)
    assert arguments.places(wanted, options) == 6
    assert arguments.start_timeout_s(options) == 60.0
    none: Any = {"standbys": "0"}
    arguments.check_options(none, elastic=False)


def test_workers_have_the_time_of_the_flag_to_start():
    assert arguments.start_timeout_s({}) == Settings.start_timeout_s
    assert arguments.start_timeout_s({"start_timeout": 60.0}) == 60.0


def test_standbys_are_refused_in_a_static_job():
    arguments.check_options({"standbys": 1})
    arguments.check_options({"standbys": 0}, elastic=False)
    with raises(Invalid):
        arguments.check_options({"standbys": 1}, elastic=False)
