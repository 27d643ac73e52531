"""Torchft for the step benchmark: its lighthouse, a manager in each rank, and its DistributedDataParallel.

Optional; install it with ``pip install torchft``. If it is missing, the benchmark reports this. Every rank is a
separate replica group, as in torchft's elastic mode, and uses the defaults: a quorum and a vote for each step, over its
own Gloo group.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import socket
from datetime import timedelta
from typing import Any

from torch import distributed

import models

START_S = 60  # time for all ranks to be in the first quorum
JOIN_MS = 60_000  # time that the lighthouse waits for all, so that the first quorum is complete


def why_not() -> str:
    """Return why torchft cannot be used, or an empty result if it can."""
    if importlib.util.find_spec("torchft") is None:
        return "not installed"
    try:
        importlib.import_module("torchft")
    except ImportError as error:
        return f"can't be imported: {error}"
    return ""


class Torchft:
    """Torchft of one rank. Collective: all ranks of torch's default group create and close it."""

    def __init__(self) -> None:
        os.environ.setdefault("RUST_LOG", "error")  # otherwise, it logs a page for each step
        logging.getLogger("torchft.manager").setLevel(logging.ERROR)
        coordination: Any = importlib.import_module("torchft.coordination")
        torchft: Any = importlib.import_module("torchft")
        self._torchft = torchft
        rank, size = distributed.get_rank(), distributed.get_world_size()
        self._lighthouse: Any = None
        address: list[Any] = [None]
        if rank == 0:
            self._lighthouse = coordination.LighthouseServer(
                bind="[::]:0", min_replicas=size, join_timeout_ms=JOIN_MS
            )
            address = [_by_number(self._lighthouse.address())]
        distributed.broadcast_object_list(address, 0)
        c10d: Any = distributed  # the stubs lack functions that this benchmark uses
        self._store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager: Any = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=START_S)),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=size,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=address[0],
            replica_id=f"benchmark_{rank}",
            hostname="127.0.0.1",
            timeout=timedelta(seconds=START_S),
            init_sync=False,  # all begin with the same weights
        )

    def steps(self, training: models.Training) -> models.Steps:
        wrapped = self._torchft.DistributedDataParallel(self.manager, training.model)
        return models.Steps(
            training, wrapped, self._torchft.Optimizer(self.manager, training.optimizer())
        )

    def close(self) -> None:
        """Close at the same time on all ranks, because a manager must not end while another is in a step."""
        distributed.barrier()
        self.manager.shutdown(wait=False)
        distributed.barrier()
        if self._lighthouse is not None:
            with contextlib.suppress(RuntimeError):
                self._lighthouse.shutdown()


def _by_number(address: str) -> str:
    """Replace this machine's name, which may not be resolvable, by loopback."""
    return address.replace(socket.gethostname(), "127.0.0.1")
