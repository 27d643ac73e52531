"""Lightning's cluster environment for elastic jobs: the worker's rank and the size of the world.

Values are computed at each query, so that a change of the world takes effect immediately.
"""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment

from elastic.errors import Invalid
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle


class ElasticEnvironment(ClusterEnvironment):
    """Cluster environment of a worker started by elasticrun, or by another launcher that `elastic.init` supports.

    Raises:
        Invalid: this process was not started by elasticrun or another known launcher.
    """

    def __init__(self) -> None:
        lifecycle.init()
        env = worker_settings.read()
        if env.driver is None and env.started is None:
            raise Invalid(
                'strategy="elastic" requires a worker that elasticrun started: run `elasticrun -np 2 python'
                ' script.py`, or omit strategy="elastic"'
            )

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        """Return a placeholder, because workers find each other through the driver."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return worker_settings.read().driver is not None

    def world_size(self) -> int:
        return max(lifecycle.place().size, 1)

    def set_world_size(self, size: int) -> None:
        """Do nothing, because the driver determines the size of the world."""

    def global_rank(self) -> int:
        return lifecycle.place().rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because the driver assigns ranks."""

    def local_rank(self) -> int:
        return lifecycle.place().local_rank

    def node_rank(self) -> int:
        return lifecycle.place().cross_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any ``devices`` and ``num_nodes``, because elasticrun determines the number of workers."""
