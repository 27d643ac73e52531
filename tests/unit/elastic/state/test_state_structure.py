"""What a commit knows of a model from the commit before is used only while it is still right."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import Invalid
from elastic.state import TorchState
from elastic.state.handlers import optimizer_state
from elastic.state.handlers.model_state import ModelStateHandler
from elastic.state.handlers.optimizer_state import OptimizerStateHandler
from elastic.state.handlers.python_values import Index, copied
from elastic.state.snapshots import state_structure
from elastic.state.snapshots.snapshot import same_bits
from elastic.state.snapshots.state_structure import tensors_and_structure
from harness.golden import raises


class Net(nn.Module):
    """Typed loosely: the tests take it apart."""

    body: Any
    head: Any
    spare: Any
    mask: Any

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2)
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("later", None)
        self.register_parameter("spare", None)


def another_module(net: Net) -> None:
    net.head = nn.Linear(3, 2)


def another_deep_module(net: Net) -> None:
    net.body[0] = nn.Linear(3, 3, bias=False)


def another_parameter(net: Net) -> None:
    net.head.weight = nn.Parameter(torch.randn(5, 3))


def other_data(net: Net) -> None:
    net.head.weight.data = torch.randn(4, 3)


def a_parameter_moves(net: Net) -> None:
    bias = net.head.bias
    del net.head.bias
    net.head.register_parameter("offset", bias)


def a_parameter_changes_places(net: Net) -> None:
    """The same keys and tensors in the same order, only of other modules."""
    net.body = nn.Sequential(nn.Module(), nn.Module())
    net.body[0].register_parameter("a", nn.Parameter(torch.ones(1)))


def modules_change_places(net: Net) -> None:
    net.body[0], net.head = net.head, net.body[0]


def parameters_are_tied(net: Net) -> None:
    net.body[1].bias = net.body[1].weight


def a_parameter_appears(net: Net) -> None:
    net.spare = nn.Parameter(torch.ones(2))


def a_buffer_appears(net: Net) -> None:
    net.later = torch.ones(4)


def a_buffer_vanishes(net: Net) -> None:
    net.mask = None


def a_buffer_is_no_longer_saved(net: Net) -> None:
    net.register_buffer("mask", net.mask, persistent=False)


def a_weight_is_parametrized(net: Net) -> None:
    nn.utils.parametrizations.weight_norm(net.head)


class Noted(nn.Linear):
    """Keeps more than tensors."""

    def get_extra_state(self) -> Any:
        return {"note": 1}


def a_module_becomes_of_another_class(net: Net) -> None:
    net.head.__class__ = Noted


CHANGES = [
    a_module_becomes_of_another_class,
    another_module,
    another_deep_module,
    another_parameter,
    other_data,
    a_parameter_moves,
    a_parameter_changes_places,
    modules_change_places,
    parameters_are_tied,
    a_parameter_appears,
    a_buffer_appears,
    a_buffer_vanishes,
    a_buffer_is_no_longer_saved,
    a_weight_is_parametrized,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_rebuilt_model_is_examined_again(change: Callable[[Net], None]):
    net = Net()
    handler = ModelStateHandler(net)
    handler.save()
    change(net)
    handler.save()
    fresh = ModelStateHandler(net)
    known, expected = handler.snapshot.bank, fresh.snapshot.bank
    for kind in ("names", "extra"):
        assert known.extra[0][kind] == expected.extra[0][kind]
    assert known.buffers().keys() == expected.buffers().keys()
    live = dict(tensors_and_structure(net).tensors())
    for name, buffer in known.buffers().items():
        assert same_bits(buffer, live[name].detach()), name


def test_parameter_moved_to_another_module_gets_its_new_name():
    """The flat lists of keys and tensors stay the same: only where one module ends tells them apart."""

    def holder(**parameters: nn.Parameter) -> nn.Module:
        made = nn.Module()
        for key, parameter in parameters.items():
            made.register_parameter(key, parameter)
        return made

    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))
    net = nn.Sequential(holder(a=a, b=b), holder())
    handler = ModelStateHandler(net)
    del net[0].b
    net[1].register_parameter("b", b)
    handler.save()
    assert list(handler.snapshot.bank.buffers()) == ["0.a", "1.b"]


def test_unchanged_model_is_not_examined_again(monkeypatch):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = TorchState(net, optimizer)

    def refuse(*_: object) -> Any:
        raise AssertionError("looked for again")

    monkeypatch.setattr(state_structure, "tensors_and_structure", refuse)
    monkeypatch.setattr("elastic.state.handlers.model_state.tensors_and_structure", refuse)
    monkeypatch.setattr(optimizer_state, "entries_of", refuse)
    optimizer.step()
    state.commit()


def entries_as_lists(optimizer: Any) -> None:
    for entries in optimizer.state.values():
        entries["exp_avg"] = entries["exp_avg"].tolist()


def an_entry_of_another_shape(optimizer: Any) -> None:
    next(iter(optimizer.state.values()))["exp_avg"] = torch.randn(7)


def entries_under_another_key(optimizer: Any) -> None:
    for entries in optimizer.state.values():
        entries["average"] = entries.pop("exp_avg")


def entries_of_another_parameter(optimizer: Any) -> None:
    one, other, *_ = optimizer.param_groups[0]["params"]
    optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]


def entries_in_another_order(optimizer: Any) -> None:
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first] = optimizer.state.pop(first)


def an_entry_without_values(optimizer: Any) -> None:
    next(iter(optimizer.state.values()))["exp_avg"] = torch.empty(3, 3, device="meta")


def parameters_in_another_order(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


def a_parameter_without_entries(optimizer: Any) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][0]]


def an_entry_of_no_parameter(optimizer: Any) -> None:
    optimizer.state["note"] = {"n": 1}


def no_dictionary(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]] = 5


@pytest.mark.parametrize(
    "change",
    [
        entries_as_lists,
        an_entry_of_another_shape,
        entries_under_another_key,
        entries_of_another_parameter,
        entries_in_another_order,
        an_entry_without_values,
        parameters_in_another_order,
        a_parameter_without_entries,
        an_entry_of_no_parameter,
        no_dictionary,
    ],
    ids=lambda change: change.__name__,
)
def test_optimizer_with_replaced_entries_is_examined_again(change: Callable[[Any], None]):
    net = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    handler = OptimizerStateHandler(optimizer)
    handler.save()
    change(optimizer)
    handler.save()
    known, expected = handler.snapshot.bank, OptimizerStateHandler(optimizer).snapshot.bank
    for kind in ("owners", "values", "origins", "loose"):
        assert repr(known.extra[0][kind]) == repr(expected.extra[0][kind]), kind
    assert known.buffers().keys() == expected.buffers().keys()
    for name, buffer in expected.buffers().items():
        assert same_bits(known.buffers()[name], buffer), name


# ---- Python values with them --------------------------------------------------------------------


def test_copies_of_python_values_are_independent_and_keep_internal_references():
    shared = [1, 2]
    value: dict[Any, Any] = {"a": shared, "b": (shared, 3), "c": {"d": shared}, (1, "x"): 1.5}
    value["self"] = value
    made, expected = copied(value, "it"), copy.deepcopy(value)
    assert made.keys() == expected.keys()
    assert made["self"] is made
    assert made["a"] is made["b"][0] is made["c"]["d"]
    assert made["a"] == shared
    assert made["a"] is not shared


def test_copies_keep_references_to_handled_objects_and_an_index():
    model, index = nn.Linear(1, 1), Index(a=[1])
    handled = {"n": 1}
    made = copied({"model": [model], "index": index, "handled": handled}, "it", [model, handled])
    assert made["model"][0] is model
    assert made["index"] is index
    assert made["handled"] is handled


def test_subclass_of_dict_or_list_keeps_its_type_in_a_copy():
    class Named(dict[str, int]):
        pass

    class Row(list[int]):
        pass

    made = copied([Named(a=1), Row([2])], "it")
    assert [type(each) for each in made] == [Named, Row]
    with raises(Invalid):
        copied({"lock": threading.Lock()}, "it")
