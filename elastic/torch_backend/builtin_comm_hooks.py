"""DDP's fp16 hook of C++, over our process groups: its twin in Python. Acts.

That of C++ (``_register_builtin_comm_hook(FP16_COMPRESS)``) takes results that only torch's own process groups can
make: a future of Python has an object of Python. Both compute the same.
"""

from __future__ import annotations

from typing import Any

from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from elastic.torch_backend.following_group import FollowingGroup

_torch: Any = distributed  # its stubs lack what is used here
_theirs: Any = DistributedDataParallel._register_builtin_comm_hook


def replace() -> None:
    """From now on, for models over process groups of ours. Idempotent."""
    ddp: Any = DistributedDataParallel
    ddp._register_builtin_comm_hook = _register


def _register(model: DistributedDataParallel, kind: Any) -> None:
    ours = isinstance(model.process_group, FollowingGroup)
    if not ours or kind != _torch.BuiltinCommHookType.FP16_COMPRESS:
        _theirs(model, kind)
        return
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model.register_comm_hook(model.process_group, fp16_compress_hook)
