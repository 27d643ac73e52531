"""Collectives in a world of one rank: results are available immediately. Calls fail only after an abort."""

from __future__ import annotations

import torch

from elastic.collectives import dtypes_and_ops
from elastic.collectives.interface import Op, Work
from elastic.errors import CollectiveFailed


class LocalCollectives:
    """A group of one rank. Every work is complete when it is returned."""

    rank = 0
    size = 1
    scales_inside = False

    def __init__(self) -> None:
        self._aborted = False

    def allreduce(self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1) -> Work:
        dtypes_and_ops.check(tensor, op)
        done = self._done()
        _, then = dtypes_and_ops.carried(tensor, op, scale, divisor)
        if then is not None:
            then()
        return done

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._done()

    def allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        done = self._done()
        outputs[0].copy_(tensor.reshape(outputs[0].shape))
        return done

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]
    ) -> Work:
        done = self._done()
        output.copy_(tensor.reshape(output.shape))
        return done

    def barrier(self) -> Work:
        return self._done()

    def abort(self) -> None:
        self._aborted = True

    def drain(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self._aborted = True

    def close_in_forked_child(self) -> None:
        self._aborted = True

    def _done(self) -> Work:
        if self._aborted:
            raise CollectiveFailed("aborted", aborted=True)
        return _DONE


class _Done:
    def done(self) -> bool:
        return True

    def within(self, timeout_s: float) -> bool:
        return True

    def wait(self) -> None:
        return None


_DONE = _Done()
