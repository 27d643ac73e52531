"""Raise an error on all ranks of a group together, after every rank has detected it."""

from __future__ import annotations

import contextlib
from typing import NoReturn

from elastic.collectives.interface import Collectives
from elastic.errors import CollectiveFailed


def wait_for_all(group: Collectives) -> None:
    """Wait until every rank has the result of the previous collective.

    All ranks must call this function.

    A rank that raises an error leaves the group. Without this wait, a slower rank would report a lost peer instead of
    the error.
    """
    with contextlib.suppress(CollectiveFailed):
        group.barrier().wait()


def raise_together(group: Collectives, error: Exception) -> NoReturn:
    """Raise an error on this rank after every rank has detected the error. This function is called on all ranks."""
    wait_for_all(group)
    raise error
