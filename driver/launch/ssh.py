"""Starter of agents on other hosts over ssh.

The user's ssh configuration determines the user, port, key and jump host.

The remote command is constant, so that no remote shell can misinterpret a name. All parameters are sent on standard
input: two lines with the Python interpreters to try, then the bootstrap. ssh stays connected while the agent depends on
the driver, and sends keepalives to detect a lost connection.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from elastic.driver.launch.child_processes import ChildProcess, ChildProcesses
from elastic.driver.launch.ssh_failures import (
    NO_PYTHON,
    SSH_FAILED,
    no_ssh,
    why_ended,
    why_no_agent,
    why_ssh_failed,
)
from elastic.driver.launch.starter import AGENT_MODULE, RUN_MODULE, Bootstrap, StartFailed
from elastic.driver.network.host_lists import parse_host
from elastic.driver.output_interfaces import Log
from elastic.errors import Invalid
from elastic.version import __version__

AT_ONCE = 32  # maximum number of concurrent logins; established connections do not count
CLOSE_S = 10.0


def remote(module: str) -> str:
    """Return the remote command that runs ``module`` with the first available one of two Python interpreters.

    The paths of the interpreters are read from the first two lines of standard input. Any login shell can parse the
    command, because its quoted part contains no quotes, backslashes, newlines or exclamation marks.
    """
    return (
        "exec /bin/sh -c 'IFS= read -r a; IFS= read -r b; "
        'for p in "$a" "$b"; do '
        'case "$p" in "") false;; */*) test -f "$p" && test -x "$p";; *) command -v "$p" >/dev/null;; esac '
        f'&& exec "$p" -c "{RUN_MODULE}" {module}; '
        "done; "
        f'echo "{NO_PYTHON}: $a $b" >&2; exit 127'
        "'"
    )


REMOTE = remote(AGENT_MODULE)


@dataclass(frozen=True)
class SshOptions:
    """ssh options from the command line.

    Raises:
        Invalid: a file is not readable, or a value is malformed. Names of other hosts are not checked.
    """

    port: int | None = None
    identity: str | None = None  # file with a private key, or None for ssh's default
    # configuration file that replaces ~/.ssh/config and the system's configuration
    config: str | None = None
    python: str | None = None  # path of the Python that runs the agents on all hosts
    program: str = "ssh"
    connect_s: int = 10  # timeout for connecting, in seconds
    ready_s: float = 60.0  # timeout until the agent is ready, including the login, in seconds
    alive_s: int = 5  # interval between two keepalives on an idle connection, in seconds
    # number of unanswered keepalives after which the connection counts as lost
    alive_count: int = 3

    def __post_init__(self) -> None:
        for flag, file in (("--ssh-identity-file", self.identity), ("--ssh-config", self.config)):
            if file is not None and not os.access(file, os.R_OK):
                raise Invalid(f"{flag} {file} is not readable: pass a readable file")
        if self.python is not None and (
            not self.python or self.python[0] in "-~" or not self.python.isprintable()
        ):
            raise Invalid(
                f"--remote-python {self.python!r} is not the path of a Python interpreter: pass a full path such"
                " as /opt/venv/bin/python"
            )

    def words(self) -> list[str]:
        """Return the ssh arguments for the port, the key and the configuration file, which precede the host."""
        words = ["-F", self.config] if self.config is not None else []
        words += ["-p", str(self.port)] if self.port is not None else []
        return words + (["-i", self.identity] if self.identity is not None else [])


class SshStarter:
    """Starter that starts agents with ssh. Must be created in the event loop.

    Args:
        environ: environment of the ssh process, such as SSH_AUTH_SOCK. It is not passed to agents.
    """

    def __init__(self, options: SshOptions, *, environ: Mapping[str, str], log: Log) -> None:
        self._options = options
        self._environ = environ
        self._children = ChildProcesses(
            log,
            lambda host, process: why_ended(host, process.code, process.last_output(), by_ssh=True),
            at_once=AT_ONCE,
            ready_s=options.ready_s,
            close_s=CLOSE_S,
        )

    async def start(self, bootstrap: Bootstrap) -> None:
        host = bootstrap.host
        try:
            parse_host(f"[{host}]" if ":" in host else host)
        except Invalid as error:
            raise StartFailed(f"no agent was started over ssh: {error}") from None
        pythons = (
            [self._options.python] * 2 if self._options.python else [sys.executable, "python3"]
        )
        try:
            await self._children.begin(
                bootstrap,
                self.command(host),
                self._environ,
                partial(self._explain, host),
                first="".join(f"{python}\n" for python in pythons).encode(),
            )
        except FileNotFoundError:
            raise StartFailed(no_ssh(host, self._options.program)) from None
        except OSError as error:
            raise StartFailed(
                f"the program {self._options.program} can't be started to reach {host}: {error.strerror}. Check its"
                " permissions"
            ) from None

    async def close(self) -> None:
        await self._children.close(spare=False)

    def command(self, host: str) -> list[str]:
        """Return the command that starts an agent on ``host``."""
        return ssh_command(self._options, host, REMOTE)

    async def _explain(self, host: str, process: ChildProcess, release: str | None) -> str:
        if process.code == SSH_FAILED:
            return why_ssh_failed(
                host, process.last_output(), shlex.join([*self._options.words(), host])
            )
        return why_no_agent(
            host,
            process.code,
            process.last_output(),
            ours=__version__,
            release=release,
            limit_s=self._options.ready_s,
        )


def ssh_command(options: SshOptions, host: str, remote_command: str) -> list[str]:
    """Return the ssh command line that runs the remote command ``remote_command`` on ``host``.

    The command contains no secrets, and ssh cannot mistake the host for an option.
    """
    settings = {
        "BatchMode": "yes",  # ssh must not prompt for passwords.
        "ConnectTimeout": options.connect_s,
        "ServerAliveInterval": options.alive_s,
        "ServerAliveCountMax": options.alive_count,
        "LogLevel": "DEBUG1",  # At this level, ssh prints the keys that it tried.
        # ssh may use an existing shared connection, but must not create one.
        "ControlMaster": "no",
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
    }
    words = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    return [options.program, "-T", *options.words(), *words, "--", host, remote_command]
