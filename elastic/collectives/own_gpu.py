"""Which GPU this process trains on: one, the same in all threads and groups. Every thread of CUDA's starts on device 0.

What tensors say in the training thread decides; before there are any, what that thread has chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic.errors import Invalid

_index: int | None = None  # of the tensors that were reduced
_chosen: int | None = None  # by torch.cuda.set_device, when it was last looked at


def meet(device: torch.device) -> None:
    """A tensor on this device is about to be reduced with other ranks. Raises Invalid for a second GPU."""
    global _index
    if device.type != "cuda" or device.index is None:
        return
    if _index is None:
        _index = device.index
    if _index != device.index:
        raise Invalid(
            f"the collectives of this worker were on cuda:{_index}, and are now on {device}: start one worker per"
            " GPU, and call torch.cuda.set_device(local_rank()) before any tensor is created on the GPU"
        )


def settle() -> None:
    """In the training thread: what it has chosen counts in threads that can't know. Begins nothing on a GPU."""
    global _chosen
    if torch.cuda.is_initialized():
        _chosen = torch.cuda.current_device()


def uuid(device: torch.device) -> str:
    """By which it is known in all processes, whatever numbers they have for it; empty if it has none."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def refuse_shared(uuids: Sequence[str], visible: int) -> None:
    """Of the GPUs of all ranks of a group. Raises Invalid where two have the same, and so on every rank.

    ``visible``: how many GPUs this process sees.
    """
    first: dict[str, int] = {}
    for rank, each in enumerate(uuids):
        if each and first.setdefault(each, rank) != rank:
            raise Invalid(
                f"ranks {first[each]} and {rank} use the same GPU ({each}), but NCCL needs one per worker: call"
                " torch.cuda.set_device(local_rank()) before any tensor is created on the GPU, and start no more"
                f" workers on a host than it has GPUs ({visible} visible here)"
            )


def of(type: str) -> torch.device:
    """The device of this type that this process uses."""
    return device() if type == "cuda" else torch.device(type)


def device() -> torch.device:
    """In any thread."""
    known = _index if _index is not None else _chosen
    return torch.device("cuda", torch.cuda.current_device() if known is None else known)
