"""State for scripts that write their own, and the run loop without a framework, under Horovod's path."""

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
    """`elastic.run`, in the form that Horovod's front ends build theirs with.

    ``reset`` is Horovod's ``shutdown()`` and ``init()`` between two worlds. Here the loop forms the next world by
    itself, with the processes' connections kept, and ``reset`` is not called: what else it does belongs into
    ``state.register_reset_callbacks``. Raises Invalid if it is not a function.
    """
    if not callable(reset):
        raise Invalid(f"run_fn needs a reset function, not a {type(reset).__name__}")
    return run(func)


__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]
