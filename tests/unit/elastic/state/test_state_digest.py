"""What a state says of itself to the driver: its layout, and digests of what is committed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic.state import TorchState
from harness.golden import recorded


def mlp() -> Any:
    return nn.Sequential(nn.Linear(90, 90), nn.BatchNorm1d(90), nn.Linear(90, 4))


def test_layout_contains_parameters_buffers_and_groups_independent_of_values():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TorchState(model=model, optimizer=optimizer, epoch=3)
    before = state.layout()
    assert before.splitlines() == [
        "model.0.weight float32 [3, 2]",
        "model.0.bias float32 [3]",
        "model.1.weight float32 [3]",
        "model.1.bias float32 [3]",
        "model.1.running_mean buffer",
        "model.1.running_var buffer",
        "model.1.num_batches_tracked buffer",
        "optimizer SGD groups [4]",
    ]
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    state.epoch = 4
    assert state.layout() == before


def test_tied_parameters_are_marked_in_the_layout():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    recorded("log", TorchState(net=model).layout().splitlines())


def test_equal_bits_give_equal_digests_and_buffers_have_a_separate_digest():
    torch.manual_seed(1)
    one = TorchState(model=mlp())
    torch.manual_seed(1)
    two = TorchState(model=mlp())
    assert 0 < one.digest() == two.digest() < 2**63
    one.model(torch.randn(8, 90))
    assert one.digest_buffers() == two.digest_buffers()  # of the commit, not of the live tensors
    one.commit()
    assert one.digest() == two.digest()
    assert one.digest_buffers() != two.digest_buffers()
    assert TorchState(epoch=1).digest() == 0


def test_digest_detects_a_bit_a_swap_and_a_permutation():
    model: Any = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    state = TorchState(model=model)
    seen = {state.digest()}

    def changed() -> int:
        state.commit()
        seen.add(state.digest())
        return len(seen)

    with torch.no_grad():
        weight = model[0].weight
        weight[7, 9] = torch.nextafter(weight[7, 9], torch.tensor(9.0))
        assert changed() == 2
        swapped = weight.clone()
        weight.copy_(model[1].weight)
        model[1].weight.copy_(swapped)
        assert changed() == 3
        weight.copy_(weight[torch.randperm(512)])
        assert changed() == 4
        weight.copy_(weight[:, torch.randperm(512)])
        assert changed() == 5
        weight.view(-1)[:2].copy_(weight.view(-1)[:2].flip(0))
        assert changed() == 6


def test_a_digest_does_not_depend_on_strides():
    content = torch.randn(300, 200)
    one, two = nn.Module(), nn.Module()
    one.p = nn.Parameter(content.clone())
    two.p = nn.Parameter(content.t().contiguous().t())
    assert TorchState(model=one).digest() == TorchState(model=two).digest()
