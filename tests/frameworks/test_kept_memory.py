"""TensorFlow's gradients reuse their memory in the next step, in a process that imports Horovod's API."""

from __future__ import annotations

import os
import sys

import pytest

from harness.program import stdout_of

# Each is too large for malloc to keep. oneDNN would keep them, on a processor that has it on by default.
STEPS = """
import resource

import tensorflow as tf
import {door}

def step():
    return [tf.zeros([10 << 20]) + 1.0 for _ in range(3)]

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print("faults", (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)
"""
PAGES = 3 * (40 << 20) // os.sysconf("SC_PAGE_SIZE")  # of the memory of a step


def faults_a_step(door: str, **environ: str) -> int:
    chosen = ("TF_CPU_ALLOCATOR_USE_BFC", "TF_CPU_BFC_MEM_LIMIT_IN_MB", "KERAS_BACKEND")
    env = {name: value for name, value in os.environ.items() if name not in chosen}
    script = STEPS.format(door=door)
    env |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", **environ}
    said = stdout_of(sys.executable, "-c", script, env=env, timeout=120)
    return int(said.split("faults")[1])


@pytest.mark.nightly
@pytest.mark.parametrize("door", ["horovod.tensorflow", "horovod.keras"])
def test_gradient_memory_is_reused_in_the_next_step(door):
    assert faults_a_step(door) < PAGES / 20


@pytest.mark.nightly
def test_memory_is_released_when_the_user_disables_the_pooling_allocator():
    assert faults_a_step("horovod.tensorflow", TF_CPU_ALLOCATOR_USE_BFC="0") > PAGES / 2
