"""Timeouts of hung workers and of collectives, from the flags and the environment."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from elastic.driver.commandline.options.argument_parser import or_default, seconds
from elastic.driver.commandline.options.flags import Options
from elastic.driver.commandline.options.worker_count import is_elastic
from elastic.driver.settings import Settings
from elastic.errors import Invalid

_A_DAY_S = 86_400.0
_SLACK_S = 60.0  # margin by which collectives time out after the driver has acted on a hang


def stall_limits(options: Options) -> dict[str, Any]:
    """Return the fields of `Settings` that limit how long a worker may hang, in seconds. 0 disables a limit."""
    if options.stall_check is False:
        return dict.fromkeys(("idle_s", "busy_warning_s", "busy_s", "gpu_hang_s"), 0.0)
    warning_s = or_default(options.busy_warning, options.stall_warning)
    busy_s = or_default(options.busy_timeout, options.stall_shutdown)
    busy_s = or_default(busy_s, Settings.busy_s)
    # A static job does not replace fenced workers, so allow an idle worker as much time as a busy one: it may be
    # waiting for an upload.
    idle_s = Settings.idle_s if is_elastic(options) else busy_s
    return {
        "idle_s": or_default(options.idle_timeout, idle_s),
        "busy_warning_s": or_default(warning_s, Settings.busy_warning_s),
        "busy_s": busy_s,
        "gpu_hang_s": or_default(options.gpu_hang_timeout, Settings.gpu_hang_s),
    }


def own_timeout_s(options: Options, environ: Mapping[str, str]) -> float | None:
    """Return the timeout of collectives that the user has set, in seconds, or None.

    Raises:
        Invalid: the value of the variable is invalid.
    """
    if options.gloo_timeout_seconds is not None:
        return options.gloo_timeout_seconds
    text = environ.get("ELASTIC_COLLECTIVE_TIMEOUT")
    if not text:
        return None
    try:
        return seconds(text)
    except argparse.ArgumentTypeError as error:
        raise Invalid(f"ELASTIC_COLLECTIVE_TIMEOUT: {error}") from None


def collective_timeout_s(options: Options, environ: Mapping[str, str]) -> float:
    """Return the timeout of collectives in Gloo, in seconds.

    The timeout is a last resort, because the driver detects a hang much earlier.
    """
    own_s = own_timeout_s(options, environ)
    if own_s is not None:
        return own_s
    busy_s: float = stall_limits(options)["busy_s"]
    return busy_s + _SLACK_S if busy_s else _A_DAY_S
