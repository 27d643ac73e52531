"""Imports of Horovod by scripts work, or are refused with advice."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from harness import horovod_imports as table
from horovod.common import util
from horovod.runner.common.util.env import get_env_rank_and_size


def _skip_without_engine(text: str) -> None:
    for name, package in {"horovod.ray": "ray", "horovod.spark": "pyspark"}.items():
        if name in text:
            pytest.importorskip(package)


@pytest.mark.parametrize(
    "statement", table.with_framework(table.lines(table.STATEMENTS), wanted=False)
)
def test_imports_of_horovods_tests_and_examples_work(statement):
    _skip_without_engine(statement)
    exec(statement, {})


@pytest.mark.parametrize(
    "statement", table.with_framework(table.lines(table.REFUSED), wanted=False)
)
def test_import_is_refused_when_there_is_no_counterpart(statement):
    _skip_without_engine(statement)
    table.try_refused(statement)


@pytest.mark.parametrize("name", table.with_framework(table.MODULES.split(), wanted=False))
def test_each_module_of_horovod_exists_or_is_refused(name):
    _skip_without_engine(name)
    table.try_module(name)


def test_module_that_horovod_does_not_have_is_not_found():
    assert importlib.util.find_spec("horovod.common.no_such_module") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("horovod.runner.no_such_module")


PLACES = [
    ({}, (0, 1)),
    ({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "4", "PMI_RANK": "0", "PMI_SIZE": "1"}, (2, 4)),
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}, (3, 8)),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
]


@pytest.fixture
def unset(monkeypatch):
    for name in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        monkeypatch.delenv(f"{name}_RANK", raising=False)
        monkeypatch.delenv(f"{name}_SIZE", raising=False)


@pytest.mark.parametrize(("given", "expected"), PLACES)
def test_rank_and_size_are_read_from_the_environment(unset, given, expected):
    with util.env(**given):
        assert get_env_rank_and_size() == expected


def test_size_without_a_rank_is_refused(unset, monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(RuntimeError):
        get_env_rank_and_size()
