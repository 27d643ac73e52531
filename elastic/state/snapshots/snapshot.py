"""Snapshots of named tensors, copied at memory bandwidth to buffers that are allocated once.

Either all tensors are copied, or none if nothing has changed. Tensors count as unchanged only if each has the same
storage and ``_version``, `change_detection` has recorded nothing since, and the contents are equal. Small tensors, such
as running statistics, are compared completely, large ones by a sample. A single set of buffers suffices, even for CUDA
tensors, because a new snapshot waits for copies in flight. If a commit is interrupted by an exception, this worker has
no valid commit. It reports this and receives the newest commit from another rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elastic.collectives.shared_memory.host_copy import HostCopy
from elastic.state.snapshots import change_detection, pinned_copy, preallocated_memory

SAMPLES = 16  # approximate number of elements to compare in a large tensor
SMALL = 4096  # tensors up to this many elements are compared completely


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached view of all distinct elements: expanded dimensions are reduced to length 1."""
    view = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_contiguous():
        return view
    for dimension, (length, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if stride == 0 and length > 1:
            view = view.narrow(dimension, 0, 1)
    return view


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the tensors are bitwise identical, so that NaN equals NaN. Shapes and dtypes must agree."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(as_bytes(one.cpu()), as_bytes(other.cpu()))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a uint8 tensor [nbytes] in logical order: a view if the tensor is contiguous, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return (
        plain.reshape(-1).view(torch.uint8)
        if plain.numel()
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


class TensorSignature:
    """Metadata of tensors at one moment, with dtypes, shapes, addresses, and versions.

    There is one list per property instead of one object per tensor, because each commit reads the properties of all
    tensors. Apart from the copy, this is a large part of a commit's cost.
    """

    __slots__ = ("kinds", "names", "pointers", "storages", "tensors", "versions")

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.names = list(tensors)
        self.tensors = live = list(tensors.values())
        self.kinds = [
            (each.shape, each.dtype, each.device, each.is_contiguous(), each.is_neg(), type(each))
            for each in live
        ]
        self.pointers = [each.data_ptr() for each in live]
        self.storages = [each.untyped_storage()._cdata for each in live]
        self.versions: list[int] | None
        try:
            self.versions = [each._version for each in live]
        except RuntimeError:  # inference tensors have no version
            self.versions = None

    def on_gpu(self) -> bool:
        return any(kind[2].type == "cuda" for kind in self.kinds)


class _Copy:
    __slots__ = ("buffer", "on_gpu", "pointer", "storage")

    def __init__(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        self.on_gpu = tensor.is_cuda
        self.buffer = buffer
        self.pointer = -1
        self.storage: StorageWeakRef | None = None

    def fits(self, tensor: torch.Tensor) -> bool:
        buffer = self.buffer
        return (
            buffer.shape == tensor.shape
            and buffer.dtype == tensor.dtype
            and self.on_gpu == tensor.is_cuda
        )

    def refer(self, tensor: torch.Tensor) -> None:
        self.pointer = tensor.data_ptr()
        # While this weak reference exists, the address cannot be reused for another storage.
        storage = tensor.untyped_storage()
        if self.storage is None or self.storage.cdata != storage._cdata:
            self.storage = StorageWeakRef(storage)

    def same_storage(self, tensor: torch.Tensor) -> bool:
        return (
            self.storage is not None
            and self.pointer == tensor.data_ptr()
            and self.storage.cdata == tensor.untyped_storage()._cdata
        )

    def seems_equal(self, tensor: torch.Tensor) -> bool:
        # Do not compare CUDA tensors, since reading them would wait for the device. Their versions and the recorded
        # changes must suffice.
        return tensor.is_cuda or self._sample_agrees(tensor)

    def _sample_agrees(self, tensor: torch.Tensor) -> bool:
        count = tensor.numel()
        if count <= SMALL:
            return torch.equal(tensor, self.buffer)
        if not (tensor.is_contiguous() and self.buffer.is_contiguous()):
            if tensor.stride() != self.buffer.stride():
                return False
            tensor = tensor.as_strided((count,), (1,))
            buffer = self.buffer.as_strided((count,), (1,))
        else:
            tensor, buffer = tensor.view(-1), self.buffer.view(-1)
        step = count // SAMPLES
        return torch.equal(tensor[::step], buffer[::step])


def _wasteful(buffers: list[torch.Tensor]) -> bool:
    """Return whether most of the pinned memory that these buffers keep alive belonged to deleted buffers."""
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in buffers}
    return sum(held.values()) > 2 * pinned_copy.layout([each.nbytes for each in buffers])[1]


class SnapshotBuffers:
    """One complete set of copies, together with a value that the owner stores with them."""

    def __init__(self) -> None:
        self.copies: dict[str, _Copy] = {}
        self.extra: Any = None
        self.transit: pinned_copy.PinnedCopy | None = None
        self._names: list[str] = []
        self._kinds: list[Any] = []  # shapes and dtypes that the buffers were allocated for
        self._buffers: list[torch.Tensor] = []
        self._host = HostCopy([], [])
        self._on_gpu = False
        self._pointers: list[int] = []
        self._storages: list[int] = []
        # ``_version`` of each tensor at the time of the copy, or None if unreliable
        self._versions: list[int] | None = None
        self._moment: change_detection.Moment | None = None

    def take(
        self, look: TensorSignature, extra: Any, stage: pinned_copy.DeviceStaging, *, trust: bool
    ) -> None:
        # Read this marker before the copy, so that the next commit detects changes made during the copy.
        moment = change_detection.moment()
        self.extra = extra
        if trust and moment == self._moment and self._unchanged(look):
            return
        self._moment = None  # the contents are invalid until the copies are complete
        if look.kinds != self._kinds or look.names != self._names:
            self._arrange(look, self._copies_for(look))
        self._copy(look, stage)
        self._refer(look)
        self._moment = moment

    def _unchanged(self, look: TensorSignature) -> bool:
        return (
            look.versions is not None
            and look.versions == self._versions
            and look.pointers == self._pointers
            and look.storages == self._storages
            and look.kinds == self._kinds
            and look.names == self._names
            and all(map(_Copy.seems_equal, self.copies.values(), look.tensors))
        )

    def _copies_for(self, look: TensorSignature) -> dict[str, _Copy]:
        tensors = dict(zip(look.names, look.tensors, strict=True))
        kept = {n: c for n, c in self.copies.items() if n in tensors and c.fits(tensors[n])}
        if _wasteful([copy.buffer for copy in kept.values() if copy.on_gpu]):
            kept = {name: copy for name, copy in kept.items() if not copy.on_gpu}
        # Free obsolete buffers before allocating new ones.
        self.copies, self._buffers, self._names, self._kinds = kept, [], [], []
        missing = {name: tensor for name, tensor in tensors.items() if name not in kept}
        pinned_ones = iter(pinned_copy.like([each for each in missing.values() if each.is_cuda]))
        copies = {}
        for name, tensor in tensors.items():
            copies[name] = kept.get(name) or _Copy(
                tensor,
                # empty_like keeps the order of dense strides, so a copy is a single pass over memory.
                next(pinned_ones) if tensor.is_cuda else preallocated_memory.empty_like(tensor),
            )
        return copies

    def _arrange(self, look: TensorSignature, copies: dict[str, _Copy]) -> None:
        self.copies = copies
        self._names, self._kinds = look.names, look.kinds
        self._buffers = [copy.buffer for copy in copies.values()]
        self._on_gpu = look.on_gpu()
        self._host = HostCopy([], []) if self._on_gpu else HostCopy(look.tensors, self._buffers)
        self._pointers = []  # new copies have no recorded storages yet

    def _refer(self, look: TensorSignature) -> None:
        if look.pointers != self._pointers or look.storages != self._storages:
            for copy, tensor in zip(self.copies.values(), look.tensors, strict=True):
                copy.refer(tensor)
            self._pointers, self._storages = look.pointers, look.storages
        self._versions = look.versions

    def _copy(self, look: TensorSignature, stage: pinned_copy.DeviceStaging) -> None:
        self.transit = pinned_copy.PinnedCopy() if self._on_gpu else None
        with torch.no_grad():
            if self.transit is None:
                if look.tensors:
                    self._host.run(look.tensors, look.pointers)
                return
            pairs = list(zip(look.tensors, self._buffers, strict=True))
            pinned_copy.send([pair for pair in pairs if pair[0].is_cuda], stage, self.transit)
            host = [pair for pair in pairs if not pair[0].is_cuda]
            if host:
                torch._foreach_copy_([buffer for _, buffer in host], [tensor for tensor, _ in host])

    def empty_twin(self) -> SnapshotBuffers:
        """Return a second set that has its own buffers for the CPU tensors only.

        Its buffers for GPU tensors are allocated at the first copy, because they are pinned in one allocation.
        """
        twin = SnapshotBuffers()
        for name, copy in [*self.copies.items()]:
            if not copy.on_gpu:
                twin.copies[name] = _Copy(copy.buffer, torch.empty_like(copy.buffer).zero_())
        return twin

    def adopt(self, tensors: dict[str, torch.Tensor]) -> None:
        """Record that these tensors were just set to their copies. The tensors then count as unchanged."""
        look = TensorSignature(tensors)
        fitting = {
            name: copy
            for name, tensor in tensors.items()
            if (copy := self.copies.get(name)) is not None and copy.fits(tensor)
        }
        if len(fitting) == len(look.names) == len(self.copies):
            self._arrange(look, fitting)
            self._refer(look)
        else:
            for name, copy in fitting.items():
                copy.refer(tensors[name])
            self._versions = None
        self._moment = change_detection.moment()

    def buffers(self) -> dict[str, torch.Tensor]:
        return {name: copy.buffer for name, copy in self.copies.items()}

    def clone(self) -> SnapshotBuffers:
        """Return the same copies in separate, pageable buffers, for a single restore."""
        twin = SnapshotBuffers()
        twin.extra = self.extra
        for name, copy in self.copies.items():
            twin.copies[name] = _Copy(copy.buffer, copy.buffer.clone())
        return twin


class Snapshot:
    """Newest copies of named tensors.

    While one set of copies is held, later commits go to a second set. After the release, the older set is kept for
    reuse.
    """

    def __init__(self, bank: SnapshotBuffers | None = None) -> None:
        self.bank = bank or SnapshotBuffers()
        self._stage = pinned_copy.DeviceStaging()
        self._held: SnapshotBuffers | None = None
        self._spare: SnapshotBuffers | None = None

    def hold(self) -> SnapshotBuffers:
        """Keep the newest copies unchanged until `release`. Only one set can be held at a time."""
        assert self._held is None, "copies are held already"
        self._held = self.bank
        return self.bank

    def release(self) -> None:
        """Allow the held copies to be overwritten. Thread-safe."""
        held, self._held = self._held, None
        if held is not self.bank:
            self._spare = held

    def prepare(self) -> None:
        """Allocate the buffers of the second set before they are needed. Thread-safe.

        The first write to new memory takes several times as long as a copy.
        """
        if self._spare is None and self._held is None:
            self._spare = self.bank.empty_twin()

    def take(self, tensors: dict[str, torch.Tensor], extra: Any, *, trust: bool = True) -> None:
        """Copy the tensors that may have changed.

        CPU copies are complete when this returns. CUDA copies may still be in flight.

        Args:
            tensors: tensors by name.
            extra: a value to store with the copies.
            trust: whether to skip the copy if change detection finds no change. If False, all tensors are copied.

        Raises:
            DeviceLost: the previous CUDA copies did not complete within the time limit.
        """
        self.complete()
        if self.bank is self._held:
            self.bank, self._spare = self._spare or SnapshotBuffers(), None
        self.bank.take(TensorSignature(tensors), extra, self._stage, trust=trust)

    def complete(self) -> None:
        """Wait until all copies in flight are complete.

        Raises:
            DeviceLost: the copies did not complete within the time limit.
        """
        if self.bank.transit is not None:
            self.bank.transit.wait()
