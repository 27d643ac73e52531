"""What torch and NCCL read of the environment of a process that reduces on GPUs. Pure.

Torch reads some of it when it makes a group, some at the first wait and some in threads of its own. So it has to stand
before the process starts: the driver and its agents see to that, and `elastic.init()` under other launchers.
"""

from __future__ import annotations

import math

# These give way to the user's. With the first two torch's watchdog would wait a minute after an error, holding its
# lock. The others connect while the communicator is made, and let several of one GPU be launched in one order.
DEFAULTS = {
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_RUNTIME_CONNECT": "0",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}


def needed(connect_s: float) -> dict[str, str]:
    """What recovery rests on, whatever else is set: an aborted communicator must not end its process.

    A wait for a communicator that does not connect ends after ``connect_s`` seconds; by torch's default, half an hour.
    """
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, math.ceil(connect_s))),
    }
