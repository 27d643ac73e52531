"""Broadcasts of parameters, optimizer states and objects, under the path that some scripts import them from."""

from __future__ import annotations

from elastic.api.broadcasting import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
