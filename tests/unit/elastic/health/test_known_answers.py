"""The built-in health check: right results pass, and a single wrong bit does not."""

from __future__ import annotations

import zlib
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pynvml
import pytest
import torch

from elastic import failpoints
from elastic.health import check, gpu_errors, known_answers
from elastic.health.exit_codes import FAILED, PASSED, WRONG_RESULT


@pytest.fixture
def flipped():
    """A bit of the product is flipped."""
    failpoints.use("health-check flip=product:4711")
    yield
    failpoints.use("")


def test_known_answers_are_exact_in_any_order_of_summation():
    left, right = (each.astype(np.int64) for each in known_answers.factors())
    product = left @ right
    assert np.abs(left).max() * np.abs(right).max() * known_answers.SIZE < 2**24
    assert zlib.crc32(product.astype(np.float32).tobytes()) == known_answers.PRODUCT_CRC
    numbers = known_answers.summands().astype(np.int64)
    assert numbers.sum() == known_answers.TOTAL < 2**24 and numbers.min() >= 0


def test_right_results_pass_by_numpy_and_by_torch():
    assert not known_answers.wrong_on_cpu()
    assert not known_answers.wrong_on_gpu(torch, "cpu")


@pytest.mark.usefixtures("flipped")
@pytest.mark.parametrize("device", ["numpy", "torch"])
def test_flipped_bit_of_a_product_is_found(device, monkeypatch):
    monkeypatch.setenv("ELASTIC_WORKER", "h:0#1")
    if device == "numpy":
        assert known_answers.wrong_on_cpu()
    else:
        assert known_answers.wrong_on_gpu(torch, "cpu")


def test_wrong_sum_and_wrong_memory_are_found(monkeypatch):
    monkeypatch.setattr(known_answers, "TOTAL", known_answers.TOTAL + 1)
    assert known_answers.wrong_on_cpu() and known_answers.wrong_on_gpu(torch, "cpu")
    monkeypatch.undo()
    monkeypatch.setattr(np, "count_nonzero", lambda found: 1)
    assert known_answers.wrong_on_cpu()


class Torch:
    """torch with two GPUs, of which ``bad`` fails; results come from the CPU."""

    def __init__(self, bad: int | None, error: str = "CUDA error: uncorrectable ECC error") -> None:
        self.cuda = self
        self.bad, self.error = bad, error
        self.used: list[int] = []

    def __getattr__(self, name):
        return getattr(torch, name)

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, index: int) -> object:
        return object()

    def wrong(self, module: object, device: str) -> str:
        self.used.append(int(device.rpartition(":")[2]))
        if self.used[-1] == self.bad:
            if self.error:
                raise RuntimeError(f"{self.error}\nCompile with TORCH_USE_CUDA_DSA")
            return "the matrix product has other bits"
        return ""


@pytest.mark.parametrize(
    ("slot", "bad", "error", "code", "used"),
    [
        (1, None, "", PASSED, [1]),
        (1, 0, "", PASSED, [1]),
        (1, 1, "", WRONG_RESULT, [1]),
        (0, 0, "CUDA error: uncorrectable ECC error", FAILED, [0]),
        (3, 1, "", WRONG_RESULT, [1]),
        (None, 1, "", WRONG_RESULT, [0, 1]),
    ],
)
def test_gpu_of_the_slot_is_checked(slot, bad, error, code, used, monkeypatch):
    fake = Torch(bad, error)
    monkeypatch.setattr(check, "gpus_here", lambda: True)
    monkeypatch.setattr(known_answers, "wrong_on_gpu", fake.wrong)
    monkeypatch.setitem(__import__("sys").modules, "torch", fake)
    found, line = check.check(slot)
    assert (found, fake.used) == (code, used)
    assert "\n" not in line and line


def nvml(
    ecc: int | None = 0,
    rows: tuple[int, int, int, int] | None = None,
    xids: tuple[int, ...] | None = None,
) -> Any:
    """NVML of one GPU. None: the GPU does not support it."""
    fake = create_autospec(pynvml)
    fake.NVMLError = pynvml.NVMLError
    unsupported = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    none_left = pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
    fake.nvmlDeviceGetHandleByUUID.side_effect = lambda uuid: {"GPU-1234": "the GPU"}[uuid]
    fake.nvmlDeviceGetTotalEccErrors.side_effect = [unsupported if ecc is None else ecc]
    fake.nvmlDeviceGetRemappedRows.side_effect = [unsupported if rows is None else rows]
    fake.nvmlDeviceRegisterEvents.side_effect = [unsupported if xids is None else None]
    events = []
    for xid in xids or ():
        event = pynvml.c_nvmlEventData_t()
        event.eventType, event.eventData = pynvml.nvmlEventTypeXidCriticalError, xid
        events.append(event)
    fake.nvmlEventSetWait_v2.side_effect = [*events, none_left]
    return fake


@pytest.mark.parametrize(
    ("reported", "bad"),
    [
        ({}, False),
        ({"ecc": None}, False),
        ({"ecc": 2}, True),
        ({"rows": (3, 1, 0, 0)}, False),
        ({"rows": (0, 0, 1, 0)}, True),
        ({"ecc": None, "rows": (0, 0, 0, 1)}, True),
        ({"xids": ()}, False),
        ({"xids": (79,)}, True),
        ({"xids": (31, 13)}, False),
        ({"xids": (31, 48)}, True),
    ],
)
def test_gpu_when_the_driver_reports_errors_then_fails_the_check(reported, bad):
    fake = nvml(**reported)
    found = gpu_errors.watch("1234", fake)
    assert fake.nvmlDeviceRegisterEvents.call_count == 1, "before the computations"
    fake.nvmlEventSetWait_v2.assert_not_called()
    assert bool(found()) is bad


def test_gpu_when_unknown_then_passes_the_check():
    assert not gpu_errors.watch("", nvml(2))()
    gone = nvml(2)
    gone.nvmlDeviceGetHandleByUUID.side_effect = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    assert not gpu_errors.watch("1234", gone)()
