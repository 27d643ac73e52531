"""Arguments of `elastic.spark.run`, checked before anything is started."""

from __future__ import annotations

import io
import shutil
import sys
from typing import Any
from unittest.mock import create_autospec

import pytest

import elastic.spark
from elastic.driver.spark.cluster import SparkCluster
from elastic.errors import Invalid
from elastic.spark import spark_run
from harness.golden import raises

pyspark = pytest.importorskip("pyspark")


def cluster(slots: list[int], *, local: bool = True) -> Any:
    found = create_autospec(SparkCluster, instance=True)
    found.local = local
    found.slots.side_effect = slots
    return found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((4, None, None), (4, 4, 4)),
        ((None, None, None), (6, 6, 6)),
        ((None, 8, None), (8, 8, 8)),
        ((None, 1, 4), (4, 1, 4)),
        ((3, 1, 4), (3, 1, 4)),
        ((None, 2, None), (6, 2, 6)),
    ],
)
def test_sizes_are_the_given_ones_or_derived_from_spark(given, found):
    assert spark_run.sizes(given[0], given[1], given[2], 6) == found


@pytest.mark.parametrize("given", [(0, None, None), (True, None, None), (2, 3, None), (5, 1, 4)])
def test_sizes_that_allow_no_world_are_refused(given):
    with raises(Invalid):
        spark_run.sizes(given[0], given[1], given[2], 6)


def test_too_few_slots_of_a_local_master_are_refused_at_once():
    with raises(Invalid):
        spark_run.await_slots(cluster([2]), 3, 600.0)


def test_slots_of_joined_executors_are_awaited(monkeypatch):
    monkeypatch.setattr(spark_run, "LOOK_S", 0.0)
    spark_run.await_slots(cluster([0, 1, 3], local=False), 3, 600.0)


def test_too_few_executors_are_refused_when_no_more_join(monkeypatch):
    monkeypatch.setattr(spark_run, "LOOK_S", 0.0)
    monkeypatch.setattr(spark_run, "QUIET_S", 0.0)
    with raises(Invalid):
        spark_run.await_slots(cluster([0, 1, 1, 1], local=False), 3, 600.0)


def test_missing_pyspark_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with raises(Invalid):
        elastic.spark.run(print, num_proc=1)


def test_missing_spark_session_is_reported(monkeypatch):
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)
    with raises(Invalid):
        elastic.spark.run(print, num_proc=1)


def test_missing_java_is_reported(monkeypatch):
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with raises(Invalid):
        elastic.spark.run(print, num_proc=1)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(3, ()), (print, "abc"), (print, (x for x in "a"))],
    ids=["function", "text", "generator"],
)
def test_call_that_cannot_be_made_is_refused(function, arguments):
    with raises(Invalid):
        elastic.spark.run(function, arguments, num_proc=1)


@pytest.mark.parametrize(
    ("arguments", "named"), [((1, 2), {}), ((), {}), ((1,), {"other": 2})], ids=["2", "0", "other"]
)
def test_arguments_that_the_function_does_not_take_are_refused(arguments, named):
    def function(one: int) -> None: ...

    with raises(Invalid):
        elastic.spark.run(function, arguments, named, num_proc=1)


def test_function_that_cannot_be_pickled_is_refused():
    with raises(Invalid):
        elastic.spark.run(print, (sys._getframe(),), num_proc=1)


def test_output_is_written_to_text_or_byte_streams(capsys):
    text, both = io.StringIO(), io.TextIOWrapper(io.BytesIO())
    found = spark_run.streams(text, both)
    assert found is not None
    for write in found:
        write("grün\n".encode())
    assert text.getvalue() == "grün\n"
    assert both.buffer.getvalue() == "grün\n".encode()
    assert spark_run.streams(None, None) is None


@pytest.mark.parametrize("given", [("out.txt", None), (None, 3), (io.StringIO(), b"err")])
def test_objects_that_are_no_streams_are_refused(given):
    with raises(Invalid):
        elastic.spark.run(print, stdout=given[0], stderr=given[1])


def test_stream_that_raises_cannot_be_written():
    closed = create_autospec(io.StringIO, instance=True)
    closed.write.side_effect = RuntimeError
    found = spark_run.streams(closed, None)
    assert found is not None
    with pytest.raises(OSError):
        found[0](b"line\n")
