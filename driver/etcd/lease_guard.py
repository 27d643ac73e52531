"""Process that revokes the lease of a killed driver, so that another driver can lead immediately.

The guard runs in its own session and reads a pipe from the driver: a line with etcd's endpoints and credentials, then a
line for each lease of the driver. When the driver exits, the guard revokes the last lease. If this fails, the lease
expires after its time to live.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import msgspec

from elastic.driver.etcd.client import EtcdClient
from elastic.driver.etcd.connection import Rejected, Unavailable
from elastic.driver.etcd.member_failover import Log
from elastic.driver.network.credentials import EtcdAccess
from elastic.driver.processes.orphan_reaper_program import read_to_end

REVOKE_S = 10.0


class LeaseGuard:
    """Driver's side of the lease guard: starts the guard process, sends it leases, and ends it."""

    def __init__(self, access: EtcdAccess, log: Log) -> None:
        self._popen: subprocess.Popen[bytes] | None = None
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "elastic.driver.etcd.lease_guard", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            log(
                "warning",
                f"the lease guard can't be started ({error.strerror}): if this driver is killed, another one takes"
                " over only after its lease expires",
            )
            return
        assert self._popen.stdin is not None
        os.set_blocking(self._popen.stdin.fileno(), False)
        self._write(msgspec.json.encode(access))

    @property
    def pid(self) -> int | None:
        return self._popen.pid if self._popen else None

    def send_lease(self, lease: int) -> None:
        self._write(str(lease).encode())

    def close(self) -> None:
        """End the guard process. Leases that were not revoked expire later."""
        if self._popen is not None:
            self._popen.kill()
            assert self._popen.stdin is not None
            self._popen.stdin.close()
            self._popen.wait()
            self._popen = None

    def _write(self, line: bytes) -> None:
        if self._popen is not None and self._popen.stdin is not None:
            # The guard process has exited, so the lease will expire instead.
            with contextlib.suppress(OSError):
                os.write(self._popen.stdin.fileno(), line + b"\n")


# ---- the process


async def revoke(access: EtcdAccess, lease: int) -> None:
    etcd = EtcdClient(access, lambda level, text: None)
    try:
        with contextlib.suppress(Unavailable, Rejected):
            await etcd.revoke(lease, within_s=REVOKE_S)
    finally:
        await etcd.close()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    received = bytearray()
    read_to_end(int(sys.argv[1]), received.extend)
    first, *leases = bytes(received).split(b"\n")[:-1] or [b""]
    if leases:
        asyncio.run(revoke(msgspec.json.decode(first, type=EtcdAccess), int(leases[-1])))


if __name__ == "__main__":
    main()
