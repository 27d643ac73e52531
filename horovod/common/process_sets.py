"""Process sets, under Horovod's module path."""

from elastic.negotiation.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    process_set_by_id,
    process_sets,
    remove_process_set,
)

__all__ = [
    "ProcessSet",
    "add_process_set",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "process_set_by_id",
    "process_sets",
    "remove_process_set",
]
