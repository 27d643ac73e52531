"""Coordinator of workers that other software, such as Ray Train, places and starts.

It also creates the workers' environment variables.
"""

from __future__ import annotations

import secrets
import socket
from typing import Any

from elastic.errors import Invalid, JobFailed

ANSWER_S = 60.0  # timeout for a task without CPUs to start on a node that runs workers, in seconds


class Coordinator:
    """Registry of the workers of a world, and source of their environment variables.

    Register all workers with `register` before you call any other method.
    """

    def __init__(self, settings: Any) -> None:
        """Create a coordinator. ``settings.timeout_s`` is the timeout for all workers to call ``hvd.init()``."""
        self.settings = settings
        self.hostnames: set[str] = set()
        self._nodes: dict[int, str] = {}  # node of each rank

    @property
    def world_size(self) -> int:
        return len(self._nodes)

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Register a worker. ``node_id`` is the hexadecimal ID of its Ray node."""
        self.hostnames.add(hostname)
        self._nodes[world_rank] = node_id

    def finalize_registration(self) -> dict[int, dict[str, int]]:
        """Return, for each rank, Horovod's variables for the local and cross ranks and sizes.

        `hvd.init` computes the same values.
        """
        found: dict[int, dict[str, int]] = {}
        before: dict[str, int] = {}  # number of preceding ranks on each node
        alike: dict[int, int] = {}  # number of preceding ranks with each local rank
        for rank, node in sorted(self._nodes.items()):
            local = before.get(node, 0)
            found[rank] = {
                "HOROVOD_LOCAL_RANK": local,
                "HOROVOD_LOCAL_SIZE": list(self._nodes.values()).count(node),
                "HOROVOD_CROSS_RANK": alike.get(local, 0),
            }
            before[node] = local + 1
            alike[local] = alike.get(local, 0) + 1
        for place in found.values():
            place["HOROVOD_CROSS_SIZE"] = alike[place["HOROVOD_LOCAL_RANK"]]
        return found

    def establish_rendezvous(self) -> dict[str, str]:
        """Return the variables that all workers need: the address of rank 0 and a secret.

        Raises:
            Invalid: a rank is not registered.
            JobFailed: the node of rank 0 did not report its address in time.
        """
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if sorted(self._nodes) != [*range(len(self._nodes))] or not self._nodes:
            raise Invalid(
                f"registered ranks {sorted(self._nodes)} are incomplete: register every rank, starting from 0"
            )
        first = self._nodes[0]
        there = NodeAffinitySchedulingStrategy(first, soft=False)
        found = ray.remote(num_cpus=0)(_address).options(scheduling_strategy=there).remote()
        try:
            host, port = ray.get(found, timeout=ANSWER_S)
        except RayError as error:
            raise JobFailed(
                f"the node {first} of rank 0 did not report its address within {ANSWER_S:g} s: {error}. Check that"
                " `ray list nodes` shows the node as alive"
            ) from error
        return {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "ELASTIC_MASTER_PORT": str(port),  # makes init() use this port and no other
            "ELASTIC_SECRET": secrets.token_hex(32),
            "HOROVOD_START_TIMEOUT": str(self.settings.timeout_s),
        }


def _address() -> tuple[str, int]:
    """Return the address of this node and a free port. Runs as a Ray task on the node of rank 0."""
    import ray

    node: Any = ray.util  # ray.util has no type annotations
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
    return str(node.get_node_ip_address()), port


__all__ = ["Coordinator"]
