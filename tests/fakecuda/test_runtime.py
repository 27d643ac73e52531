"""The harness itself: streams, memory, devices and values behave as on a GPU."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest

from harness import wording
from harness.program import output_of

pytestmark = [pytest.mark.fakecuda, pytest.mark.slow]
RUN_S = 100.0


def run(env: dict[str, str], script: str) -> str:
    """Run a separate process; return its output, including stderr."""
    code = textwrap.dedent(script)
    return output_of(sys.executable, "-c", code, env=os.environ | env, timeout=RUN_S)


def test_streams_are_asynchronous_and_ordered_only_by_events(fake_cuda):
    script = """
        import torch
        written = torch.zeros(4, device="cuda")
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(500_000_000)
            written.fill_(1)
        early = written.clone()  # nobody has waited
        torch.cuda.current_stream().synchronize()
        assert not side.query()
        torch.cuda.current_stream().wait_stream(side)
        late = written.clone()
        assert early.tolist() == [0] * 4, early
        assert late.tolist() == [1] * 4, late
    """
    run(fake_cuda(), script)


def test_stream_wait_refers_to_the_record_at_its_call(fake_cuda):
    script = """
        import torch
        written = torch.zeros(4, device="cuda")
        slow, waiting, idle = (torch.cuda.Stream() for _ in range(3))
        event = torch.cuda.Event()
        torch.cuda.synchronize()
        with torch.cuda.stream(slow):
            torch.cuda._sleep(500_000_000)
            written.fill_(1)
        event.record(slow)
        waiting.wait_event(event)
        with torch.cuda.stream(waiting):
            copy = written.clone()
        event.record(idle)
        event.synchronize()
        assert event.query()  # the newest record counts
        assert not slow.query() and not waiting.query()
        waiting.synchronize()
        assert copy.tolist() == [1] * 4, copy
    """
    run(fake_cuda(), script)


def test_context_is_counted_when_a_thread_first_uses_a_device(fake_cuda):
    script = """
        import threading, torch, fake_cuda
        assert torch.cuda.device_count() == 3 and fake_cuda.contexts() == []
        torch.cuda.set_device(1)
        torch.ones(2, device="cuda")
        assert fake_cuda.contexts() == [1], fake_cuda.contexts()
        guarded = threading.Thread(target=lambda: torch.cuda.synchronize(1))
        guarded.start(); guarded.join()
        assert fake_cuda.contexts() == [1], fake_cuda.contexts()
        careless = threading.Thread(target=torch.cuda.synchronize)
        careless.start(); careless.join()
        assert fake_cuda.contexts() == [0, 1], fake_cuda.contexts()
    """
    run(fake_cuda(gpus=3), script)


def test_use_of_freed_memory_permanently_fails_the_device(fake_cuda):
    script = """
        import ctypes, torch
        torch.zeros(1, device="cuda:1"), torch.zeros(1, device="cuda:0")
        torch.cuda.set_device(0)
        runtime = ctypes.CDLL("libcudart.so.13")
        at = ctypes.c_void_p()
        assert runtime.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(1024)) == 0
        assert runtime.cudaMemset(at, 0, ctypes.c_size_t(1024)) == 0
        assert runtime.cudaFree(at) == 0
        assert runtime.cudaMemset(at, 0, ctypes.c_size_t(1024)) == 700
        for _ in range(2):
            try:
                torch.zeros(1, device="cuda:0").item()
            except torch.AcceleratorError as error:
                assert "illegal memory access" in str(error)
            else:
                raise AssertionError("the error did not stay")
        torch.cuda.set_device(1)
        assert torch.ones(1, device="cuda:1").item() == 1
    """
    assert "freed memory was used" in run(fake_cuda(), script)


def test_memory_runs_out_and_an_unknown_kernel_refuses(fake_cuda):
    script = """
        import torch
        try:
            torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("there was room")
        try:
            torch.nn.LSTM(2, 2).cuda()(torch.ones(1, 1, 2, device="cuda"))
        except RuntimeError as error:
            assert "not supported" in str(error), error
        else:
            raise AssertionError("an LSTM was computed")
        assert torch.ones(1, device="cuda").item() == 1  # which spoils nothing
    """
    assert wording.NOT_MADE_UP in run(fake_cuda(FAKE_GPU_MB="64"), script)


def test_fake_cuda_training_equals_cpu_training_bitwise(fake_cuda):
    script = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        images, labels = torch.randn(4, 3, 8, 8), torch.tensor([1, 2, 3, 4])

        def trained(device, make):
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
                nn.Linear(512, 10), nn.LayerNorm(10), nn.GELU(),
            ).to(device)
            optimizer = make(model.parameters())
            for _ in range(5):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
            return [each.detach().cpu() for each in model.state_dict().values()]

        makes = {
            "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
            "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        }
        for name, make in makes.items():
            pairs = zip(trained("cpu", make), trained("cuda", make))
            assert all(torch.equal(a, b) for a, b in pairs), name
        attend = nn.functional.scaled_dot_product_attention
        query = torch.randn(2, 4, 16, 8)
        there = query.cuda()
        assert torch.allclose(
            attend(there, there, there, is_causal=True).cpu(),
            attend(query, query, query, is_causal=True), atol=1e-5,
        )
        torch.manual_seed(7); first = torch.rand(9, device="cuda"), torch.rand(9, device="cuda")
        torch.manual_seed(7); again = torch.rand(9, device="cuda"), torch.rand(9, device="cuda")
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
        assert not torch.equal(first[0], first[1])
    """
    assert wording.NOT_MADE_UP not in run(fake_cuda(), script)
