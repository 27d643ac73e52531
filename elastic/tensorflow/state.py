"""The state of a script that keeps TensorFlow's variables itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from elastic.errors import Invalid
from elastic.state.handled_state import HandledState
from elastic.state.handlers import registry
from elastic.state.handlers.variables import VariablesPart


class _Variables(list[Any]):
    """Of a state: told from a list that is a value like others."""


class TensorFlowState(HandledState):
    """Variables, and Python values: ``TensorFlowState([w, b, *optimizer.variables], batch=0)``.

    Args:
        variables: that exist, in the same order on every worker.
        session: of TensorFlow 1; not supported here.
        rng: commits and restores this worker's random generators too (torch, numpy, random).
        **kwargs: values of the state, as attributes.

    Raises:
        Invalid: without variables, for what is not a variable, or for a session.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable] | None = None,
        session: Any = None,
        rng: Any = False,
        **kwargs: Any,
    ) -> None:
        if session is not None:
            raise Invalid(
                "TensorFlowState can't commit the variables of a session; let TensorFlow run eagerly"
            )
        if not variables:
            raise Invalid("TensorFlowState has no variables; give those that exist, in a list")
        for variable in variables:
            if not hasattr(variable, "assign"):
                raise Invalid(
                    f"variables has a {type(variable).__name__}, which is not a variable; give TensorFlow's or Keras's"
                )
        super().__init__({"variables": _Variables(variables), **kwargs}, rng)


registry.set_handler_registry([(_Variables, VariablesPart), *registry.get_handler_registry()])
