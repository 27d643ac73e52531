"""Description of a tensor before its content is known, and its destination."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class Destination(enum.Enum):
    """Where a tensor goes that has no tensor to go into."""

    NEW = "allocated, then handed to `Part.place`"
    NOWHERE = "dropped"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor before its content is known."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str = "cpu"  # where it lies at the one who describes it

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def fits(self, tensor: torch.Tensor) -> bool:
        # An inference tensor can't be written outside inference mode: it is replaced.
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
