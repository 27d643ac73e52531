"""Access to this process's runtime for lower layers: collectives, reports and traces.

`elastic.runtime.lifecycle` registers itself in this module when it is imported. Higher layers import that module
directly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from elastic.collectives.interface import Collectives
from elastic.collectives.store_group import DistantGroup
from elastic.errors import NotInitialized
from elastic.protocol.messages import Place, World
from elastic.rendezvous.worker_settings import Environment

if TYPE_CHECKING:
    import torch

NOT_LOADED = (
    "torch.distributed's process group is torch's own, although elasticrun started this worker: torch loads the"
    " elastic backend only if hvd-elastic is installed (pip install), and not with TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    " or --torch-backend off. Install it, or call elastic.init() as well"
)
NOT_STARTED = (
    "elasticrun did not start this process, and elastic.init() was not called: start the script with"
    " `elasticrun -np 2 python {script}`, or call elastic.init() at its beginning, which also works with torchrun and"
    " python"
)
NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init(). (If only elastic is imported: elastic.init().)"


class Context(Protocol):
    """Interface of the runtime that collectives, gradients, reports and traces need.

    ``engine``, ``tracing``, ``account``, ``reporting`` and ``first_not_finite`` have the type Any in this interface,
    because their types are defined in higher layers.
    """

    env: Environment
    elastic: bool
    alone: bool
    activity: int
    tracing: Any
    account: Any
    reporting: Any
    # record of the first non-finite gradient, or None if replicas are not compared
    first_not_finite: Any

    @property
    def place(self) -> Place: ...

    @property
    def generation(self) -> int: ...

    @property
    def world(self) -> World | None: ...

    @property
    def broken(self) -> bool: ...

    @property
    def provisional(self) -> bool: ...

    def guard(self, name: str) -> AbstractContextManager[None]: ...

    def group(
        self, purpose: str, device: torch.device, ranks: tuple[int, ...] | None = None
    ) -> Collectives: ...

    def copy_group(
        self, name: str, ranks: tuple[int, ...], *, replies: bool = False
    ) -> Collectives | DistantGroup: ...

    def wanted(
        self, purpose: str, device_type: str, ranks: tuple[int, ...] | None = None
    ) -> bool: ...

    def alone_group(self) -> Collectives: ...

    def engine(self) -> Any: ...

    def mark_broken(self, generation: int, reason: str) -> None: ...


_current: Callable[[], Context] | None = None
_refusal: Callable[[], str] = str


def refuse_collectives(why: Callable[[], str]) -> None:
    """Register a function that is called before each collective of a script.

    The function returns the reason why collectives are not possible now, or "".
    """
    global _refusal
    _refusal = why


def refusal() -> str:
    """Return the reason why a script cannot run a collective now, or an empty string if it can."""
    return _refusal()


def register(current: Callable[[], Context]) -> None:
    """Register ``current``, the function that returns the runtime."""
    global _current
    _current = current


def current() -> Context:
    """Return the runtime. Raises NotInitialized before ``init()``."""
    if _current is None:
        raise NotInitialized(NOT_INITIALIZED)
    return _current()
