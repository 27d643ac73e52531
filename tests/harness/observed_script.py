"""A training function that is observed by the checks of the first steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from elastic.runtime import lifecycle
from elastic.script_checks import source_analysis
from elastic.script_checks.mistakes import CommitCall, Kind
from elastic.script_checks.observer import ScriptObserver


def mistakes_of(state: Any, train: Callable[[Any], object], *, commits: bool = True) -> set[Kind]:
    """Return the mistakes of ``train(state)``; without commits, of a script that never mentions them."""
    observer = ScriptObserver(lifecycle.current(), state, train)
    calls = [CommitCall.SOME_STEPS] if commits else []
    with mock.patch.object(source_analysis, "commits", lambda function: calls):
        observer.meet()
        observer.begin()
        try:
            train(state)
        finally:
            observer.end()
    return observer._reported
