"""What a worker reads of its environment."""

from __future__ import annotations

import pytest

from elastic import environment
from elastic.errors import Invalid


def test_without_a_launcher_a_collective_has_as_long_as_a_group_to_form():
    env = environment.read({"HOROVOD_GLOO_TIMEOUT_SECONDS": "7"})
    assert (env.timeout_s, env.collective_timeout_s) == (7.0, 7.0)


def test_where_the_driver_judges_who_is_stuck_a_collective_has_longer():
    env = environment.read({"ELASTIC_COLLECTIVE_TIMEOUT": "660"})
    assert (env.timeout_s, env.collective_timeout_s) == (30.0, 660.0)


def test_the_wait_for_the_driver_ends_later_than_any_patience_of_its_own():
    assert environment.read({}).wait_timeout_s == 1260.0
    assert environment.read({"ELASTIC_WAIT_TIMEOUT": "62"}).wait_timeout_s == 62.0


@pytest.mark.parametrize(
    "name",
    ["HOROVOD_GLOO_TIMEOUT_SECONDS", "ELASTIC_COLLECTIVE_TIMEOUT", "ELASTIC_WAIT_TIMEOUT"],
)
def test_a_damaged_number_is_named(name):
    with pytest.raises(Invalid, match=f"{name} is 'soon'; give a number of seconds"):
        environment.read({name: "soon"})
