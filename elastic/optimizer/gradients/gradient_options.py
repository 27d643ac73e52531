"""Options of an optimizer's gradient reduction, and values derived from them. This module does not communicate."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic.api.compression import Compression
from elastic.collectives.interface import Op
from elastic.errors import Invalid
from elastic.optimizer.gradients import bucket_plan
from elastic.optimizer.gradients.flat_buckets import Compressor, Scales, gradient_strides


@dataclass(frozen=True)
class Options:
    """Validated arguments of `elastic.optimizer.distributed_optimizer.DistributedOptimizer`."""

    op: Op
    predivide_factor: float
    compression: Compressor
    groups: int | Sequence[Sequence[torch.Tensor]] | None

    @property
    def wire_op(self) -> Op:
        """Return the reduction operation of the group, which is SUM for an average."""
        return Op.SUM if self.op is Op.AVERAGE else self.op

    @property
    def casts(self) -> bool:
        """Return whether the compression only changes the dtype, like the built-in ones.

        If so, it is applied to whole buckets.
        """
        return self.compression in (Compression.none, Compression.fp16, Compression.bf16)

    def wire_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype in which this parameter's gradient is sent, if the compression only changes the dtype."""
        return self.compression.compress(parameter.new_empty(0))[0].dtype

    def scales(self, size: int, inside: bool, wire: torch.dtype) -> Scales:
        """Return the factors for each stage of a gradient reduction.

        An average is always computed as the sum over all ranks divided by their number, so that it is bitwise identical
        with every kind of group.

        Args:
            size: number of ranks.
            inside: whether the group itself applies the factors, which it does in float32 if ``wire`` is a
                half-precision dtype.
            wire: dtype that is sent.
        """
        if self.op is not Op.AVERAGE:
            return Scales()
        # A user-defined compression may produce integers, so divide after the decompression.
        inside = inside and self.casts
        if self.predivide_factor != 1.0:
            before, after = 1.0 / self.predivide_factor, self.predivide_factor / size
            if inside:
                return Scales(filling=before, reducing=after)
            return Scales(filling=before, finishing=after)
        if inside:
            return Scales(reducing_over=size)
        # In a half-precision dtype the sum may overflow, so scale before it.
        if self.casts and wire in (torch.float16, torch.bfloat16):
            return Scales(filling=1.0 / size)
        return Scales(finishing_over=size)

    def grouped(self, parameters: Sequence[torch.Tensor]) -> list[list[int]]:
        """Return the user-defined groups, each as a list of indices into ``parameters``."""
        if not self.groups:
            return []
        if isinstance(self.groups, int):
            return bucket_plan.split(len(parameters), self.groups)
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        return [
            [index_of[id(parameter)] for parameter in group if id(parameter) in index_of]
            for group in self.groups
        ]

    def lines(
        self, named: Sequence[tuple[str, torch.Tensor]], fusion_bytes: int | None
    ) -> list[str]:
        """Return all settings that must be equal on all ranks, one line of name and value for each.

        Examples are ``compression fp16`` and ``parameter.3 layer.bias float32 [20] strides [1]``. ``fusion_bytes`` is
        None unless the user has set it: the default depends on the world, which a joining worker has not received.
        """
        groups = self.groups or 0
        if not isinstance(groups, int):
            number_of = {id(parameter): number for number, (_, parameter) in enumerate(named)}
            shown: object = [[number_of.get(id(each), -1) for each in group] for group in groups]
        else:
            shown = groups
        return [
            f"op {self.op.name}",
            f"gradient_predivide_factor {float(self.predivide_factor)}",
            f"compression {_compression_name(self.compression)}",
            f"groups {shown}",
            f"fusion_bytes {'by default' if fusion_bytes is None else fusion_bytes}",
            *(
                f"parameter.{number} {_described(name, parameter)}"
                for number, (name, parameter) in enumerate(named)
            ),
        ]


def check_predivide_factor(factor: object, op: Op) -> None:
    """Raise Invalid unless the factor is positive, and 1.0 for any reduction other than an average."""
    if not isinstance(factor, int | float) or not math.isfinite(factor):
        raise Invalid(f"gradient_predivide_factor is {factor!r}: pass a positive number")
    if factor != 1.0 and op is not Op.AVERAGE:
        raise Invalid(
            "gradient_predivide_factor requires op=Average: omit gradient_predivide_factor"
        )
    if factor <= 0:
        raise Invalid(f"gradient_predivide_factor is {factor}: pass a positive number")


def check_compression(compression: object) -> None:
    """Raise Invalid unless the object has ``compress`` and ``decompress``."""
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise Invalid(
            f"compression is {compression!r}: pass Compression.none, Compression.fp16, Compression.bf16, or an"
            " object with compress() and decompress()"
        )


def digest_of(lines: Sequence[str]) -> int:
    """Return a 62-bit integer digest of lines."""
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def _described(name: str, parameter: torch.Tensor) -> str:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{name} {dtype} {list(parameter.shape)} strides {list(gradient_strides(parameter))}"


def _compression_name(compression: Compressor) -> str:
    for name in ("none", "fp16", "bf16"):
        if compression is getattr(Compression, name):
            return name
    kind = compression if isinstance(compression, type) else type(compression)
    return kind.__qualname__
