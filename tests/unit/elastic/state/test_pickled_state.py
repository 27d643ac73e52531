"""A state belongs to its process."""

import copy
import pickle

import cloudpickle
import pytest
import torch

from elastic.errors import ElasticError, NotPicklable
from elastic.state import TorchState


class Trainer:
    """As scripts have them: the state is an attribute."""

    def __init__(self):
        self.state = TorchState(model=torch.nn.Linear(1, 1), step=0)


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps, copy.deepcopy])
def test_object_that_contains_a_state_cannot_be_pickled(dumps):
    with pytest.raises(TypeError) as raised:
        dumps(Trainer())
    assert raised.type is NotPicklable
    assert isinstance(raised.value, ElasticError)
