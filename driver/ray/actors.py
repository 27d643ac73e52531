"""Operations on named actors of Ray: create, find, call and kill them. Makes no decisions.

All methods except `ask` may block while Ray's head node does not respond, so they must be called in a thread.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

# Maximum number of concurrent calls of an actor. Calls that wait for log lines or for workers' answers must not block
# others.
MAX_CALLS = 10_000


class Taken(Exception):
    """Error raised when another live actor already has the requested name."""


class Actors(Protocol):
    """Interface for operations on actors.

    Actor handles are opaque. Exceptions raised by Ray propagate to the caller.
    """

    def make(self, name: str, node: str, *, detached: bool) -> Any:
        """Request an AgentActor pinned to this node. Returns before the actor runs.

        Raises:
            Taken: a live actor already has this name.
        """

    def find(self, name: str) -> Any:
        """Return the live actor with this name, or None if the actor does not exist."""

    def names(self) -> list[str]:
        """Return the names of all live actors in the job's namespace."""

    def ask(self, actor: Any, method: str, *args: Any) -> Future[Any]:
        """Call a method of an actor. Return a future of the method's result."""

    def kill(self, actor: Any) -> None:
        """Kill an actor immediately, even if it has not started or is already dead."""


class RayActors:
    """Implementation of `Actors` with Ray, in the namespace of this process."""

    def make(self, name: str, node: str, *, detached: bool) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from elastic.driver.ray.node.agent_actor import AgentActor

        try:
            return (
                ray.remote(AgentActor)
                .options(
                    name=name,
                    namespace=self._here(),
                    lifetime="detached" if detached else "non_detached",
                    num_cpus=0,
                    num_gpus=0,
                    max_restarts=0,
                    max_task_retries=0,
                    max_concurrency=MAX_CALLS,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                .remote()
            )
        except ValueError as error:
            if "already taken" in str(error):
                raise Taken(name) from None
            raise

    def find(self, name: str) -> Any:
        import ray

        try:
            return ray.get_actor(name, namespace=self._here())
        except ValueError:
            return None

    def names(self) -> list[str]:
        import ray.util

        here = self._here()
        listed = ray.util.list_named_actors(all_namespaces=True)
        return [each["name"] for each in listed if each["namespace"] == here]

    def ask(self, actor: Any, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = getattr(actor, method).remote(*args).future()
        return future

    def kill(self, actor: Any) -> None:
        import ray

        ray.kill(actor, no_restart=True)

    def _here(self) -> str:
        import ray

        return str(ray.get_runtime_context().namespace)
