"""Exceptions of the GPU and NCCL, by their types."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import DistBackendError

from elastic.errors import DeviceLost
from elastic.runtime.failures import hardware_errors


def with_code(error: torch.AcceleratorError, code: int) -> torch.AcceleratorError:
    error.error_code = code  # type: ignore[attr-defined]  # as torch sets it
    return error


def out_of(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        with_code(torch.AcceleratorError("CUDA error: an illegal memory access"), 700),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        DistBackendError("NCCL error: unhandled system error"),
        DeviceLost("a copy did not complete"),
        out_of(RuntimeError("in a library of the user's"), DistBackendError("NCCL error")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_hardware_errors_are_recognized(error):
    assert hardware_errors.at_fault(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA error"),
        RuntimeError("CUDA error: what anybody may write"),
        torch.OutOfMemoryError("CUDA out of memory"),
        # An assertion in a kernel: an index out of range, say.
        with_code(torch.AcceleratorError("CUDA error: device-side assert triggered"), 710),
        with_code(torch.AcceleratorError("CUDA error: invalid device ordinal"), 101),
        # Memory that ran out, outside torch's allocator.
        with_code(torch.AcceleratorError("CUDA error: out of memory"), 2),
    ],
    ids=lambda error: str(error)[:30],
)
def test_script_errors_are_no_hardware_errors(error):
    assert not hardware_errors.at_fault(error)


def test_error_is_a_hardware_error_when_the_device_context_is_lost(monkeypatch):
    """A library's error after a sticky one has its own type; the device has the true state."""

    def refuses() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    error = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")
    monkeypatch.setattr(hardware_errors, "_ask_the_device", refuses)
    assert hardware_errors.at_fault(error)
    monkeypatch.setattr(hardware_errors, "_ask_the_device", lambda: None)
    assert not hardware_errors.at_fault(error)
