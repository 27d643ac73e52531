"""Explanations of failed agent starts, derived from the output of ssh and the remote command.

Pure: no I/O, no clock.

ssh runs with LogLevel DEBUG1. Its debug messages (``debug1:``) list the keys that it tried.
"""

from __future__ import annotations

import re

# exit code of ssh for its own errors; all other codes are those of the remote command
SSH_FAILED = 255
NO_PYTHON = "hvd-elastic: no python"

_SHOWN = 300  # maximum number of characters quoted from the output
_DEBUG = re.compile(r"debug[123]: |Authenticated to |Transferred: sent |Bytes per second: ")


# The most frequent errors of ssh. The first match is reported, because one error often produces the messages of others.
_SSH = (
    (
        r"Could not resolve hostname (\S+): ([^\r\n]*)",
        "{host} can't be reached: the name {0} is not known here ({1}); correct the list of hosts, or give it a"
        " HostName in ~/.ssh/config",
    ),
    (
        r"(?s)Offending \S+ key in (\S+):(\d+).*Host key for (\S+) has changed",
        "the host key of {host} differs from the known one (line {1} of {0}): the connection may "
        "be intercepted; if"
        " the host was reinstalled, remove the old key: ssh-keygen -f {0} -R '{2}', then log in by hand: ssh {words}",
    ),
    (
        r"Host key verification failed|host key is known for \S+ and you have requested",
        "the host key of {host}, or of a jump host, is unknown; log in once by hand and compare "
        "it: ssh {words}",
    ),
    (
        r"(?m)^(\S+)@\S+: Permission denied \(([^)\r\n]*)\)",
        "{host} denies user {0} permission ({1}); keys that were tried: {tried}; install one: "
        "ssh-copy-id {words}"
        " (a key with a passphrase needs ssh-agent)",
    ),
    (
        r"ssh: connect to host (\S+) port (\d+): ([^\r\n]*)",
        "{host} can't be reached at {0} port {1}: {2}; check that it is up, that its sshd listens there and that no"
        " firewall drops the packets",
    ),
    (
        r"(?:kex|ssh)_exchange_identification: ([^\r\n]*)",
        (
            "{host}, or a jump host, closed the connection before the login ({0}); check the log of its sshd:"
            " MaxStartups may be too low for so many simultaneous connections"
        ),
    ),
)


def why_ssh_failed(host: str, output: str, words: str) -> str:
    """Return the reason why ssh failed, from its output.

    Args:
        host: the host.
        output: output of ssh and of the remote command.
        words: ssh arguments with which the user can reproduce the failure.
    """
    for expression, sentence in _SSH:
        if found := re.search(expression, output):
            keys = re.findall(r"Offering public key: (.+?) [A-Z0-9-]+ SHA256:", output)
            tried = ", ".join(dict.fromkeys(keys)) or "none"
            return sentence.format(*found.groups(), host=host, words=words, tried=tried)
    own = " | ".join(_ssh_lines(output))[-_SHOWN:] or "no reason given"
    return f"ssh to {host} failed: {own}; try it by hand: ssh {words}"


def why_no_agent(
    host: str, code: int | None, output: str, *, ours: str, release: str | None, limit_s: float
) -> str:
    """Return the reason why no agent could be started on a host.

    Args:
        host: the host.
        code: exit code of the command that starts the agent. None means that it was still running at the time limit.
        output: output of the command.
        ours: release of this package on the driver's machine.
        release: different release that the agent reported, or None.
        limit_s: time limit for the start, in seconds.
    """
    if release is not None:
        return (
            f"{host} has release {release} of hvd-elastic, but this machine has {ours}; install the same release"
            f" on both: pip install hvd-elastic=={ours}"
        )
    lines = _ssh_lines(output)
    last = lines[-1][:_SHOWN] if lines else ""
    if code is None:
        more = f"; last output: {last}" if last else ""
        return (
            f"no agent was ready on {host} within {limit_s:g} s{more}; check the load of that host"
        )
    for line in reversed(lines):
        if line.startswith(NO_PYTHON):
            tried = line.removeprefix(NO_PYTHON).strip(": ")
            return (
                f"{host} has no Python to run the agent with (tried {tried}): pass --remote-python"
            )
        if found := re.search(r"No module named '?([\w.]+)'?", line):
            return _missing(host, found[1], ours)
    if re.match(r"SyntaxError: ", last):
        return f"the Python on {host} is too old: pass a newer one with --remote-python"
    ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the agent on {host} {ending} before it was ready" + (f": {last}" if last else "")


def why_ended(host: str, code: int | None, output: str, *, by_ssh: bool) -> str:
    """Return the reason why an agent that was ready, or the ssh connection to it, ended unexpectedly."""
    lines = _ssh_lines(output)
    last = f": {lines[-1][:_SHOWN]}" if lines else ""
    if by_ssh and code == SSH_FAILED:
        if found := re.search(r"Timeout, server .* not responding", output):
            last = f": {found[0]}"
        return f"lost the ssh connection to the agent on {host}{last}"
    if code is not None and code < 0:
        return f"the {'ssh to the ' if by_ssh else ''}agent on {host} was killed by signal {-code}"
    return f"the agent on {host} ended with exit code {code}{last if code else ''}"


def no_ssh(host: str, program: str) -> str:
    return (
        f"{program!r}, which starts the agent on {host}, is missing here: install OpenSSH's client (Debian: apt-get"
        " install openssh-client)"
    )


def _missing(host: str, module: str, ours: str) -> str:
    install = f"pip install hvd-elastic=={ours}"
    if module == "elastic":
        return (
            f"hvd-elastic is not installed for the Python that was used on {host}: install it there ({install}), or"
            " pass another Python with --remote-python"
        )
    if module.startswith("elastic."):
        return f"{host} has another release of hvd-elastic, without {module}: install this release, {install}"
    return f"hvd-elastic on {host} lacks its dependency {module}: install it there with all others, {install}"


def _ssh_lines(output: str) -> list[str]:
    """Return the lines of ``output`` that are neither empty nor debug messages of ssh."""
    lines = (line.strip() for line in output.splitlines())
    return [line for line in lines if line and not _DEBUG.match(line)]
