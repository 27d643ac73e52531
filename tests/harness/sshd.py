"""Real ssh servers on loopback for tests, one per "host", each on a separate port, with its own keys.

They need only the present account and no configuration of the machine. All files are in one folder, and the servers
end with the `SshHosts` that started them.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from harness.ports import free_port

DEADLINE_S = 60.0
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
SEPARATION = Path("/run/sshd")  # a root sshd requires this empty folder


def missing() -> str:
    """Return why no server can run here; empty if one can."""
    for program, found in (("sshd", SSHD), ("ssh", shutil.which("ssh"))):
        if not found:
            return f"needs {program}; apt-get install openssh-server openssh-client"
    return ""


class Sshd:
    """One server; it accepts connections when the constructor returns."""

    def __init__(self, folder: Path, authorized: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.address = "127.0.0.1"
        self.port = free_port()
        self.host_key = make_key(folder / "host_key")
        self._authorized = authorized
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        assert SSHD is not None, missing()
        if os.getuid() == 0:
            SEPARATION.mkdir(mode=0o755, exist_ok=True)
        lines = {
            "AddressFamily": "any",
            "ListenAddress": self.address,
            "Port": self.port,
            "HostKey": self.host_key,
            "AuthorizedKeysFile": self._authorized,
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "UseDNS": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "MaxStartups": 100,
            **({"PerSourcePenalties": "no"} if ssh_version() >= (9, 8) else {}),
        }
        config = self.folder / "sshd_config"
        config.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        self._process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        listens = threading.Event()
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(listens,), daemon=True)
        self._reader.start()
        ready = listens.wait(DEADLINE_S) and self._process.poll() is None
        assert ready, f"sshd does not listen on {self.address} port {self.port}: {self._lines}"

    def _read(self, listens: threading.Event) -> None:
        assert self._process is not None and self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.rstrip())
            if line.startswith("Server listening on"):
                listens.set()
        listens.set()

    def processes(self) -> list[psutil.Process]:
        """Return the processes of its connections and their descendants, without detached ones."""
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def stop(self) -> None:
        """End it immediately, with its connections and their processes."""
        if self._process is None:
            return
        doomed = [psutil.Process(self._process.pid), *self.processes()] if self.runs else []
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(DEADLINE_S)
        psutil.wait_procs(doomed, DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process = None

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None


class SshHosts:
    """Servers by name, and a client's configuration for them: ``ssh -F str(hosts.config) alpha``."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self.key = make_key(folder / "id_ed25519")
        self.authorized = folder / "authorized_keys"
        self.known = folder / "known_hosts"
        self.config = folder / "ssh_config"
        self.servers: dict[str, Sshd] = {}
        self.authorize()
        try:
            for name in names:
                self.servers[name] = Sshd(folder / f"sshd-{name}", self.authorized)
        except BaseException:
            self.stop()
            raise
        self.trust()
        self.configure()

    def authorize(self, yes: bool = True) -> None:
        """Set whether the servers accept the key."""
        self.authorized.write_text(Path(f"{self.key}.pub").read_text() if yes else "")
        self.authorized.chmod(0o600)

    def trust(self, names: Sequence[str] | None = None) -> None:
        """Write the keys of these servers as known hosts, and no others."""
        lines = []
        for name in self.servers if names is None else names:
            server = self.servers[name]
            key = Path(f"{server.host_key}.pub").read_text()
            lines.append(f"[{server.address}]:{server.port} {key}")
        self.known.write_text("".join(lines))

    def configure(self, **more: str) -> None:
        """Write the client's configuration: ``more`` are lines for single hosts, ``gamma="ProxyJump alpha"``."""
        text = ""
        for name, server in self.servers.items():
            text += f"Host {name}\n  HostName {server.address}\n  Port {server.port}\n"
        text += "".join(f"Host {name}\n  {lines}\n" for name, lines in more.items())
        text += (
            f"Host *\n  User {getpass.getuser()}\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known}\n  GlobalKnownHostsFile none\n"
        )
        self.config.write_text(text)

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


@contextlib.contextmanager
def ssh_hosts(folder: Path, names: Sequence[str]) -> Iterator[SshHosts]:
    folder.mkdir(exist_ok=True)
    hosts = SshHosts(folder, names)
    try:
        yield hosts
    finally:
        hosts.stop()


def make_key(path: Path) -> Path:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)],
        check=True,
        timeout=DEADLINE_S,
    )
    return path


def ssh_version() -> tuple[int, int]:
    text = subprocess.run(["ssh", "-V"], capture_output=True, text=True, timeout=DEADLINE_S).stderr
    found = re.match(r"OpenSSH_(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)
