"""The built-in health check: right results pass, and a single wrong bit does not."""

from __future__ import annotations

import zlib

import numpy as np
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


def test_answers_are_those_of_whole_numbers_in_every_order():
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


class Nvml:
    """NVML of one GPU."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, ecc: int | None = 0, rows: tuple[int, int, int, int] | None = None) -> None:
        self.ecc, self.rows = ecc, rows

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-1234"
        return uuid

    def nvmlDeviceGetTotalEccErrors(self, gpu: str, kind: int, counter: int) -> int:
        if self.ecc is None:
            raise self.NVMLError
        return self.ecc

    def nvmlDeviceGetRemappedRows(self, gpu: str) -> tuple[int, int, int, int]:
        if self.rows is None:
            raise self.NVMLError
        return self.rows


@pytest.mark.parametrize(
    ("nvml", "bad"),
    [
        (Nvml(), False),
        (Nvml(None), False),
        (Nvml(2), True),
        (Nvml(0, (3, 1, 0, 0)), False),
        (Nvml(0, (0, 0, 1, 0)), True),
        (Nvml(None, (0, 0, 0, 1)), True),
    ],
)
def test_counted_errors_of_a_gpu_are_found(nvml, bad):
    assert bool(gpu_errors.found_on("1234", nvml)) is bad


def test_unknown_gpu_is_not_blamed():
    assert not gpu_errors.found_on("", Nvml(2))
