"""Actor class for scripts that place their workers themselves: ``ray.remote(BaseHorovodWorker)``."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.ray import ray_logger
from horovod.ray.settings import checked_environment


class BaseHorovodWorker:
    """Actor that holds the environment and the object of a worker.

    ``executable`` is the object created by `start_executable`, or None.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        os.environ["HOROVOD_HOSTNAME"] = self.node_id()
        os.environ["HOROVOD_RANK"] = str(world_rank)
        os.environ["HOROVOD_SIZE"] = str(world_size)

    def node_id(self) -> str:
        """Return the hexadecimal ID of this Ray node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def hostname(self) -> str:
        return socket.gethostname()

    def get_gpu_ids(self) -> list[int | str]:
        import ray

        return list(ray.get_gpu_ids())

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set environment variables. Variables with the value None are not changed."""
        os.environ.update(checked_environment(env_vars))

    def env_vars(self) -> dict[str, str]:
        """Return all environment variables of this process."""
        return dict(os.environ)

    def start_executable(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        return func(self.executable)

    def set_queue(self, queue: Any) -> None:
        """Set the queue that `ray_logger` uses in this process."""
        ray_logger.configure(queue)


__all__ = ["BaseHorovodWorker"]
