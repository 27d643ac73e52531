"""State of training that is kept when the world changes. Names are imported on first access."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "State": "elastic.state.state",
    "ObjectState": "elastic.state.state",
    "TorchState": "elastic.state.torch_state",
    "ElasticSampler": "elastic.state.sampler",
}

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState"]

if TYPE_CHECKING:
    from elastic.state.sampler import ElasticSampler as ElasticSampler
    from elastic.state.state import ObjectState as ObjectState
    from elastic.state.state import State as State
    from elastic.state.torch_state import TorchState as TorchState


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(
                f"module 'elastic.state' has no attribute {name!r}: see dir(elastic.state)"
            )
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
