"""What ``import torch`` calls in every process: the entry point ``torch.backends``. In a worker that elasticrun has
started it puts our backend where scripts ask torch.distributed for Gloo, for NCCL or for nothing in particular.

Nothing is imported here that takes time, and nothing happens in any other process.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "ELASTIC_TORCH_BACKEND"  # set by elasticrun; --torch-backend


def autoload() -> None:
    """Idempotent. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` keeps torch from calling it."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if os.environ.get(VARIABLE) != "elastic" or c10d is None:
        return
    from elastic.torch_backend import in_place_of_others

    in_place_of_others.install()
