"""State for scripts that implement their own, and the run loop without a framework, under Horovod's path."""

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
    """Wrap a function in `elastic.run`, for front ends that use Horovod's form of it.

    In Horovod, ``reset`` calls ``shutdown()`` and ``init()`` between two worlds. It is not called here, because the run
    loop forms the next world itself and keeps the connections. Move any other code in it to
    ``state.register_reset_callbacks``.

    Raises:
        Invalid: ``reset`` is not a function.
    """
    if not callable(reset):
        raise Invalid(f"reset is a {type(reset).__name__}: pass a function")
    return run(func)


__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]
