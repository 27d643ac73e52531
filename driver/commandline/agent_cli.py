"""Commands ``elasticrun agent``, which offers this host to a job, and ``elasticrun secret``."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.driver.agents import agent_main
from elastic.driver.commandline.options.argument_parser import (
    LOG_LEVELS,
    ArgumentParser,
    NameList,
    add_declared,
    flag,
    log_level,
    seconds,
    whole,
)
from elastic.driver.commandline.options.flags import Options
from elastic.driver.commandline.options.multi_host_checks import etcd_access, tls_files
from elastic.driver.commandline.options.multi_host_flags import EtcdFlags, SecurityFlags
from elastic.driver.etcd.keys import check_host, check_slots, job_root
from elastic.driver.launch.starter import Bootstrap
from elastic.driver.network import interface_selection
from elastic.driver.network.host_lists import parse_address
from elastic.driver.network.secret import make_secret_file, read_secret
from elastic.driver.processes.console import LEVELS, Console, is_terminal
from elastic.driver.reasons import counted
from elastic.errors import Invalid

AGENT = """\
Run an agent that offers this host to all jobs named NAME, one after another. The agent registers in etcd or
connects to the driver; it starts, monitors and stops the workers of this host."""

GRACE = "ELASTIC_GRACE_SECONDS"
READY_FILE = "ELASTIC_READY_FILE"

SECRET = """\
Create a file with a new secret, readable only by you. Copy the file to all hosts of a job and pass it to driver
and agents with --secret-file. The secret grants full access to the jobs that use it."""


@dataclass
class AgentOptions(Options):
    """Parsed flags of ``elasticrun agent``. A field is None if the user did not pass the flag."""

    drivers: list[str] | None = flag(
        "--driver",
        "HOST:PORT,...",
        "Addresses of the driver; names are resolved at each connection attempt.",
        action=NameList,
    )
    host: str | None = flag(
        "--host", "NAME", "Name under which to register this host (default: the host name)."
    )
    slots: str | None = flag(
        "--slots", "N", "Number of slots, or auto: one per GPU, else one per core (default: auto)."
    )
    network_interfaces: list[str] | None = flag(
        "--network-interface --network-interfaces",
        "LIST",
        "Interfaces, networks or addresses for worker traffic, in order of preference (default: "
        "the route to "
        "the driver).",
        action=NameList,
    )
    grace: float | None = flag(
        "--grace",
        "S",
        f"Seconds between SIGTERM and SIGKILL of a worker (default: {GRACE}, or 30).",
        seconds,
    )
    ready_file: str | None = flag(
        "--ready-file",
        "FILE",
        "File that exists while a driver is connected, for readiness probes (default:"
        f" {READY_FILE}, or none).",
    )
    log_level: str | None = flag(
        "--log-level",
        "LEVEL",
        f"Lowest level to log: {', '.join(LOG_LEVELS)} (default: INFO).",
        log_level,
    )


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run ``elasticrun agent`` or ``elasticrun secret``, and return the exit code.

    Raises:
        Invalid: a flag is invalid.
    """
    name, *rest = arguments
    return _secret(rest) if name == "secret" else _agent(rest, environ)


def _secret(arguments: Sequence[str]) -> int:
    parser = ArgumentParser(
        prog="elasticrun secret", usage="elasticrun secret FILE", description=SECRET
    )
    parser.group("general")("-h --help", None, None, "Show this help and exit.", action="help")
    own, files = parser.split(arguments)
    parser.parse_args(own)
    if len(files) != 1:
        raise Invalid("no file was given: pass a file name, as in elasticrun secret job.secret")
    make_secret_file(files[0])
    print(f"created {files[0]}: copy it to every host of the job, and keep it from other users")
    return 0


