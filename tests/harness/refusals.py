"""Errors for invalid input."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from elastic.errors import Invalid


def refusal_of(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Return the message of the Invalid that a call raises; a returned coroutine is run."""
    with pytest.raises(Invalid) as caught:
        answer = call(*arguments, **named)
        if asyncio.iscoroutine(answer):
            asyncio.run(answer)
    assert "\n" not in str(caught.value)
    return str(caught.value)
