"""An sshd on every host, with keys of this run, and an ssh configuration that contains them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from stress.hosts.namespaces import Host
from stress.hosts.programs import HostProgram

# ssh's default configuration, replaced on the driver's host only.
CONFIG = Path("/etc/ssh/ssh_config")
LISTENS = "Server listening"  # a line of sshd
PRIVILEGES = Path("/run/sshd")  # required by sshd

_SSHD = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
"""
_SSH = """\
Host {names}
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
"""


def start(hosts: Sequence[Host], folder: Path) -> list[HostProgram]:
    """Start them, and return once all listen. ``folder`` is created for keys, configuration and logs."""
    folder.mkdir(mode=0o700)
    PRIVILEGES.mkdir(mode=0o755, exist_ok=True)
    for name in ("host_key", "key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True, timeout=30)
    names = [host.name for host in hosts]
    key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"{','.join(names)} {key}")
    (folder / "sshd_config").write_text(_SSHD.format(folder=folder))
    (folder / "ssh_config").write_text(_SSH.format(folder=folder, names=" ".join(names)))
    words = ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")]
    started = [HostProgram(host, f"sshd-{host.name}", words, folder) for host in hosts]
    for each in started:
        each.wait_for(LISTENS)
    return started
