"""Errors of a script without a runtime."""

from unittest.mock import create_autospec

import pytest
import torch.distributed

import elastic
from elastic.errors import NotInitialized
from elastic.protocol.messages import Address
from elastic.rendezvous import worker_settings
from elastic.rendezvous.worker_settings import Environment
from elastic.runtime import lifecycle
from harness.golden import raises


@pytest.mark.parametrize(
    ("group_made", "under_elasticrun"), [(True, True), (True, False), (False, True)]
)
def test_torch_without_our_backend_raises_not_initialized(
    monkeypatch, group_made, under_elasticrun
):
    known = create_autospec(Environment, instance=True)
    known.driver = Address("127.0.0.1", 1) if under_elasticrun else None
    monkeypatch.setattr(worker_settings, "read", lambda: known)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: group_made)
    monkeypatch.setattr("sys.argv", ["train.py"])
    with raises(NotInitialized):
        lifecycle.current()


def test_elastic_run_when_elasticrun_did_not_start_the_script_then_the_error_names_the_command(
    monkeypatch,
):
    known = create_autospec(Environment, instance=True)
    known.driver = None
    monkeypatch.setattr(worker_settings, "read", lambda: known)
    monkeypatch.setattr("sys.argv", ["train.py"])
    train = elastic.run(lambda state: None)
    with raises(NotInitialized, "elasticrun", "train.py"):
        train(elastic.ObjectState(step=0))
    with raises(NotInitialized):
        elastic.rank()
