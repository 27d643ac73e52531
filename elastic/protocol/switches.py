"""Environment variables that enable or disable a feature, as driver and workers read them. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.errors import Invalid

TENSORS = "tensors"  # a value of ELASTIC_DIGESTS
_VALUES = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


def switch(env: Mapping[str, str], name: str, default: bool = False, words: str = "1 or 0") -> bool:
    """Parse an environment variable that is on or off. Raises Invalid if it has another value.

    Args:
        default: value if the variable is unset or empty.
        words: the allowed values, as listed in the error message.
    """
    text = env.get(name, "").strip().lower()
    value = _VALUES.get(text) if text else default
    if value is None:
        raise Invalid(f"{name} is {env[name]!r}: set it to {words}")
    return value


def digests(env: Mapping[str, str]) -> bool:
    """Return whether workers report digests of their commits. Raises Invalid if ELASTIC_DIGESTS has another value."""
    if env.get("ELASTIC_DIGESTS") == TENSORS:
        return True
    return switch(env, "ELASTIC_DIGESTS", words=f"1, 0 or {TENSORS}")
