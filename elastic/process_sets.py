"""The set of all workers, in the shape of Horovod's process sets. Smaller sets are not available yet."""

from __future__ import annotations

from elastic import runtime
from elastic.errors import Invalid


class GlobalProcessSet:
    """Every worker of the present world."""

    process_set_id = 0
    mpi_comm = None

    @property
    def ranks(self) -> list[int]:
        """All ranks. Raises NotInitialized before ``init()``, as the methods do."""
        return list(range(self.size()))

    def size(self) -> int:
        return runtime.current().place.size

    def rank(self) -> int:
        return runtime.current().place.rank

    def included(self) -> bool:
        """Always True: every worker is part of the world."""
        runtime.current()
        return True

    def __reduce__(self) -> str:
        return "global_process_set"  # copied or pickled, it stays the one object

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set = GlobalProcessSet()


def require_global(process_set: object) -> None:
    """Raises Invalid (a ValueError) for any other set."""
    if process_set is not global_process_set and process_set is not None:
        raise Invalid(
            "process sets are not available yet; leave process_set out, or pass global_process_set"
        )


__all__ = ["GlobalProcessSet", "global_process_set"]
