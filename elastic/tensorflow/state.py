"""State of a script that manages TensorFlow's variables itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from elastic.api import arrays
from elastic.errors import Invalid
from elastic.state import handler_registry
from elastic.state.handled_state import HandledState
from elastic.state.handlers.framework_variables import VariablesPart


class _Variables(list[Any]):
    """Marker for the variables of a state, to distinguish them from a list that is an ordinary value."""


class _SessionVariables(_Variables):
    """Variables of a TensorFlow 1 graph, whose values are in a session."""

    def __init__(self, variables: Sequence[tf.Variable], session: tf.compat.v1.Session) -> None:
        super().__init__(variables)
        self.session = session


class _SessionPart(VariablesPart):
    value: _SessionVariables

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        named = self.named()
        values = self.value.session.run(list(named.values()))
        return None, dict(zip(named, map(arrays.value_of, values), strict=True))

    def assign(self, variable: Any, value: torch.Tensor) -> None:
        variable.load(arrays.to_numpy(value), self.value.session)


class TensorFlowState(HandledState):
    """State of variables and Python values, as in ``TensorFlowState([w, b, *optimizer.variables], batch=0)``.

    Args:
        variables: existing variables, in the same order on every worker. Default with a session: all global variables.
        session: session of TensorFlow 1, in which the variables are initialized; the default session if None.
        rng: whether to commit and restore this worker's random generators (torch, numpy, random).
        **kwargs: values of the state, available as attributes.

    Raises:
        Invalid: no variables exist, or a value in ``variables`` is not a variable.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable] | None = None,
        session: Any = None,
        rng: Any = False,
        **kwargs: Any,
    ) -> None:
        if session is None and not tf.executing_eagerly():
            session = tf.compat.v1.get_default_session()
            if session is None:
                raise Invalid(
                    "session is missing: in graph mode, pass TensorFlowState the session with the variables"
                )
        if session is not None and not hasattr(session, "graph"):
            raise Invalid(f"session is a {type(session).__name__}: pass a tf.compat.v1.Session")
        if session is not None and variables is None:
            with session.graph.as_default():
                variables = tf.compat.v1.global_variables()
        if not variables:
            raise Invalid("TensorFlowState got no variables: pass a list of existing variables")
        for variable in variables:
            if not hasattr(variable, "assign"):
                raise Invalid(
                    f"variables contains a {type(variable).__name__}, which is not a variable: pass variables of"
                    " TensorFlow or Keras"
                )
        kept = _Variables(variables)
        if session is not None:
            kept = _SessionVariables(variables, session)
        super().__init__({"variables": kept, **kwargs}, rng)


handler_registry.set_handler_registry(
    [
        (_SessionVariables, _SessionPart),
        (_Variables, VariablesPart),
        *handler_registry.get_handler_registry(),
    ]
)
