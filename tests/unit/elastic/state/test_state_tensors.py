"""Tensors of every kind are committed and restored: tied, strided, expanded, sparse, absent, of no shape yet."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from elastic.errors import Invalid, StateMismatch
from elastic.state import TorchState
from elastic.state.handlers.model_state import ModelStateHandler
from elastic.state.snapshots.snapshot import same_bits
from harness.golden import raises


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_bits(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert same_bits(tensor, expected[name]), name


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(4, 4)
        self.same = nn.Linear(4, 4)
        self.same.weight = self.tied.weight
        self.transposed = nn.Parameter(torch.randn(6, 3).t())
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.halved = nn.Parameter(torch.randn(3).bfloat16())
        self.imaginary = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.image = nn.Parameter(torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last))
        self.sparse = nn.Parameter(torch.eye(3).to_sparse())
        self.register_buffer("expanded", torch.randn(1, 3).expand(4, 3))
        self.register_buffer("sliced", torch.randn(8)[::2])
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("csr", torch.eye(3).to_sparse_csr())
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.register_buffer("later", None)
        self.register_buffer("nan", torch.full((3,), float("nan")))
        self.register_parameter("nothing", None)
        self.ghost = nn.Parameter(torch.empty(5, device="meta"))
        self.note = "old"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def everything(zoo: Zoo) -> dict[str, torch.Tensor]:
    tensors = {**dict(zoo.named_parameters()), **dict(zoo.named_buffers())}
    return {name: each.detach().clone() for name, each in tensors.items() if name != "ghost"}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_of_every_kind_are_restored():
    zoo = Zoo()
    expected = everything(zoo)
    state = TorchState(model=zoo)
    with torch.no_grad():
        for name, tensor in {**dict(zoo.named_parameters()), **dict(zoo.named_buffers())}.items():
            if name == "flags":
                tensor.logical_not_()
            elif name == "expanded":
                tensor[0].add_(1)
            elif name == "csr":
                tensor.values().add_(1)
            elif name == "sparse":
                tensor.data = (2 * torch.eye(3)).to_sparse()
            elif name != "ghost":
                tensor.add_(1)
    zoo.register_buffer("later", torch.ones(2))
    zoo.note = "new"
    state.restore()
    present = everything(zoo)
    assert present.keys() == expected.keys()
    for name, tensor in expected.items():
        if name in ("sparse", "csr"):
            assert torch.equal(present[name].to_dense(), tensor.to_dense()), name
        else:
            assert same_bits(present[name], tensor), name
    assert zoo.same.weight is zoo.tied.weight
    assert dict(zoo.named_buffers()).get("later") is None
    assert zoo.note == "old"


def test_parameters_that_share_a_storage_since_the_commit_are_separated_by_a_restore():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    expected = bits(model)
    state = TorchState(model=model)
    model[0].weight.data = model[1].weight.data
    state.restore()
    assert_bits(model, expected)


def test_shared_storage_of_parameters_is_kept_by_a_restore():
    flat = torch.randn(18)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[0].weight.data = flat[:9].view(3, 3)
    model[1].weight.data = flat[9:].view(3, 3)
    kept = flat.clone()
    state = TorchState(model=model)
    flat.zero_()
    state.restore()
    assert torch.equal(flat, kept)


def test_parameter_with_changed_shape_or_dtype_is_restored():
    model = nn.Linear(3, 3)
    expected = bits(model)
    state = TorchState(model=model)
    model.weight.data = torch.zeros(5, 5)
    model.bias.data = model.bias.data.double()
    state.restore()
    assert_bits(model, expected)


def test_a_module_without_its_committed_parameter_is_refused():
    model = nn.Sequential(nn.Linear(3, 3))
    state = TorchState(model=model)
    model[0] = nn.Identity()
    with raises(StateMismatch):
        state.restore()


def test_a_lazy_module_is_refused_before_its_first_forward_pass():
    with raises(Invalid):
        TorchState(model=nn.LazyLinear(3))


class Counting(nn.Module):
    """Keeps a number in its state dict, as scripts do that know of no extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = 10

    def state_dict(self, *args, **kwargs):
        return {**super().state_dict(*args, **kwargs), "seen": self.seen}

    def load_state_dict(self, found, **kwargs):  # type: ignore[override]
        found = dict(found)
        self.seen = found.pop("seen")
        return super().load_state_dict(found, **kwargs)


class Remembering(nn.Module):
    """The same one level down, where torch calls it for a module within a model."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 10

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "seen"] = self.seen

    def _load_from_state_dict(self, found, prefix, *others):
        self.seen = found.pop(prefix + "seen")
        super()._load_from_state_dict(found, prefix, *others)


@pytest.mark.parametrize("model", [Counting(), nn.Sequential(nn.Linear(2, 2), Remembering())])
def test_additions_of_a_custom_state_dict_are_restored(model):
    seen = model if isinstance(model, Counting) else model[1]
    state = TorchState(model=model)
    state.save()
    seen.seen = 99
    for parameter in model.parameters():
        parameter.data += 1
    other = copy.deepcopy(model)
    state.restore()
    assert seen.seen == 10
    assert next(model.parameters()).max() <= 1

    receiver = ModelStateHandler(other)
    structure, tensors = ModelStateHandler(model).pack()
    receiver.place(structure, tensors, None, restoring=False)
    assert repr(other.state_dict()) == repr(model.state_dict())


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_quantized_model_is_restored():
    model = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, dtype=torch.qint8
    )
    ones = torch.ones(1, 4)
    before = model(ones)
    state = TorchState(model=model)
    state.save()
    other = torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)
    model[0].set_weight_bias(other, torch.zeros(4))
    assert not torch.equal(model(ones), before)
    state.restore()
    assert torch.equal(model(ones), before)
