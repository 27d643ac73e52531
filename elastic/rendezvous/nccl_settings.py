"""Environment variables that torch and NCCL read in a process that reduces on GPUs. Pure: no I/O, no clock.

Torch reads some of them when it creates a group, some at the first wait and some in its own threads. They must
therefore be set early: by the driver and its agents before the process starts or, under other launchers, by
`elastic.init()`.
"""

from __future__ import annotations

import math

# timeout in seconds for connecting a group; equal to the default of HOROVOD_GLOO_TIMEOUT_SECONDS
CONNECT_TIMEOUT_S = 30.0
# Defaults, which the user's values override. The first two variables prevent torch's watchdog from waiting a minute
# after an error while it holds its lock. With the other two, communicators connect when they are created, and
# collectives of different communicators on one GPU start in a single order.
DEFAULTS = {
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_RUNTIME_CONNECT": "0",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}


def needed(connect_s: float) -> dict[str, str]:
    """Return the environment variables that recovery requires.

    Without them, an aborted communicator would end its process. With them, waiting for a communicator that does not
    connect ends after ``connect_s`` seconds; torch's default is half an hour.
    """
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, math.ceil(connect_s))),
    }
