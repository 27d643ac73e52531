"""Numbers of connections that ranks keep and prepare to the rendezvous store. Pure: no I/O, no clock."""

from __future__ import annotations

KEEPING_RANKS = 128  # number of ranks that keep connections to the store, which rank 0 holds open
CONNECTIONS = 4  # maximum number of connections that a rank starts before it knows the next world
KEPT = 6  # maximum number of idle connections of a rank to the store
# Maximum numbers of such connections of all ranks. Rank 0 needs a descriptor for each, often of at most 1024, of which
# `elastic.protocol.pending_handshakes` allows a quarter for connections without a request.
ALL_CONNECTIONS, ALL_KEPT = 128, 256


def early_connections(size: int) -> int:
    """Return the number of connections that each of ``size`` ranks starts before it knows the next world."""
    return _each(CONNECTIONS, ALL_CONNECTIONS, size)


def kept_connections(size: int) -> int:
    """Return the number of idle connections that each of ``size`` ranks keeps to the store."""
    return _each(KEPT, ALL_KEPT, size)


def _each(most: int, of_all: int, size: int) -> int:
    """Return the number of connections of each rank: at most ``most``, and if possible ``of_all`` of all ranks."""
    return max(1, min(most, of_all // size))
