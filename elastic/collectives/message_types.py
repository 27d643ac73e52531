"""Type of a message's tensor, and the error raised if it differs from that of the receiver's tensor."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch

from elastic.errors import TensorMismatch
from elastic.protocol import calls
from elastic.protocol.calls import Called


class TensorType(NamedTuple):
    """Type of a contiguous tensor. ``code`` identifies its dtype and is the same in every version of torch."""

    nbytes: int
    code: int


def type_of(tensor: torch.Tensor) -> TensorType:
    return TensorType(tensor.nbytes, code_of(tensor.dtype))


def code_of(dtype: torch.dtype) -> int:
    """Return the 32-bit code of a dtype."""
    return _CODES.get(dtype) or zlib.crc32(str(dtype).encode())


_DTYPES = {each: None for each in vars(torch).values() if isinstance(each, torch.dtype)}
_CODES: dict[torch.dtype, int] = {}
_CODES.update({each: code_of(each) for each in _DTYPES})
_NAMED = {code: dtype for dtype, code in _CODES.items()}


def mismatch(source: int, sent: TensorType, to: int, received: TensorType) -> TensorMismatch:
    """Return the error to raise on both ranks if a message does not match the receiver's tensor."""
    found = (
        Called(source, "send", tensors=_text(sent)),
        Called(to, "recv", tensors=_text(received)),
    )
    return TensorMismatch(calls.message_sentence(found), calls=found)


def _text(of: TensorType) -> str:
    dtype = _NAMED.get(of.code)
    if dtype is None or of.nbytes % dtype.itemsize:
        return f"{of.nbytes} bytes of an unknown dtype"
    return f"{str(dtype).removeprefix('torch.')} [{of.nbytes // dtype.itemsize}]"
