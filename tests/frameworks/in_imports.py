"""Imports of Horovod for TensorFlow and Keras work, or are refused: see `harness.horovod_imports`."""

from harness import horovod_imports as table


def test_imports_of_horovods_tests_and_examples_work(rank, size):
    for statement in table.with_framework(table.lines(table.STATEMENTS), wanted=True):
        exec(statement, {})


def test_imports_are_refused_when_there_is_no_counterpart(rank, size):
    for statement in table.with_framework(table.lines(table.REFUSED), wanted=True):
        table.try_refused(statement)


def test_each_module_of_horovod_exists_or_is_refused(rank, size):
    for name in table.with_framework(table.MODULES.split(), wanted=True):
        table.try_module(name)
