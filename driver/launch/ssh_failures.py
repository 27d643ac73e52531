"""Says in one sentence why no agent could be started, and what to do, from what ssh and the remote side said. Pure.

ssh is asked for its first level of debugging messages (``debug1:``), which name the keys that it has tried.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

SSH_FAILED = 255  # ssh's exit code for its own troubles; otherwise it is that of the remote command
NO_PYTHON = "hvd-elastic: no python"

_SHOWN = 300  # characters of somebody else's words
_DEBUG = re.compile(r"debug[123]: |Authenticated to |Transferred: sent |Bytes per second: ")


@dataclass(frozen=True)
class Route:
    """How ssh gets to a host, as ``ssh -G`` tells it; ``by_hand`` is the same as a user types it."""

    by_hand: list[str]
    user: str = ""
    name: str = ""
    port: str = ""
    known_hosts: str = ""
    direct: bool = True  # no jump host, no proxy command, and its key is listed under its own name

    @classmethod
    def told(cls, by_hand: list[str], text: str) -> Route:
        """``text``: what ``ssh -G`` has printed."""
        values: dict[str, str] = {}
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            values.setdefault(key, value)
        files = values.get("userknownhostsfile", "").split()
        aside = ("proxyjump", "proxycommand", "hostkeyalias")
        return cls(
            by_hand,
            user=values.get("user", ""),
            name=values.get("hostname", ""),
            port=values.get("port", ""),
            known_hosts=files[0] if files else "",
            direct=all(values.get(key, "none") == "none" for key in aside),
        )

    @property
    def typed(self) -> str:
        return shlex.join(self.by_hand)

    @property
    def target(self) -> list[str]:
        """The host as ssh-keyscan takes it."""
        return [*(["-p", self.port] if self.port not in ("", "22") else []), self.name]


def why_ssh_failed(host: str, said: str, route: Route) -> str:
    """ssh has ended with SSH_FAILED."""
    words = " | ".join(_own_words(said))
    for expression, sentence in _SSH:
        if found := re.search(expression, said):
            text = sentence(host, found, said, route)
            break
    else:
        text = f"ssh to {host} failed: {words[-_SHOWN:] or 'it did not say why'}; try it by hand: {route.typed}"
    return text


def why_no_agent(
    host: str, code: int | None, said: str, *, ours: str, release: str | None, limit_s: float
) -> str:
    """The command that is to become the agent has ended with ``code``, is of another ``release``, or is late (code and
    release None).
    """
    if release is not None:
        return (
            f"{host} has release {release} of hvd-elastic, and here it is {ours}; install the same on"
            f" both: pip install hvd-elastic=={ours}"
        )
    words = _own_words(said)
    last = words[-1][:_SHOWN] if words else ""
    if code is None:
        more = f"; the last that was heard is: {last}" if last else ""
        return f"no agent was ready on {host} within {limit_s:g} s{more}; look at the load there"
    for word in reversed(words):
        if word.startswith(NO_PYTHON):
            tried = word.removeprefix(NO_PYTHON).strip(": ")
            return f"{host} has no python to run the agent with (tried {tried}); name one by --remote-python"
        if found := re.search(r"No module named '?([\w.]+)'?", word):
            return _missing(host, found[1], ours)
    if re.match(r"SyntaxError: ", last):
        return f"the python of {host} is too old for hvd-elastic; name another by --remote-python"
    ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the agent on {host} {ending} before it was ready" + (f": {last}" if last else "")


def why_ended(host: str, code: int | None, said: str, *, by_ssh: bool) -> str:
    """An agent that was ready has ended before it was told to, or the way to it has."""
    words = _own_words(said)
    last = f": {words[-1][:_SHOWN]}" if words else ""
    if by_ssh and code == SSH_FAILED:
        if found := re.search(r"Timeout, server .* not responding", said):
            last = f": {found[0]}"
        return f"the ssh connection to the agent on {host} has broken{last}"
    if code is not None and code < 0:
        return f"the {'ssh to the ' if by_ssh else ''}agent on {host} was killed by signal {-code}"
    return f"the agent on {host} has ended with exit code {code}{last if code else ''}"


def no_ssh(host: str, program: str) -> str:
    return (
        f"there is no program {program!r} here, by which an agent could be started on {host}; install"
        " OpenSSH's client (Debian: apt-get install openssh-client)"
    )


def _missing(host: str, module: str, ours: str) -> str:
    install = f"pip install hvd-elastic=={ours}"
    if module == "elastic":
        return (
            f"hvd-elastic is not installed for the python that was taken on {host}; install it there"
            f" ({install}), or name another python by --remote-python"
        )
    if module.startswith("elastic."):
        return f"{host} has another release of hvd-elastic, without {module}; install the same as here: {install}"
    return (
        f"hvd-elastic on {host} lacks its dependency {module}; install it there with all: {install}"
    )


def _own_words(said: str) -> list[str]:
    """Lines, without what ssh says for debugging and without empty ones."""
    lines = (line.strip() for line in said.splitlines())
    return [line for line in lines if line and not _DEBUG.match(line)]


def _unresolved(host: str, found: re.Match[str], said: str, route: Route) -> str:
    return (
        f"{host} can't be reached: the name {found[1]} is not known here ({found[2].strip()}); correct"
        " the list of hosts, or give it a HostName in ~/.ssh/config"
    )


def _changed(host: str, found: re.Match[str], said: str, route: Route) -> str:
    offending = re.search(r"Offending .* key in (\S+):(\d+)", said)
    listed = re.search(r"Host key for (\S+) has changed", said)
    where = f" (line {offending[2]} of {offending[1]})" if offending else ""
    file = offending[1] if offending else route.known_hosts
    forget = shlex.join(["ssh-keygen", "-f", file, "-R", listed[1] if listed else route.name])
    return (
        f"the host key of {host} is not the one known for it{where}: somebody may stand in between;"
        f" if it was installed anew, forget the old key: {forget}, then log in by hand: {route.typed}"
    )


def _unknown(host: str, found: re.Match[str], said: str, route: Route) -> str:
    key = re.search(r"Server host key: (\S+ \S+)", said)
    scan = f"{shlex.join(['ssh-keyscan', *route.target])} >> {shlex.quote(route.known_hosts)}"
    # A jump host is checked by a process of its own, so it may be that one's key that is not known.
    if not route.direct or "UNKNOWN port" in said:
        return (
            f"the host key of {host}, or of a host on the way there, is not known here; log in once by"
            f" hand and compare it: {route.typed}"
        )
    return (
        f"the host key of {host} is not known here{f' ({key[1]})' if key else ''}; log in once by hand"
        f" and compare it: {route.typed}, or trust it: {scan}"
    )


def _denied(host: str, found: re.Match[str], said: str, route: Route) -> str:
    tried = list(dict.fromkeys(re.findall(r"Offering public key: (.+?) [A-Z0-9-]+ SHA256:", said)))
    user = found[1].partition("@")[0]
    words = route.by_hand[1:]
    if "-i" in words:  # ssh-copy-id has the public half there
        del words[words.index("-i") : words.index("-i") + 2]
    file = next((key for key in tried if key.startswith("/")), "")
    copy = shlex.join(["ssh-copy-id", *(["-i", f"{file}.pub"] if file else []), *words])
    if tried:
        keys = f"it tried the key{'s'[: len(tried) > 1]} {', '.join(tried)}; bring it there"
    else:
        keys = "it had no key to try; bring it one"
    return (
        f"{host} denies user {user} permission ({found[2]}): {keys}: {copy}"
        " (a key with a passphrase needs ssh-agent)"
    )


def _too_many(host: str, found: re.Match[str], said: str, route: Route) -> str:
    return (
        f"{host} was offered too many keys by ssh-agent; name the right one by IdentityFile and"
        " IdentitiesOnly yes in ~/.ssh/config"
    )


def _not_connected(host: str, found: re.Match[str], said: str, route: Route) -> str:
    at = f"{found[1]} port {found[2]}"
    match found[3].strip():
        case "Connection refused":
            cure = "start sshd there, or correct the port"
        case "Connection timed out" | "Operation timed out":
            cure = "look whether it is up, and whether a firewall drops the packets"
        case _:
            cure = "look at the network and the list of hosts"
    return f"{host} can't be reached at {at}: {found[3].strip()}; {cure}"


def _silent(host: str, found: re.Match[str], said: str, route: Route) -> str:
    return f"{host} accepts connections but does not answer ssh ({found[0].strip()}); look at its sshd and its load"


def _hung_up(host: str, found: re.Match[str], said: str, route: Route) -> str:
    return (
        f"{host}, or a host on the way, closed the connection before the login ({found[0].strip()}); look"
        " at the log of its sshd: MaxStartups may be too low for so many at once"
    )


def _configuration(host: str, found: re.Match[str], said: str, route: Route) -> str:
    line = found[0].strip()[:_SHOWN]
    return f"ssh to {host} does not take its configuration: {line}; correct that file"


def _broken(host: str, found: re.Match[str], said: str, route: Route) -> str:
    return f"the ssh connection to {host} broke before its agent was ready: {found[0].strip()}"


def _closed(host: str, found: re.Match[str], said: str, route: Route) -> str:
    return (_broken if "Authenticated to " in said else _hung_up)(host, found, said, route)


# In this order: one trouble of ssh often ends in the words of another.
_SSH = (
    (r"Could not resolve hostname (\S+): ([^\r\n]*)", _unresolved),
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", _changed),
    (r"Host key verification failed|host key is known for \S+ and you have requested", _unknown),
    (r"(?m)^(\S+@\S+): Permission denied \(([^)\r\n]*)\)", _denied),
    (r"Too many authentication failures", _too_many),
    (r"(?m)^[^\r\n]*Bad configuration option[^\r\n]*", _configuration),
    (r"(?m)^(?:Bad owner or permissions on|Can't open user config file)[^\r\n]*", _configuration),
    (r"ssh: connect to host (\S+) port (\d+): ([^\r\n]*)", _not_connected),
    (r"Timeout, server [^\r\n]* not responding[^\r\n]*", _broken),
    (r"Connection timed out during banner exchange|Connection to \S+ port \d+ timed out", _silent),
    (r"(?:kex_exchange_identification|ssh_exchange_identification): [^\r\n]*", _hung_up),
    (r"(?m)^(?:Connection (?:closed|reset) by |Connection to |client_loop: )[^\r\n]*", _closed),
)
