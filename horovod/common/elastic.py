"""Base classes of states, for scripts that define their own state, and the run loop without a framework.

They are available under Horovod's module path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elastic.errors import Invalid
from elastic.run_loop import run
from elastic.state import ObjectState, State
from horovod.runner.elastic.worker import WorkerNotificationManager

Value = TypeVar("Value")

notification_manager = WorkerNotificationManager()


def run_fn(func: Callable[..., Value], reset: Callable[[], None]) -> Callable[..., Value]:
    """Wrap a function in `elastic.run`. This is Horovod's form, which has a second argument ``reset``.

    In Horovod, ``reset`` calls ``shutdown()`` and ``init()`` between two worlds. It is not called here, because the run
    loop itself forms the next world. If ``reset`` contains other code, register that code with
    ``state.register_reset_callbacks``.

    Raises:
        Invalid: ``reset`` is not a function.
    """
    if not callable(reset):
        raise Invalid(f"reset is a {type(reset).__name__}: pass a function")
    return run(func)


__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]
