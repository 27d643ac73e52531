"""Random numbers between two steps: a commit contains the state of the generators."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from elastic.exact import random_generators
from elastic.exact.shards import Shards


@pytest.fixture(autouse=True)
def those_of_before():
    before = random_generators.state()
    yield
    random_generators.set_state(before)


def draw() -> list[float]:
    return [
        float(torch.rand(())),
        float(torch.randn(3)[0]),
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(numpy.random.standard_normal()),
    ]


def test_generator_state_is_restored():
    random_generators.set_seed(3)
    draw()
    saved = random_generators.state()
    drawn = draw()
    assert draw() != drawn
    random_generators.set_state(saved)
    assert draw() == drawn


def test_random_numbers_before_the_first_step_depend_only_on_the_seed_of_the_shards():
    """A script that seeds nothing draws the same in every run, once its shards are in a state."""
    Shards(2, seed=1).state_dict()
    drawn = draw()
    random.seed(5)
    torch.manual_seed(5)
    Shards(2, seed=1).state_dict()
    assert draw() == drawn
    Shards(2, seed=2).state_dict()
    assert draw() != drawn


def test_commit_contains_the_generator_state_after_earlier_draws():
    """A worker that continues from it draws what the others draw, not what they drew before it."""
    shards = Shards(2, seed=1)
    shards.state_dict()
    list(shards)
    before = draw()  # as noise on the weights after the step
    saved = shards.state_dict()
    drawn = draw()
    other = Shards(2, seed=1)
    draw()
    other.load_state_dict(saved)
    assert draw() == drawn != before
