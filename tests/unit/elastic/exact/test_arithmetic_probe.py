"""A process's description of its numerics: equal where it is equal, and different where it is not."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from elastic.exact import arithmetic_probe
from harness.golden import raises
from harness.program import stdout_of

MATMUL: Any = getattr(torch.backends.mkldnn, "matmul", None)
PROGRAM = (
    "from elastic.exact import arithmetic_probe; print(*arithmetic_probe.lines(), sep=chr(10))"
)


def said_with(**env: str) -> dict[str, str]:
    told = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    output = stdout_of(sys.executable, "-c", PROGRAM, env=told)
    return dict(line.split(" ", 1) for line in output.splitlines())


def measured(said: dict[str, str]) -> dict[str, str]:
    """Without the settings."""
    settings = ("torch", "instructions", "threads")
    return {k: v for k, v in said.items() if k.removeprefix("arithmetic.") not in settings}


# Settings of torch and oneDNN if the machine has these instructions.
FEWER = {"AVX512": ("avx2", "AVX2"), "AVX2": ("default", "SSE41")}


@pytest.mark.nightly
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in FEWER, reason="needs a machine with AVX2"
)
def test_different_threads_or_instruction_sets_change_the_measured_numbers():
    """Not only in the reported settings: also in unknown ones."""
    usual = said_with()
    assert said_with() == usual
    torchs, onednns = FEWER[torch.backends.cpu.get_cpu_capability()]
    for other in (
        {"OMP_NUM_THREADS": "2"},
        {"ATEN_CPU_CAPABILITY": torchs},
        {"ONEDNN_MAX_CPU_ISA": onednns},
    ):
        assert measured(said_with(**other)) != measured(usual), other


def test_probe_preserves_the_generator_state_and_is_measured_once():
    before = torch.get_rng_state()
    first = arithmetic_probe.lines()
    measured = arithmetic_probe._measured.cache_info().misses
    assert (
        arithmetic_probe.lines() == first
        and arithmetic_probe._measured.cache_info().misses == measured
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_probe_reports_thread_count_and_matmul_precision(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert {"arithmetic.threads 77", "arithmetic.matmul_precision medium"} <= set(
        arithmetic_probe.lines()
    )


@pytest.mark.skipif(MATMUL is None, reason="needs torch 2.9")
def test_precision_set_by_the_newer_names_is_reported():
    """torch's older functions raise then."""
    usual = arithmetic_probe.lines()
    MATMUL.fp32_precision = "bf16"
    try:
        with raises(RuntimeError):
            torch.get_float32_matmul_precision()
        said = [
            line
            for line in arithmetic_probe.lines()
            if line.startswith("arithmetic.matmul_precision ")
        ]
    finally:
        MATMUL.fp32_precision = "none"
    assert "mkldnn.matmul=bf16" in said[0]
    assert arithmetic_probe.lines() == usual
