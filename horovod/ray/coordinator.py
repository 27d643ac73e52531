"""For workers that somebody else places and starts, such as Ray Train's: the variables by which they meet."""

from __future__ import annotations

import secrets
import socket
from typing import Any

from elastic.errors import Invalid, JobFailed

ANSWER_S = 60.0  # for a task without a CPU to begin on a node that has workers


class Coordinator:
    """Workers are registered one by one, with ranks from 0 on; then follow the two other calls."""

    def __init__(self, settings: Any) -> None:
        """Of ``settings`` only ``timeout_s`` counts: for all workers to call ``hvd.init()``."""
        self.settings = settings
        self.hostnames: set[str] = set()
        self._nodes: dict[int, str] = {}  # by rank

    @property
    def world_size(self) -> int:
        return len(self._nodes)

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """``node_id`` is Ray's, in hexadecimal."""
        self.hostnames.add(hostname)
        self._nodes[world_rank] = node_id

    def finalize_registration(self) -> dict[int, dict[str, int]]:
        """By rank, its place in variables of Horovod's names. `hvd.init` counts for itself and comes to the same."""
        found: dict[int, dict[str, int]] = {}
        before: dict[str, int] = {}  # node -> ranks with a place
        alike: dict[int, int] = {}  # local rank -> the same
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
        """For all workers: where rank 0 will listen, and a secret of this world. Raises Invalid or JobFailed."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if sorted(self._nodes) != [*range(len(self._nodes))] or not self._nodes:
            raise Invalid(f"ranks {sorted(self._nodes)} are registered; register each from 0 on")
        first = self._nodes[0]
        there = NodeAffinitySchedulingStrategy(first, soft=False)
        asked = ray.remote(num_cpus=0)(_address).options(scheduling_strategy=there).remote()
        try:
            host, port = ray.get(asked, timeout=ANSWER_S)
        except RayError as error:
            raise JobFailed(f"the node of rank 0, {first}, does not answer: {error}") from error
        return {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "ELASTIC_MASTER_PORT": str(port),  # this one, not another one
            "ELASTIC_SECRET": secrets.token_hex(32),
            "HOROVOD_START_TIMEOUT": str(self.settings.timeout_s),
        }


def _address() -> tuple[str, int]:
    """On the node of rank 0: its address, and a port that is free there now."""
    import ray

    node: Any = ray.util  # without types
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
    return str(node.get_node_ip_address()), port


__all__ = ["Coordinator"]
