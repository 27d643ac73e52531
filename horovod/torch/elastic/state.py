"""TorchState and its handlers, for scripts that register their own handlers."""

from elastic.state import TorchState
from elastic.state.handler_registry import get_handler_registry, set_handler_registry
from elastic.state.handlers.model_state import ModelStateHandler
from elastic.state.handlers.optimizer_state import OptimizerStateHandler
from elastic.state.handlers.part import SamplerStateHandler, StateHandler

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]
