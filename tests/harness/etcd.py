"""Real etcd servers for tests: on loopback, with free ports and separate folders, fast to start and to kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from elastic.driver.etcd.client import EtcdClient
from elastic.driver.network.credentials import EtcdAccess, TlsFiles
from elastic.errors import Invalid
from harness.ports import free_ports
from harness.waiting import wait_until

START_S = 60.0
STOP_S = 10.0


class Member:
    """One process of etcd. Its log is in ``folder/log``."""

    def __init__(self, folder: Path, name: str, tls: TlsFiles | None, flags: list[str]) -> None:
        self.folder = folder
        self.name = name
        self.tls = tls
        self.client_port, self.peer_port = free_ports(2)
        self.peer_url = f"http://127.0.0.1:{self.peer_port}"
        self.endpoint = f"127.0.0.1:{self.client_port}"
        self.cluster = f"{name}={self.peer_url}"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"etcd {self.name} does not run"
        return self._process

    def start(self) -> None:
        """Restart it; it keeps its data."""
        url = f"{'https' if self.tls else 'http'}://{self.endpoint}"
        command = ["etcd", "--name", self.name, "--data-dir", str(self.folder / "data")]
        command += ["--unsafe-no-fsync", "--bcrypt-cost", "4", "--log-level", "warn"]
        command += ["--listen-client-urls", url, "--advertise-client-urls", url]
        command += ["--listen-peer-urls", self.peer_url]
        command += ["--initial-advertise-peer-urls", self.peer_url]
        command += ["--initial-cluster", self.cluster, "--logger", "zap", *self._flags]
        if self.tls:
            command += ["--cert-file", self.tls.cert, "--key-file", self.tls.key]
            # Client certificates are required, but do not identify the user: that needs --client-cert-auth.
            command += ["--trusted-ca-file", self.tls.ca]
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop it for the block: it does not run or answer."""
        self.signal(signal.SIGSTOP)
        try:
            # Until its last thread has stopped, it may still answer. An ended one remains as a zombie.
            what = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
            pid = self.process.pid
            wait_until(lambda: os.waitid(os.P_PID, pid, what), f"the stop of {self.name}", STOP_S)
            yield
        finally:
            self.signal(signal.SIGCONT)


class Cluster:
    """The members of one etcd. ``access`` is the client configuration of tests."""

    def __init__(self, members: list[Member], tls: TlsFiles | None = None) -> None:
        self.members = members
        cluster = ",".join(member.cluster for member in members)
        for member in members:
            member.cluster = cluster
        self.access = EtcdAccess([member.endpoint for member in members], tls=tls)

    def start(self) -> None:
        for member in self.members:
            member.start()
        asyncio.run(self._answers())

    async def _answers(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            etcd = EtcdClient(self.access, lambda level, text: None)
            try:
                await etcd.open()
            except Invalid as error:
                for member in self.members:
                    log = (member.folder / "log").read_text(errors="replace")[-2000:]
                    assert member.process.poll() is None, f"etcd has ended:\n{log}"
                assert time.monotonic() < deadline, f"etcd has not started: {error}\n{log}"
                await asyncio.sleep(0.05)
            else:
                await etcd.close()
                return

    def leader(self) -> Member:
        """Return the leader, by the members' status."""
        return asyncio.run(_leader(self.members, self.access))

    def close(self) -> None:
        for member in self.members:
            member.kill()


@contextlib.contextmanager
def one_etcd(folder: Path, *, tls: TlsFiles | None = None, flags: list[str] | None = None):
    """Start a cluster of one. Elections are fast, so leases of one second are possible."""
    quick = ["--heartbeat-interval", "10", "--election-timeout", "100"]
    cluster = Cluster([Member(folder, "one", tls, [*quick, *(flags or [])])], tls)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@contextlib.contextmanager
def three_etcds(folder: Path):
    """Start a cluster of three, which survives the loss of one."""
    flags = ["--heartbeat-interval", "50", "--election-timeout", "500"]
    names = ["a", "b", "c"]
    cluster = Cluster([Member(folder / name, name, None, flags) for name in names])
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def add_user(cluster: Cluster, user: str, password: str, prefix: str) -> EtcdAccess:
    """Enable authentication, with a root and a user that may read and write under the prefix."""
    asyncio.run(_add_user(cluster.access, user, password, prefix))
    return EtcdAccess(cluster.access.endpoints, cluster.access.tls, user, password)


async def compact(access: EtcdAccess, revision: int) -> None:
    """Compact etcd's history before a revision."""
    from aetcd import rpc

    async with _channel(access, access.endpoints[0]) as channel:
        request = rpc.CompactionRequest(revision=revision, physical=True)
        await rpc.KVStub(channel).Compact(request, timeout=5)


async def _leader(members: list[Member], access: EtcdAccess) -> Member:
    from aetcd import rpc

    for member in members:
        async with _channel(access, member.endpoint) as channel:
            status = await rpc.MaintenanceStub(channel).Status(rpc.StatusRequest(), timeout=5)
            if status.leader == status.header.member_id:
                return member
    raise AssertionError("nobody leads")


async def _add_user(access: EtcdAccess, user: str, password: str, prefix: str) -> None:
    from aetcd import rpc

    key = prefix.encode()
    end = key[:-1] + bytes([key[-1] + 1])
    permission = rpc.Permission(permType=rpc.Permission.READWRITE, key=key, range_end=end)
    async with _channel(access, access.endpoints[0]) as channel:
        auth = rpc.AuthStub(channel)
        for name, word, role in (("root", "of all", "root"), (user, password, "trainer")):
            await auth.UserAdd(rpc.AuthUserAddRequest(name=name, password=word), timeout=5)
            await auth.RoleAdd(rpc.AuthRoleAddRequest(name=role), timeout=5)
            await auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=name, role=role), timeout=5)
        grant = rpc.AuthRoleGrantPermissionRequest(name="trainer", perm=permission)
        await auth.RoleGrantPermission(grant, timeout=5)
        await auth.AuthEnable(rpc.AuthEnableRequest(), timeout=5)


def _channel(access: EtcdAccess, endpoint: str):
    import grpc

    if access.tls is None:
        return grpc.aio.insecure_channel(endpoint)
    ca, key, cert = (
        Path(path).read_bytes() for path in (access.tls.ca, access.tls.key, access.tls.cert)
    )
    return grpc.aio.secure_channel(endpoint, grpc.ssl_channel_credentials(ca, key, cert))
