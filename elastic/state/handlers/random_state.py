"""Handler of this worker's random generators. Their states are committed, but never sent to peers.

The generators are those of torch, of CUDA if in use, of numpy if imported, and of ``random``.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """States of the process-wide random generators at the last commit."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}

    def save(self) -> None:
        self._saved = {"random": random.getstate(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._saved["cuda"] = torch.cuda.get_rng_state_all()
        if "numpy" in sys.modules:
            self._saved["numpy"] = sys.modules["numpy"].random.get_state()

    @property
    def saved(self) -> dict[str, Any]:
        """Return the states from the last `save`. A later `save` does not modify them."""
        return self._saved

    def adopt(self, saved: dict[str, Any]) -> None:
        """Set the states that another process has saved, for those generators that this process also has."""
        mine = {name for name in saved if name != "cuda" or torch.cuda.is_available()}
        if "numpy" in mine and "numpy" not in sys.modules:
            mine.remove("numpy")
        if "cuda" in mine and len(saved["cuda"]) != torch.cuda.device_count():
            mine.remove("cuda")
        self.save()
        self._saved.update({name: saved[name] for name in mine})
        self.restore()

    def restore(self) -> None:
        random.setstate(self._saved["random"])
        torch.set_rng_state(self._saved["torch"])
        if "cuda" in self._saved:
            torch.cuda.set_rng_state_all(self._saved["cuda"])
        if "numpy" in self._saved:
            sys.modules["numpy"].random.set_state(self._saved["numpy"])
