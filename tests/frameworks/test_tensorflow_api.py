"""`horovod.tensorflow` and Keras on TensorFlow, in worlds of 2 and 3 processes: see `in_tensorflow`, `in_keras`."""

from __future__ import annotations

import pytest

from conformance.worlds import World
from frameworks import behaviours

FIRST_S = 150.0  # imports included
# Of the script checks; the others create more models of the same kinds.
QUICK = (
    "test_unreduced_step_is_reported_when_traced_before",
    "test_no_function_remains_wrapped_after_the_check",
)

worlds = pytest.mark.parametrize(
    "world", [2, pytest.param(3, marks=pytest.mark.nightly)], indirect=True, ids="{}-ranks".format
)


@pytest.mark.parametrize("world", [2], indirect=True, ids="{}-ranks".format)
@pytest.mark.parametrize("behaviour", behaviours.of("in_threads"))
def test_abandoned_objects(world: World, behaviour: str) -> None:
    world.run(behaviours.call, "in_threads", behaviour, timeout_s=FIRST_S)


@worlds
@pytest.mark.parametrize("behaviour", behaviours.of("in_tensorflow"))
def test_tensorflow(world: World, behaviour: str) -> None:
    world.run(behaviours.call, "in_tensorflow", behaviour, timeout_s=FIRST_S)


@worlds
@pytest.mark.parametrize("behaviour", behaviours.of("in_tensorflow_graphs"))
def test_tensorflow_in_graphs(world: World, behaviour: str) -> None:
    world.run(behaviours.call, "in_tensorflow_graphs", behaviour, timeout_s=FIRST_S)


@pytest.mark.parametrize("world", [2], indirect=True, ids="{}-ranks".format)
@pytest.mark.parametrize("behaviour", behaviours.of("in_data_service"))
def test_the_data_service(world: World, behaviour: str) -> None:
    world.run(behaviours.call, "in_data_service", behaviour, timeout_s=FIRST_S)


@worlds
@pytest.mark.parametrize("behaviour", behaviours.of("in_keras"))
def test_keras(world: World, behaviour: str) -> None:
    world.run(behaviours.call, "in_keras", behaviour, timeout_s=FIRST_S)


@pytest.mark.parametrize("world", [2], indirect=True, ids="{}-ranks".format)
@pytest.mark.parametrize("behaviour", behaviours.of("in_signatures"))
def test_signatures(world: World, behaviour: str) -> None:
    world.run(behaviours.call, "in_signatures", behaviour, timeout_s=FIRST_S)


@pytest.mark.parametrize("world", [2], indirect=True, ids="{}-ranks".format)
@pytest.mark.parametrize("behaviour", behaviours.of("in_imports"))
def test_imports(world: World, behaviour: str) -> None:
    world.run(behaviours.call, "in_imports", behaviour, timeout_s=FIRST_S)


@pytest.mark.parametrize("world", [2], indirect=True, ids="{}-ranks".format)
@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param(each, marks=[] if each in QUICK else pytest.mark.nightly)
        for each in behaviours.of("in_script_checks")
    ],
)
def test_script_checks(world: World, behaviour: str) -> None:
    world.run(behaviours.call, "in_script_checks", behaviour, timeout_s=FIRST_S)
