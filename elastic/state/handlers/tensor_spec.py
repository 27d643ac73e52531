"""Metadata of a tensor to transfer, and destinations of received tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class Destination(enum.Enum):
    """Destination of a received tensor for which no live tensor exists."""

    NEW = "allocated, then handed to `Part.place`"
    NOWHERE = "dropped"


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device type of a tensor to transfer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str = "cpu"  # device type on the rank that created this spec

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def fits(self, tensor: torch.Tensor) -> bool:
        # Inference tensors do not fit, since they cannot be written outside inference mode. They are replaced.
        return (
            tuple(tensor.shape) == self.shape
            and tensor.dtype == self.dtype
            and not tensor.is_inference()
        )

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for length in self.shape:
            count *= length
        return count
