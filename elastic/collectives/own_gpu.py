"""Selection of the GPU on which this process trains, the same in all threads and groups.

CUDA starts every thread on device 0, so this module records the GPU for all threads: that of the tensors that the
training thread reduces or, before the first reduction, the device that the training thread has selected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic.errors import Invalid

# index of the GPU of the reduced tensors, or None before the first reduction
_index: int | None = None
# index of the GPU that torch.cuda.set_device has selected, as of the last check
_chosen: int | None = None


def meet(device: torch.device) -> None:
    """Record the device of a tensor that is about to be reduced as the GPU of this process.

    Raises:
        Invalid: the tensor is on another GPU than earlier tensors.
    """
    global _index
    if device.type != "cuda" or device.index is None:
        return
    if _index is None:
        _index = device.index
    if _index != device.index:
        raise Invalid(
            f"this worker ran its collectives on cuda:{_index}, but the tensor is on {device}: start one worker"
            " per GPU, and call torch.cuda.set_device(local_rank()) before you create tensors on the GPU"
        )


def settle() -> None:
    """Make the current device of the training thread the device of all other threads.

    This function is called in the training thread. It does not initialize a GPU.
    """
    global _chosen
    if torch.cuda.is_initialized():
        _chosen = torch.cuda.current_device()


def uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, which identifies it in all processes, or an empty string if it has none."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def refuse_shared(uuids: Sequence[str], visible: int) -> None:
    """Raise Invalid on every rank if two ranks of a group use the same GPU.

    Args:
        uuids: the UUID of each rank's GPU.
        visible: number of GPUs that are visible to this process.
    """
    first: dict[str, int] = {}
    for rank, each in enumerate(uuids):
        if each and first.setdefault(each, rank) != rank:
            raise Invalid(
                f"ranks {first[each]} and {rank} use the same GPU ({each}), but NCCL needs one GPU per worker."
                f" {visible} GPUs are visible here. Call torch.cuda.set_device(local_rank()) before you create"
                " tensors on the GPU, and do not start more workers on a host than it has GPUs"
            )


def of(type: str) -> torch.device:
    """Return the device that this process uses for a device type such as ``cuda``."""
    return device() if type == "cuda" else torch.device(type)


def device() -> torch.device:
    """Return the GPU of this process, in any thread."""
    known = _index if _index is not None else _chosen
    return torch.device("cuda", torch.cuda.current_device() if known is None else known)
