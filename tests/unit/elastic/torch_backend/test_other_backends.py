"""A process group of another backend, if ours replaces torch's."""

from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec

import pytest
from torch.distributed import distributed_c10d

from elastic.errors import Invalid
from elastic.rendezvous import worker_settings
from elastic.torch_backend import backend_override
from elastic.torch_backend.world_store import WorldStore
from harness.golden import raises


@pytest.mark.parametrize("elastic", [True, False])
def test_backend_that_cannot_follow_the_world_is_refused_in_an_elastic_job(monkeypatch, elastic):
    env = replace(worker_settings.read({}), elastic=elastic)
    monkeypatch.setattr(worker_settings, "read", lambda: env)
    theirs = create_autospec(distributed_c10d._new_process_group_helper)
    monkeypatch.setitem(backend_override._theirs, "_new_process_group_helper", theirs)
    asked: Any = (2, 0, [], "mpi", WorldStore(), "second")
    if not elastic:
        backend_override.new_group(*asked)
        assert theirs.call_args.args == asked
        return
    with raises(Invalid):
        backend_override.new_group(*asked)
    assert not theirs.called
