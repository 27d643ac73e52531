"""Description of a tensor whose content was not received yet, and its destination."""

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
    """Metadata of a tensor before its content is received."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str = "cpu"  # type on the rank that describes the tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def fits(self, tensor: torch.Tensor) -> bool:
        # An inference tensor cannot be written outside inference mode, so it is replaced.
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
