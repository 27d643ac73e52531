"""Errors of a script without a runtime."""

from unittest.mock import create_autospec

import pytest
import torch.distributed

from elastic.errors import NotInitialized
from elastic.protocol.messages import Address
from elastic.rendezvous import environment
from elastic.rendezvous.environment import Environment
from elastic.runtime import lifecycle
from harness.golden import raises


@pytest.mark.parametrize(
    ("group_made", "under_elasticrun"), [(True, True), (True, False), (False, True)]
)
def test_a_worker_whose_torch_has_not_loaded_our_backend_gets_an_error(
    monkeypatch, group_made, under_elasticrun
):
    known = create_autospec(Environment, instance=True)
    known.driver = Address("127.0.0.1", 1) if under_elasticrun else None
    monkeypatch.setattr(environment, "read", lambda: known)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: group_made)
    with raises(NotInitialized):
        lifecycle.current()
