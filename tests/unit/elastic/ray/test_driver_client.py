"""The caller's side of a driver actor, where this process has left Ray."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any
from unittest.mock import create_autospec

import pytest

from elastic.errors import JobFailed

if find_spec("ray") is None:
    pytest.skip("needs ray", allow_module_level=True)

import ray
from ray.actor import ActorMethod

from elastic.ray.driver_actor import DriverActor
from elastic.ray.driver_client import DriverClient
from harness.golden import raises


@pytest.fixture
def follower() -> DriverClient:
    assert not ray.is_initialized()
    return DriverClient(create_autospec(DriverActor, instance=True))


def test_poll_after_ray_was_left_fails_the_job(follower: DriverClient):
    with raises(JobFailed):
        follower.poll()


def test_follower_may_be_closed_twice(follower: DriverClient):
    follower.close()
    follower.close()


def test_handle_of_a_previous_cluster_is_closed(
    follower: DriverClient, monkeypatch: pytest.MonkeyPatch
):
    refused = Exception("Can't find actor: it might be from a different cluster")  # Ray's own words

    def kill(actor: Any, *, no_restart: bool = True) -> None:
        raise refused

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "kill", kill)
    close = create_autospec(ActorMethod, instance=True)
    close.remote.side_effect = refused
    follower.actor.close = close
    follower.close()
    assert close.remote.called
