"""Random generators of this process: seeding, saving and restoring."""

from __future__ import annotations

import array
import random
import sys
from typing import Any

import torch

WORD = "I"  # type of the Mersenne Twister's state: 624 unsigned 32-bit words


def set_seed(seed: int) -> None:
    """Seed the generators of torch on every device, of NumPy if it is imported, and of Python.

    Args:
        seed: 64-bit integer. NumPy uses the lower 32 bits.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    # torch.manual_seed would format its caller's stack if there are no GPUs, which takes 0.1 to 0.3 ms.
    else:
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def state() -> dict[str, Any]:
    """Return the states of the generators as numbers and bytes (10 KB).

    Only the current GPU's generator is included.
    """
    version, words, normal = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": (version, array.array(WORD, words).tobytes(), normal),
    }
    if "numpy" in sys.modules:
        kind, key, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (kind, key.tobytes(), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return found


def set_state(saved: dict[str, Any]) -> None:
    """Set the generators of this process to the result of `state`, possibly of another process."""
    torch.set_rng_state(_tensor(saved["torch"]))
    version, words, normal = saved["python"]
    random.setstate((version, tuple(array.array(WORD, words)), normal))
    if "numpy" in saved and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        kind, key, *rest = saved["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(key, numpy.uint32), *rest))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_tensor(saved["cuda"])] * torch.cuda.device_count())


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
