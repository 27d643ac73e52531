"""Hook that ``import torch`` calls in every process, through the entry point ``torch.backends``.

In a worker started by elasticrun, it replaces the torch.distributed backend of scripts that request Gloo, NCCL or the
default. It imports other modules of this package only when a replaced function is called, because ``import torch`` may
be in progress.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "ELASTIC_TORCH_BACKEND"  # set by elasticrun's option --torch-backend
NAME = "elastic"
REPLACED = ("rendezvous", "_new_process_group_helper", "broadcast_object_list")
_originals: dict[str, Callable[..., Any]] = {}  # torch's own functions, by name


def autoload() -> None:
    """Install the hooks. Idempotent. With ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``, torch does not call this function."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if os.environ.get(VARIABLE) != "elastic" or c10d is None or _originals:
        return
    _originals.update((name, getattr(c10d, name)) for name in REPLACED)
    replace({name: _at_first_use(name) for name in REPLACED})
    ddp: Any = sys.modules.get("torch.nn.parallel.distributed")
    if ddp is not None:
        ddp._get_default_group = group_for_ddp
    if NAME.upper() not in c10d.Backend._plugins:
        c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def replace(functions: dict[str, Callable[..., Any]]) -> None:
    """Replace functions in torch.distributed, each named in REPLACED."""
    for name, function in functions.items():
        setattr(sys.modules["torch.distributed.distributed_c10d"], name, function)
    # Only this function is also exported by torch.distributed itself.
    setattr(sys.modules["torch.distributed"], REPLACED[2], functions[REPLACED[2]])


def _at_first_use(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        from elastic.torch_backend import backend_override

        ours = backend_override.install(_originals)
        replace(ours)
        return ours[name](*args, **options)

    return call


def group_for_ddp() -> Any:
    """Return the process group for a DistributedDataParallel that was created without one."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    if not c10d.is_initialized():
        from elastic.errors import Invalid

        raise Invalid(
            "DistributedDataParallel was created before the process group: call"
            " torch.distributed.init_process_group() first. It needs no arguments, because elasticrun sets the"
            " rank of this worker"
        )
    return c10d._get_default_group()


def _create(options: Any, backend_options: Any) -> Any:
    from elastic.torch_backend import registration

    return registration.create(options, backend_options)
