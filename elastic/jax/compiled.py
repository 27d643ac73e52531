"""Collectives in functions that JAX compiles. Each collective runs when the function runs, through ``io_callback``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax._src import dispatch
from jax.experimental import io_callback

from elastic.api.arrays import to_numpy, to_torch
from elastic.errors import Invalid

Compute = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

# errors of callbacks, kept because JAX raises different ones
_raised: deque[BaseException] = deque(maxlen=8)


def call(compute: Compute, arrays: Sequence[Any]) -> list[Any]:
    """Call ``compute`` with these traced arrays each time the compiled function runs, in the order of tracing.

    ``compute`` takes and returns CPU tensors. Its results have the shapes and dtypes of ``arrays``.

    Raises:
        Invalid: JAX cannot run a collective in this context: within ``vmap``, or in a function whose gradient is
            computed.
    """

    def run(*values: Any) -> list[Any]:
        try:
            results = compute([to_torch(np.asarray(value)) for value in values])
        except BaseException as error:
            _raised.append(error)
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return [to_numpy(result) for result in results]

    kinds = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    try:
        return list(io_callback(run, kinds, *arrays, ordered=True))
    except (ValueError, NotImplementedError) as error:
        raise Invalid(
            "a collective can't run inside jax.vmap or a function that jax.grad differentiates"
            f" ({type(error).__name__}: {error}): call the collective on the results of these functions, for example"
            " on the gradients that jax.grad returns"
        ) from error


def forget_errors() -> None:
    """Discard the errors of earlier callbacks, and the tokens with which JAX orders callbacks.

    A function that was dispatched while its inputs were being computed leaves its error in a token, which every later
    callback would raise again. JAX has no public function for this.
    """
    _raised.clear()
    dispatch.runtime_tokens.clear()


def cause() -> BaseException | None:
    """Return the error of the last callback, or None. Each error is returned once."""
    found = _raised.pop() if _raised else None
    _raised.clear()
    return found
