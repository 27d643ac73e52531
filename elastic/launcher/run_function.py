"""Worker program of ``elastic.launch``: ``python -m elastic.launcher.run_function FILE``.

FILE contains the pickled call and is readable only by the user who launched the job. Without an argument, ELASTIC_CALL
contains its path. A machine that does not share the folder of FILE receives the pickled call, up to a limit, in
environment variables, which are sent over authenticated connections as text that neither driver nor agent decodes. The
return value is sent as bytes, which the driver does not decode either.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from elastic.errors import Invalid
from elastic.protocol.messages import RESULT_LIMIT

CARRIED = "ELASTIC_CALL_PART_"
PART = 96 * 1024  # maximum number of characters per environment variable; Linux permits 128 KiB
# maximum number of bytes in all variables; Linux permits 2 MiB for all variables and arguments together
CARRIED_LIMIT = 512 * 1024


def carried(call: bytes) -> dict[str, str]:
    """Return the pickled call as environment variables for a worker on another machine.

    The result is empty if the call is too large.
    """
    if len(call) > CARRIED_LIMIT:
        return {}
    text = base64.b64encode(call).decode()
    parts = [text[at : at + PART] for at in range(0, len(text), PART)]
    return {f"{CARRIED}{number}": part for number, part in enumerate(parts)}


def pickled(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call with cloudpickle. Raises Invalid if an argument has the wrong type or cannot be pickled."""
    if not callable(fn):
        raise Invalid(f"the function is a {type(fn).__name__}: pass a function")
    if not isinstance(args, list | tuple):
        raise Invalid(f"args is a {type(args).__name__}: pass a list or tuple of arguments")
    if not isinstance(kwargs, Mapping):
        raise Invalid(f"kwargs is a {type(kwargs).__name__}: pass a dict of arguments")
    try:
        call: bytes = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:  # Pickling the user's objects can raise any exception.
        what = "".join(str(error).splitlines()[:1]) or type(error).__name__
        raise Invalid(
            f"the function can't be pickled for the workers: {what}; create objects that can't be pickled inside the"
            " function, and pass only values such as numbers, strings and paths"
        ) from error
    return call


def _taken(environ: MutableMapping[str, str]) -> bytes:
    """Remove the variables of `carried` from the environment, so that children do not inherit them.

    Return the pickled call.
    """
    parts: list[str] = []
    while (part := environ.pop(f"{CARRIED}{len(parts)}", None)) is not None:
        parts.append(part)
    return base64.b64decode("".join(parts))


def _call(path: str, environ: MutableMapping[str, str]) -> bytes:
    here = _taken(environ)
    if here:
        return here
    path = path or environ.get("ELASTIC_CALL", "")
    if not path:
        raise Invalid(
            "no function was given: pass the path of a pickled call, or start workers through elastic.launch or"
            " elastic.ray"
        )
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise Invalid(
            f"the pickled function {path} is not on this machine, and exceeds the limit of {CARRIED_LIMIT:,}"
            " bytes for transfers: load large data inside the function, or set TMPDIR at the launcher to a"
            " folder that all hosts share"
        ) from None


def main(path: str = "") -> None:
    """Run the pickled call in the file ``path``, by default the file at ELASTIC_CALL.

    Raises:
        Invalid: no file is given.
    """
    from elastic.runtime import lifecycle

    function, args, kwargs = cloudpickle.loads(_call(path, os.environ))
    value = function(*args, **kwargs)
    name = getattr(function, "__name__", "the function")
    try:
        blob = cloudpickle.dumps(value)
    except Exception as error:
        what = (
            f"the return value of {name}, a {type(value).__name__}, can't be pickled and sent back"
        )
        raise TypeError(
            f"{what} ({error}): return numbers, strings, arrays and containers of them"
        ) from error
    if len(blob) > RESULT_LIMIT:
        raise ValueError(
            f"the return value of {name} has {len(blob):,} bytes, but the limit is {RESULT_LIMIT:,}: write the"
            " value to a file or to storage, and return its location"
        )
    lifecycle.send_result(blob)


if __name__ == "__main__":
    main(*sys.argv[1:2])
