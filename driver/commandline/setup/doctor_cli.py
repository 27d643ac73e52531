"""``elasticrun doctor``: check whether this host, and other hosts over ssh, are ready for training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from elastic.driver.commandline.options.argument_parser import (
    ArgumentParser,
    add_declared,
    flag,
    switch,
)
from elastic.driver.commandline.options.multi_host_flags import SshFlags
from elastic.driver.commandline.setup import host_facts
from elastic.driver.commandline.setup.host_checks import Check, HostFacts, Level, checks
from elastic.driver.launch.ssh import SshOptions, remote, ssh_command
from elastic.driver.launch.ssh_failures import SSH_FAILED, no_ssh, why_no_agent, why_ssh_failed
from elastic.driver.network.host_lists import ThisHost, parse_hosts
from elastic.version import __version__

MODULE = "elastic.driver.commandline.setup.host_facts"
# seconds within which a host must return its facts, including ssh login and a slow import of torch
ANSWER_S = 120.0
AT_ONCE = 32  # maximum number of hosts to query concurrently
DESCRIPTION = """\
Check this host, and the hosts of -H over ssh: torch, the C++ library, GPUs, NCCL, arithmetic, ports, network,
shared memory, clocks and conflicting packages. Exit with 1 if a check failed."""


@dataclass
class DoctorOptions(SshFlags):
    """Parsed flags of ``elasticrun doctor``."""

    hosts: str | None = flag("-H --hosts", "LIST", "Other hosts to check: gpu1,gpu2.")
    json: bool = switch("--json", "Print the checks of each host as JSON.")


def parser() -> ArgumentParser:
    """Return the parser of ``elasticrun doctor``."""
    made = ArgumentParser(
        prog="elasticrun doctor", usage="elasticrun doctor [flags]", description=DESCRIPTION
    )
    add_declared(made.group("checks"), DoctorOptions, "hosts", "json")
    ssh = ("ssh_port", "ssh_identity_file", "ssh_config", "remote_python")
    add_declared(made.group("ssh"), DoctorOptions, *ssh)
    made.group("general")("-h --help", None, None, "Show this help and exit.", action="help")
    return made


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run ``elasticrun doctor`` and return its exit code, which is 1 if a check failed.

    Raises:
        Invalid: a flag or an entry of ``-H`` is invalid.
    """
    options = DoctorOptions()
    parser().parse_args(arguments, namespace=options)
    this_host = ThisHost()
    listed = parse_hosts(options.hosts, default_slots=1) if options.hosts else {}
    away = [host for host in listed if this_host.elsewhere(host) is not None]
    ssh = SshOptions(
        port=options.ssh_port,
        identity=options.ssh_identity_file,
        config=options.ssh_config,
        python=options.remote_python,
    )
    with ThreadPoolExecutor(min(AT_ONCE, 1 + len(away))) as pool:
        here = pool.submit(host_facts.facts)
        others = pool.map(lambda host: checks_by_ssh(host, ssh, environ), away)
        several = bool(away)
        found = {"this host": checks(here.result(), version=__version__, several=several)}
        found |= dict(zip(away, others, strict=True))
    if options.json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        print("\n".join(line for host, of in found.items() for line in lines(host, of)))
    failed = any(each.level is Level.FAIL for of in found.values() for each in of)
    return 1 if failed else 0


def lines(host: str, found: Sequence[Check]) -> list[str]:
    """Return one line for each check of a host, followed by the remedy if the check failed."""
    result = [f"{host}:"]
    for each in found:
        result.append(f"  {each.level.value:<5}{each.what:<15}{each.found}")
        if each.do:
            result.append(f"  {'':<20}-> {each.do}")
    return result


def checks_by_ssh(host: str, ssh: SshOptions, environ: Mapping[str, str]) -> list[Check]:
    """Return the checks of another host. The result contains a failed check if the host is unreachable."""
    pythons = [ssh.python] * 2 if ssh.python else [sys.executable, "python3"]
    began = time.time()
    try:
        done = subprocess.run(
            ssh_command(ssh, host, remote(MODULE)),
            input="".join(f"{python}\n" for python in pythons),
            capture_output=True,
            text=True,
            env=dict(environ) or dict(os.environ),
            timeout=ANSWER_S,
            check=False,
        )
    except FileNotFoundError:
        return [Check("ssh", Level.FAIL, no_ssh(host, ssh.program), "install an ssh client here")]
    except subprocess.TimeoutExpired:
        return [Check("ssh", Level.FAIL, f"no answer within {ANSWER_S:g} s", f"log in: ssh {host}")]
    ended = time.time()
    if done.returncode == SSH_FAILED:
        words = " ".join([*ssh.words(), host])
        return [Check("ssh", Level.FAIL, why_ssh_failed(host, done.stderr, words), f"ssh {words}")]
    try:
        facts = msgspec.json.decode(done.stdout.splitlines()[-1], type=HostFacts)
    except (IndexError, msgspec.MsgspecError):
        reason = why_no_agent(
            host, done.returncode, done.stderr, ours=__version__, release=None, limit_s=ANSWER_S
        )
        return [
            Check("hvd-elastic", Level.FAIL, reason, f"install hvd-elastic=={__version__} there")
        ]
    # The host read its clock at an unknown time during the query, so ignore a difference of up to the query's duration.
    ahead_s = facts.at - min(max(facts.at, began), ended)
    return checks(facts, version=__version__, several=True, ahead_s=ahead_s)
