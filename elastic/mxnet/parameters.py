"""Broadcast of MXNet's parameters."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import mxnet as mx
from mxnet.gluon.parameter import DeferredInitializationError, Parameter

from elastic.api import broadcasting
from elastic.errors import Invalid
from elastic.mxnet import ops
from elastic.mxnet.bridge import Array, view
from elastic.runtime import basics


def broadcast_parameters(
    params: Mapping[str, Parameter | Array] | mx.gluon.ParameterDict,
    root_rank: int = 0,
    prefix: str | None = None,
) -> None:
    """Overwrite parameters in place with those of rank ``root_rank``, in packed broadcasts.

    A parameter with a still unknown shape is broadcast separately when MXNet initializes it.

    Args:
        params: ``Block.collect_params()``, a part of ``Module.get_params()``, or any dict of names and parameters
            or arrays: the same names, shapes and dtypes on every rank.
        root_rank: rank in the world.
        prefix: prefix of the collectives' names. Calls that run at the same time need different prefixes.

    Raises:
        ValueError: ``params`` is not a dict. Raised on every rank if names, shapes or dtypes differ between ranks.
        Invalid: (a ValueError) a parameter has copies on several devices.
        PeerLost: a worker was lost.

    Example::

        hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    """
    if not isinstance(params, Mapping | mx.gluon.ParameterDict):
        raise Invalid(
            f"params is a {type(params).__name__}: pass a dict, for example net.collect_params()"
        )
    now: dict[str, Any] = {}
    for name, value in sorted(params.items()):
        full = f"{prefix or ''}{name}"
        try:
            now[full] = view(only_array(value), write=True)
        except DeferredInitializationError:
            _broadcast_when_initialized(value, root_rank, full)
    if basics.size() > 1 and now:
        broadcasting.broadcast_parameters(now, root_rank)


def only_array(value: Parameter | Array) -> Array:
    """Return the only array of a parameter.

    Raises Invalid if the parameter has several arrays, and MXNet's own error if it has none.
    """
    return _only(value, value.list_data()) if isinstance(value, Parameter) else value


def only_gradient(parameter: Parameter) -> Array:
    """Return the only gradient of a parameter. Raises Invalid if the parameter has several gradients."""
    return _only(parameter, parameter.list_grad())


def _only(parameter: Parameter, arrays: list[Array]) -> Array:
    if len(arrays) > 1:
        raise Invalid(
            f"parameter {parameter.name} is on {len(arrays)} devices, but a worker uses one device: use"
            " mx.gpu(hvd.local_rank()) or mx.cpu()"
        )
    return arrays[0]


def _broadcast_when_initialized(parameter: Parameter, root_rank: int, name: str) -> None:
    initialize = parameter._init_impl

    def initialized(self: Parameter, *args: Any, **kwargs: Any) -> None:
        initialize(*args, **kwargs)
        if basics.size() > 1:
            ops.broadcast_(only_array(self), root_rank, name)

    parameter._init_impl = types.MethodType(initialized, parameter)
