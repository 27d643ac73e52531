"""A state on fake GPUs: host memory of a commit, and the transfer to a newcomer."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest

from harness import wording
from harness.program import output_of

pytestmark = [pytest.mark.fakecuda, pytest.mark.slow, pytest.mark.timeout(240)]
RUN_S = 200.0

# 24 tensors a little larger than a power of two each, and one that a transposed view lies in.
STATE = """
    import gc, torch
    from torch import nn
    from elastic.state import TorchState

    pinned = {}
    cudart = torch.cuda.cudart()
    register, unregister = cudart.cudaHostRegister, cudart.cudaHostUnregister

    def registering(at, nbytes, flags):
        pinned[at] = nbytes
        return register(at, nbytes, flags)

    def unregistering(at):
        del pinned[at]
        return unregister(at)

    cudart.cudaHostRegister, cudart.cudaHostUnregister = registering, unregistering

    def pinned_bytes():
        gc.collect()
        return sum(pinned.values()) + torch.cuda.host_memory_stats()["allocated_bytes.current"]

    def bits(state):
        entries = state.optimizer.state.values()
        tensors = [*state.model.parameters(), *(t for each in entries for t in each.values())]
        return [each.detach().cpu().clone() for each in tensors]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = [2**18 + 1 + each for each in range(24)]
            self.odd = nn.ParameterList(nn.Parameter(torch.randn(each)) for each in sizes)
            self.transposed = nn.Parameter(torch.randn(300, 7).t())

    def make():
        torch.manual_seed(0)
        model = Model().cuda()
        return TorchState(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1))

    def step(state):
        for each in state.model.parameters():
            each.grad = torch.ones_like(each)
        state.optimizer.step()
"""


def run(env: dict[str, str], script: str) -> str:
    """Run a separate process; return its output, including stderr."""
    code = textwrap.dedent(STATE) + textwrap.dedent(script)
    return output_of(sys.executable, "-c", code, env=os.environ | env, timeout=RUN_S)


def test_pinned_memory_of_commits_equals_the_state_size_for_any_tensor_sizes(fake_cuda):
    script = """
        state = make()
        step(state)
        state.save()
        size = sum(each.nbytes for each in bits(state))
        torch.cuda.synchronize()
        print(f"state {size} pinned {pinned_bytes()}")
        assert size <= pinned_bytes() < 1.01 * size + 100_000, pinned_bytes() / size
        before = bits(state)
        step(state)
        state.restore()
        assert all(map(torch.equal, before, bits(state)))
        assert state.model.transposed.stride() == (1, 7)
        state.model = Model().cuda()  # what was committed of the other goes
        state.optimizer = torch.optim.Adam(state.model.parameters(), lr=0.1)
        state.save()
        assert pinned_bytes() < 0.4 * size, pinned_bytes() / size
        del state
        assert pinned_bytes() < 1000, pinned_bytes()
    """
    print(run(fake_cuda(), script))


def test_a_copy_in_progress_is_complete_although_its_memory_is_released(fake_cuda):
    script = """
        state = make()
        step(state)
        state.save()
        assert state.model.odd[0].device.type == "cuda"
        expected = bits(state)
        step(state)
        state.restore()  # waits for copies that are slow
        assert all(map(torch.equal, expected, bits(state)))
        step(state)
        state.save()
        del state  # copies are under way: memory that was freed would spoil the device
        assert pinned_bytes() < 1000
        torch.cuda.synchronize()
    """
    said = run(fake_cuda(FAKE_FAULTS="copy:slow,mbps=400", FAKE_GPU_MB="700"), script)
    assert wording.SPOILT not in said
