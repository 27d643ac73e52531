"""Environment of an agent in a Spark task, and names of hosts."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.driver.spark.task_environment import (
    LOCAL,
    agents_environ,
    executor_of,
    executor_of_command,
    host_of,
)

OF_SPARK = {
    "PYTHON_WORKER_FACTORY_SECRET": "s",
    "PYTHON_WORKER_FACTORY_PORT": "1",
    "PYSPARK_EXECUTOR_MEMORY_MB": "1",
    "SPARK_REUSE_WORKER": "1",
    "SPARK_BUFFER_SIZE": "65536",
}


def environ(given: dict[str, str], **settings: object) -> dict[str, str]:
    usual: dict[str, Any] = {"programs": "/venv/bin", "modules": [], "gpus": None, "threads": None}
    usual |= {"call": "/f/call", "folder": "/work"}
    return agents_environ(given, **{**usual, **settings})


def test_variables_of_sparks_process_are_removed_and_user_variables_kept():
    found = environ({**OF_SPARK, "SPARK_HOME": "/s", "HOME": "/h"})
    assert found == {
        "SPARK_HOME": "/s",
        "HOME": "/h",
        "PATH": "/venv/bin",
        "PWD": "/work",
        "ELASTIC_CALL": "/f/call",
    }


def test_modules_replace_the_path_of_sparks_process():
    assert "PYTHONPATH" not in environ({"PYTHONPATH": "/s/pyspark.zip"})
    given = environ({"PYTHONPATH": "/s"}, modules=["/a", "/b"])
    assert given["PYTHONPATH"] == "/a:/b"


@pytest.mark.parametrize(
    ("gpus", "seen"), [(None, "7"), ([], ""), (["0", "2"], "0,2"), (["1", "1"], "1")]
)
def test_gpus_assigned_by_spark_are_visible(gpus, seen):
    assert environ({"CUDA_VISIBLE_DEVICES": "7"}, gpus=gpus)["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(("threads", "seen"), [(None, "16"), (2, "2")])
def test_threads_are_the_cores_of_a_task_unless_given(threads, seen):
    assert environ({"OMP_NUM_THREADS": "16"}, threads=threads)["OMP_NUM_THREADS"] == seen


def test_python_of_the_task_is_first_in_the_path():
    assert environ({"PATH": "/usr/bin:/venv/bin:"})["PATH"] == "/venv/bin:/usr/bin"


def test_name_of_a_host_has_its_executor():
    assert executor_of(host_of("node-1.rack-2", "17", 4)) == "17"


@pytest.mark.parametrize(
    ("words", "executor"),
    [
        (["java", "--executor-id", "3", "--cores", "1"], "3"),
        (["java", "SparkSubmit"], LOCAL),
        (["java", "--executor-id"], LOCAL),
        ([], LOCAL),
    ],
)
def test_executor_is_that_of_the_command_line(words, executor):
    assert executor_of_command(b"\0".join(word.encode() for word in words)) == executor
