"""Environment variables that enable or disable a feature, read by driver and workers. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.errors import Invalid

TENSORS = "tensors"  # value of ELASTIC_DIGESTS
_VALUES = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


def switch(env: Mapping[str, str], name: str, default: bool = False, words: str = "1 or 0") -> bool:
    """Parse the value of an environment variable that is on or off. Raises Invalid for any other value.

    Args:
        default: value if the variable is unset or empty.
        words: description of the allowed values, for the error message.
    """
    text = env.get(name, "").strip().lower()
    value = _VALUES.get(text) if text else default
    if value is None:
        raise Invalid(f"{name} is {env[name]!r}: set it to {words}")
    return value


def digests(env: Mapping[str, str]) -> bool:
    """Return whether workers report digests of their commits.

    Raises Invalid if ELASTIC_DIGESTS has an invalid value.
    """
    if env.get("ELASTIC_DIGESTS") == TENSORS:
        return True
    return switch(env, "ELASTIC_DIGESTS", words=f"1, 0 or {TENSORS}")
