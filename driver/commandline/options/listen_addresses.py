"""Addresses at which the driver serves metrics and the live page, from --metrics-port and --dashboard."""

from __future__ import annotations

from elastic.driver.commandline.options.argument_parser import or_default
from elastic.driver.commandline.options.flags import Options
from elastic.errors import Invalid


def metrics_address(options: Options) -> tuple[str, int] | None:
    """Return the address and port of the metrics, or None without --metrics-port.

    Raises:
        Invalid: the port is missing or out of range.
    """
    if options.metrics_port is None:
        if options.metrics_host is not None:
            raise Invalid("--metrics-host requires --metrics-port: pass --metrics-port PORT")
        return None
    if options.metrics_port > 65535:
        raise Invalid(f"--metrics-port {options.metrics_port} is not a port: pass 1 to 65535")
    return or_default(options.metrics_host, "127.0.0.1"), options.metrics_port


def dashboard_address(text: str | None) -> tuple[str, int] | None:
    """Parse the value of ``--dashboard``. Return the address and port.

    An address without brackets is an IPv4 address or a name.

    Raises:
        Invalid: the text does not have the form [ADDRESS]:PORT.
    """
    if text is None:
        return None
    address, _, port = text.rpartition(":")
    bare = address.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or int(port) > 65535 or (":" in address and bare == address):
        raise Invalid(
            f"--dashboard {text} is not an [ADDRESS]:PORT: pass one, as in :8080 or 10.0.0.5:8080"
        )
    return bare or "127.0.0.1", int(port)