def agent_parser() -> ArgumentParser:
    """Return the parser of ``elasticrun agent``."""
    parser = ArgumentParser(
        prog="elasticrun agent",
        usage="elasticrun agent --job NAME (--etcd HOST:PORT | --driver HOST:PORT) [flags] [-- PROGRAM]",
        description=AGENT,
    )
    add = parser.group("driver", "Pass exactly one of --etcd and --driver.")
    add_declared(add, EtcdFlags)
    add_declared(add, AgentOptions, "drivers")
    here = ("host", "slots", "network_interfaces", "grace", "ready_file")
    add_declared(parser.group("host"), AgentOptions, *here)
    add_declared(
        parser.group("security", "Pass the same flags and files as for the driver."), SecurityFlags
    )
    add = parser.group("general")
    add_declared(add, AgentOptions, "log_level")
    add("-h --help", None, None, "Show this help and exit.", action="help")
    return parser


def _agent(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = agent_parser()
    own, rest = parser.split(arguments)
    options = AgentOptions()
    parser.parse_args(own, namespace=options)
    # Ignore further words: a TrainJob appends its program, which the driver reads from the pod (--program-from-pods).
    if rest and arguments[len(own)] != "--":
        raise Invalid(f"unexpected argument {rest[0]!r}: see elasticrun agent --help")
    bootstrap = agent_bootstrap(options, environ)
    agent_main.check(bootstrap)
    level = {"TRACE": "debug", "FATAL": "error"}.get(bootstrap.log_level, bootstrap.log_level)
    log = Console(
        agent_main.write_stderr,
        level=level.lower() if level.lower() in LEVELS else "info",
        colour=is_terminal(sys.stderr),
    )
    slots = bootstrap.slots or agent_main.own_slots()
    log("info", f"host {bootstrap.host} has {counted(slots, 'slot')} for job {bootstrap.job}")
    return asyncio.run(agent_main.serve(bootstrap, slots=slots, bound=False, log=log))


def agent_bootstrap(options: AgentOptions, environ: Mapping[str, str]) -> Bootstrap:
    """Return the configuration of an agent that a user starts with ``elasticrun agent``.

    Raises:
        Invalid: ``--job``, the secret or the driver's address is missing, or a value is invalid.
    """
    etcd = etcd_access(options, environ)
    if options.job_name is None:
        raise Invalid("--job is missing: pass the driver's --job")
    job_root(options.job_name)
    if (etcd is None) == (options.drivers is None):
        raise Invalid(
            "the driver's address is unknown, or given twice: pass exactly one of --etcd HOST:PORT and --driver"
            " HOST:PORT"
        )
    for address in options.drivers or ():
        parse_address(address)
    secret = read_secret(options.secret_file, environ)
    if secret is None:
        raise Invalid("--secret-file is missing: pass a copy of the driver's secret file")
    interface_selection.check_wanted(options.network_interfaces or [])
    host = socket.gethostname() if options.host is None else options.host
    check_host(host)
    return Bootstrap(
        job=options.job_name,
        host=host,
        secret=secret.hex(),
        drivers=options.drivers or [],
        etcd=etcd,
        tls=tls_files(options.tls_cert, options.tls_key, options.tls_ca),
        slots=_slots(options.slots),
        interfaces=options.network_interfaces or [],
        log_level=(options.log_level or "INFO").lower(),
        grace_s=_grace_s(options, environ),
        ready_file=_ready_file(options.ready_file or environ.get(READY_FILE, "")),
    )


def _grace_s(options: AgentOptions, environ: Mapping[str, str]) -> float:
    if options.grace is not None:
        return options.grace
    text = environ.get(GRACE, "") or "30"
    try:
        return seconds(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise Invalid(f"{GRACE} is {text!r}: set it to a number of seconds above 0") from None


def _ready_file(path: str) -> str:
    folder = os.path.dirname(os.path.abspath(path)) if path else ""
    if path and not os.access(folder, os.W_OK):
        raise Invalid(
            f"--ready-file {path} can't be created: {folder} is not a writable folder. Pass another path"
        )
    return path


def _slots(text: str | None) -> int:
    if text in (None, "auto"):
        return 0
    try:
        return check_slots(whole(1)(str(text)))
    except Exception:
        raise Invalid(f"--slots is {text!r}: pass a number of workers, or auto") from None
